"""As-of look-ups of unique one-word keys in the order of the stream, against a search in sorted numbers."""

import bisect
import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.joins import SSIJ, AsOf
from headrace.joins.ssij.phases.direct_nearest import DirectNearestPhase
from headrace.storage import Table

KEYS = [(pa.int32(), pa.int32()), (pa.int16(), pa.int32()), (pa.int32(), pa.int16()), (None, pa.int64())]
LIMITS = {pa.int16(): (-(2**15), 2**15 - 1), pa.int32(): (-(2**31), 2**31 - 1), pa.int64(): (-(2**63), 2**63 - 1)}


def times_of(rng, dtype, shape, rows):
    """Return times that are spread evenly, lie in bunches, or reach the ends of the type."""
    least, most = LIMITS[dtype]
    if shape == "even":
        return rng.integers(0, min(4 * rows + 1, most), rows)
    if shape == "bunched":
        centers = rng.integers(least, most, 4, endpoint=True)
        return np.clip(rng.choice(centers, rows).astype(float) + rng.integers(-9, 9, rows), least // 2, most // 2)
    return np.concatenate([rng.integers(least, most, rows, endpoint=True), [least, most]])


def history_of(rng, member, time, shape, rows):
    """Return unique (member, time) keys, sorted, and the table that has them."""
    times = [int(value) for value in times_of(rng, time, shape, rows)]
    if member is None:
        keys = sorted({(0, value) for value in times})
    else:
        keys = sorted(set(zip(rng.integers(-3, max(2, rows // 5), len(times)).tolist(), times, strict=True)))
    size = len(keys)
    columns = {"m": pa.array([key[0] for key in keys], member)} if member else {}
    columns["t"] = pa.array([key[1] for key in keys], time)
    columns["id"] = np.arange(size)
    columns["text"] = pa.array([f"row {at}" for at in range(size)], pa.string(), mask=rng.random(size) < 0.2)
    return keys, pa.table(columns)


def facts_of(rng, keys, member, time, rows):
    """Return tuples that ask at, just beside, and far from the keys, some for absent members or nulls."""
    least, most = LIMITS[time]
    chosen = [keys[at] for at in rng.integers(0, len(keys), rows)]
    steps = rng.choice([0, 0, 1, -1, 7, -60, 2**14], rows).tolist()
    members = [None if rng.random() < 0.05 else key[0] + int(rng.random() < 0.1) for key in chosen]
    moved = [key[1] + step for key, step in zip(chosen, steps, strict=True)]
    times = [at if least <= at <= most and rng.random() > 0.05 else None for at in moved]
    by = {"who": pa.array(members, member)} if member else {}
    return pa.table({"n": np.arange(rows), **by, "at": pa.array(times, time)})


def expected(keys, facts, predicate, how):
    """Return (fact, row) by bisection."""
    members = facts["who"].to_pylist() if "who" in facts.column_names else [0] * len(facts)
    for n, (member, at) in enumerate(zip(members, facts["at"].to_pylist(), strict=True)):
        row = None if member is None or at is None else nearest(keys, member, at, predicate)
        if row is not None or how == "left":
            yield n, row


def nearest(keys, member, at, predicate):
    if predicate.direction == "backward":
        row = (bisect.bisect_left if predicate.strict else bisect.bisect_right)(keys, (member, at)) - 1
    else:
        row = (bisect.bisect_right if predicate.strict else bisect.bisect_left)(keys, (member, at))
    if not 0 <= row < len(keys) or keys[row][0] != member:
        return None
    near = predicate.tolerance is None or abs(keys[row][1] - at) <= predicate.tolerance
    return row if near else None


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_rows_are_those_of_a_search_in_sorted_keys(build, tools, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    member, time = data.draw(
        st.sampled_from(
            [(pa.int32(), pa.int32()), (pa.int16(), pa.int32()), (pa.int32(), pa.int16()), (None, pa.int64())]
        )
    )
    shape, how = data.draw(st.sampled_from(["even", "bunched", "ends"])), data.draw(st.sampled_from(["inner", "left"]))
    keys, history = history_of(rng, member, time, shape, data.draw(st.sampled_from([1, 5, 400, 3000])))
    facts = facts_of(rng, keys, member, time, data.draw(st.sampled_from([1, 60, 700])))
    predicate = AsOf(
        "at", "t", [("who", "m")] if member else [], data.draw(st.sampled_from(["backward", "forward"])),
        data.draw(st.sampled_from([None, None, 0, 8])), strict=data.draw(st.booleans()),
    )  # fmt: skip
    columns = data.draw(st.sampled_from([["id"], ["id", "text"]]))
    with build(history, ["m", "t"] if member else ["t"], unique=True, page_size=4096) as table:
        memory = tools.least_memory(SSIJ, table, predicate) + data.draw(st.sampled_from([90_000, 200_000, 4_000_000]))
        with SSIJ(table, predicate, how, memory, columns=columns, stream_threshold=200) as join:
            assert join.store.direct is not None
            found = [batch for part in facts.to_batches(250) for batch in join.push(part)]
            got = pa.Table.from_batches([*found, *join.finish()], join.output_schema(facts.schema))
        assert join.stats.rows_done == len(facts)
        assert join.stats.rows_held == 0
        assert join.stats.memory.peak <= join.stats.memory.limit
    pairs = zip(got["n"].to_pylist(), got["id"].to_pylist(), strict=True)
    assert sorted(pairs, key=str) == sorted(expected(keys, facts, predicate, how), key=str)
    if "text" in columns:
        texts = history["text"].to_pylist()
        wanted = [None if row is None else texts[row] for row in got["id"].to_pylist()]
        assert got["text"].to_pylist() == wanted


@pytest.mark.parametrize("direction", ["backward", "forward"])
@pytest.mark.parametrize("memory", ["150KiB", "8MiB"])
def test_a_value_between_two_leaves_goes_on_to_the_neighbor(tmp_path, direction, memory):
    """Whatever lies between two keys, also where these are in different leaves, on either side of the separator."""
    keys = 1000 * np.arange(6000)
    inside = keys[:-1] if direction == "backward" else keys[1:]
    asked = np.concatenate([keys[:-1] + step for step in (1, 500, 999)])
    source = pa.table({"k": keys, "id": keys})
    with Table.build(tmp_path / "t", source, key=["k"], unique=True, page_size=4096) as table:
        assert len(table.snapshot().leaf_pages) > 10
        with SSIJ(table, AsOf("at", "k", direction=direction), memory=memory, columns=["id"]) as join:
            assert join.store.direct is not None
            for _ in range(2):  # the second time the pages are cached, if there is room
                got = pa.Table.from_batches([*join.push(pa.record_batch({"at": asked})), *join.flush()]).sort_by("at")
                assert got["id"].to_numpy().tolist() == np.repeat(inside, 3).tolist()


def test_an_empty_table_matches_nothing(tmp_path):
    empty = pa.table({"k": pa.array([], pa.int64())})
    with Table.build(tmp_path / "t", empty, key=["k"], unique=True) as table:
        for how, rows in (("inner", 0), ("left", 3)):
            with SSIJ(table, AsOf("s", "k"), how) as join:
                batches = [*join.push(pa.record_batch({"s": [1, None, 5]})), *join.finish()]
            assert sum(map(len, batches)) == rows


def test_versions_that_are_added_count_from_then_on(tmp_path):
    """Pages that a commit rewrote are described again; those that it left keep their descriptors."""
    keys = np.arange(0, 40_000, 4)
    source = pa.table({"k": keys, "id": keys})
    with Table.build(tmp_path / "t", source, key=["k"], unique=True, page_size=4096) as table:
        asked = pa.record_batch({"at": np.arange(40_000)})
        with SSIJ(table, AsOf("at", "k"), memory="8MiB", columns=["id"]) as join:
            assert join.store.direct is not None
            for added in ([], [17, 18, 30_001], [1, 39_999]):
                new = np.array(added, dtype=np.int64)
                list(join.apply(upserts=pa.table({"k": new, "id": new})))
                keys = np.union1d(keys, new)
                got = pa.Table.from_batches([*join.push(asked), *join.flush()]).sort_by("at")
                assert got["id"].to_numpy().tolist() == keys[np.searchsorted(keys, got["at"], "right") - 1].tolist()


def test_several_threads_find_what_one_finds(tmp_path):
    rng = np.random.default_rng(7)
    keys = np.unique(rng.integers(0, 10**6, 50_000))
    with Table.build(tmp_path / "t", pa.table({"k": keys, "id": keys}), key=["k"], unique=True) as table:
        asked = pa.record_batch({"at": rng.integers(-5, 10**6, 100_000)})
        results = []
        for threads in (1, 3):
            with SSIJ(table, AsOf("at", "k"), memory="16MiB", columns=["id"], threads=threads) as join:
                for _ in range(2):
                    got = pa.Table.from_batches([*join.push(asked), *join.flush()])
                    results.append(got.sort_by([("at", "ascending"), ("id", "ascending")]))
                assert isinstance(join.algorithm._online_phase(), DirectNearestPhase)
    assert all(first.equals(second) for first, second in itertools.pairwise(results))
    at, found = results[0]["at"].to_numpy(), results[0]["id"].to_numpy()
    assert found.tolist() == keys[np.searchsorted(keys, at, "right") - 1].tolist()
