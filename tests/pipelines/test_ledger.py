"""The ledger of loaded files: against a dict, across closed files, odd folders and a million names."""

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.pipelines.errors import LedgerError
from headrace.pipelines.source.discovery import Found, FoundFile
from headrace.pipelines.source.ledger import Ledger, RejectedRow


def found(*files):
    """Return a listing of (name, size, date)."""
    files = [FoundFile(*file) for file in files]
    sizes, mtimes = ([getattr(file, name) for file in files] for name in ("size", "mtime_ns"))
    return Found([file.name for file in files], np.array(sizes, np.int64), np.array(mtimes, np.int64))


def new_of(ledger, *files, hash_of=lambda _file: None):
    listing = found(*files)
    return [listing.names[index] for index in ledger.compare(listing, hash_of).new]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoint"


@pytest.fixture
def ledger(folder):
    with Ledger(folder) as opened:
        yield opened


def load(ledger, *files, prints=None):
    files = [FoundFile(*file) for file in files]
    number = ledger.next_number()
    ledger.plan(number, "attempt", files)
    ledger.done(number, prints)
    return number


def test_the_identity_is_made_once(folder):
    with Ledger(folder) as first:
        assert first.is_new
        stream = first.stream
    with Ledger(folder) as second:
        assert second.stream == stream
    shutil.move(folder, folder.parent / "moved")
    with Ledger(folder.parent / "moved") as third:
        assert third.stream == stream
    with Ledger(folder) as fourth:
        assert fourth.stream != stream


def test_new_files_come_by_date_and_then_by_name(ledger):
    assert new_of(ledger, ("b", 1, 5), ("é", 1, 5), ("a", 1, 5), ("z", 1, -4), ("c", 1, 2**63 - 1)) == [
        "z", "a", "b", "é", "c",
    ]  # fmt: skip


def test_a_file_is_new_whatever_its_date(ledger):
    load(ledger, ("b", 1, 10**18))
    assert new_of(ledger, ("b", 1, 10**18), ("a", 1, 0)) == ["a"]


def test_a_planned_batch_is_pending_until_it_is_done(folder):
    files = (FoundFile("a\n[*]", 1, 2), FoundFile("b", 3, 4))
    with Ledger(folder) as ledger:
        ledger.plan(0, "x", files)
        assert not ledger.is_new
    with Ledger(folder) as ledger:
        plan = ledger.pending()
        assert (plan.number, plan.attempt, plan.files, plan.skipped) == (0, "x", files, frozenset())
        assert (ledger.last_loaded(), ledger.next_number()) == (None, 0)
        ledger.done(0)
    with Ledger(folder) as ledger:
        assert ledger.pending() is None
        assert (ledger.last_loaded(), ledger.next_number()) == (0, 1)
        assert new_of(ledger, *files) == []


def test_a_plan_that_is_forgotten_leaves_its_files_new(ledger):
    load(ledger, ("a", 1, 1))
    ledger.plan(1, "x", [FoundFile("a", 2, 2), FoundFile("b", 1, 1)])
    ledger.forget(1)
    assert ledger.pending() is None
    assert ledger.next_number() == 1
    assert ledger.file("a").size == 1
    assert new_of(ledger, ("a", 1, 1), ("b", 1, 1)) == ["b"]


def test_one_batch_is_pending_and_numbers_are_not_used_twice(ledger):
    load(ledger, ("a", 1, 1))
    with pytest.raises(LedgerError, match="batch 0 cannot be planned"):
        ledger.plan(0, "x", [FoundFile("b", 1, 1)])
    ledger.plan(1, "x", [FoundFile("b", 1, 1)])
    with pytest.raises(LedgerError, match=r"batch 2 cannot be planned: the ledger .* has batch 1 already"):
        ledger.plan(2, "y", [FoundFile("c", 1, 1)])


@pytest.mark.parametrize("now", [("a", 11, 1), ("a", 9, 1), ("a", 10, 2), ("a", 0, 2), ("a", 10, 0)])
def test_a_loaded_file_of_other_size_or_content_is_changed(ledger, now):
    number = load(ledger, ("a", 10, 1), prints={"a": "before"})
    compared = ledger.compare(found(now), lambda _file: "after")
    assert not len(compared.new)
    ((change),) = compared.changed
    assert (change.file, change.loaded.size, change.loaded.batch) == (FoundFile(*now), 10, number)


