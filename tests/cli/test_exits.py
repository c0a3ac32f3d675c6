"""Every family of errors has one exit code, and a failure says step, cause, state left and how to go on."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import pyarrow as pa
import pytest

from headrace.cli.reporting.console import Console
from headrace.cli.reporting.errors import InputFileError
from headrace.cli.reporting.exits import ExitCode, exit_code_of, guarded
from headrace.etl.errors import DeclarationError
from headrace.joins.errors import JoinInputError
from headrace.pipelines.errors import ConservationError, PipelineFileError, SparkStartError
from headrace.storage import Table
from headrace.storage.errors import CorruptPageError, LockedError, NotATableError, SchemaError

COMMAND = ["headrace", "join", "a b.tbl"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (click.UsageError("x"), 2),
        (click.BadParameter("x"), 2),
        (CorruptPageError("x"), 3),
        (NotATableError("x"), 1),
        (ConservationError("x"), 3),
        (SchemaError("x"), 1),
        (LockedError("x"), 1),
        (JoinInputError("x"), 1),
        (DeclarationError("x"), 1),
        (PipelineFileError("x"), 1),
        (SparkStartError("x"), 1),
        (InputFileError("x"), 1),
        (PermissionError("x"), 1),
        (MemoryError(), 1),
        (ValueError("x"), 70),
        (AssertionError(), 70),
        (KeyError("x"), 70),
    ],
)
def test_each_family_has_its_code(error, code):
    assert exit_code_of(error) == code


def raising(error, console, **step):
    def work():
        with console.step("joining a with b", left="nothing; out is as it was", **step):
            raise error

    return work


def test_a_failure_names_step_cause_state_and_the_way_on(capsys):
    console = Console()
    assert guarded(raising(InputFileError("no file x"), console), console, COMMAND) == ExitCode.FAILURE
    assert capsys.readouterr().err.splitlines() == [
        "headrace: failed while joining a with b",
        "  cause  no file x",
        "  left   nothing; out is as it was",
        "  go on  fix the cause, then run: headrace join 'a b.tbl'",
    ]


def test_damage_has_a_way_on_of_its_own(capsys):
    console = Console()
    guarded(raising(CorruptPageError("page 7"), console, repair="headrace table check b"), console, COMMAND)
    assert capsys.readouterr().err.endswith("  go on  headrace table check b\n")


def test_the_innermost_step_is_the_one_that_failed(capsys):
    console = Console()

    def work():
        with console.step("loading", left="everything"):
            raising(SchemaError("x"), console)()

    guarded(work, console, COMMAND)
    assert "while joining a with b" in capsys.readouterr().err


def test_json_failures_are_one_document_on_standard_output(capsys):
    console = Console()
    console.json_mode = True
    guarded(raising(SchemaError("no column x"), console), console, COMMAND)
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["step"] == "joining a with b"
    assert error["exit_code"] == 1
    assert error["cause"] == "no column x"


def test_a_file_of_the_operating_system_is_named(capsys):
    console = Console()
    assert guarded(raising(FileNotFoundError(2, "No such file", "x.csv"), console), console, COMMAND) == 1
    assert "No such file: x.csv" in capsys.readouterr().err


def test_a_bug_is_one_line_and_a_log_with_the_traceback(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    console = Console()
    assert guarded(raising(KeyError("surprise"), console), console, COMMAND) == ExitCode.BUG
    (log,) = tmp_path.glob("headrace-bug-*.log")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert str(log) in lines[0]
    assert "Traceback" in log.read_text()
    assert "headrace join 'a b.tbl'" in log.read_text()


def test_success_is_zero():
    assert guarded(lambda: None, Console(), COMMAND) == ExitCode.OK


def test_an_unknown_command_lists_the_valid_ones(invoke):
    outcome = invoke("jion")
    assert outcome.code == 2
    assert "there is no command 'jion' (did you mean 'join'?); the commands are demo, init, run" in outcome.err


def test_the_help_of_every_group_shows_whole_sentences(invoke):
    groups = [(), ("dimension",), ("errors",), ("source",), ("table",)]
    for group in groups:
        lines = invoke(*group, "--help").out.partition("Commands:")[2].splitlines()
        assert len(lines) > 3, group
        assert [line for line in lines if line.endswith("...")] == [], group


@pytest.mark.parametrize(
    "options",
    [
        ["--on", "=k"],
        ["--on", "k="],
        ["--on", "k", "--memory", "lots"],
        ["--on", "k", "--memory", "32"],
        ["--on", "k", "--deadline", "-1s"],
        *(["--on", "k", "--delimiter", mark] for mark in ("", ",,", "é", "\n", '"')),
    ],
)
def test_values_that_cannot_be_read_are_usage_errors(invoke, options):
    assert invoke("join", "t", "s", "-o", "out.parquet", *options).code == 2


SLOW_STREAM = """
import signal
import os, sys, pyarrow as pa
from headrace.cli.main import handle_termination
from headrace.cli.reporting.console import Console
from headrace.cli.reporting.exits import guarded
from headrace.cli.arguments.sink import ParquetSink
from pathlib import Path

