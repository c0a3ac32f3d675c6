import numpy as np
import pyarrow as pa
import pytest
from simulated import Model, NoLocks, SimulatedDisk, Sync, Write, build, rows_at, rows_of, writer_of

from headrace.storage.commit import draft, page_writer
from headrace.storage.errors import (
    CorruptPageError,
    InputError,
    KeyInputError,
    PoisonedHandleError,
    SchemaError,
    StorageIOError,
    UniqueViolationError,
)
from headrace.storage.format import superblock
from headrace.storage.format.slots import read_superblock
from headrace.storage.format.superblock import decode_superblock
from headrace.storage.tree.snapshot import open_snapshot, pages_of

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.string())])


def table_of(rows):
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def rows(keys, text="v"):
    return [{"k": int(k), "v": f"{text}{k}" + 100 * "."} for k in keys]


def keys(*values):
    return pa.table({"k": pa.array(values, pa.int64())})


@pytest.fixture
def disk():
    return build(table_of(rows(range(0, 2000, 2))), ["k"], unique=True)


@pytest.fixture
def writer(disk):
    return writer_of(disk)


def test_a_commit_tells_what_it_did(writer, disk):
    before = writer.snapshot.txid
    result = writer.apply(table_of(rows([2, 3, 5], "new")), keys(4, 5, 7, 2000))
    assert (result.txid, result.inserted, result.updated, result.deleted) == (before + 1, 2, 1, 1)
    assert not result.skipped
    found = {row["k"]: row["v"] for row in rows_of(disk)}
    assert len(found) == 1001
    assert found[3].startswith("new")
    assert 4 not in found


def test_nothing_to_change_is_no_commit(writer, disk):
    result = writer.apply()
    assert result.txid == writer.apply(deletes=keys(1, 3)).txid == open_snapshot(disk).txid
    assert not any(isinstance(operation, Write) for operation in disk.log)


def test_an_application_version_is_kept_even_without_changes(writer, disk):
    writer.apply(app=("p", 7))
    assert open_snapshot(disk).superblock.apps == {"p": 7}


@pytest.mark.parametrize("version", [3, 2, -(2**63)])
def test_a_repeated_commit_is_skipped(writer, disk, version):
    writer.apply(table_of(rows([1])), app=("p", 3))
    txid = open_snapshot(disk).txid
    result = writer.apply(table_of(rows([1, 3], "again")), app=("p", version))
    assert result.skipped
    assert result.txid == txid == open_snapshot(disk).txid
    assert not writer.apply(table_of(rows([1])), app=("q", version)).skipped
    assert open_snapshot(disk).superblock.apps == {"p": 3, "q": version}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"upserts": table_of(rows([7, 7]))}, "k=7 twice"),
        ({"inserts": table_of(rows([1, 6]))}, "k=6 is in the table"),
        ({"inserts": table_of(rows([1])), "upserts": table_of(rows([1]))}, "k=1 twice"),
    ],
)
def test_a_unique_violation_names_the_key_and_changes_nothing(writer, disk, changes, message):
    before = rows_of(disk)
    with pytest.raises(UniqueViolationError, match=message):
        writer.apply(**changes, app=("p", 1))
    assert rows_of(disk) == before
    assert not writer.apply(table_of(rows([1])), app=("p", 1)).skipped
    assert len(rows_of(disk)) == len(before) + 1


def test_an_insert_of_a_deleted_key_is_no_violation(writer, disk):
    writer.apply(deletes=keys(6), inserts=table_of(rows([6], "again")))
    assert [row["v"][:6] for row in rows_of(disk) if row["k"] == 6] == ["again6"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"upserts": pa.table({"k": [1]})}, SchemaError, "'v' is missing"),
        ({"upserts": pa.table({"k": [1], "v": ["a"], "w": [1]})}, SchemaError, "'w' is unknown"),
        ({"upserts": pa.table([[1], ["a"], ["b"]], ["k", "v", "v"])}, SchemaError, "'v' occurs more than once"),
        ({"upserts": pa.table({"k": [1], "v": [[1]]})}, SchemaError, "'v' of type .*cannot be stored"),
        ({"upserts": pa.table({"k": [None], "v": ["a"]})}, KeyInputError, "'k' has type null|'k' is null"),
        ({"deletes": keys(1, None)}, KeyInputError, "'k' .*null"),
        ({"deletes": pa.table({"v": ["a"]})}, SchemaError, "'k' is missing"),
        ({"deletes": pa.table({"k": ["a"]})}, KeyInputError, "string"),
        ({"upserts": {"k": [1], "v": ["a"]}}, SchemaError, "not dict"),
        ({"deletes": [1]}, SchemaError, "not list"),
        ({"deletes": pa.table([[1], [2]], ["k", "k"])}, SchemaError, "'k' occurs more than once"),
        ({"upserts": table_of(rows([1])), "app": "xy"}, InputError, "a name and a whole version"),
        ({"upserts": table_of([{"k": 1, "v": "x" * 5000}])}, InputError, "does not fit in a page"),
        ({"upserts": table_of(rows([1])), "app": ("p", 2**63)}, InputError, "64-bit"),
        ({"upserts": table_of(rows([1])), "app": ("p" * 3000, 1)}, InputError, "application"),
        ({"upserts": table_of(rows([1])), "app": ("\ud800", 1)}, InputError, "application id .* UTF-8"),
    ],
)
def test_bad_input_changes_nothing(writer, disk, changes, error, message):
    before = rows_of(disk)
    with pytest.raises(error, match=message):
        writer.apply(**changes)
    assert rows_of(disk) == before
    writer.apply(table_of(rows([1])))
    assert len(rows_of(disk)) == len(before) + 1