def test_a_loaded_file_that_was_touched_is_unchanged_and_its_content_is_read_once(folder):
    asked = []

    def hash_of(file):
        asked.append(file)
        return "same"

    with Ledger(folder) as ledger:
        load(ledger, ("a", 10, 1), ("b", 5, 5), prints={"a": "same", "b": "other"})
        compared = ledger.compare(found(("a", 10, 2), ("b", 5, 5)), hash_of)
        assert (len(compared.new), compared.changed) == (0, ())
        ledger.compare(found(("a", 10, 2), ("b", 5, 5)), hash_of)
    with Ledger(folder) as ledger:
        ledger.compare(found(("a", 10, 2)), hash_of)
        assert ledger.file("a").fingerprint == "same"
    assert asked == [FoundFile("a", 10, 2)]


def test_without_a_fingerprint_another_date_is_a_change(ledger):
    load(ledger, ("a", 10, 1))
    assert len(ledger.compare(found(("a", 10, 2)), lambda _file: None).changed) == 1


def test_an_empty_file_waits_until_it_is_filled(ledger):
    compared = ledger.compare(found(("b", 0, 1), ("a", 0, 1), ("c", 1, 1)), lambda _file: None)
    assert (compared.empty, compared.new.tolist()) == (("a", "b"), [2])
    assert new_of(ledger, ("a", 1, 1)) == ["a"]


def test_a_skipped_file_is_new_when_its_content_changes(ledger):
    ledger.skip(FoundFile("a", 10, 1), "print")
    assert not ledger.is_new
    assert new_of(ledger, ("a", 10, 1)) == []
    assert new_of(ledger, ("a", 10, 2), hash_of=lambda _file: "print") == []
    assert new_of(ledger, ("a", 10, 3), hash_of=lambda _file: "other") == ["a"]
    assert new_of(ledger, ("a", 11, 2)) == ["a"]
    assert ledger.compare(found(("a", 0, 1)), lambda _file: None).empty == ("a",)


def test_a_skipped_file_of_the_pending_batch_is_told_and_loaded_if_the_facts_hold_it(folder):
    with Ledger(folder) as ledger:
        ledger.plan(0, "x", [FoundFile("a", 1, 1), FoundFile("b", 1, 1)])
        ledger.skip(FoundFile("a", 1, 1))
    with Ledger(folder) as ledger:
        assert ledger.pending().skipped == {"a"}
        ledger.done(0)
        assert (ledger.file("a").state, ledger.file("b").state) == ("loaded", "loaded")
        assert ledger.next_number() == 1


def test_a_file_that_was_skipped_for_one_batch_is_not_skipped_for_the_next(ledger):
    ledger.skip(FoundFile("a", 1, 1))
    ledger.plan(0, "x", [FoundFile("a", 2, 2)])
    assert ledger.pending().skipped == frozenset()


def test_skipping_a_change_of_a_loaded_file_keeps_it_loaded(ledger):
    load(ledger, ("a", 10, 1))
    ledger.skip(FoundFile("a", 12, 2))
    compared = ledger.compare(found(("a", 12, 2)), lambda _file: None)
    assert (len(compared.new), compared.changed) == (0, ())
    assert (ledger.file("a").state, ledger.file("a").batch) == ("loaded", 0)
    assert len(ledger.compare(found(("a", 13, 2)), lambda _file: None).changed) == 1


def test_files_are_listed_the_last_recorded_first(folder):
    times = iter(range(100))
    with Ledger(folder, clock=lambda: next(times)) as ledger:
        load(ledger, ("a", 1, 1), ("b", 1, 1))
        ledger.skip(FoundFile("c", 1, 1))
        load(ledger, ("d", 1, 1))
        assert [(file.name, file.state, file.batch) for file in ledger.files()] == [
            ("d", "loaded", 1), ("c", "skipped", None), ("a", "loaded", 0), ("b", "loaded", 0),
        ]  # fmt: skip


def test_adopting_takes_what_is_there_as_loaded_under_a_new_stream(folder):
    with Ledger(folder) as ledger:
        load(ledger, ("a", 1, 1))
        ledger.plan(1, "x", [FoundFile("b", 1, 1)])
        before = ledger.stream
    with Ledger.adopt(folder, found(("a", 5, 5), ("b", 1, 1), ("empty", 0, 1)), replaces=before) as adopted:
        assert (adopted.stream != before, adopted.replaces, adopted.is_new) == (True, before, False)
        assert (adopted.pending(), adopted.next_number()) == (None, 0)
        assert new_of(adopted, ("a", 5, 5), ("b", 1, 1), ("c", 1, 1), ("empty", 2, 1)) == ["c", "empty"]
    assert sorted(path.name for path in folder.iterdir()) == ["ledger.db"]


