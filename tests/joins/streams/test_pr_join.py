"""What PR-Join does inside: which pairs its results cover at each time, when it joins a partition, and how it reads."""

import numpy as np
import pyarrow as pa
import pytest

from headrace.joins.errors import ClosedError, JoinInputError
from headrace.joins.streams import RPJ, Near, PRJoin, SymmetricHash
from headrace.storage.file import FileBackend

SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.int64())])
INPUTS = {"a": SCHEMA, "b": SCHEMA}
MEMORY = 128 << 10


def pr_join(folder, **options):
    settings = {"memory": MEMORY, "wait": 1e-6, "spill": folder, "clock": lambda: 0.0, "partitions": 8} | options
    return PRJoin(INPUTS, "x", **settings)


def rows(keys, start, stop):
    return pa.record_batch({"id": pa.array(range(start, stop), pa.int64()), "x": keys[start:stop]}, SCHEMA)


def keys_of(seed, count, domain=600):
    return np.random.default_rng(seed).integers(0, domain, (2, count))


def pairs(batches):
    table = pa.Table.from_batches(
        batches, None if batches else pa.schema([("id", pa.int64()), ("id_right", pa.int64())])
    )
    return list(zip(table["id"].to_pylist(), table["id_right"].to_pylist(), strict=True))


def partition_of(join, keys):
    """Return the partition of each tuple of an input."""
    table = pa.table({"x": keys})
    return join.algorithm.partitions_of_results(table)


def covered_pairs(join, keys):
    """Return the results between the covered tuples, which are the first of each partition."""
    first = []
    for side in (0, 1):
        partition = partition_of(join, keys[side])
        ranks = np.zeros(len(partition), dtype=np.int64)
        for number in range(join.algorithm.partitions):
            chosen = partition == number
            ranks[chosen] = np.arange(chosen.sum())
        first.append(np.flatnonzero(ranks < join.coverage.covered[side][partition]))
    left, right = (pa.table({"x": keys[side][first[side]], name: first[side]}) for side, name in enumerate("ab"))
    both = left.join(right, "x", join_type="inner")
    return set(zip(both["a"].to_pylist(), both["b"].to_pylist(), strict=True))


@pytest.mark.parametrize("blocked_every", [0, 7])
def test_the_results_are_exactly_those_between_the_tuples_that_are_covered(tmp_path, blocked_every):
    keys, found, sizes = keys_of(3, 6000), [], set()
    with pr_join(tmp_path) as join:
        for step, start in enumerate(range(0, 6000, 100)):
            for side, name in enumerate("ab"):
                found += pairs(list(join.push(rows(keys[side], start, start + 100), side=name, at=float(step))))
            if blocked_every and step % blocked_every == 0:
                found += pairs(list(join.tick(step + 0.5)))
            assert len(found) == len(set(found))
            assert set(found) == covered_pairs(join, keys)
            sizes.add(len(found))
            coverage = join.coverage
            assert coverage.arrived.sum(axis=1).tolist() == coverage.rows.tolist() == [start + 100] * 2
        assert coverage.ripples.min() >= 1
        assert (coverage.covered < coverage.arrived).any()
        assert len(sizes) > 20, "results come all the time"
        found += pairs(list(join.finish()))
        assert (join.coverage.covered == join.coverage.arrived).all()
        assert len(found) == len(set(found))
        assert set(found) == covered_pairs(join, keys)
        assert join.stats.memory.peak <= MEMORY


@pytest.mark.parametrize("expansion", [0.5, 1.0, 3.0])
def test_ripples_expand_by_a_factor_and_partitions_take_turns(tmp_path, expansion):
    keys, joined = keys_of(4, 20_000, 100_000), [[] for _ in range(8)]
    with pr_join(tmp_path, expansion=expansion) as join:
        for start in range(0, 20_000, 20):
            for side, name in enumerate("ab"):
                before = join.coverage.ripples
                rippling = join.algorithm._rippling
                join.push(rows(keys[side], start, start + 20), side=name, at=0.0).drain()
                coverage = join.coverage
                if not rippling and join.algorithm._rippling:
                    base = coverage.covered.sum(axis=0)
                for partition in np.flatnonzero(coverage.ripples - before):
                    joined[partition].append(int(coverage.covered[:, partition].sum()))
    for partition, sizes in enumerate(joined):
        wanted = base[partition] * (1 + expansion) ** (1 + partition / 8 + np.arange(len(sizes)))
        assert len(sizes) >= (1 if expansion > 1 else 3)
        assert (np.array(sizes) >= wanted).all()
        assert (np.array(sizes) <= wanted + 21).all(), "joined with the batch that makes it large enough"


