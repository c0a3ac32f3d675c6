"""A join over a table that changes: each stream tuple sees the relation wholly before or wholly after a change."""

import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.joins import SSIJ
from headrace.joins.errors import JoinStateError
from headrace.storage.errors import KeyInputError, LockedError, MemoryBudgetError
from headrace.storage.table import Table

KEYS = 400
PAD = "x" * 120

keys = st.lists(st.integers(0, KEYS + 5), max_size=30)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("push"), keys),
        st.tuples(st.just("apply"), keys, keys),
        st.tuples(st.just("elsewhere"), keys, keys),
        st.tuples(st.sampled_from(["tick", "flush", "refresh", "compact"])),
    ),
    max_size=20,
)


def rows_of(numbers, version):
    return pa.table(
        {
            "k": pa.array(numbers, pa.int64()),
            "v": pa.array([f"{version}-{number}{PAD}" for number in numbers], pa.string()),
        }
    )


def changes(state, upserts, deletes, version):
    """Change the model as `Table.apply` changes a table, and return what to give it."""
    upserts = sorted(set(upserts))
    deletes = sorted(set(deletes) - set(upserts))
    state = {key: value for key, value in state.items() if key not in deletes}
    return (
        state | dict.fromkeys(upserts, version),
        rows_of(upserts, version),
        pa.table({"k": pa.array(deletes, pa.int64())}),
    )


class Run:
    """A join, the relation as it sees it, the relation as it is, and the results that ought to come."""

    def __init__(self, table, how, memory, threshold, index="fitting"):
        self.table = table
        self.join = SSIJ(
            table, "k", how, memory, input_threshold=threshold, stream_threshold=2 * threshold, index=index
        )
        self.how, self.version = how, 0
        self.seen = self.actual = dict.fromkeys(range(0, KEYS, 2), 0)
        self.wanted, self.got, self.pushed = [], [], 0

    def take(self, output):
        for result in output:
            self.got += zip(result["id"].to_pylist(), result["v"].to_pylist(), strict=True)

    def push(self, numbers):
        ids = range(self.pushed, self.pushed + len(numbers))
        self.pushed += len(numbers)
        for place, number in zip(ids, numbers, strict=True):
            if number in self.seen:
                self.wanted.append((place, f"{self.seen[number]}-{number}{PAD}"))
            elif self.how == "left":
                self.wanted.append((place, None))
        batch = {"k": pa.array(numbers, pa.int64()), "id": pa.array(ids, pa.int64())}
        self.take(self.join.push(pa.record_batch(batch)))

    def apply(self, upserts, deletes):
        self.version += 1
        self.actual, rows, gone = changes(self.actual, upserts, deletes, self.version)
        self.take(self.join.apply(rows, gone))
        self.seen = self.actual

    def elsewhere(self, upserts, deletes):
        self.version += 1
        self.actual, rows, gone = changes(self.actual, upserts, deletes, self.version)
        with Table.open(self.table.path) as other:
            other.apply(rows, gone)

    def compact(self):
        with Table.open(self.table.path) as other:
            other.compact()

    def refresh(self):
        self.take(self.join.refresh())
        self.seen = self.actual

    def tick(self):
        self.take(self.join.tick())

    def flush(self):
        self.take(self.join.flush())


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    todo=actions,
    how=st.sampled_from(["inner", "left"]),
    memory=st.sampled_from(["160KiB", "400KiB", "8MiB"]),
    threshold=st.sampled_from([1, 10, 100]),
    index=st.sampled_from(["fitting", "paged"]),
)
def test_each_tuple_sees_the_relation_before_or_after_a_change(build, todo, how, memory, threshold, index):
    with build(rows_of(range(0, KEYS, 2), 0), ["k"], unique=True, page_size=4096) as table:
        run = Run(table, how, memory, threshold, index)
        for name, *arguments in todo:
            getattr(run, name)(*arguments)
        run.take(run.join.finish())
        assert sorted(run.got) == sorted(run.wanted)
        assert run.join.stats.memory.peak <= run.join.stats.memory.limit


def test_pages_that_a_change_leaves_alone_stay_cached(build):
    with build(rows_of(range(KEYS), 0), ["k"], unique=True, page_size=4096) as table:
        join = SSIJ(table, on="k", memory="8MiB", input_threshold=1)
        join.push(pa.record_batch({"k": np.arange(KEYS)})).drain()
        join.flush().drain()
        cached = join.stats.pages_cached
        assert cached == table.stats.leaves
        join.apply(rows_of([7], 1)).drain()
        assert join.stats.pages_cached == cached - 1
        before = join.stats
        rows = join.push(pa.record_batch({"k": [7, 300]})).to_table().to_pylist() + join.flush().to_table().to_pylist()
        assert (join.stats - before).pages_wanted == 1
        assert sorted(row["v"][:5] for row in rows) == ["0-300", "1-7xx"]


