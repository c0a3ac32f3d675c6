"""Tuples in memory against a model in Python: contents, indexes, and what is charged."""

import numpy as np
import pyarrow as pa
import pytest

from headrace.joins.errors import MemoryBudgetError
from headrace.joins.memory import MemoryBudget
from headrace.joins.streams import JoinGraph, Near
from headrace.joins.streams.base.blocks import SpillReserve, merge_rows, read_block, write_block
from headrace.joins.streams.tuples.indexes import new_cursor
from headrace.joins.streams.tuples.layout import RowLayout
from headrace.joins.streams.tuples.rows import RowsEncoder
from headrace.joins.streams.tuples.store import TupleStore
from headrace.storage.spill import SpillFolder

SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.int32()), ("t", pa.string()), ("z", pa.float64())])
GRAPH = JoinGraph(
    {"a": SCHEMA, "b": SCHEMA},
    [("a.x", "b.x"), ("a.t", "b.t"), Near("a.z", "b.z", 0.5), Near("a.x", "b.x", 2)],
)
WIDTHS = {edge.keys[0]: edge.width for edge in GRAPH.edges}


def layout():
    return RowLayout.of(SCHEMA, [key.wide for key in GRAPH.keys[0]], "a")


def batch(rng, rows, first=0):
    return pa.record_batch(
        {
            "id": np.arange(first, first + rows),
            "x": pa.array(rng.integers(-5, 6, rows), pa.int32()),
            "t": [f"{'long ' * int(n)}{n % 3}" for n in rng.integers(0, 6, rows)],
            "z": np.round(rng.normal(size=rows), 1),
        },
        schema=SCHEMA,
    )


def encoded(data):
    rows, valid = RowsEncoder(layout(), GRAPH.keys[0]).encode(data)
    assert valid is None
    return rows


def matches(key, left, right):
    """Return whether two rows meet the condition of a key, in plain Python."""
    names = [GRAPH.schemas[0].names[at] for at in GRAPH.keys[0][key].columns]
    if WIDTHS[key] is None:
        return all(left[name] == right[name] for name in names)
    width = WIDTHS[key]
    return abs(left[names[0]] - right[names[0]]) <= (width.number if width.floating else width.words)


def probe(store, key, rows, limit):
    """Return all pairs, found `limit` at a time."""
    cursor, out, pairs = new_cursor(), (np.empty(limit, np.int64), np.empty(limit, np.int64)), []
    index = np.arange(len(rows))
    while cursor[0] < len(index):
        found = store.probe(key, rows, key, index, WIDTHS[key], cursor, out)
        pairs += zip(out[0][:found].tolist(), out[1][:found].tolist(), strict=True)
    return pairs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["sorted", "hash"])
def test_a_store_does_what_a_list_does(seed, kind):
    rng, budget = np.random.default_rng(seed), MemoryBudget(8 << 20)
    ordered = [kind == "sorted" or WIDTHS[key] is not None for key in range(len(WIDTHS))]
    store, model, first = TupleStore(layout(), budget, ordered), [], 0
    for _ in range(25):
        data = batch(rng, int(rng.integers(0, 120)), first)
        first += len(data)
        rows, cut = encoded(data), int(rng.integers(0, len(data) + 1))
        store.insert(rows, 0, cut)
        store.insert(rows, cut)
        model += data.to_pylist()
        gone = rng.permutation(len(store))[: int(rng.integers(0, len(store) + 1))] if rng.random() < 0.7 else []
        before = store.rows.batch().to_pylist()
        removed = store.remove(np.array(gone, dtype=np.int64), departure=7)
        assert removed.batch().to_pylist() == [before[slot] for slot in gone]
        assert (removed.departures == 7).all()
        lost = {before[slot]["id"] for slot in gone}
        model = [row for row in model if row["id"] not in lost]
        held = store.rows.batch().to_pylist()
        assert sorted(held, key=lambda row: row["id"]) == model
        probing = batch(rng, 9)
        wanted = probing.to_pylist()
        for key in WIDTHS:
            found = probe(store, key, encoded(probing), int(rng.integers(1, 50)))
            assert sorted(found) == [
                (at, slot)
                for at, left in enumerate(wanted)
                for slot, right in enumerate(held)
                if matches(key, left, right)
            ]
        assert budget.use().used == budget.held("tuples") + budget.held("key_index")
    store.free()
    assert budget.use().used == 0


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_sweep_keeps_the_order_of_what_stays(share):
    rng, budget = np.random.default_rng(9), MemoryBudget(8 << 20)
    store = TupleStore(layout(), budget, [WIDTHS[key] is not None for key in range(len(WIDTHS))])
    for first in range(0, 600, 200):
        store.insert(encoded(batch(rng, 200, first)))
    store.drop(rng.permutation(600)[:50])
    before, stay, seen = store.rows.batch().to_pylist(), rng.random(550) < share, []

    def keep(start, stop):
        seen.extend(store.rows.take(np.arange(start, stop)).batch().to_pylist())
        return stay[start:stop]

    store.sweep(keep, 64)
    assert seen == before
    held = store.rows.batch().to_pylist()
    assert held == [row for row, kept in zip(before, stay, strict=True) if kept]
    assert store.live_nbytes == sum(store.rows.sizes(np.arange(len(held))).tolist())
    probing = batch(rng, 20)
    for key in WIDTHS:
        assert sorted(probe(store, key, encoded(probing), 30)) == [
            (at, slot)
            for at, left in enumerate(probing.to_pylist())
            for slot, right in enumerate(held)
            if matches(key, left, right)
        ]
    store.insert(encoded(batch(rng, 100, 700)))
    assert len(store) == len(held) + 100
    assert budget.use().used == budget.held("tuples") + budget.held("key_index")