def test_adopting_an_empty_folder_is_adopting(folder):
    with Ledger.adopt(folder, found()) as adopted:
        assert not adopted.is_new


def test_adopting_replaces_a_damaged_ledger_and_its_journal(folder):
    folder.mkdir()
    (folder / "ledger.db").write_bytes(os.urandom(10_000))
    (folder / "ledger.db-journal").write_bytes(os.urandom(5000))
    with Ledger.adopt(folder, found(("a", 1, 1))) as adopted:
        assert new_of(adopted, ("a", 1, 1), ("b", 1, 1)) == ["b"]


def test_a_checkpoint_of_spark_is_refused_until_it_is_adopted(folder):
    (folder / "offsets").mkdir(parents=True)
    with pytest.raises(LedgerError, match=r"Spark Structured Streaming.*headrace source adopt PIPELINE"):
        Ledger(folder)
    Ledger.adopt(folder, found(("a", 1, 1))).close()
    Ledger(folder).close()


def test_a_checkpoint_that_is_not_local_is_refused():
    with pytest.raises(LedgerError, match="no local folder"):
        Ledger("s3://bucket/checkpoint")


def test_a_file_that_is_no_ledger_is_refused(folder):
    folder.mkdir()
    (folder / "ledger.db").write_bytes(b"not a database" * 1000)
    with pytest.raises(LedgerError, match=r"not a database; it is damaged: restore .*headrace source adopt"):
        Ledger(folder)


def test_a_ledger_of_a_newer_release_is_refused(folder):
    Ledger(folder).close()
    with sqlite3.connect(folder / "ledger.db") as connection:
        connection.execute("UPDATE identity SET version = 9")
    connection.close()
    with pytest.raises(LedgerError, match="newer release"):
        Ledger(folder)


def test_a_disk_that_is_full_is_told(ledger, monkeypatch):
    def fail(*_arguments):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("headrace.pipelines.source.ledger._upsert", fail)
    ledger.plan(0, "x", [FoundFile("a", 1, 1)])
    with pytest.raises(LedgerError, match="disk is full; free some space"):
        ledger.done(0)
    monkeypatch.undo()
    assert ledger.pending().number == 0
    ledger.done(0)


def test_a_file_in_place_of_the_folder_is_told(tmp_path):
    (tmp_path / "checkpoint").write_text("")
    with pytest.raises(LedgerError, match="cannot be used"):
        Ledger(tmp_path / "checkpoint")


