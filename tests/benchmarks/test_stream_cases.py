"""The experiments with joins of streams: made data, simulated arrivals, and verdicts that can fail."""

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from benchmarks.streams import diner_cases, run
from benchmarks.streams._data import TUPLE, batch, matches, stock, zipf
from benchmarks.streams._report import Report, Verdict
from benchmarks.streams._world import OPERATORS, Settings, arrivals, online


def test_matches_are_counted_as_duckdb_counts_them():
    left, right = zipf(500, 40, 1, 5)
    connection = duckdb.connect()
    connection.register("l", pa.table({"x": left}))
    connection.register("r", pa.table({"x": right}))
    assert matches(left, right) == connection.sql("SELECT count(*) FROM l JOIN r USING (x)").fetchall()[0][0]


def test_tuples_have_the_size_of_those_in_the_paper():
    assert batch(np.arange(10), np.arange(10)).nbytes == 10 * TUPLE


def test_arrivals_are_in_order_and_pause_after_each_fragment():
    settings = Settings()
    streams = (np.arange(1000), np.arange(1000))
    plain = arrivals(streams, settings, 3)
    delayed = arrivals(streams, settings, 3, fragments=10, delay=0.5)
    for found in (plain, delayed):
        assert (np.diff(found.times) >= 0).all()
        for side in (0, 1):
            assert found.ids[found.sides == side].tolist() == list(range(1000))
    assert delayed.times[-1] == pytest.approx(1.45 * plain.times[-1], rel=0.1)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_run_ends_with_a_part_of_the_results(name):
    keys = stock(2000, 60, 1)
    settings = Settings(max_new_arrivals=50)
    arriving = arrivals(keys, settings, 7, fragments=4, delay=0.5)
    found = online(name, arriving, 200_000, settings)
    assert 0 < found.reactive < found.results < matches(*keys)
    assert found.buffers
    assert found == online(name, arriving, 200_000, settings)


def test_verdicts_depend_on_the_rows():
    columns = ["data", "memory %", *OPERATORS, "paper's DINER %"]
    shares = {data: list(values) for data, values in diner_cases.PAPER_SHARES.items()}
    good = Report({}, columns)
    for data, values in shares.items():
        for percent, value in zip(diner_cases.MEMORIES, values, strict=True):
            good.rows.append([data, percent, value, value / (4 - percent / 10), value / (4 - percent / 10), value])
    diner_cases._judge_online(good)
    assert all(verdict.holds for verdict in good.verdicts)
    bad = Report({}, columns)
    bad.rows = [
        [data, percent, 20 - percent / 10, 100 - 4 * percent, 100 - 4 * percent, 99] for data, percent, *_ in good.rows
    ]
    diner_cases._judge_online(bad)
    assert not any(verdict.holds for verdict in bad.verdicts)


@pytest.mark.parametrize("holds", [True, False])
def test_the_command_fails_if_a_claim_does_not_hold(tmp_path, monkeypatch, capsys, holds):
    def case(*, quick):
        return Report({"quick": quick}, ["n"], [[1]], [Verdict("it is so", holds, "1")])

    monkeypatch.setattr(diner_cases, "shifting", case)
    if holds:
        run.main(["shifting", "--quick", "--out", str(tmp_path)])
    else:
        with pytest.raises(SystemExit) as error:
            run.main(["shifting", "--quick", "--out", str(tmp_path)])
        assert error.value.code == 1
    assert ("DOES NOT HOLD" in capsys.readouterr().out) != holds
    assert (tmp_path / "shifting.json").exists()
