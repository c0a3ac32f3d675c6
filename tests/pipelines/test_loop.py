"""The loop of a run with facts that are a list: crashes between any two steps, files that change, what is left out."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from headrace.pipelines.catalog import BatchRecord
from headrace.pipelines.config.model import SourceConfig, TriggerConfig
from headrace.pipelines.errors import BatchError, SourceFileError
from headrace.pipelines.hooks import Step
from headrace.pipelines.loop import BatchLoop, StopRequest
from headrace.pipelines.source.discovery import examine, fingerprint
from headrace.pipelines.source.feed import SourceFeed
from headrace.pipelines.source.ledger import Ledger
from headrace.pipelines.source.pieces import spread

STEPS = (
    "after listing", "after plan", "before facts", "after facts", "after rest", "after batch", "after done", "on batch",
)  # fmt: skip
STEPS_OF_RESUMING = ("after finish", "after forget")


class CrashError(Exception):
    """Raised in place of a crash."""


class Facts:
    """A fact table in memory: batches by stream and number, with what follows each of them."""

    def __init__(self):
        self.batches = {}
        self.finished = set()

    @property
    def records(self):
        return sorted(text for _, texts in self.batches.values() for text in texts)


class FakeProtocol:
    """Loads a batch like the real one: the facts decide, then follows the rest."""

    def __init__(self, folder, facts, hook):
        self.folder = folder
        self.facts = facts
        self.hook = hook

    def finish(self, number, stream, attempt=None):
        if (stream, number) not in self.facts.batches:
            return None
        loaded_by, texts = self.facts.batches[stream, number]
        if attempt not in {None, loaded_by}:
            raise BatchError("another attempt loaded the batch")
        self.facts.finished.add((stream, number))
        return record(number, len(texts))

    def run_batch(self, pieces, number, stream, attempt):
        texts = [text for name in pieces for text in (Path(self.folder) / name).read_text().split()]
        if "bad" in texts:
            raise BatchError("the file is bad")
        self.hook("before facts")
        assert (stream, number) not in self.facts.batches
        assert all(each < number for name, each in self.facts.batches if name == stream)
        self.facts.batches[stream, number] = (attempt, texts)
        self.hook("after facts")
        self.facts.finished.add((stream, number))
        self.hook("after rest")
        return record(number, len(texts))


def record(number, rows):
    counts = dict.fromkeys(
        ("dropped", "routed", "rejected", "new_members", "pages_wanted", "pages_read", "seeks", "deadline_misses"), 0
    )
    return BatchRecord(
        run="r", stream="s", batch=number, started=0.0, seconds=0.0, rows_in=rows, loaded=rows, hit_ratio=0.0,
        detail={}, **counts,
    )  # fmt: skip


class Project:
    """A source folder, its ledger's folder and the facts."""

    def __init__(self, base):
        self.base = Path(base)
        self.folder = self.base / "in"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.facts = Facts()
        self.source = {"format": "csv", "path": str(self.folder), "schema": {"id": "bigint"}}
        self.trigger = {"max_files": 2}
        self.date = 10**9

    @property
    def checkpoint(self):
        return self.base / "checkpoint"

    def write(self, name, text):
        self.date += 1
        path = self.folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        os.utime(path, (self.date, self.date))

    def run(self, hook=lambda _step: None, stop=None, interval=None, on_batch=None):
        """Run once, and return the loop and the feed."""
        with Ledger(self.checkpoint) as ledger:
            trigger = TriggerConfig.model_validate(self.trigger)
            feed = SourceFeed(SourceConfig.model_validate(self.source), trigger, ledger)
            protocol = FakeProtocol(self.folder, self.facts, hook)

            def told(batch):
                hook("on batch")
                if on_batch is not None:
                    on_batch(batch)

            loop = BatchLoop(feed, protocol, lambda files: [file.name for file in files], on_batch=told, hook=hook)
            loop.run(stop or StopRequest(), interval)
        return loop, feed

    def crash_at(self, step, nth=1):
        """Run until a step has come so many times."""
        seen = []

        def hook(name):
            seen.append(name)
            if seen.count(step) == nth and name == step:
                raise CrashError(step)

        with pytest.raises(CrashError):
            self.run(hook)

    @property
    def there(self):
        return sorted(text for path in self.folder.rglob("*") if path.is_file() for text in path.read_text().split())


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def test_batches_take_files_by_date_until_nothing_is_new(project):
    for name in ("c", "a", "b"):
        project.write(name, name)
    loop, _ = project.run()
    assert [texts for _, texts in project.facts.batches.values()] == [["c", "a"], ["b"]]
    assert [each.batch for each in loop.records] == [0, 1]
    assert project.run()[0].records == []


