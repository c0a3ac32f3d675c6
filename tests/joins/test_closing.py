"""A dropped or closed operator frees its memory at once; a closed one refuses work and keeps its statistics."""

import contextlib
import gc
import subprocess
import sys
import textwrap
import tracemalloc
import weakref

import numpy as np
import pyarrow as pa
import pytest

from headrace.joins import SSIJ, AsOf, Band
from headrace.joins.errors import ClosedError, JoinStateError
from headrace.storage import Table
from headrace.storage.errors import CorruptPageError

MIB = 2**20
ROWS = 200_000


@pytest.fixture(scope="module")
def table(build):
    relation = pa.table({"k": np.arange(ROWS), "v": np.arange(ROWS)})
    with build(relation, ["k"], unique=True, page_size=4096) as table:
        yield table


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def stream(rows=50_000, seed=1):
    return pa.record_batch({"s": np.random.default_rng(seed).integers(0, ROWS, rows)})


@pytest.mark.usefixtures("no_gc")
def test_a_dropped_operator_is_freed_without_a_collection_of_cycles(table, operator):
    join = operator(table, on=[("s", "k")], memory="4MiB")
    join.push(stream()).drain()
    join.flush().drain()
    algorithm = weakref.ref(join.algorithm)
    del join
    assert algorithm() is None


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("taken", [0, 1])
def test_an_operator_that_is_dropped_with_results_left_is_freed(table, operator, taken):
    def dropped():
        join = operator(table, on=[("s", "k")], memory="1MiB")
        output = join.push(stream())
        output = join.flush() if taken == 0 else output
        for _ in range(taken):
            next(output, None)
        return weakref.ref(join.algorithm)

    dropped()  # the compilation of kernels leaves cycles
    assert dropped()() is None


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("on", [Band("s", "k", 1, 1), AsOf("s", "k")], ids=["band", "as-of"])
def test_every_phase_is_free_of_cycles(table, on):
    join = SSIJ(table, on=on, memory="2MiB", threads=3)
    join.push(stream(100_000)).drain()
    join.flush().drain()
    algorithm = weakref.ref(join.algorithm)
    del join
    assert algorithm() is None


@pytest.mark.usefixtures("no_gc")
def test_tiers_are_free_of_cycles(table):
    join = SSIJ(table, on=[("s", "k")], memory="64MiB", threads=3)
    for seed in range(12):
        join.push(stream(100_000, seed)).drain()
        join.flush().drain()
    assert join.stats.memory.rows > 0
    algorithm = weakref.ref(join.algorithm)
    del join
    assert algorithm() is None


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("threads", [1, 3])
def test_an_operator_that_failed_is_freed(table, monkeypatch, threads):
    join = SSIJ(table, on=[("s", "k")], memory="2MiB", threads=threads)
    join.push(stream(1000)).drain()

    def damaged(_):
        raise CorruptPageError("page 7")

    with monkeypatch.context() as patch:
        patch.setattr("headrace.storage.read.read_queue.Reading.check", damaged)
        with contextlib.suppress(CorruptPageError):
            join.flush().drain()
    with pytest.raises(JoinStateError, match=r"failed before \(page 7\)"):
        join.flush()
    algorithm = weakref.ref(join.algorithm)
    del join
    assert algorithm() is None


@pytest.mark.usefixtures("no_gc")
def test_the_memory_of_dropped_operators_does_not_add_up(table, operator):
    def round_trip():
        join = operator(table, on=[("s", "k")], memory="16MiB")
        join.push(stream(5000)).drain()
        join.flush().drain()
        held = tracemalloc.get_traced_memory()[0]
        del join
        return held, tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        round_trip()  # fills caches of the interpreter
        _, before = round_trip()
        rounds = [round_trip() for _ in range(4)]
    finally:
        tracemalloc.stop()
    held, left = max(held for held, _ in rounds) - before, rounds[-1][1] - before
    assert held > 15_000  # pages are mapped, so only the process sees them: the next test
    assert left < held, f"{left} bytes are left of four operators of {held} bytes each"