def test_columns_are_matched_by_name_and_cast(writer, disk):
    writer.apply(pa.table({"v": pa.array(["x"]).dictionary_encode(), "k": pa.array([1], pa.int16())}))
    assert {"k": 1, "v": "x"} in rows_of(disk)


def test_a_transaction_is_one_commit_and_sees_itself(writer, disk):
    txid = writer.snapshot.txid
    with writer.transaction(app=("p", 1)) as change:
        change.apply(inserts=table_of(rows([1, 3])))
        change.apply(deletes=keys(1))
        change.apply(table_of(rows([3, 9], "late")))
        with pytest.raises(InputError, match="not committed"):
            _ = change.result
    assert (change.result.inserted, change.result.updated, change.result.deleted) == (3, 1, 1)
    assert open_snapshot(disk).txid == txid + 1 == change.result.txid
    found = {row["k"]: row["v"] for row in rows_of(disk)}
    assert 1 not in found
    assert found[3].startswith("late")


def test_a_transaction_that_fails_leaves_nothing(writer, disk):
    before = rows_of(disk)
    with pytest.raises(ZeroDivisionError), writer.transaction() as change:  # noqa: PT012 - the block is what fails
        change.apply(table_of(rows([1])))
        raise ZeroDivisionError
    assert rows_of(disk) == before
    earlier = "earlier change of this transaction failed"
    with pytest.raises(InputError, match=earlier), writer.transaction() as change:  # noqa: PT012 - as above
        change.apply(table_of(rows([1])))
        with pytest.raises(UniqueViolationError):
            change.apply(inserts=table_of(rows([1])))
        with pytest.raises(InputError, match="has ended"):
            change.apply(table_of(rows([5])))
    assert rows_of(disk) == before
    with pytest.raises(InputError, match="has ended"):
        change.apply(table_of(rows([5])))


def test_two_transactions_at_once_are_refused(writer):
    with writer.transaction(), pytest.raises(InputError, match="open already"):
        writer.acquire()
    writer.acquire()


def test_no_change_is_made_beside_an_open_transaction(writer, disk):
    before = rows_of(disk)
    with writer.transaction() as change:
        change.apply(table_of(rows([1])))
        for batch in (table_of(rows([3])), table_of(rows([3])).to_batches()[0]):
            with pytest.raises(InputError, match="open already"):
                writer.apply(batch)
        with pytest.raises(InputError, match="open already"):
            writer.transaction()
    assert rows_of(disk) != before
    assert len(rows_of(disk)) == len(before) + 1


def test_pages_of_a_failed_transaction_are_used_again(writer, disk):
    for _ in range(5):
        with pytest.raises(UniqueViolationError):
            writer.apply(inserts=table_of(rows([*range(1, 1000, 2), 1000])))
    writer.apply(table_of(rows([1])))
    assert writer.snapshot.superblock.pages <= len(disk.image) // 4096
    assert len(disk.image) // 4096 <= 3 * writer.snapshot.superblock.leaves


@pytest.mark.parametrize("fill", [0.5, 0.8, 1.0])
def test_a_table_grows_from_nothing_and_shrinks_to_nothing(fill):
    disk = build(table_of([]), ["k"], unique=True, fill=fill)
    writer = writer_of(disk)
    order = np.random.default_rng(1).permutation(6000)
    for part in np.split(order, 6):
        writer.apply(table_of(rows(part)))
    assert writer.snapshot.superblock.height >= 3
    assert [row["k"] for row in rows_of(disk)] == list(range(6000))
    most = writer.snapshot.superblock.leaves
    for part in np.split(order, 6):
        writer.apply(deletes=keys(*part.tolist()))
        leaves = writer.snapshot.superblock.leaves
        assert leaves <= most
    assert rows_of(disk) == []
    assert writer.snapshot.superblock.height == 0
    writer.apply(table_of(rows([5])))
    assert [row["k"] for row in rows_of(disk)] == [5]