def test_a_join_keeps_its_snapshot_until_it_is_refreshed(build):
    with build(rows_of(range(KEYS), 0), ["k"], unique=True, page_size=4096) as table:
        join = SSIJ(table, on="k", input_threshold=1, stream_threshold=1)
        table.apply(rows_of([3], 1))
        first = join.push(pa.record_batch({"k": [3]})).to_table()
        join.refresh().drain()
        second = join.push(pa.record_batch({"k": [3]})).to_table()
    assert [first["v"][0].as_py()[:2], second["v"][0].as_py()[:2]] == ["0-", "1-"]


def test_an_empty_table_can_grow_under_a_join(build):
    with build(rows_of([], 0), ["k"], unique=True, page_size=4096) as table:
        join = SSIJ(table, on="k", memory="8MiB", input_threshold=1, stream_threshold=1)
        assert join.push(pa.record_batch({"k": [3]})).drain() == 0
        join.apply(rows_of(range(KEYS), 1)).drain()
        assert join.push(pa.record_batch({"k": np.arange(KEYS)})).drain() == KEYS
        assert join.stats.pages_cached > 5


def test_a_table_replaced_by_another_one_is_refused(build):
    with build(rows_of(range(10), 0), ["k"], unique=True) as table:
        join = SSIJ(table, on="k")
        Table.build(table.path, pa.table({"k": [1], "other": [2]}), ["k"], overwrite=True).close()
        with pytest.raises(JoinStateError, match="replaced"):
            join.refresh().drain()


@pytest.mark.parametrize("memory", ["120KiB", "200KiB", "2MiB"])
def test_batches_that_wait_behind_a_change_keep_their_room(build, memory):
    with build(rows_of(range(KEYS), 0), ["k"], unique=True, page_size=4096) as table:
        join = SSIJ(table, "k", memory=memory, index="paged", input_threshold=1)
        batch = pa.record_batch({"k": np.arange(0, KEYS, 3), "pad": ["z" * 90] * len(range(0, KEYS, 3))})
        join.push(batch)
        join.apply(rows_of(range(KEYS, 5 * KEYS), 1))  # makes another store, since inner nodes are paged
        join.push(batch)
        assert join.finish().drain() == 2 * len(batch)
        assert join.store.queued == 0


def test_a_change_that_the_table_refuses_leaves_the_join_as_it_was(build):
    with build(rows_of(range(KEYS), 0), ["k"], unique=True, page_size=4096) as table:
        join = SSIJ(table, "k", memory="8MiB")
        join.push(pa.record_batch({"k": [3]}))
        with pytest.raises(KeyInputError):
            join.apply(rows_of([None], 1)).drain()
        with Table.open(table.path, mode="w"), pytest.raises(LockedError, match="wait for it"):
            join.apply(rows_of([3], 1)).drain()
        before = join.push(pa.record_batch({"k": [3]})).to_table(join.output_schema(pa.schema([("k", pa.int64())])))
        results = [*before.to_batches(), *join.apply(rows_of([3], 1), wait=1), *join.push(pa.record_batch({"k": [3]}))]
        results += join.finish()
        assert [value[:2] for batch in results for value in batch["v"].to_pylist()] == ["0-", "1-"]


@pytest.mark.parametrize("index", ["whole", "paged"])
def test_a_change_that_outgrows_the_memory_says_that_it_is_committed_and_where_to_go_on(build, tools, index):
    with build(rows_of(range(KEYS), 0), ["k"], unique=True, page_size=4096) as table:
        memory = tools.least_memory(SSIJ, table, "k", index=index)
        join = SSIJ(table, "k", memory=memory, index=index)
        first = pa.record_batch({"k": np.arange(0, KEYS, 3)})
        got = list(join.push(first))
        output = join.apply(rows_of(range(KEYS, 50 * KEYS), 1))
        with pytest.raises(MemoryBudgetError, match=r"committed.*at least .*push them to a new operator") as error:
            got.extend(output)
        assert sum(map(len, got)) == len(first)
        with pytest.raises(JoinStateError, match="pushed before has its results, so push the rest to a new operator"):
            join.push(first)
        join.close()
        enough = int(re.search(r"\((\d+) bytes\)", str(error.value))[1])
        with SSIJ(table, "k", memory=enough, index=index) as join:
            rest = pa.record_batch({"k": np.arange(0, 50 * KEYS, 7)})
            assert join.push(rest).drain() + join.finish().drain() == len(rest)