SCRIPT = textwrap.dedent(
    """
    import gc, sys
    import numpy as np, pyarrow as pa
    from headrace.joins import SSIJ
    from headrace.storage import Table

    def resident():
        return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) * 1024

    def fill(table, memory, pushes):
        join = SSIJ(table, on="k", memory=memory)
        for _ in range(pushes):
            join.push(pa.record_batch({"k": rng.integers(0, rows, 100_000)})).drain()
        join.flush().drain()
        return join

    path, rows, rng = sys.argv[1], int(sys.argv[2]), np.random.default_rng(1)
    with Table.open(path) as table:
        fill(table, "72MiB", 20).close()
        gc.collect()
        gc.disable()
        before = resident()
        join = fill(table, "72MiB", 20)
        held = resident() - before
        if sys.argv[3] == "closed":
            join.close()
        else:
            del join
        print(held, resident() - before)
    """
)


@pytest.mark.parametrize("end", ["closed", "dropped"])
def test_the_process_shrinks_when_an_operator_of_72_mib_ends(tmp_path, end):
    rows = 6_000_000
    relation = pa.table({"k": np.arange(rows), "v": np.random.default_rng(1).integers(0, 2**62, rows)})
    Table.build(tmp_path / "t.hdr", relation, ["k"], unique=True).close()
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "t.hdr"), str(rows), end]
    held, left = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert held > 40 * MIB
    assert left < held // 6, f"{left / MIB:.1f} of {held / MIB:.1f} MiB are left"


def test_a_closed_operator_refuses_work(table, operator):
    join = operator(table, on=[("s", "k")])
    join.push(stream(10)).drain()
    join.close()
    join.close()
    for call in (lambda: join.push(stream(10)), join.tick, join.flush, join.finish):
        with pytest.raises(ClosedError, match="the join is closed; make a new operator"):
            call()
    assert join.due is None


def test_a_closed_ssij_refuses_changes(table):
    join = SSIJ(table, on=[("s", "k")])
    join.close()
    for call in (join.refresh, join.apply):
        with pytest.raises(ClosedError):
            call()


def test_statistics_stay_after_close_but_for_the_memory(table, operator):
    with operator(table, on=[("s", "k")], memory="4MiB") as join:
        rows = join.push(stream()).drain() + join.finish().drain()
        peak = join.stats.memory.peak
    assert join.stats.rows_in == join.stats.rows_out == rows == 50_000
    assert (join.stats.memory.used, join.stats.memory.cache) == (0, 0)
    assert (join.stats.memory.limit, join.stats.memory.peak) == (4 * MIB, peak)


def test_results_that_were_dropped_by_close_are_an_error_when_they_are_taken(table, operator):
    with operator(table, on=[("s", "k")], memory="1MiB") as join:
        join.push(stream()).drain()
        output = join.finish()
        if operator is not SSIJ:
            join.close()
    if operator.__name__ == "IndexNestedLoops":  # its results come with each push
        assert list(output) == []
        return
    with pytest.raises(ClosedError, match="before all of its results were taken"):
        next(output)


def test_results_that_were_all_taken_end_as_ever_after_close(table, operator):
    with operator(table, on=[("s", "k")]) as join:
        output = join.push(stream(10))
        output.drain()
    assert list(output) == []


def test_with_closes_an_operator_when_its_block_raises(table, operator):
    with contextlib.suppress(KeyError), operator(table, on=[("s", "k")]) as join:
        raise KeyError
    with pytest.raises(ClosedError):
        join.push(stream(1))


def test_an_output_keeps_working_when_only_the_operator_is_dropped(table):
    join = SSIJ(table, on=[("s", "k")], memory="1MiB")
    rows = join.push(stream()).drain()
    output = join.finish()
    del join
    assert rows + output.drain() == 50_000
