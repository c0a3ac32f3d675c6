"""Entries of the inverted index: which waiting tuples meet which leaves, and the memory that they take."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from headrace.joins.ssij.memory.inverted_index import ReadLeaves
from headrace.joins.ssij.memory.stream_buffer import Chunk

LEAVES, CHUNKS, ROWS = 1000, 60, 200


@pytest.fixture
def chunks(rng):
    """Chunks of tuples that wait for one leaf each; of every third chunk, some tuples have left."""
    made = []
    for number in range(CHUNKS):
        first = np.sort(rng.integers(0, LEAVES, ROWS)).astype(np.int32)
        chunk = Chunk(pa.record_batch({"id": number * ROWS + np.arange(ROWS)}), 0.0, first, first)
        made.append(replace(chunk, alive=rng.random(ROWS) < 0.5) if number % 3 == 0 else chunk)
    return made


@pytest.mark.parametrize("most", [1, 7, 500, 10**6])
def test_each_waiting_tuple_meets_its_leaf_once_in_groups_of_bounded_size(chunks, most, rng):
    leaves = np.flatnonzero(rng.random(LEAVES) < 0.5).astype(np.int32)
    found = []
    for group in ReadLeaves(leaves, leaves).pairs(chunks, most):
        assert sum(len(postings.runs) for postings in group) <= most
        for postings in group:
            found += zip(postings.rows()["id"].to_pylist(), postings.frame.tolist(), strict=True)
    wanted = [
        (tuple_id, leaf)
        for chunk in chunks
        for at, (tuple_id, leaf) in enumerate(zip(chunk.rows["id"].to_pylist(), chunk.first.tolist(), strict=True))
        if (chunk.alive is None or chunk.alive[at]) and leaf in set(leaves.tolist())
    ]
    assert sorted(found) == wanted


def test_entries_take_memory_for_the_largest_group_however_many_chunks_there_are(chunks):
    leaves, most = np.arange(LEAVES, dtype=np.int32), CHUNKS * ROWS
    read = ReadLeaves(leaves, leaves)
    list(read.pairs(chunks, most))  # compiles the kernel
    tracemalloc.start()
    try:
        group = next(read.pairs(chunks, most))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(group) == CHUNKS
    assert held < 3 * 8 * most, f"{held} bytes for {most} entries of 8 bytes"
