"""Starting Spark: what is missing is said in one line with the remedy; the terminal stays quiet."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from pyspark import SparkContext

from headrace.pipelines.errors import BatchError, JarsUnavailableError, JavaNotFoundError, SparkStartError
from headrace.pipelines.spark.failures import cause_of, explained
from headrace.pipelines.spark.jars import _artifact, _cause, cache_folder, delta_jars, require_java, require_user
from headrace.pipelines.spark.sessions import SparkSettings, _start_conf, _start_error


def test_a_missing_java_is_named_with_the_remedy(monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(JavaNotFoundError, match=r"no Java was found.*install a Java runtime, version 17") as caught:
        require_java()
    assert "\n" not in str(caught.value)


def test_a_java_home_without_java_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaNotFoundError, match=f"JAVA_HOME is {tmp_path}"):
        require_java()


def test_a_user_without_a_name_is_told_before_java_starts(monkeypatch):
    def no_entry(uid):
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", no_entry)
    with pytest.raises(SparkStartError, match=r"user id \d+ has no entry in the system's list of users.*/etc/passwd"):
        require_user()


@pytest.mark.parametrize(
    "text",
    [
        "java.lang.UnsupportedClassVersionError: org/apache/spark/launcher/Main",
        "JAVA_HOME is not set",
        "java: not found",
    ],
)
def test_a_java_that_does_not_fit_is_told_from_the_log(tmp_path, text):
    log = tmp_path / "spark.log"
    log.write_text(text)
    assert isinstance(_start_error(log), JavaNotFoundError)


def test_another_failure_shows_the_end_of_the_log(tmp_path):
    log = tmp_path / "spark.log"
    log.write_text("one\nError: out of luck\n")
    assert "out of luck" in str(_start_error(log))
    assert str(log) in str(_start_error(log))


def test_a_stack_of_calls_is_left_out_of_the_reason(tmp_path):
    log = tmp_path / "spark.log"
    log.write_text(
        'Using the default profile\nException in thread "main" java.lang.Oops: basedir must be absolute\n'
        "\tat a.b(C.scala:1)\n"
    )
    assert 'start: Exception in thread "main" java.lang.Oops: basedir must be absolute;' in str(_start_error(log))


def test_jars_that_cannot_be_fetched_are_named_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))

    def no_network(_coordinates, _folder, log):
        log.write_text(":: resolving\n\tunresolved dependency: io.delta#delta-spark: not found\n")
        return 1

    monkeypatch.setattr("headrace.pipelines.spark.jars._run_resolver", no_network)
    with pytest.raises(
        JarsUnavailableError, match=r"unresolved dependency: io.delta.*connect to the network"
    ) as caught:
        delta_jars()
    assert "\n" not in str(caught.value)


@pytest.fixture
def fetches(monkeypatch, tmp_path):
    """Let the resolver bring two jars without a network, and return the folders it was called for."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    calls = []

    def network(_coordinates, folder, _log):
        calls.append(folder)
        (folder / "jars").mkdir(exist_ok=True)
        for name in ("io.delta_delta-spark_4.2_2.13-4.4.0.jar", "org.slf4j_slf4j-api-2.0.13.jar"):
            (folder / "jars" / name).write_bytes(b"jar")
        return 0

    monkeypatch.setattr("headrace.pipelines.spark.jars._run_resolver", network)
    return calls


def test_jars_are_fetched_once_and_without_those_that_spark_has(fetches):
    assert [jar.name for jar in delta_jars()] == ["io.delta_delta-spark_4.2_2.13-4.4.0.jar"]
    delta_jars()
    assert len(fetches) == 1


def test_a_jar_that_has_gone_is_fetched_again(fetches):
    for jar in delta_jars():
        jar.unlink()
    assert all(jar.exists() for jar in delta_jars())
    assert len(fetches) == 2


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(JarsUnavailableError, match="HEADRACE_CACHE"):
        delta_jars()


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "headrace"


@pytest.mark.parametrize(
    ("name", "artifact"),
    [
        ("org.slf4j_slf4j-api-2.0.13.jar", "slf4j-api"),
        ("zstd-jni-1.5.7-3.jar", "zstd-jni"),
        ("io.delta_delta-spark_4.2_2.13-4.4.0.jar", "delta-spark_4.2_2.13"),
    ],
)
def test_an_artifact_is_told_from_its_file(tmp_path, name, artifact):
    assert _artifact(tmp_path / name) == artifact