def test_a_batch_takes_no_more_bytes_than_it_may_but_one_file(project):
    project.trigger = {"max_files": 10, "max_bytes": 5}
    for name, text in (("a", "xxx"), ("b", "xx"), ("c", "xxxxxxx"), ("d", "x")):
        project.write(name, text)
    project.run()
    assert [texts for _, texts in project.facts.batches.values()] == [["xxx", "xx"], ["xxxxxxx"], ["x"]]


def test_files_that_arrive_during_a_run_are_loaded_by_it(project):
    project.write("a", "1")
    arrived = []

    def arrive(_):
        if not arrived:
            arrived.append(project.write("0", "2"))

    project.run(on_batch=arrive)
    assert project.facts.records == ["1", "2"]


def test_a_file_with_an_old_date_is_loaded(project):
    project.write("b", "1")
    project.run()
    project.write("a", "2")
    os.utime(project.folder / "a", (0, 0))
    project.run()
    assert project.facts.records == ["1", "2"]


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_loses_and_doubles_nothing(project, step, nth):
    for name in "abc":
        project.write(name, name)
    project.crash_at(step, nth)
    project.write("d", "d")
    project.run()
    assert project.facts.records == project.there
    assert len(project.facts.finished) == len(project.facts.batches)


@pytest.mark.parametrize("again", STEPS_OF_RESUMING)
@pytest.mark.parametrize("step", STEPS[1:-2])
def test_a_crash_while_a_crash_is_mended_loses_and_doubles_nothing(project, step, again):
    for name in "abc":
        project.write(name, name)
    project.crash_at(step)
    seen = []

    def hook(name):
        seen.append(name)
        if name == again:
            raise CrashError(name)

    for _ in range(2):
        try:
            project.run(hook)
        except CrashError:
            continue
    project.run()
    assert project.facts.records == project.there
    assert seen


def test_a_batch_that_failed_is_planned_again_from_the_files_there_are_now(project):
    project.write("a", "bad")
    project.write("b", "b")
    with pytest.raises(BatchError, match="bad"):
        project.run()
    project.write("a", "good")
    project.write("0", "0")
    project.run()
    assert project.facts.records == ["0", "b", "good"]
    assert [number for _, number in project.facts.batches] == [0, 1]


def test_a_planned_file_that_is_gone_is_named_and_loaded_when_it_is_put_back(project):
    project.write("a", "bad")
    with pytest.raises(BatchError):
        project.run()
    (project.folder / "a").unlink()
    for _ in range(2):
        with pytest.raises(SourceFileError, match=r"'a'; put them back, or .* `headrace source skip PIPELINE a`"):
            project.run()
    project.write("a", "good")
    project.run()
    assert project.facts.records == ["good"]


def test_a_planned_file_that_was_skipped_is_gone_by_decision_and_new_when_it_comes_back(project):
    project.write("a", "bad")
    project.write("b", "b")
    with pytest.raises(BatchError):
        project.run()
    (project.folder / "a").unlink()
    with Ledger(project.checkpoint) as ledger:
        ledger.skip(next(file for file in ledger.pending().files if file.name == "a"))
    project.run()
    assert project.facts.records == ["b"]
    project.write("a", "good")
    project.run()
    assert project.facts.records == ["b", "good"]


def test_a_file_that_grew_after_it_was_loaded_is_named_with_its_sizes(project):
    project.write("a", "1")
    project.run()
    project.write("a", "1 2")
    project.write("b", "3")
    with pytest.raises(
        SourceFileError, match=r"'a' had 1 bytes in batch 0 and has 3 now; put each back.*source\.changed"
    ):
        project.run()
    assert project.facts.records == ["1"]
    project.write("a", "1")
    project.run()
    assert project.facts.records == ["1", "3"]


def test_a_file_that_grows_while_it_is_loaded_is_named_by_the_same_run(project):
    project.write("a", "1")
    with pytest.raises(SourceFileError, match="'a' had 1 bytes"):
        project.run(on_batch=lambda _: project.write("a", "1 2"))


def test_a_file_of_one_size_with_other_content_is_named(project):
    project.write("a", "1")
    project.run()
    project.write("a", "2")
    with pytest.raises(SourceFileError, match="'a' has other content than in batch 0"):
        project.run()


