"""What is shown, where it goes, and how it looks without a terminal."""

import dataclasses
import datetime as dt
import decimal
import json
import math
from pathlib import Path

import numpy as np
import pytest

from headrace.cli.reporting.blocks import Grid, Pairs, Text, as_json, as_text, render
from headrace.cli.reporting.console import Activity, Console


@dataclasses.dataclass
class Point:
    x: int
    where: Path


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (336776, "336,776"),
        (0.123, "0.12"),
        (12345.67, "12,345.67"),
        ("as is", "as is"),
        (("a", 1000), "a, 1,000"),
        (b"\x01\xff", "01ff"),
        (dt.datetime(2013, 1, 1, 10, tzinfo=dt.UTC), "2013-01-01 10:00:00+00:00"),
    ],
)
def test_values_read_as_people_write_them(value, text):
    assert as_text(value) == text


@pytest.mark.parametrize(
    ("value", "document"),
    [
        (Point(1, Path("a/b")), {"x": 1, "where": "a/b"}),
        ({"k": (1, None)}, {"k": [1, None]}),
        (b"\xff", "ff"),
        (dt.date(2013, 1, 1), "2013-01-01"),
        (decimal.Decimal("1.20"), "1.20"),
        (math.nan, None),
        (np.int32(7), 7),
        (np.array([1, 2]), [1, 2]),
    ],
)
def test_everything_has_a_json_form(value, document):
    assert json.loads(json.dumps(as_json(value))) == document


def test_pairs_are_aligned():
    assert render(Pairs("Title", {"a": 1, "long name": "x"})) == ["Title", "  a          1", "  long name  x"]


def test_numbers_stand_right_and_text_left():
    assert render(Grid("", ("name", "rows"), [("a", 1), ("b", 1000)])) == [
        "name   rows",
        "----  -----",
        "a         1",
        "b     1,000",
    ]


@pytest.mark.parametrize(
    ("column", "texts"), [([1.0, 20.0], ["1", "20"]), ([0.5, 1.0], ["0.50", "1.00"]), ([9.5, 20.06], ["9.5", "20.1"])]
)
def test_the_fractions_of_a_column_have_the_same_decimals(column, texts):
    lines = render(Grid("", ("value",), [(value,) for value in column]))[2:]
    assert [line.strip() for line in lines] == texts


def test_an_empty_grid_is_its_heading():
    assert render(Grid("", ("name",), [])) == ["name", "----"]


def test_results_go_to_standard_output_and_notes_to_standard_error(capsys):
    console = Console()
    console.note("reading")
    console.result({"rows": 1}, Text("one row"))
    shown = capsys.readouterr()
    assert shown.out == "one row\n"
    assert shown.err.endswith(" reading\n")


def test_json_is_the_only_thing_on_standard_output(capsys):
    console = Console()
    console.json_mode = True
    console.note("reading")
    console.result({"rows": 1}, Text("one row"))
    assert capsys.readouterr().out == '{"rows": 1}\n'


def test_nothing_is_coloured_where_nobody_watches(capsys):
    Console().result({}, Pairs("Title", {"a": 1}))
    assert "\x1b" not in capsys.readouterr().out


def test_quiet_shows_no_notes(capsys):
    console = Console()
    console.quiet = True
    console.note("reading")
    assert capsys.readouterr().err == ""


def test_a_note_carries_the_time_of_day(capsys):
    console = Console(now=lambda: dt.datetime(2013, 1, 31, 10, 30))  # noqa: DTZ001 - local time
    console.note("batch 1: done")
    assert capsys.readouterr().err == "2013-01-31 10:30:00 batch 1: done\n"


def test_progress_off_a_terminal_is_a_line_every_half_minute(capsys):
    now = [0.0]
    console = Console(clock=lambda: now[0], now=lambda: dt.datetime(2013, 1, 31, 10, 30))  # noqa: DTZ001 - local time
    with console.progress("joined", total=300) as progress:
        for second in (10, 31, 40):
            now[0] = second
            progress.advance(100)
    assert capsys.readouterr().err == "2013-01-31 10:30:00 joined: 200 of 300 rows, 6/s\n"


def test_progress_tells_the_number_of_results(capsys):
    now = [0.0]
    console = Console(clock=lambda: now[0], now=lambda: dt.datetime(2013, 1, 31, 10, 30))  # noqa: DTZ001 - local time
    with console.progress("correlated") as progress:
        now[0] = 40
        progress.advance(200, 1500)
    assert capsys.readouterr().err == "2013-01-31 10:30:00 correlated: 200 rows, 5/s, 1,500 results\n"


class Ticking:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def activity(monkeypatch):
    """Return a clock, and an activity on a terminal or beside one, whose thread shows nothing by itself."""
    monkeypatch.delenv("TERM", raising=False)

    def begun(*, terminal):
        monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
        clock = Ticking()
        console = Console(clock, now=lambda: dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC))
        return clock, Activity(console, "starting Spark")

    return begun


def test_a_step_that_takes_long_has_one_line_without_a_terminal(activity, capsys):
    clock, shown = activity(terminal=False)
    clock.now = 60.0
    shown.refresh()  # a note has announced the first step
    shown.begin("checking the tables")
    clock.now += 4.9
    shown.refresh()
    shown.begin("batch 0: reading 2 of 5 files")
    for _ in range(9):
        clock.now += 5.0
        shown.refresh()
    shown.begin("")
    clock.now += 60.0
    shown.refresh()
    assert capsys.readouterr().err == "2026-01-02 03:04:05 batch 0: reading 2 of 5 files\n"


def test_a_terminal_shows_each_step_with_its_seconds_in_one_line(activity, capsys):
    clock, shown = activity(terminal=True)
    clock.now = 7.0
    shown.refresh()
    shown.begin("checking the tables")
    clock.now = 9.0
    shown.refresh()
    shown.begin("")
    clock.now = 20.0
    shown.refresh()
    lines = capsys.readouterr().err.split("\r\x1b[2K")
    steps = ["starting Spark, 7 s", "checking the tables, 0 s", "checking the tables, 2 s"]
    assert lines == ["", *(f"03:04:05 {step}" for step in steps), ""]


def test_a_closed_standard_error_stops_nothing(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr", None)
    console = Console()
    console.note("reading")
    with console.progress("reading") as progress:
        progress.advance(1)
    console.result({}, Text("done"))
    assert capsys.readouterr().out == "done\n"


def test_a_long_progress_line_is_cut_to_the_terminal(activity, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    _, shown = activity(terminal=True)
    shown.begin("checking the tables of a pipeline")
    assert capsys.readouterr().err == "\r\x1b[2K03:04:05 checking t"