AS_NOBODY = """
import os, sys
from headrace.pipelines.source.discovery import FoundFile
from headrace.pipelines.errors import LedgerError
from headrace.pipelines.source.ledger import Ledger, RejectedRow
Ledger(sys.argv[2]).close()  # what is imported late, too
os.setuid(65534)
try:
    Ledger(sys.argv[1]).skip(FoundFile("a", 1, 1))
except LedgerError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_that_may_not_be_written_is_told(tmp_path, exists):
    folder = tmp_path / "checkpoint"
    if exists:
        Ledger(folder).close()
    for each in (tmp_path, *tmp_path.parents):
        if each == Path(tempfile.gettempdir()):
            break
        each.chmod(0o755)
    command = [sys.executable, "-c", AS_NOBODY, folder, tmp_path / "other"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "let this user read and write its folder" in done.stdout, done.stderr


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_any_umask_leaves_a_ledger_that_its_owner_can_use(tmp_path, umask):
    before = os.umask(umask)
    try:
        with Ledger(tmp_path / "a/b") as ledger:
            load(ledger, ("a", 1, 1))
        for path in (tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/ledger.db"):
            assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600
        with Ledger(tmp_path / "a/b") as ledger:
            assert ledger.next_number() == 1
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["a?b", "a%41", "a#b", "a b", "in[1]", "ünï", "new\nline", "a;b", "file:x"])
def test_the_name_of_the_folder_is_literal(tmp_path, name):
    with Ledger(tmp_path / name) as ledger:
        load(ledger, ("a", 1, 1))
    assert (tmp_path / name / "ledger.db").is_file()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_more_files_than_fit_in_one_query_are_compared(ledger):
    files = [(f"f{number:05}", 1, number) for number in range(1203)]
    load(ledger, *files, prints={name: name for name, _, _ in files})
    touched = [(name, size, date + 1) for name, size, date in files]
    compared = ledger.compare(found(*touched), lambda file: file.name if file.name != "f00700" else "x")
    assert [change.file.name for change in compared.changed] == ["f00700"]
    assert not len(compared.new)


class LedgerMachine(RuleBasedStateMachine):
    """Files that come, go and change; batches that are planned, loaded or lost; against dicts."""

    NAMES = st.sampled_from(["a", "b", "sub/c", "é", "x y"])

    @initialize()
    def start(self):
        self.base = tempfile.TemporaryDirectory()
        self.ledger = Ledger(self.base.name + "/checkpoint")
        self.now = {}
        self.known = {}
        self.plan = None
        self.number = 0
        self.date = 0

    def teardown(self):
        if hasattr(self, "ledger"):
            self.ledger.close()
            self.base.cleanup()

    def listing(self):
        return found(*((name, len(content), date) for name, (content, date) in self.now.items()))

    def hash_of(self, file):
        return "hash of " + self.now[file.name][0]

    @rule(name=NAMES, content=st.text("xy", max_size=3))
    def write(self, name, content):
        self.date += 1
        self.now[name] = (content, self.date)

    @rule(name=NAMES)
    def remove(self, name):
        self.now.pop(name, None)

    @rule(name=NAMES)
    def touch(self, name):
        if name in self.now:
            self.write(name, self.now[name][0])

    @rule(name=NAMES)
    def skip(self, name):
        if name in self.now and self.known.get(name, ("", ""))[0] != "loaded":
            content, date = self.now[name]
            file = FoundFile(name, len(content), date)
            self.ledger.skip(file, self.hash_of(file))
            self.known[name] = ("skipped", content)

    @precondition(lambda self: self.plan is None)
    @rule(most=st.integers(1, 3))
    def plan_batch(self, most):
        listing = self.listing()
        compared = self.ledger.compare(listing, self.hash_of)
        files = [listing.file(index) for index in compared.new[:most]]
        if files:
            self.ledger.plan(self.number, f"attempt of {self.number}", files)
            self.plan = {file.name: self.now[file.name][0] for file in files}

    @precondition(lambda self: self.plan is not None)
    @rule()
    def load_batch(self):
        self.ledger.done(self.number, {name: "hash of " + content for name, content in self.plan.items()})
        self.known |= {name: ("loaded", content) for name, content in self.plan.items()}
        self.plan = None
        self.number += 1

    @precondition(lambda self: self.plan is not None)
    @rule()
    def lose_batch(self):
        self.ledger.forget(self.number)
        self.plan = None

    @rule()
    def reopen(self):
        stream = self.ledger.stream
        self.ledger.close()
        self.ledger = Ledger(self.base.name + "/checkpoint")
        assert self.ledger.stream == stream

    @invariant()
    def the_ledger_says_what_the_dicts_say(self):
        if not hasattr(self, "ledger"):
            return
        compared = self.ledger.compare(self.listing(), self.hash_of)
        wanted = {
            name for name, (content, _) in self.now.items()
            if name not in self.known or (self.known[name][0] == "skipped" and self.known[name][1] != content)
        }  # fmt: skip
        assert {self.listing().names[index] for index in compared.new} == {n for n in wanted if self.now[n][0]}
        assert set(compared.empty) == {name for name in wanted if not self.now[name][0]}
        assert {change.file.name for change in compared.changed} == {
            name for name, (state, content) in self.known.items()
            if name in self.now and state == "loaded" and self.now[name][0] != content
        }  # fmt: skip
        pending = self.ledger.pending()
        assert (pending and {file.name for file in pending.files}) == (self.plan and set(self.plan))
        assert self.ledger.next_number() == self.number
        assert {file.name: file.state for file in self.ledger.files()} == {n: s for n, (s, _) in self.known.items()}


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(deadline=None, max_examples=30, stateful_step_count=25)


def test_a_planned_retry_is_kept_until_it_is_loaded_or_forgotten(tmp_path):
    rows = (RejectedRow("s", 0, "a b.csv", 3), RejectedRow("t", 2, "a b.csv", 1))
    with Ledger(tmp_path) as ledger:
        ledger.plan(0, "x", (), rows)
    with Ledger(tmp_path) as ledger:
        plan = ledger.pending()
        assert (plan.number, plan.attempt, plan.files, plan.retried) == (0, "x", (), rows)
        ledger.forget(0)
        assert ledger.pending() is None
        ledger.plan(0, "y", (), rows[:1])
        assert ledger.pending().retried == rows[:1]
        ledger.done(0)
        assert (ledger.pending(), ledger.last_loaded(), list(ledger.files())) == (None, 0, [])
        ledger.plan(1, "z", (), rows[1:])
        assert ledger.pending().retried == rows[1:]