def test_a_file_that_was_touched_is_no_change(project):
    project.write("a", "1")
    project.run()
    project.write("a", "1")
    project.run()
    assert project.facts.records == ["1"]


def test_a_batch_that_a_crash_left_to_be_noted_keeps_its_fingerprints(project):
    project.write("a", "1")
    project.crash_at("after facts")
    project.run()
    project.write("a", "1")
    project.run()
    project.write("a", "2")
    with pytest.raises(SourceFileError, match="other content"):
        project.run()


def test_a_changed_file_is_loaded_again_by_choice(project):
    project.source["changed"] = "reload"
    project.write("a", "1")
    project.write("b", "2")
    project.run()
    project.write("a", "1 3")
    project.write("b", "")
    _, intake = project.run()
    assert project.facts.records == ["1", "1", "2", "3"]
    assert [(left.name, left.reason.split(";")[0]) for left in intake.left_out] == [
        ("b", "emptied after it was loaded")
    ]
    project.write("b", "4")
    _, intake = project.run()
    assert project.facts.records == ["1", "1", "2", "3", "4"]
    assert intake.left_out == ()


def test_a_changed_file_is_ignored_by_choice_and_named(project):
    project.source["changed"] = "ignore"
    project.write("a", "1")
    project.run()
    project.write("a", "2")
    loop, intake = project.run()
    assert loop.records == []
    assert [(left.name, "ignore" in left.reason) for left in intake.left_out] == [("a", True)]


def test_an_empty_file_is_named_and_loaded_when_it_is_filled(project):
    project.write("a", "")
    _, intake = project.run()
    assert [(left.name, left.reason) for left in intake.left_out] == [("a", "empty; it is loaded when it holds a byte")]
    project.write("a", "1")
    _, intake = project.run()
    assert (project.facts.records, intake.left_out) == (["1"], ())


def test_subfolders_are_named_or_loaded(project):
    project.write("sub/a", "1")
    _, intake = project.run()
    assert [left.name for left in intake.left_out] == ["sub"]
    project.source["recursive"] = True
    project.run()
    assert project.facts.records == ["1"]


def test_only_files_of_the_pattern_are_loaded(project):
    project.source["files"] = "a?.csv"
    for name in ("a1.csv", "a?.csv", "a.csv", "b.csv"):
        project.write(name, name)
    project.run()
    assert project.facts.records == ["a1.csv", "a?.csv"]


def test_a_file_that_vanishes_before_it_is_planned_is_new_when_it_comes_back(project):
    project.trigger = {"max_files": 1}
    for name in "ab":
        project.write(name, name)
    project.run(on_batch=lambda _: (project.folder / "b").unlink(missing_ok=True))
    assert project.facts.records == ["a"]
    project.write("b", "b")
    project.run()
    assert project.facts.records == ["a", "b"]


def test_a_project_that_is_moved_goes_on(project, tmp_path):
    project.write("a", "1")
    project.run()
    project.base.joinpath("in").rename(tmp_path / "renamed")
    project.folder = tmp_path / "renamed"
    project.source["path"] = str(project.folder)
    project.write("b", "2")
    project.run()
    assert project.facts.records == ["1", "2"]


def test_a_run_that_is_told_to_stop_ends_after_the_batch(project):
    for name in "abcdef":
        project.write(name, name)
    stop = StopRequest()
    loop, _ = project.run(stop=stop, on_batch=lambda _: stop.by(15), interval=0.0)
    assert (len(loop.records), stop.signal) == (1, 15)
    assert project.facts.records == ["a", "b"]


def test_a_followed_source_is_listed_again_until_the_run_is_told_to_stop(project):
    stop = StopRequest()
    listings = []

    def hook(step):
        if step == "after listing":
            listings.append(step)
            if len(listings) == 2:
                project.write("a", "1")
            elif len(listings) == 4:
                stop.by(2)

    project.run(hook, stop, interval=0.0)
    assert project.facts.records == ["1"]


KILLED = """
import json, os, signal, sys
sys.path.insert(0, {tests!r})
from test_loop import Project
project = Project({base!r})
def hook(name):
    if name == {step!r}:
        batches = [[*key, *value] for key, value in project.facts.batches.items()]
        (project.base / "facts").write_text(json.dumps(batches))
        os.kill(os.getpid(), signal.SIGKILL)
project.run(hook)
"""


