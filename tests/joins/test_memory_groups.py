"""A process that joins grows by its budget and 16 MiB at most: in a memory group of that size it is not killed.

The group is charged for what the process takes after it was ready: Python, Arrow, the open table and the stream's keys
are there before. Warm processes have run joins of other tables before, so that all kernels are loaded. Cold ones load
them within the limit.
"""

import subprocess
import sys
import textwrap
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.peers._groups import MemoryGroup
from headrace.storage.table import Table

MIB = 2**20
BESIDE = 16 * MIB
KILLED = -9
SEED = 7

SCRIPT = textwrap.dedent(
    """
    import ctypes, sys, tempfile
    import numpy as np, pyarrow as pa
    from headrace.joins import SSIJ
    from headrace.storage.table import Table

    path, rows, memory, pushes, size, warm, how, seed = sys.argv[1:]
    rows, pushes, size = int(rows), int(pushes), int(size)

    def consume(output):
        count = total = 0
        for batch in output:
            count += len(batch)
            total ^= int(np.bitwise_xor.reduce(batch["v"].fill_null(0).to_numpy() * batch["number"].to_numpy()))
        return count, total

    def joined(table, memory, streams):
        parts = []
        with SSIJ(table, on=[("key", "k")], how=how, memory=memory) as join:
            for number, keys in enumerate(streams):
                parts.append(consume(join.push(pa.record_batch({"key": keys, "number": keys + number}))))
            parts.append(consume(join.finish()))
        return parts

    def heat(schema):
        with tempfile.TemporaryDirectory() as folder:
            keys = np.random.default_rng(1).permutation(100_000)
            columns = {"k": np.arange(100_000), "v": keys}
            if "t" in schema.names:
                columns["t"] = [f"text {key}" for key in range(100_000)]
            with Table.build(f"{folder}/t", pa.table(columns, schema), ["k"], unique=True) as small:
                for budget in (small.stats.bytes // 2, 16 * small.stats.bytes):
                    joined(small, budget, [keys, keys, keys])

    table = Table.open(path)
    if warm == "warm":
        heat(table.schema)
    streams = np.frombuffer(sys.stdin.buffer.read(8 * pushes * size), dtype=np.int64).reshape(pushes, size)
    pa.record_batch({"key": streams[0], "number": streams[0]})  # Arrow loads pandas with the first one
    ctypes.CDLL(None).malloc_trim(0)
    print("ready", flush=True)
    sys.stdin.buffer.read(1)
    parts = joined(table, int(memory), list(streams))
    print(sum(count for count, _ in parts), int(np.bitwise_xor.reduce([total for _, total in parts])))
    """
)

HOG = "import sys, numpy as np; print('ready', flush=True); sys.stdin.buffer.read(1); np.ones(int(sys.argv[1]) // 8)"


@pytest.fixture(autouse=True)
def groups():
    """Skip where the system grants no memory group."""
    group = MemoryGroup.create("probe")
    if group is None:
        pytest.skip("needs the right to make memory groups below /sys/fs/cgroup")
    group.remove()


@contextmanager
def in_group(command, given, limit):
    """Start a process, wait until it is ready, limit what it takes from then on, and let it go on."""
    group = MemoryGroup.create("join")
    process = subprocess.Popen([sys.executable, "-c", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        given(process.stdin)
        process.stdin.flush()
        assert process.stdout.readline() == b"ready\n"
        group.add(process.pid)
        group.limit(limit)
        yield process, group
    finally:
        group.remove()
        process.wait()
        process.stdout.close()


def values(keys):
    """Return the payload of keys: distinct, and larger than 32 bits."""
    return (keys * 2_654_435_761 + 12_345) & (2**62 - 1)


def build(path, rows, *, text):
    """Build a table with a payload that can be computed from the key."""
    fields = [("k", pa.int64()), ("v", pa.int64()), *([("t", pa.string())] if text else [])]
    step = 500_000

    def batches():
        for start in range(0, rows, step):
            keys = np.arange(start, min(start + step, rows))
            columns = [keys, values(keys), *([[f"what is known of {key % 9973:>12}" for key in keys]] if text else [])]
            yield pa.record_batch(columns, schema=pa.schema(fields))

    Table.build(path, batches(), ["k"], unique=True).close()
    return path


def zipf(rows, pushes, size):
    """Return keys of which few are frequent, scattered over the table, and some absent."""
    rng = np.random.default_rng(SEED)
    rank = np.exp(rng.random((pushes, size)) * np.log(rows)).astype(np.int64)
    return rank * 2_654_435_761 % (rows + rows // 50)


def expected(streams, rows, how):
    """Return the number of results and the exclusive-or of payload times number, by direct computation."""
    total = count = 0
    for number, keys in enumerate(streams):
        present = keys < rows
        count += len(keys) if how == "left" else int(present.sum())
        total ^= int(np.bitwise_xor.reduce(np.where(present, values(keys), 0) * (keys + number)))
    return count, total


def assert_within(path, rows, budget, heat, how="inner", pushes=16, size=250_000, beside=BESIDE):
    streams = zipf(rows, pushes, size)
    command = [SCRIPT, str(path), *map(str, (rows, budget, pushes, size)), heat, how, str(SEED)]
    with in_group(command, lambda stdin: stdin.write(streams.tobytes()), budget + beside) as (process, group):
        output, _ = process.communicate(b"\n")
        print(f"{(budget + beside - group.peak) / MIB:.2f} MiB below the limit")  # noqa: T201 - shown by `pytest -rP`
        assert process.returncode == 0, f"ended with {process.returncode}; the group held {group.peak / MIB:.1f} MiB"
    assert tuple(map(int, output.split())) == expected(streams, rows, how)


def test_a_process_that_takes_more_is_killed():
    with in_group([HOG, str(80 * MIB)], lambda _: None, 48 * MIB) as (process, _):
        process.communicate(b"\n")
    assert process.returncode == KILLED


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    rows = 3_000_000
    return {kind: (build(folder / kind, rows, text=kind == "text"), rows) for kind in ("narrow", "text")}


@pytest.mark.parametrize("kind", ["narrow", "text"])
@pytest.mark.parametrize(
    ("budget", "heat", "how"), [(16, "warm", "left"), (32, "cold", "inner"), (64, "warm", "inner")]
)
def test_the_process_keeps_to_its_budget(tables, kind, budget, heat, how):
    assert_within(*tables[kind], budget * MIB, heat, how, pushes=8)


@pytest.fixture(scope="module")
def large_tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    sizes = {"narrow": 80_000_000, "text": 20_000_000}
    built = {kind: (build(folder / kind, rows, text=kind == "text"), rows) for kind, rows in sizes.items()}
    for path, rows in built.values():
        assert_within(path, rows, 72 * MIB, "cold", beside=1024 * MIB)  # kernels that are not compiled yet will be
    return built


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("budget", [16, 32, 72, 150, 256])
@pytest.mark.parametrize("heat", ["warm", "cold"])
@pytest.mark.parametrize("kind", ["narrow", "text"])
def test_the_process_keeps_to_any_budget_over_many_rows(large_tables, kind, heat, budget):
    assert_within(*large_tables[kind], budget * MIB, heat, pushes=24)