def test_a_log_without_a_telling_line_gives_its_last(tmp_path):
    (tmp_path / "log").write_text("a\nb\n")
    assert _cause(tmp_path / "log") == "b"


def test_under_spark_submit_the_master_stays_its_own():
    assert "spark.master" not in _start_conf(SparkSettings(), submitted=True)
    assert _start_conf(SparkSettings(), submitted=False)["spark.master"] == "local[*,4]"


def test_the_cause_of_a_workers_error_is_its_last_line():
    text = (
        "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
        '  File "worker.py", line 1, in f\n'
    )
    assert cause_of(RuntimeError(f"{text}my.steps.OddError: it is odd\n")) == "it is odd (OddError)"
    assert cause_of(RuntimeError(f"{text}KeyError: 'city'\n")) == "'city' (KeyError)"
    told = cause_of(RuntimeError(f"{text}headrace.storage.errors.MemoryBudgetError: the budget is too small\n"))
    assert told == "the budget is too small"


def test_a_long_cause_keeps_its_beginning_and_its_end():
    message = f"a.csv: {'column, ' * 1000}leave it out with: headrace source skip PIPELINE a.csv"
    told = cause_of(RuntimeError(f"Traceback (most recent call last):\nheadrace.errors.SourceFileError: {message}"))
    assert told.startswith("a.csv: column")
    assert told.endswith("headrace source skip PIPELINE a.csv")
    assert len(told) < 2100


def test_the_cause_of_a_java_error_is_its_innermost_one():
    class Java:
        def __init__(self, text, cause=None):
            self.text, self.cause = text, cause

        def getCause(self):  # noqa: N802 - Java's name
            return self.cause

        def toString(self):  # noqa: N802 - Java's name
            return self.text

    error = RuntimeError("An error occurred while calling o1.collect.\n: long story")
    error.java_exception = Java(
        "org.apache.spark.SparkException: job aborted", Java("java.io.IOException: disk full\n at x")
    )
    assert cause_of(error) == "disk full"


def test_a_missing_java_ends_the_entry_point_with_one_line(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "p.yml").write_text(
        "name: p\nsource: {format: csv, path: in, schema: {id: bigint}}\nduplicates: {key: [id]}\nsink: {path: facts}\n"
    )
    environment = {**os.environ, "PATH": "/nowhere", "HEADRACE_CACHE": str(tmp_path / "cache")}
    environment.pop("JAVA_HOME", None)
    command = [sys.executable, "-m", "headrace.pipelines", str(tmp_path / "p.yml"), "--once"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().startswith("JavaNotFoundError: no Java was found")
    assert done.stdout == ""


_KILLED = """
import signal, sys
from headrace.cli.main import entry_point
from headrace.pipelines.batch.protocol import BatchProtocol
own = BatchProtocol.run_batch
def killed(*args, **options):
    from pyspark import SparkContext
    SparkContext._gateway.proc.send_signal(signal.SIGKILL)
    return own(*args, **options)
BatchProtocol.run_batch = killed
sys.exit(entry_point())
"""


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_a_run_says_that_sparks_process_ended(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("id\n1\n")
    (tmp_path / "p.yml").write_text(
        "name: p\nsource: {format: csv, path: in, schema: {id: bigint}}\nduplicates: {key: [id]}\nsink: {path: facts}\n"
    )
    command = [sys.executable, "-c", _KILLED, "run", "p.yml", "--once"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cause  Spark's process ended during a batch: it was killed, perhaps because" in done.stderr
    assert "nothing is lost; the next run repeats this batch" in done.stderr
    assert "run p.yml --once" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_end_of_sparks_process_is_told_with_how_to_repeat_the_step(monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=ended))
    with pytest.raises(BatchError) as told, explained("restating", "restate again"):
        raise ConnectionRefusedError(111, "Connection refused")
    assert str(told.value).startswith("Spark's process ended during restating: it was killed")
    assert str(told.value).endswith("nothing is lost; restate again")
    monkeypatch.setattr(SparkContext, "_gateway", None)
    with pytest.raises(BatchError, match=r"^restating failed: it is odd; nothing is lost; restate again$"), \
            explained("restating", "restate again"):  # fmt: skip
        raise ValueError("it is odd")
