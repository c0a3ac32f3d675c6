"""What RPJ does inside: which tuples it flushes, and which task it does while its inputs are blocked."""

import numpy as np
import pyarrow as pa
import pytest

from headrace.joins.errors import JoinInputError
from headrace.joins.streams import RPJ, Near
from headrace.storage.file import FileBackend

SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.int64())])


def rows(keys):
    return pa.record_batch({"id": pa.array(range(len(keys)), pa.int64()), "x": pa.array(keys, pa.int64())}, SCHEMA)


def rpj(folder, **options):
    settings = {"memory": "256KiB", "wait": 1e-6, "spill": folder, "clock": lambda: 0.0, "partitions": 4} | options
    return RPJ({"a": SCHEMA, "b": SCHEMA}, "x", **settings)


def test_the_opposite_of_the_least_probable_arrival_is_flushed(tmp_path):
    with rpj(tmp_path) as join:
        join.push(rows(range(400)), side="a").drain()
        join.push(rows(range(400)), side="b").drain()
        algorithm = join.algorithm
        algorithm.recent[:] = 100
        algorithm.recent[1, 2] = 1
        algorithm._flush_nbytes = 50 * algorithm.layouts[0].stride
        before = algorithm.counts.copy()
        algorithm._make_room()
        gone = before - algorithm.counts
        assert gone[0, 2] == gone.sum() == 50


def test_the_next_least_probable_bucket_follows_if_one_has_too_few_tuples(tmp_path):
    with rpj(tmp_path) as join:
        join.push(rows(range(40)), side="a").drain()
        algorithm = join.algorithm
        algorithm.recent[:] = 100
        algorithm.recent[1, :3] = 3, 1, 2
        before = algorithm.counts.copy()
        algorithm._flush_nbytes = (before[0, 1] + 1) * algorithm.layouts[0].stride
        algorithm._make_room()
        assert (before - algorithm.counts)[0].tolist() == [0, before[0, 1], 1, 0]


def test_tuples_of_a_flush_are_sorted_and_the_oldest_go_first(tmp_path):
    with rpj(tmp_path, partitions=2) as join:
        join.push(rows(np.random.default_rng(2).permutation(1000)), side="a").drain()
        algorithm = join.algorithm
        bucket = int(np.argmax(algorithm.counts[0]))
        slots = np.flatnonzero(algorithm.partition_of_slots(0) == bucket)
        oldest = np.sort(algorithm.stores[0].rows.arrivals[slots])[:10]
        algorithm._flush_oldest(0, bucket, 10 * algorithm.layouts[0].stride)
        block = algorithm.blocks[0][0]
        content = algorithm.spill_file(0, bucket).read(block.ref)
        stored = np.ndarray((10, algorithm.layouts[0].stride), np.uint8, content)
        arrivals, words = (np.ascontiguousarray(stored[:, at : at + 8]).view(np.int64).ravel() for at in (0, 16))
        assert sorted(arrivals.tolist()) == oldest.tolist()
        assert (np.diff(words.view(np.uint64).astype(object)) > 0).all()


def test_a_task_reads_new_blocks_without_a_search_for_the_first(tmp_path):
    offsets, found = [], []

    class Counting(FileBackend):
        def pread_into(self, offset, buffers):
            offsets.append(offset)
            super().pread_into(offset, buffers)

    def backend(path):
        return Counting(path, "x", direct=False)

    with rpj(tmp_path, partitions=2, fan_in=3, backend=backend) as join:
        for side in "ab":
            join.push(rows(range(600)), side=side).drain()
        algorithm = join.algorithm
        for side in (0, 1) * 7:
            algorithm._flush_oldest(side, 1, 10 * algorithm.layouts[side].stride)
        for _ in range(3):
            before = len(offsets)
            assert sum(map(len, algorithm._join_disk(1))) == 0, "all pairs met in memory"
            found.append((algorithm._joined[:, 1].tolist(), len(offsets) - before))
    blocks = [3 + 3, 3 + 6 + 3 + 3, 1 + 7 + 1 + 6]  # new ones of an input, and those of the other that they meet
    assert found == [([stop, stop], 2 * count) for stop, count in zip((3, 6, 7), blocks, strict=True)]


def test_both_tasks_are_done_while_inputs_are_blocked_and_no_result_is_repeated(tmp_path):
    rng = np.random.default_rng(6)
    found = []
    with rpj(tmp_path, memory="128KiB") as join:
        keys = rng.integers(0, 1200, (2, 8000))

        def take(output):
            for batch in output:
                found.extend(zip(batch.column(0).to_pylist(), batch.column(2).to_pylist(), strict=True))

        for start in range(0, 8000, 500):
            for side, name in enumerate("ab"):
                ids = pa.array(range(start, start + 500), pa.int64())
                batch = pa.record_batch({"id": ids, "x": keys[side, start : start + 500]}, SCHEMA)
                take(join.push(batch, side=name, at=0.0))
            steps = iter(range(15))
            take(join.idle(1.0, waiting=lambda steps=steps: next(steps) > 10))
        assert join.algorithm._joined.any()
        assert join.algorithm._probes
        assert join.stats.rows_reactive > 0
        take(join.finish())
    left, right = (pa.table({"x": keys[side], name: range(8000)}) for side, name in enumerate("ab"))
    both = left.join(right, "x", join_type="inner")
    wanted = set(zip(both["a"].to_pylist(), both["b"].to_pylist(), strict=True))
    assert len(found) == len(set(found))
    assert set(found) == wanted


def test_bands_and_wrong_parameters_are_refused(tmp_path):
    inputs = {"a": SCHEMA, "b": SCHEMA}
    with pytest.raises(JoinInputError, match="DINER for bands"):
        RPJ(inputs, Near("x", "x", 1), spill=tmp_path)
    with pytest.raises(JoinInputError, match="`fan_in`"):
        RPJ(inputs, "x", fan_in=0)
    with pytest.raises(JoinInputError, match="`partitions`"):
        RPJ(inputs, "x", partitions=3)
