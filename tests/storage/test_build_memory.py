"""Loads of more than the memory they are given, in a process of their own."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.storage import Table
from headrace.storage.load.sources import LEAST_MEMORY

ROWS, PARTS = 600_000, 16
LOAD = """
import resource, sys
from headrace.storage import Table
Table.build(sys.argv[1], sys.argv[2], ["k"], memory=sys.argv[3]).close()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak_of(target, source, memory):
    command = [sys.executable, "-c", LOAD, str(target), str(source), memory]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_an_unsorted_load_stays_within_its_memory(tmp_path):
    rng = np.random.default_rng(1)
    schema = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("w", pa.float64())])
    with pq.ParquetWriter(tmp_path / "large.parquet", schema) as writer:
        for _ in range(PARTS):
            columns = rng.integers(0, 2**60, ROWS), rng.integers(0, 2**60, ROWS), rng.random(ROWS)
            writer.write_table(pa.table(list(columns), schema=schema))
    pq.write_table(pa.table({"k": [2, 1], "v": [1, 2], "w": [0.5, 1.5]}), tmp_path / "small.parquet")
    empty = peak_of(tmp_path / "a", tmp_path / "small.parquet", "1MiB")
    peak = peak_of(tmp_path / "b", tmp_path / "large.parquet", "1MiB")
    assert (tmp_path / "large.parquet").stat().st_size > LEAST_MEMORY
    assert peak - empty < LEAST_MEMORY + (128 << 20)
    with Table.open(tmp_path / "b") as table:
        assert table.stats.rows == ROWS * PARTS
        assert table.check().ok
