"""Threads that change a table through one handle at once, and changes that are broken off between two steps."""

import contextlib
import shutil
import threading

import numpy as np
import pyarrow as pa
import pytest

from headrace.storage import Table, handle
from headrace.storage.commit import writer
from headrace.storage.errors import ClosedTableError, InputError, LockedError

ROWS = 5_000
THREADS = 4
TURNS = 40


def one(key, value):
    return pa.record_batch({"k": [key], "v": [value]})


@pytest.fixture
def path(tmp_path):
    rows = pa.table({"k": np.arange(ROWS), "v": np.zeros(ROWS, dtype=np.int64)})
    Table.build(tmp_path / "t", rows, key="k", unique=True).close()
    return tmp_path / "t"


@pytest.fixture(params=["r", "w"])
def table(path, request):
    with Table.open(path, mode=request.param) as table:
        yield table


def test_threads_change_a_table_in_turn(table):
    failed = []

    def change(thread):
        try:
            for turn in range(1, TURNS + 1):
                table.apply(one(turn * 100 + thread, turn), wait=60)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=change, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert table.check().violations == ()
    keys = [turn * 100 + thread for turn in range(1, TURNS + 1) for thread in range(THREADS)]
    found = table.lookup(pa.record_batch({"k": keys}))
    assert found["v"].to_pylist() == [key // 100 for key in keys]
    assert table.snapshot().txid == 2 + THREADS * TURNS


def test_a_thread_does_not_wait_longer_than_it_says(table):
    refused = []

    def change(wait):
        try:
            table.apply(one(1, 1), wait=wait)
        except (InputError, LockedError) as error:
            refused.append(error)

    with table.transaction() as transaction:
        transaction.apply(one(2, 2))
        for wait in (0, 0.01, "soon"):
            thread = threading.Thread(target=change, args=(wait,))
            thread.start()
            thread.join()
    assert [type(error) for error in refused] == [LockedError, LockedError, InputError]
    assert "another thread is writing" in str(refused[0])
    assert table.lookup(pa.record_batch({"k": [1, 2]}))["v"].to_pylist() == [0, 2]


@pytest.mark.parametrize("other", [lambda table: table.apply(one(1, 1)), Table.compact, Table.build_filter])
def test_nothing_else_changes_a_table_within_its_transaction(table, other):
    with table.transaction() as transaction:
        transaction.apply(one(2, 2))
        with pytest.raises(InputError, match="open already"):
            other(table)
    assert table.lookup(pa.record_batch({"k": [1, 2]}))["v"].to_pylist() == [0, 2]
    assert table.check().violations == ()


def test_a_table_closed_within_its_transaction_says_so(table):
    def close_within():
        with table.transaction() as transaction:
            transaction.apply(one(2, 2))
            table.close()

    with pytest.raises(ClosedTableError):
        close_within()


def test_closing_waits_for_the_commit_of_another_thread(table, monkeypatch):
    inside, go_on, apply, done = threading.Event(), threading.Event(), writer.Writer.apply, []

    def slowly(*args, **options):
        inside.set()
        go_on.wait(60)
        return apply(*args, **options)

    monkeypatch.setattr(writer.Writer, "apply", slowly)
    writing = threading.Thread(target=lambda: done.append(table.apply(one(1, 9))))
    closing = threading.Thread(target=table.close)
    writing.start()
    inside.wait(60)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    go_on.set()
    closing.join()
    writing.join()
    assert [result.updated for result in done] == [1]
    with Table.open(table.path) as again:
        assert again.lookup(pa.record_batch({"k": [1]}))["v"].to_pylist() == [9]


def test_closing_does_not_wait_for_a_transaction_that_nobody_ends(table, monkeypatch):
    monkeypatch.setattr(handle, "_LONGEST_COMMIT", 0.01)
    with pytest.raises(ClosedTableError), table.transaction() as transaction:  # noqa: PT012 - closed within
        transaction.apply(one(2, 2))
        closing = threading.Thread(target=table.close)
        closing.start()
        closing.join()


def test_a_change_interrupted_before_it_begins_leaves_no_transaction_open(table, monkeypatch):
    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, "Transaction", interrupted)
        with pytest.raises(KeyboardInterrupt):
            table.apply(deletes=pa.table({"k": [1]}))
    assert table.apply(deletes=pa.table({"k": [1]})).deleted == 1


def test_a_writer_interrupted_as_it_begins_begins_anew(path, monkeypatch):
    def interrupted(*_args):
        raise KeyboardInterrupt

    with Table.open(path) as table:
        with monkeypatch.context() as patch:
            patch.setattr(writer, "open_snapshot", interrupted)
            with pytest.raises(KeyboardInterrupt):
                table.apply(one(1, 1))
        assert table.apply(one(1, 1)).updated == 1


@pytest.mark.parametrize("aborted", [False, True])
def test_a_transaction_that_has_ended_holds_no_pages_back(table, aborted):
    every = pa.table({"k": np.arange(ROWS), "v": np.arange(ROWS)})
    with contextlib.suppress(InterruptedError), table.transaction() as transaction:
        transaction.apply(every)
        if aborted:
            raise InterruptedError
    for _ in range(60):
        table.apply(every)
    assert transaction.skipped is False
    assert table.compact().pages_before < 100


def test_a_table_stays_the_one_that_was_opened_in_whatever_folder_the_process_works(path, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(path, elsewhere / "t")
    monkeypatch.chdir(tmp_path)
    with Table.open("t") as table:
        monkeypatch.chdir(elsewhere)
        table.apply(one(1, 1))
        table.build_filter()
        table.refresh()
        assert table.lookup(pa.record_batch({"k": [1]}))["v"].to_pylist() == [1]
        assert (tmp_path / "t.filter").exists()
        assert table.drop_filter()
    with Table.open("t") as other:
        assert other.lookup(pa.record_batch({"k": [1]}))["v"].to_pylist() == [0]