def work():
    with ParquetSink(Path(sys.argv[1]), pa.schema([("k", pa.int64())])) as sink:
        sink.write(pa.record_batch({"k": [1]}))
        print("writing", flush=True)
        sys.stdin.read()

signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background begin by ignoring it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and those of nohup this one
handle_termination()
sys.exit(guarded(work, Console(), ["headrace", "join"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_no_half_written_output(tmp_path, number):
    out = tmp_path / "out.parquet"
    out.write_text("older result")
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_STREAM, str(out)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "writing\n"
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert "interrupted" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]
    assert out.read_text() == "older result"


INTERRUPTED_CALL = """
import logging
from headrace.cli.main import handle_termination, time_log_lines

time_log_lines()
handle_termination()
for logger in (logging.getLogger(), logging.getLogger("sqlalchemy.pool")):
    for error in (KeyboardInterrupt(), ValueError("lost connection")):
        try:
            raise error
        except BaseException:
            logger.exception("%s while sending command.", type(error).__name__)
            try:
                raise OSError("is closed")
            except OSError:
                logger.exception("%s before the connection was closed.", type(error).__name__)
"""


def test_libraries_tell_no_interrupt_with_its_stack():
    command = [sys.executable, "-c", INTERRUPTED_CALL]
    errors = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "KeyboardInterrupt" not in errors
    assert errors.count("ValueError while sending command.") == 2
    assert errors.count("ValueError before the connection was closed.") == 2


def test_an_import_that_an_interrupt_ended_is_an_interrupt():
    error = ImportError("needs another version")
    assert exit_code_of(error) == ExitCode.BUG
    error.__context__ = KeyboardInterrupt()
    assert exit_code_of(error) == ExitCode.INTERRUPTED


INFO = [sys.executable, "-m", "headrace", "table", "info", "t", "--json"]


@pytest.fixture
def folder(tmp_path):
    Table.build(tmp_path / "t", pa.table({"k": [1]}), key="k").close()
    return tmp_path


def test_a_full_output_is_a_failure_that_standard_error_tells(folder):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(INFO, check=False, stdout=full, stderr=subprocess.PIPE, cwd=folder, text=True)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_output_is_told(folder):
    command = f"{shlex.join(INFO)} >&-"
    done = subprocess.run(command, check=False, shell=True, stderr=subprocess.PIPE, cwd=folder, text=True)
    assert done.returncode == 1
    assert "standard output is closed" in done.stderr


def test_a_result_that_nobody_reads_is_no_failure(folder):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(INFO, check=False, stdout=writing, stderr=subprocess.PIPE, cwd=folder, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_failure_names_the_pipeline_file_in_the_commands_it_recommends(capsys):
    console = Console()

    def work():
        with console.step("running it", left="nothing", pipeline=Path("my shop.yml")):
            raise InputFileError("leave it out with: headrace source skip PIPELINE a.csv")

    assert guarded(work, console, ["headrace", "run"]) == ExitCode.FAILURE
    assert "headrace source skip 'my shop.yml' a.csv" in capsys.readouterr().err


def test_a_size_without_a_unit_is_told_one(invoke):
    outcome = invoke("join", "t", "s", "--on", "k", "--memory", "32", "-o", "out.parquet")
    assert "32 has no unit; write one, as in 32MiB" in outcome.err