def test_sorted_entries_are_in_the_order_of_values():
    data = batch(np.random.default_rng(2), 300)
    ordered = [True] * len(WIDTHS)
    store = TupleStore(layout(), MemoryBudget(8 << 20), ordered)
    store.insert(encoded(data))
    for key, width in WIDTHS.items():
        name = SCHEMA.names[GRAPH.keys[0][key].columns[0]]
        if width is not None:
            values = data[name].take(pa.array(store.sorted_index(key).slots)).to_pylist()
            assert values == sorted(data[name].to_pylist())


def test_fitting_is_exact_and_nothing_is_added_beyond_it():
    rng, budget = np.random.default_rng(4), MemoryBudget(200_000)
    store = TupleStore(layout(), budget, [False, None, None, None][: len(WIDTHS)])
    rows, start = encoded(batch(rng, 5000)), 0
    while (fits := store.fitting(rows, start)) > 0:
        step = min(fits, 300)
        store.insert(rows, start, start + step)
        start += step
    assert 0 < start < 5000
    assert budget.available < 3 * 4096
    used = budget.use().used
    with pytest.raises(MemoryBudgetError):
        store.insert(rows, start, start + 1)
    assert (budget.use().used, len(store)) == (used, start)


def test_blocks_keep_tuples_with_their_stamps(tmp_path):
    rng, budget = np.random.default_rng(6), MemoryBudget(1 << 20)
    rows = encoded(batch(rng, 200))
    rows.arrivals[:], rows.departures[:] = np.arange(200), 900
    part = rows.take(np.arange(150, 50, -1))
    with SpillFolder(tmp_path) as folder:
        file = folder.file("a")
        blocks = [write_block(file, one, budget) for one in (part, rows)]
        assert budget.use().used == 0
        with read_block(file, rows.layout, blocks[0], budget) as found:
            assert budget.held("spill") == blocks[0].nbytes
            assert found.batch() == part.batch()
            assert found.arrivals.tolist() == list(range(150, 50, -1))
            assert found.departures.tolist() == [900] * 100
            merged = merge_rows([found, rows.take(np.arange(20))], 0)
        assert budget.use().used == 0
    words = merged.key_words(0)
    assert (words[:-1] <= words[1:]).all()
    wanted = part.batch().to_pylist() + rows.take(np.arange(20)).batch().to_pylist()
    assert sorted(map(str, merged.batch().to_pylist())) == sorted(map(str, wanted))


def test_a_reserve_is_charged_once_and_takes_more_from_the_budget():
    budget = MemoryBudget(1000)
    reserve = SpillReserve(budget, 600)
    reserve.charge("spill", 500)
    assert budget.use().used == 600
    reserve.charge("spill", 300)
    assert budget.use().used == 800
    with pytest.raises(MemoryBudgetError):
        reserve.charge("spill", 201)
    reserve.release("spill", 500)
    assert budget.use().used == 600
    reserve.release("spill", 300)
    assert (budget.use().used, reserve.available) == (600, 600)
