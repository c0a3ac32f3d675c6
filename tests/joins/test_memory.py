"""The account is a hard limit, and it is true: it agrees with what the process really takes."""

import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.joins import SSIJ
from headrace.joins.memory import MemoryBudget
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.table import Table

MIB = 2**20


def test_the_limit_is_never_exceeded_and_nothing_is_charged_when_it_would_be():
    budget = MemoryBudget(100)
    budget.charge("cache", 60)
    with pytest.raises(MemoryBudgetError, match="at least 120 bytes"):
        budget.charge("input_buffer", 60)
    assert (budget.available, budget.held("input_buffer")) == (40, 0)


def test_components_are_told_apart_and_the_peak_is_kept():
    budget = MemoryBudget(100)
    budget.charge("cache", 60)
    budget.resize("stream_buffer", 30)
    budget.resize("stream_buffer", 10)
    budget.release("cache", 20)
    use = budget.use()
    assert (use.cache, use.stream_buffer, use.used, use.peak, use.limit) == (40, 10, 50, 90, 100)


@pytest.fixture(scope="module")
def table(build):
    rng = np.random.default_rng(3)
    rows = pa.table({"k": np.arange(60_000), "v": rng.integers(0, 2**60, 60_000)})
    with build(rows, ["k"], unique=True, page_size=4096) as table:
        yield table


@settings(max_examples=12)
@given(
    spare=st.integers(0, 2 * MIB),
    batches=st.lists(st.integers(0, 4000), max_size=12),
    seed=st.integers(0, 2**32 - 1),
    threshold=st.sampled_from([None, 1, 500, 10**6]),
)
def test_the_account_stays_within_the_limit_at_every_step(table, tools, spare, batches, seed, threshold):
    rng = np.random.default_rng(seed)
    memory = tools.least_memory(SSIJ, table, [("k", "k")]) + spare
    join = SSIJ(table, on="k", memory=memory, input_threshold=threshold, stream_threshold=threshold)
    rows = 0
    for size in batches:
        for result in join.push(pa.record_batch({"k": rng.integers(0, 60_000, size)})):
            rows += len(result)
            use, store = join.stats.memory, join.store
            assert use.used == use.index + use.cache + use.input_buffer + use.stream_buffer + use.inverted_index + (
                use.workspace + use.read_buffer + use.statistics + use.records + use.rows + use.filter
            )
            assert use.used <= use.peak <= memory
            assert store.cache.used <= store.cache.capacity == use.cache // 4096
            assert use.stream_buffer >= store.stream.tuple_nbytes == sum(c.tuple_nbytes for c in store.stream.chunks)
            assert use.inverted_index >= sum(chunk.index_nbytes for chunk in store.stream.chunks)
    assert rows + join.finish().drain() == sum(batches)


SCRIPT = textwrap.dedent(
    """
    import sys
    import numpy as np, pyarrow as pa
    from headrace.joins import SSIJ
    from headrace.storage.table import Table

    def peak():
        return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

    path, rows, memory, pushes = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    rng = np.random.default_rng(1)
    with Table.open(path) as table:
        join = SSIJ(table, on="k", how="left", memory=memory)
        join.push(pa.record_batch({"k": pa.array([1], pa.int64())})).drain()
        join.flush().drain()
        for _ in range(pushes):
            join.push(pa.record_batch({"k": rng.integers(0, rows, 50_000)})).drain()
        join.finish().drain()
    print(peak(), join.stats.memory.peak, join.stats.pages_read)
    """
)


def peak_of(path, rows, memory, pushes):
    command = [sys.executable, "-c", SCRIPT, str(path), str(rows), memory, str(pushes)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(number) for number in result.stdout.split()]


def assert_within(path, rows, budget, pushes=40):
    """Compare the peak of a process that joins with that of one that has only loaded all it needs for it."""
    empty, _, _ = peak_of(path, rows, str(budget), 0)
    full, account, _ = peak_of(path, rows, str(budget), pushes)
    assert account <= budget
    assert full - empty <= budget + 8 * MIB, f"{(full - empty) / MIB:.1f} MiB"


def test_the_process_stays_within_the_budget(tmp_path):
    rows = 1_000_000
    rng = np.random.default_rng(4)
    Table.build(
        tmp_path / "t.hdr", pa.table({"k": np.arange(rows), "v": rng.integers(0, 2**62, rows)}), ["k"], unique=True
    ).close()
    assert_within(tmp_path / "t.hdr", rows, 8 * MIB)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_process_stays_within_any_budget_over_a_table_of_2_gb(tmp_path):
    rows, rng = 50_000_000, np.random.default_rng(4)

    def batches():
        for start in range(0, rows, 1_000_000):
            columns = {"k": np.arange(start, start + 1_000_000)}
            columns |= {name: rng.integers(0, 2**62, 1_000_000) for name in "abcd"}
            yield pa.record_batch(columns)

    Table.build(tmp_path / "t.hdr", batches(), ["k"], unique=True).close()
    assert (tmp_path / "t.hdr").stat().st_size > 2e9
    for budget in (32, 64, 96):
        assert_within(tmp_path / "t.hdr", rows, budget * MIB, pushes=120)