def test_keys_that_only_grow_fill_their_pages():
    disk = build(table_of([]), ["k"], unique=True)
    writer = writer_of(disk)
    for start in range(0, 12000, 300):
        writer.apply(table_of(rows(range(start, start + 300))))
    loaded = build(table_of(rows(range(12000))), ["k"], unique=True)
    assert writer.snapshot.superblock.leaves <= 1.2 * open_snapshot(loaded).superblock.leaves


def test_underfull_leaves_are_merged(writer, disk):
    leaves = writer.snapshot.superblock.leaves
    writer.apply(deletes=keys(*[k for k in range(2000) if k % 20]))
    assert writer.snapshot.superblock.leaves <= leaves // 5
    assert [row["k"] for row in rows_of(disk)] == list(range(0, 2000, 20))


@pytest.mark.parametrize(("room", "nodes"), [(72, 0), (0, 2)])
def test_only_what_a_change_needs_is_written(room, nodes, monkeypatch):
    monkeypatch.setattr(superblock, "MOST_RELOCATIONS", room)
    disk = build(table_of(rows(range(20000))), ["k"], unique=True)
    writer = writer_of(disk)
    assert (writer.snapshot.superblock.height, writer.snapshot.superblock.leaves > 200) == (3, True)
    writer.apply(table_of(rows([10000], "w")))
    written = sum(len(operation.data) for operation in disk.log if isinstance(operation, Write))
    assert written == (1 + nodes + 1) * 4096  # the leaf, the path, the superblock