@pytest.mark.parametrize("step", STEPS[1:-2])
def test_a_ledger_that_is_killed_at_a_step_is_right_afterwards(tmp_path, step):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a").write_text("1")
    script = KILLED.format(tests=str(Path(__file__).parent), base=str(tmp_path), step=step)
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    project = Project(tmp_path)
    for stream, number, attempt, texts in json.loads((tmp_path / "facts").read_text()):
        project.facts.batches[stream, number] = (attempt, texts)
    project.run()
    assert project.facts.records == ["1"]


class LoopMachine(RuleBasedStateMachine):
    """Runs that crash at random steps while files arrive, are touched, emptied and filled."""

    @initialize()
    def start(self):
        self.base = tempfile.TemporaryDirectory()
        self.project = Project(self.base.name)
        self.count = 0

    def teardown(self):
        if hasattr(self, "base"):
            self.base.cleanup()

    @rule(files=st.integers(1, 4))
    def arrive(self, files):
        for _ in range(files):
            self.count += 1
            self.project.write(f"f{self.count}", str(self.count))

    @rule(back=st.integers(0, 10**9))
    def arrive_with_an_old_date(self, back):
        self.arrive(1)
        os.utime(self.project.folder / f"f{self.count}", (back, back))

    @rule()
    def arrive_empty(self):
        self.count += 1
        self.project.write(f"e{self.count}", "")

    @rule()
    def fill(self):
        for path in self.project.folder.glob("e*"):
            if not path.stat().st_size:
                self.project.write(path.name, path.name)

    @rule()
    def touch(self):
        self.project.run()  # the fingerprints of a batch that ended early are taken when it is completed
        for path in self.project.folder.glob("*"):
            self.project.write(path.name, path.read_text())

    @rule(step=st.sampled_from([*STEPS, *STEPS_OF_RESUMING]), nth=st.integers(1, 3))
    def crash(self, step, nth):
        seen = []

        def hook(name):
            seen.append(name)
            if name == step and seen.count(step) == nth:
                raise CrashError(name)

        try:
            self.project.run(hook)
        except CrashError:
            return
        self.check()

    @rule()
    def run(self):
        self.project.run()
        self.check()

    def check(self):
        assert self.project.facts.records == self.project.there
        assert self.project.facts.finished == set(self.project.facts.batches)


def test_a_file_touched_before_its_fingerprint_was_taken_is_not_said_to_have_other_content():
    machine = LoopMachine()
    try:
        machine.start()
        machine.arrive(files=1)
        machine.crash(step="after facts", nth=1)
        for path in machine.project.folder.glob("*"):
            machine.project.write(path.name, path.read_text())
        with pytest.raises(SourceFileError, match="what its content was then is not known"):
            machine.run()
    finally:
        machine.teardown()


TestLoopMachine = LoopMachine.TestCase
TestLoopMachine.settings = settings(deadline=None, max_examples=25, stateful_step_count=15)


def test_a_signal_ends_the_wait_at_once():
    stop = StopRequest()
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: stop.by(number))
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        began = time.monotonic()
        stop.wait(60)
        assert time.monotonic() - began < 30
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert (stop.asked, stop.signal) == (True, signal.SIGUSR1)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [[], [5], [1] * 9, [9, 1, 1, 1, 8, 1, 1, 7], list(range(20))])
def test_parts_have_the_rows_of_sparks_partitions_and_like_sizes(sizes, parts):
    chosen = spread(sizes, parts)
    count, parts = len(sizes), min(parts, len(sizes))
    assert sorted(index for part in chosen for index in part) == list(range(count))
    assert [len(part) for part in chosen] == [(i + 1) * count // parts - i * count // parts for i in range(parts)]
    if parts:
        most = max(sum(sizes[index] for index in part) for part in chosen)
        assert most <= sum(sizes) / parts + max(sizes)


def test_a_fingerprint_that_fails_does_not_fail_the_batch(project, monkeypatch):
    monkeypatch.setattr("headrace.pipelines.source.feed.fingerprint", lambda *_: None)
    project.write("a", "1")
    project.run()
    monkeypatch.undo()
    assert fingerprint(str(project.folder), project_file(project)) is not None
    project.write("a", "1")
    with pytest.raises(SourceFileError, match="what its content was then is not known"):
        project.run()


def project_file(project):
    return examine(str(project.folder), "a")


def test_a_batch_says_what_it_reads_and_nothing_while_there_is_nothing_to_do(project):
    for name in ("a", "b", "c"):
        project.write(f"{name}.csv", f"id\n{name}\n")
    described = []
    project.run(lambda step: described.append(step.begins) if isinstance(step, Step) else None)
    assert described == ["", "batch 0: reading 2 of 3 files", "", "batch 1: reading 1 file", ""]
