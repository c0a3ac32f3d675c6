"""A process that joins streams grows by its budget and 16 MiB at most: in a memory group of that size it is not killed.

What the pages of its spill files take in the system's cache is charged to the group as well, and taken back as needed.
"""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from benchmarks.peers._groups import MemoryGroup

MIB = 2**20
BESIDE = 16 * MIB

SCRIPT = textwrap.dedent(
    """
    import ctypes, sys
    import numpy as np, pyarrow as pa
    from headrace.joins import streams

    operator, how, memory, rows, text, spill = sys.argv[1:]
    operator, rows, text = getattr(streams, operator), int(rows), text == "text"

    def batch(start, side):
        ids = np.arange(start, min(start + 20_000, rows))
        columns = {"k": ids * (7 if side == "a" else 11) % rows, "id": ids}
        if text:
            columns["t"] = [f"what is known of {number % 9973:>12}" for number in ids]
        return pa.record_batch(columns)

    def joined(rows, memory):
        count = total = 0
        schema = batch(0, "a").schema
        with operator({"a": schema, "b": schema}, "k", how, memory, spill=spill) as join:
            for start in range(0, rows, 20_000):
                for side in "ab":
                    for result in join.push(batch(start, side), side=side):
                        count += len(result)
                        total += int(result["id"].to_numpy().sum())
            for result in join.finish():
                count += len(result)
                total += int(result["id"].to_numpy().sum())
            assert join.stats.memory.peak <= join.stats.memory.limit
            return count, total, join.stats.rows_spilled

    joined(20_000, "1MiB")
    ctypes.CDLL(None).malloc_trim(0)
    print("ready", flush=True)
    sys.stdin.buffer.read(1)
    print(*joined(rows, int(memory)))
    """
)


def assert_within(operator, how, budget, rows, kind, folder):
    group = MemoryGroup.create("streams")
    if group is None:
        pytest.skip("needs the right to make memory groups below /sys/fs/cgroup")
    command = [SCRIPT, operator, how, str(budget), str(rows), kind, str(folder)]
    with subprocess.Popen([sys.executable, "-c", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            group.add(process.pid)
            group.limit(budget + BESIDE)
            output, _ = process.communicate(b"\n")
            peak = group.peak
        finally:
            group.remove()
    assert process.returncode == 0, f"ended with {process.returncode}; the group held {peak / MIB:.1f} MiB"
    count, total, spilled = map(int, output.split())
    assert (count, total) == (rows, int(np.arange(rows).sum())), "each key occurs once on each side"
    assert spilled > 0


def test_a_join_that_spills_keeps_to_its_budget(tmp_path):
    assert_within("XJoin", "left", 3 * MIB, 60_007, "text", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [4, 32, 128])
@pytest.mark.parametrize("kind", ["narrow", "text"])
@pytest.mark.parametrize("operator", ["XJoin", "PRJoin", "DoublePipelinedHash"])
def test_joins_that_spill_keep_to_any_budget(operator, kind, budget, tmp_path):
    assert_within(operator, "inner", budget * MIB, 3_000_017, kind, tmp_path)