def test_a_batch_that_passes_several_sizes_is_joined_once(tmp_path):
    keys = keys_of(5, 12_000)
    with pr_join(tmp_path, expansion=0.1) as join:
        for side, name in enumerate("ab"):
            join.push(rows(keys[side], 0, 1000), side=name, at=0.0).drain()
        ripples = join.coverage.ripples
        large = join.algorithm._workspace
        join.algorithm._workspace *= 1000  # so that the batch is one slice
        join.push(rows(keys[0], 1000, 12_000), side="a", at=0.0).drain()
        join.algorithm._workspace = large
        assert (join.coverage.ripples - ripples).max() == 1
        assert (join.algorithm._due > join.coverage.arrived.sum(axis=0)).all()


def test_what_fits_in_memory_is_joined_at_once(tmp_path):
    keys = keys_of(6, 400)
    with pr_join(tmp_path) as join, SymmetricHash(INPUTS, "x") as other:
        for start in range(0, 400, 50):
            for side, name in enumerate("ab"):
                batch = rows(keys[side], start, start + 50)
                assert list(join.push(batch, side=name, at=0.0)) == list(other.push(batch, side=name))
        assert join.stats.rows_spilled == 0
        assert join.tick(9.0).drain() == 0
        assert join.stats.reactive_steps == 0
        assert (join.coverage.covered == join.coverage.arrived).all()
        assert join.coverage.ripples.sum() == 0


def test_when_memory_is_full_the_fullest_partition_writes_its_larger_input(tmp_path):
    keys = np.arange(600)
    with pr_join(tmp_path) as join:
        join.push(rows(keys, 0, 500), side="a", at=0.0).drain()
        join.push(rows(keys, 0, 300), side="b", at=0.0).drain()
        algorithm = join.algorithm
        assert not algorithm._rippling
        fullest = int(np.argmax(algorithm.counts.sum(axis=0)))
        before = algorithm.counts.copy()
        algorithm._make_room()
        gone = before - algorithm.counts
        assert gone[0, fullest] == gone.sum() == before[0, fullest] > before[1, fullest] > 0
        assert algorithm.budget.use().key_index == 0, "nothing is found by its key any more"


class Disk:
    """Counts what is read from all files, and the reads that do not begin where the last one ended or began."""

    def __init__(self):
        self.seeks, self.nbytes, self.last = 0, 0, (None, 0, 0)

    def file(self, path):
        disk = self

        class Counting(FileBackend):
            def pread_into(self, offset, buffers):
                nbytes, (last, start, end) = sum(map(len, buffers)), disk.last
                disk.seeks += last != self.path or offset not in {start, end}
                disk.nbytes += nbytes if offset != start or last != self.path else 0
                disk.last = self.path, offset, offset + nbytes
                super().pread_into(offset, buffers)

        return Counting(path, "x", direct=False)


def test_a_join_of_a_partition_reads_two_files_from_begin_to_end(tmp_path):
    keys, disk, joins = keys_of(7, 8000, 5000), Disk(), 0
    with pr_join(tmp_path, backend=disk.file) as join:
        for start in range(0, 8000, 20):
            for side, name in enumerate("ab"):
                seeks, before, ripples = disk.seeks, join.stats, join.coverage.ripples
                join.push(rows(keys[side], start, start + 20), side=name, at=0.0).drain()
                after, grown = join.stats, np.flatnonzero(join.coverage.ripples - ripples)
                files = [join.algorithm.spill_file(side, int(partition)) for partition in grown for side in (0, 1)]
                joins += len(grown)
                assert disk.seeks - seeks <= 2 * len(grown)
                assert after.blocks_read - before.blocks_read == sum(map(len, files))
    assert joins > 20
    assert after.bytes_read <= 2 * after.bytes_spilled, "twice at most before the end, since sizes double"


def test_results_come_with_fewer_seeks_than_those_of_tasks_on_few_blocks(tmp_path):
    """RPJ joins a bucket's new blocks with those before, or one block with memory; PR-Join all of a partition."""
    keys, seeks, online = keys_of(8, 8000, 5000), {}, {}
    for operator in (PRJoin, RPJ):
        disk = Disk()
        options = {"memory": MEMORY, "wait": 1e-6, "spill": tmp_path, "clock": lambda: 0.0, "partitions": 8}
        with operator(INPUTS, "x", backend=disk.file, **options) as join:
            for step, start in enumerate(range(0, 8000, 100)):
                for side, name in enumerate("ab"):
                    join.push(rows(keys[side], start, start + 100), side=name, at=float(step)).drain()
                if step % 8 == 0:
                    join.idle(step + 0.5).drain()
            seeks[operator], online[operator] = disk.seeks, join.stats.rows_out
    assert online[PRJoin] >= online[RPJ]
    assert 1.3 * seeks[PRJoin] < seeks[RPJ]