def slot_txids(disk):
    """Return the transaction in each slot, and whether it has a proof."""
    copies = [decode_superblock(bytes(disk.image[at : at + 2048]), at // 4096) for at in (0, 4096)]
    return [(copy.txid, copy.proof is not None) for copy in copies]


def test_the_superblock_of_a_small_commit_is_repeated_when_the_writer_leaves(writer, disk):
    for value in ("w", "x"):
        writer.apply(table_of(rows([10], value)))
    txid = writer.snapshot.txid
    assert sorted(slot_txids(disk)) == [(txid - 1, True), (txid, True)]
    disk.log.clear()
    writer.release()
    assert sorted(slot_txids(disk)) == [(txid, False), (txid, True)]
    writer.release()
    assert len(disk.log) == 1


def test_the_superblock_of_a_commit_of_many_pages_is_repeated_at_once(writer, disk):
    writer.apply(table_of(rows(range(0, 2000, 100), "w")))
    txid = writer.snapshot.txid
    assert sorted(slot_txids(disk)) == [(txid, False), (txid, True)]


def test_a_writer_that_failed_repeats_nothing(writer, disk):
    writer.apply(table_of(rows([10], "w")))
    disk.fail = lambda _operation: 0
    with pytest.raises(StorageIOError):
        writer.apply(table_of(rows([10], "x")))
    disk.fail = None
    disk.log.clear()
    writer.release()
    assert disk.log == []


def test_a_disk_that_fails_as_the_writer_leaves_loses_nothing(writer, disk):
    writer.apply(table_of(rows([10], "w")))
    disk.fail = lambda _operation: 100
    writer.release()
    disk.fail = None
    assert open_snapshot(disk).txid == writer.snapshot.txid
    assert {row["v"] for row in rows_of(disk) if row["k"] == 10} == {row["v"] for row in rows([10], "w")}


@pytest.mark.parametrize("run", [1, 50, 3000])
def test_a_key_may_span_many_leaves(run):
    start = [{"k": k, "v": f"{k}-{i:05}" + 30 * "."} for k in (1, 5, 9) for i in range(run if k == 5 else 3)]
    disk = build(table_of(start), ["k"], unique=False)
    writer = writer_of(disk)
    model = Model(["k"], start)
    more = [{"k": 5, "v": f"more-{i}"} for i in range(run)]
    for changes in (
        {"inserts": more},
        {"inserts": [{"k": 4, "v": "x"}, {"k": 6, "v": "y"}]},
        {"upserts": [{"k": 5, "v": f"replaced-{i:05}" + 40 * "."} for i in range(run)]},
        {"upserts": [{"k": 5, "v": "one"}], "inserts": [{"k": 5, "v": "two"}]},
        {"deletes": [{"k": 5}]},
    ):
        batches = {name: keys(5) if name == "deletes" else table_of(part) for name, part in changes.items()}
        result = writer.apply(**batches)
        assert (result.inserted, result.updated, result.deleted) == model.apply(**changes)
        assert sorted(rows_of(disk), key=str) == sorted(model.sorted(), key=str)


def test_pages_that_a_reader_needs_are_left_alone(disk):
    class Claimed(NoLocks):
        claims = frozenset()

        def oldest_claim(self, before):
            return min((txid for txid in self.claims if txid < before), default=None)

    locks = Claimed()
    writer = writer_of(disk, locks=locks)
    rng = np.random.default_rng(2)
    held = []
    for turn in range(30):
        snapshot = open_snapshot(disk)
        held.append((snapshot, rows_at(disk, snapshot)))
        locks.claims = frozenset(snapshot.txid for snapshot, _ in held)
        if turn == 15:
            writer = writer_of(disk, locks=locks)
        writer.apply(
            table_of(rows(np.unique(rng.integers(0, 3000, 40)), f"t{turn}-")), keys(*rng.integers(0, 3000, 30))
        )
        held = held[-3:] + held[:2]
    for snapshot, content in held:
        assert rows_at(disk, snapshot) == content
    locks.claims = frozenset()
    before = len(disk.image)
    for turn in range(30):
        writer.apply(table_of(rows(np.unique(rng.integers(0, 3000, 40)), f"u{turn}-")))
    assert len(disk.image) <= 1.2 * before


@pytest.mark.parametrize(("proof_pages", "changed", "syncs"), [(64, 1, 1), (64, 100, 1), (0, 100, 2)])
def test_a_small_commit_syncs_once(proof_pages, changed, syncs, monkeypatch):
    monkeypatch.setattr(page_writer, "PROOF_PAGES", proof_pages)
    disk = build(table_of(rows(range(1000))), ["k"], unique=True)
    writer = writer_of(disk)
    for number in range(3):
        disk.log.clear()
        writer.apply(table_of(rows(range(number, number + changed), "w")))
        assert sum(isinstance(operation, Sync) for operation in disk.log) == syncs
    writer.release()
    assert read_superblock(disk).proof is None


def test_pages_that_a_transaction_replaced_are_not_part_of_its_proof():
    """A later commit may use them while this one may still have to be proven."""
    disk = build(table_of(rows(range(1000))), ["k"], unique=True)
    writer = writer_of(disk)
    with writer.transaction() as change:
        for text in "abc":
            change.apply(table_of(rows([500], text)))
    proof = writer.snapshot.superblock.proof
    assert set(proof.pages) <= set(pages_of(writer.snapshot).tolist())
    assert len(proof.pages) == 1


def test_a_sync_that_fails_while_a_large_commit_goes_on_fails_the_commit(disk, writer, monkeypatch):
    monkeypatch.setattr(page_writer, "_SYNC_BYTES", 4096)
    before, sync = rows_of(disk), disk.sync

    def fail_once():
        disk.sync = sync
        raise StorageIOError("cannot sync")

    disk.sync = fail_once
    with pytest.raises(StorageIOError, match="cannot sync"):
        writer.apply(table_of(rows(range(0, 2000, 2), "w")))
    with pytest.raises(PoisonedHandleError):
        writer.apply(table_of(rows([0], "w")))
    assert rows_of(disk) == before


def test_a_large_commit_syncs_as_it_goes(disk, writer, monkeypatch):
    monkeypatch.setattr(page_writer, "_SYNC_BYTES", 4096)
    disk.log.clear()
    writer.apply(table_of(rows(range(0, 2000, 2), "w")))
    assert sum(isinstance(operation, Sync) for operation in disk.log) > 2
    assert [row["v"][0] for row in rows_of(disk)] == ["w"] * 1000


@pytest.mark.parametrize("patched", [True, False])
def test_a_change_in_many_parts_is_what_one_in_one_part_is(patched, monkeypatch):
    monkeypatch.setattr(draft, "_CHUNK_BYTES", 3 * 4096)
    key = "k" if patched else "v"
    model = Model([key], rows(range(0, 2000, 2)))
    disk = build(table_of(model.sorted()), [key], unique=True)
    writer, rng = writer_of(disk), np.random.default_rng(5)
    for turn in range(4):
        upserts, gone = rows(np.unique(rng.integers(0, 2500, 300))), rows(np.unique(rng.integers(0, 2500, 100)))
        writer.apply(table_of(upserts), table_of(gone))
        model.apply(upserts, gone)
        assert rows_of(disk) == model.sorted(), turn


def test_damage_in_a_late_part_of_a_change_undoes_all_of_it(disk, writer, monkeypatch):
    monkeypatch.setattr(draft, "_CHUNK_BYTES", 3 * 4096)
    before, pages = bytes(disk.image), writer.snapshot.leaf_pages
    at = int(pages[-4]) * 4096 + 500
    disk.image[at] ^= 1
    with pytest.raises(CorruptPageError):
        writer.apply(table_of(rows(range(0, 2000, 2), "w")))
    disk.image[at] ^= 1
    assert rows_of(disk) == rows_of(SimulatedDisk(bytearray(before)))
    assert writer.apply(table_of(rows(range(0, 2000, 2), "w"))).updated == 1000
