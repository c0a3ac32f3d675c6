"""Joins of streams on disks that fail, in processes that are killed, and with inputs at the limits."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headrace.joins import streams
from headrace.joins.errors import MemoryBudgetError
from headrace.joins.streams import DoublePipelinedHash, HashMerge, ProgressiveMerge, XJoin
from headrace.storage.errors import StorageIOError

SCHEMA = pa.schema([("k", pa.int64()), ("id", pa.int64()), ("t", pa.string())])
INPUTS = {"a": SCHEMA, "b": SCHEMA}
OTHERS = ["DINER", "MINER", "MJoin", "RPJ", "PRJoin", "XJoin", "HashMerge", "ProgressiveMerge", "PunctuatedJoin"]
SPILLING = ["DoublePipelinedHash", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
HOWS = ["full", *(pytest.param(how, marks=pytest.mark.slow) for how in ("inner", "left", "right"))]

SCRIPT = textwrap.dedent(
    """
    import itertools, resource, sys
    import numpy as np, pyarrow as pa
    from headrace.joins import streams

    operator, spill, limit = getattr(streams, sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    def batch(start):
        ids = np.arange(start, start + 1000)
        return pa.record_batch({"k": ids * 7 % 100_003, "id": ids, "t": [f"text {at}" for at in ids]})

    schema = batch(0).schema
    with operator({"a": schema, "b": schema}, "k", memory="2MiB", spill=spill) as join:
        for start in itertools.count(0, 1000):
            for side in "ab":
                for result in join.push(batch(start), side=side):
                    assert result["id"] == result["id_right"]
            if join.stats.rows_spilled > 30_000:
                print("spilled", flush=True)
            if limit and start > 400_000:
                break
    """
)


def start(operator, folder, limit=0):
    command = [sys.executable, "-c", SCRIPT, operator, str(folder), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def batch(keys, first=0):
    ids = range(first, first + len(keys))
    columns = [pa.array(keys, pa.int64()), pa.array(ids, pa.int64()), pa.array([f"t{at}" for at in ids], pa.string())]
    return pa.record_batch(columns, schema=SCHEMA)


def joined(join, left, right, step=500):
    """Push two lists of keys in turns, and return the pairs of ids of all results."""
    batches = []
    for at in range(0, max(len(left), len(right)), step):
        for side, keys in (("a", left), ("b", right)):
            if at < len(keys):
                batches += join.push(batch(keys[at : at + step], at), side=side)
    table = pa.Table.from_batches([*batches, *join.finish()], join.schema)
    return sorted(zip(table["id"].to_pylist(), table["id_right"].to_pylist(), strict=True), key=str)


@pytest.mark.parametrize("operator", SPILLING)
def test_what_a_killed_join_left_is_removed_by_the_next_one(operator, tmp_path):
    with start(operator, tmp_path) as process:
        assert process.stdout.readline() == "spilled\n", process.stderr.read()
        (left,) = tmp_path.iterdir()
        assert sum(path.stat().st_size for path in left.iterdir()) > 0
        process.send_signal(signal.SIGKILL)
    assert left.exists()
    keys = list(range(12_000))
    with getattr(streams, operator)(INPUTS, "k", memory="1MiB", spill=tmp_path) as join:
        found = joined(join, keys, keys)
        assert join.stats.rows_spilled
        assert not left.exists()
    assert len(found) == 12_000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("operator", SPILLING)
def test_a_file_that_the_system_does_not_let_grow_ends_the_join(operator, tmp_path):
    with start(operator, tmp_path, limit=300_000) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "StorageIOError" in errors.splitlines()[-1]
    assert "File too large" in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("operator", ["DoublePipelinedHash", *OTHERS])
def test_a_folder_that_cannot_be_written_to_ends_the_join(operator):
    if not Path("/sys/kernel").is_dir():
        pytest.skip("needs a folder that nobody may write to")
    with (
        getattr(streams, operator)(INPUTS, "k", memory="1MiB", spill="/sys/kernel") as join,
        pytest.raises(StorageIOError, match="name an existing folder that this user may write to"),
    ):
        joined(join, range(40_000), range(40_000), 1000)


@pytest.mark.parametrize("operator", [XJoin, DoublePipelinedHash])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([None] * 1200, [None] * 1200),
        ([], list(range(1200))),
        (list(range(1200)), []),
        ([], []),
        ([7] * 200, [7] * 200),
        ([7] * 1200 + [8], [9] * 1200 + [8]),
        (list(range(1200)), list(range(1199, -1, -1))),
    ],
    ids=["nulls", "empty left", "empty right", "empty", "one key", "one key each", "reversed"],
)
def test_inputs_at_the_limits(operator, how, left, right, tmp_path):
    with operator(INPUTS, "k", how, memory=160_000, spill=tmp_path) as join:
        found = joined(join, left, right)
    places = {}
    for at, key in enumerate(right):
        places.setdefault(key, []).append(at)
    pairs = [(a, b) for a, key in enumerate(left) if key is not None for b in places.get(key, [])]
    if how in {"left", "full"}:
        pairs += [(a, None) for a in set(range(len(left))) - {a for a, _ in pairs}]
    if how in {"right", "full"}:
        pairs += [(None, b) for b in set(range(len(right))) - {b for _, b in pairs}]
    assert found == sorted(pairs, key=str)


@pytest.mark.parametrize("operator", [HashMerge, ProgressiveMerge])
def test_lists_of_blocks_that_fill_the_memory_are_named(operator, tmp_path):
    padding = pa.array([b"x" * 192] * 200, pa.binary(192))
    rng, wide = np.random.default_rng(3), pa.schema([("k", pa.int64()), ("p", padding.type)])

    def push_all(join):
        for side in "ab" * 200:
            keys = pa.array(rng.integers(0, 50_000, 200))
            join.push(pa.record_batch([keys, padding], schema=wide), side=side).drain()

    message = r"lists of their blocks take .* give the join at least 320000 bytes"
    with (
        operator({"a": wide, "b": wide}, "k", memory=160_000, spill=tmp_path) as join,
        pytest.raises(MemoryBudgetError, match=message),
    ):
        push_all(join)