def test_expanding_ripples_read_less_than_those_of_a_fixed_width(tmp_path):
    """Ripples as wide as the memory, those of Block Ripple Join, read all before them again and again (section 3.2)."""
    keys, read = keys_of(8, 16_000, 5000), {}
    for fixed in (False, True):
        with pr_join(tmp_path) as join:
            algorithm = join.algorithm
            for start in range(0, 16_000, 50):
                for side, name in enumerate("ab"):
                    ripples, due = join.coverage.ripples, algorithm._due.copy()
                    join.push(rows(keys[side], start, start + 50), side=name, at=0.0).drain()
                    if fixed and algorithm._rippling and not due.any():
                        width = join.coverage.covered.sum(axis=0)
                    if fixed and (grown := join.coverage.ripples > ripples).any():
                        algorithm._due[grown] = due[grown] + width[grown]
            read[fixed] = join.stats.bytes_read
            assert read[fixed] <= 2 * join.stats.bytes_spilled or fixed
    assert 2 * read[False] < read[True]


def test_a_partition_that_does_not_fit_in_memory_is_joined_in_parts(tmp_path):
    keys = np.zeros((2, 4000), dtype=np.int64)
    keys[:, ::400] = 7
    with pr_join(tmp_path, partitions=2) as join:
        count = sum(
            join.push(rows(keys[side], start, start + 500), side=name, at=0.0).drain()
            for start in range(0, 4000, 500)
            for side, name in enumerate("ab")
        )
        assert join.coverage.ripples.max() >= 2
        count += join.finish().drain()
        assert join.stats.memory.peak <= MEMORY
    assert count == 10**2 + 3990**2


def test_blocked_inputs_are_used_for_the_partition_with_most_pairs_for_each_tuple(tmp_path):
    keys = keys_of(9, 3000)
    with pr_join(tmp_path) as join:
        for side, name in enumerate("ab"):
            join.push(rows(keys[side], 0, 3000), side=name, at=0.0).drain()
        order = []
        while True:
            before = join.coverage
            left = before.arrived.prod(axis=0) - before.covered.prod(axis=0)
            join.tick(1.0).drain()
            done = np.flatnonzero(join.coverage.ripples - before.ripples)
            if len(done) == 0:
                break
            assert left[done] / before.arrived.sum(axis=0)[done] == (left / before.arrived.sum(axis=0)).max()
            order.append(int(done[0]))
        assert len(order) == len(set(order)) >= 4, "each partition once"
        assert (join.coverage.covered == join.coverage.arrived).all()
        assert join.stats.reactive_steps == len(order)
        read = join.stats.blocks_read
        assert join.finish().drain() == 0
        assert join.stats.blocks_read == read, "all pairs have met"


def test_results_depend_on_arrivals_alone(tmp_path):
    keys = keys_of(10, 4000)

    def play(clock, *, consume):
        with pr_join(tmp_path, clock=clock) as join:
            outputs = []
            for start in range(0, 4000, 100):
                for side, name in enumerate("ab"):
                    output = join.push(rows(keys[side], start, start + 100), side=name, at=start / 100)
                    outputs.append(output)
                    if consume:
                        outputs[-1] = list(output)
            outputs.append(join.finish())
            return [batch for output in outputs for batch in output]

    ticks = iter(range(10**9))
    wanted = play(lambda: 0.0, consume=True)
    assert sum(map(len, wanted)) > 0
    assert play(lambda: float(next(ticks)), consume=True) == wanted
    assert play(lambda: 0.0, consume=False) == wanted


def test_wrong_parameters_are_refused(tmp_path):
    with pytest.raises(JoinInputError, match="DINER for bands"):
        PRJoin(INPUTS, Near("x", "x", 1), spill=tmp_path)
    for expansion in (0, -1.0, 1e-9, float("inf"), float("nan"), "2", True):
        with pytest.raises(JoinInputError, match=r"`expansion` must be a number from 0\.01 to 1000"):
            PRJoin(INPUTS, "x", expansion=expansion)
    with pytest.raises(JoinInputError, match="`partitions`"):
        PRJoin(INPUTS, "x", partitions=3)


def test_coverage_waits_for_the_rest_of_an_output(tmp_path):
    keys = np.zeros((2, 1000), dtype=np.int64)
    join = pr_join(tmp_path, memory="1MiB")
    join.push(rows(keys[0], 0, 1000), side="a", at=0.0).drain()
    output = join.push(rows(keys[1], 0, 1000), side="b", at=0.0)
    next(iter(output))
    with pytest.raises(JoinInputError, match="consume the rest of it"):
        _ = join.coverage
    output.drain()
    assert join.coverage.covered.sum() == 2000
    join.close()
    with pytest.raises(ClosedError):
        _ = join.coverage
