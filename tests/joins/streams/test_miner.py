"""What MINER and MJoin do inside: probing order, victims, reactive steps, pieces. Results: test_conformance.py."""

import numpy as np
import pyarrow as pa
import pytest

from headrace.joins.errors import JoinInputError
from headrace.joins.memory import MemoryBudget
from headrace.joins.streams import MINER, JoinGraph, MJoin, Near
from headrace.joins.streams.base.combining import Combiner
from headrace.joins.streams.diner.regions import LOWER, MIDDLE, UPPER
from headrace.storage.errors import StorageIOError
from headrace.storage.file import FileBackend

SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.int64()), ("y", pa.int64())])
CHAIN = [("a.y", "b.x"), ("b.y", "c.x"), ("c.y", "d.x")]
ONE_KEY = [("a.x", "b.x"), ("b.x", "c.x"), ("c.x", "d.x")]
A, B, C, D = range(4)


def rows(xs, ys=None, start=0):
    ys = xs if ys is None else ys
    return pa.record_batch(
        [pa.array(range(start, start + len(xs)), pa.int64()), pa.array(xs, pa.int64()), pa.array(ys, pa.int64())],
        schema=SCHEMA,
    )


def chain(tmp_path, memory="1MiB", **options):
    return MINER(dict.fromkeys("abcd", SCHEMA), CHAIN, memory=memory, spill=tmp_path, **options)


def push(join, side, *args, at=0.0):
    return join.push(rows(*args), side=side, at=at).drain()


# Probing sequence: section 4.1


def test_probing_goes_to_connected_inputs_by_growing_selectivity(tmp_path):
    with chain(tmp_path) as join:
        for side, count in zip("abcd", (10, 20, 30, 40), strict=True):
            push(join, side, [-ord(side)] * count, [ord(side)] * count)
        algorithm = join.algorithm
        algorithm.selectivity.local_joins.update({(A, B): 30, (B, C): 60, (C, D): 480})  # 0.15, 0.1, 0.4
        assert [step.side for step in algorithm.probing_sequence(B)] == [C, A, D]
        assert [step.side for step in algorithm.probing_sequence(A)] == [B, C, D]
        algorithm.selectivity.local_joins[C, D] = 12  # 0.01
        assert [step.side for step in algorithm.probing_sequence(B)] == [C, D, A]
        algorithm.selectivity.local_joins[A, B] = 10  # 0.05
        assert [step.side for step in algorithm.probing_sequence(B)] == [A, C, D]


def test_joins_between_two_inputs_count_though_they_are_no_results(tmp_path):
    with chain(tmp_path) as join:
        push(join, "a", [0, 0], [5, 5])
        assert push(join, "b", [5, 5, 6], [1, 1, 1]) == 0
        assert join.algorithm.selectivity.local_joins == {(A, B): 4, (B, C): 0, (C, D): 0}
        assert not any(policy.regions.joins.any() for policies in join.algorithm.policies for policy in policies)


def test_results_are_credited_to_all_join_attributes_of_all_inputs(tmp_path):
    with chain(tmp_path) as join:
        push(join, "a", [0, 0], [5, 5])
        push(join, "b", [5], [6])
        push(join, "c", [6], [7])
        assert push(join, "d", [7], [8]) == 2
        credited = [[int(policy.regions.joins.sum()) for policy in row] for row in join.algorithm.policies]
        assert credited == [[2], [2, 2], [2, 2], [2]]


# Flushing policy: section 4.1


def test_the_victim_is_the_largest_input_and_its_area_of_least_benefit(tmp_path):
    with chain(tmp_path) as join:
        push(join, "a", list(range(50)))
        push(join, "b", list(range(100)), list(range(1000, 1100)))
        algorithm = join.algorithm
        by_x, by_y = (policy.regions for policy in algorithm.policies[B])
        words_x, words_y = (index.words for index in algorithm.indexes[B])
        by_x.lower, by_x.upper = int(words_x[29]), int(words_x[70])
        by_y.lower, by_y.upper = int(words_y[9]), int(words_y[80])
        by_x.joins[[LOWER, MIDDLE, UPPER]] = 300, 400, 300  # 10 for each tuple
        by_y.joins[[LOWER, MIDDLE, UPPER]] = 100, 700, 40  # 10, 10, and 2
        assert algorithm.victim() == (B, 1)
        by_x.joins[LOWER] = 30
        assert algorithm.victim() == (B, 0)
        push(join, "c", list(range(101)))
        assert algorithm.victim() == (C, 0)


def test_a_flush_takes_a_block_from_the_chosen_area_and_zeroes_counters(tmp_path):
    with chain(tmp_path, block=2048) as join:
        push(join, "b", list(range(100)), list(range(1100, 1000, -1)))
        algorithm = join.algorithm
        by_y = algorithm.policies[B][1].regions
        words = algorithm.indexes[B][1].words
        by_y.lower, by_y.upper = int(words[9]), int(words[60])
        by_y.joins[:] = 100, 600, 1
        algorithm.policies[B][0].regions.joins[:] = 0, 900, 0
        algorithm.selectivity.local_joins[A, B] = 7
        algorithm._flush()
        left = algorithm.stores[B].rows.batch()
        gone = 100 - len(left)
        assert 10 <= gone <= 40
        assert sorted(left["y"].to_pylist()) == list(range(1001, 1101 - gone))
        assert left["x"].to_pylist() == [1100 - y for y in left["y"].to_pylist()]  # both attributes lost them
        assert [len(index) for index in algorithm.indexes[B]] == [100 - gone] * 2
        assert not any(policy.regions.joins.any() for policy in algorithm.policies[B])
        assert not any(algorithm.selectivity.local_joins.values())


def test_tuples_that_nothing_can_match_any_more_are_flushed_first(tmp_path):
    with chain(tmp_path) as join:
        push(join, "a", list(range(10)))
        push(join, "c", list(range(50)))
        assert join.algorithm.victim()[0] == C
        for side in "bcd":
            join.end(side).drain()
        assert join.algorithm.victim()[0] == A


# Reactive phase: section 4.2


def spilled_star(tmp_path, tools, operator=MINER, **options):
    rng = np.random.default_rng(3)
    inputs = {name: tools.make_input(rng, ["int64", "int64"], 900, 700) for name in "abc"}
    case = tools.Case(inputs, [("a.x", "b.x"), ("a.x", "c.x")], "a.x = b.x AND a.x = c.x")
    contestant = tools.Contestant(operator)
    return case, tools.make(contestant, case, tmp_path, 1.0, **options)


def test_a_reactive_step_joins_one_block_of_each_inner_input(tmp_path, tools):
    case, join = spilled_star(tmp_path, tools, max_outer_blocks=1)
    with join:
        for name, table in case.inputs.items():
            for batch in table.to_batches():
                join.push(batch, side=name, at=0.0).drain()
        reactive, read = join.algorithm.reactive, join.stats.blocks_read
        assert read == 0
        join.tick(1.0).drain()
        outer = reactive.outer
        assert 2 <= join.stats.blocks_read <= 3
        before = [(join.algorithm.disk[side], reactive.joined[side]) for side in range(3) if side != outer]
        assert all(joined == len(blocks) or blocks for blocks, joined in before)
        steps = 0
        while reactive.joined[outer] == 0:
            read = join.stats.blocks_read
            join.tick(1.0).drain()
            assert join.stats.blocks_read - read <= 3
            steps += 1
        assert reactive.joined[outer] == 1
        assert steps >= min(joined for _, joined in before)


def test_arrivals_interrupt_reactive_work_which_goes_on_where_it_was(tmp_path, tools):
    case, join = spilled_star(tmp_path, tools, max_outer_blocks=1)
    parts = {name: table.combine_chunks().to_batches()[0] for name, table in case.inputs.items()}
    with join:
        found = []
        for start in range(0, 900, 100):
            for name, batch in parts.items():
                found += list(join.push(batch.slice(start, 100), side=name, at=float(start)))
            for _ in range(7):
                found += list(join.tick(start + 50.0))
        assert join.stats.rows_reactive > 0
        found += list(join.finish())
        tools.assert_same_rows(pa.Table.from_batches(found, join.schema), tools.expected(case))


def test_reactive_work_stops_when_enough_tuples_wait(tmp_path, tools):
    case, join = spilled_star(tmp_path, tools, max_new_arrivals=10)
    waiting = iter([9, 10, 11, 12])
    with join:
        for name, table in case.inputs.items():
            for batch in table.to_batches():
                join.push(batch, side=name, at=0.0).drain()
        join.idle(1.0, arrived=lambda: next(waiting)).drain()
        assert join.stats.reactive_steps == 3


# Results in shapes beyond the suite


SHAPES = {
    "bands in a chain": (
        [Near("a.x", "b.x", 2), ("b.y", "c.y"), Near("c.x", "d.x", 1)],
        "abs(a.x - b.x) <= 2 AND b.y = c.y AND abs(c.x - d.x) <= 1",
    ),
    "bands in a star": (
        [Near("a.x", "b.x", 1), Near("a.y", "c.y", 1), ("a.x", "d.x")],
        "abs(a.x - b.x) <= 1 AND abs(a.y - c.y) <= 1 AND a.x = d.x",
    ),
    "a cycle": (
        [("a.x", "b.x"), ("b.y", "c.y"), Near("c.x", "a.x", 3), ("c.x", "d.x")],
        "a.x = b.x AND b.y = c.y AND abs(c.x - a.x) <= 3 AND c.x = d.x",
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_bands_and_cycles_of_many_inputs_are_joined(tmp_path, tools, shape):
    rng, sizes = np.random.default_rng(11), (500, 300, 300, 500)
    on, sql = SHAPES[shape]
    inputs = {
        name: tools.make_input(rng, ["int64", "int64"], size, 300) for name, size in zip("abcd", sizes, strict=True)
    }
    case = tools.Case(inputs, on, sql, events=tools.schedule(rng, sizes, 90))
    with tools.make(tools.Contestant(MINER), case, tmp_path, 1.0) as join:
        tools.assert_same_rows(tools.run(join, case), tools.expected(case))
        assert join.stats.rows_spilled > 0
        assert join.stats.memory.peak <= join.stats.memory.limit


@pytest.mark.parametrize("operator", [MINER, MJoin])
def test_a_full_disk_during_a_spill_of_many_inputs_is_an_error(tmp_path, tools, operator):
    class Full(FileBackend):
        def pwrite(self, offset, data):  # noqa: ARG002 - the backend's signature
            raise StorageIOError(f"cannot write {self.path}: no space left; free space and try again")

    case, join = spilled_star(tmp_path, tools, operator, backend=lambda path: Full(path, "x"))
    with join:
        with pytest.raises(StorageIOError, match="free space"):  # noqa: PT012 - the push that fills the memory fails
            for name, table in case.inputs.items():
                for batch in table.to_batches():
                    join.push(batch, side=name).drain()
        with pytest.raises(Exception, match=r"failed before|is finished"):
            join.finish()
    assert list(tmp_path.iterdir()) == []


# Pieces of partial results


def test_pieces_of_partial_results_are_bounded():
    graph, budget = JoinGraph(dict.fromkeys("abcd", SCHEMA), ONE_KEY), MemoryBudget(1 << 20)
    combiner = Combiner(graph, budget)
    join = MINER(dict.fromkeys("abcd", SCHEMA), ONE_KEY, memory="2MiB")
    with join:
        for side in "bcd":
            push(join, side, [1] * 40)
        stores, sequence = join.algorithm.stores, combiner.sequence(A, lambda _, there: there)
        probing, _ = join.algorithm.encoders[A].encode(rows([1] * 3))
        pieces = [
            len(piece[D][1]) for piece in combiner.combine({A: (probing, np.arange(3))}, sequence, stores.__getitem__)
        ]
    assert sum(pieces) == 3 * 40**3
    assert max(pieces) <= combiner.limit


# MJoin


def star_of_four(tmp_path, operator=MJoin, memory="1MiB", **options):
    return operator(dict.fromkeys("abcd", SCHEMA), ONE_KEY, memory=memory, spill=tmp_path, **options)


def test_mjoin_flushes_one_partition_of_all_inputs_together(tmp_path):
    with star_of_four(tmp_path) as join:
        for side in "abcd":
            push(join, side, list(range(60)))
        algorithm = join.algorithm
        algorithm._flush()
        left = [set(store.rows.batch()["x"].to_pylist()) for store in algorithm.stores]
        assert 0 < len(left[0]) < 60
        assert left == [left[0]] * 4
        assert np.count_nonzero(algorithm.spilled) == 1
        assert algorithm.spilled.sum() == 4 * (60 - len(left[0]))


def test_mjoin_probes_the_most_selective_join_first():
    on = [("a.x", "b.x"), ("a.x", "c.x"), ("a.x", "d.x")]
    with MJoin(dict.fromkeys("abcd", SCHEMA), on, memory="1MiB") as join:
        push(join, "b", [1, 1, 2])
        push(join, "c", [1, 2])
        push(join, "d", [3])
        push(join, "a", [1, 2, 4, 4])
        assert [step.side for step in join.algorithm.probing_sequence(A)] == [D, B, C]  # 0, 3/4, and 3/3 matches
        push(join, "a", [3, 3, 3, 3])
        assert [step.side for step in join.algorithm.probing_sequence(A)] == [B, D, C]  # 3/8, 4/7, and 3/3


@pytest.mark.parametrize("on", [CHAIN, [("a.x", "b.x"), ("a.x", "c.x"), Near("a.x", "d.x", 1)]])
def test_mjoin_refuses_inputs_that_do_not_share_one_key(on):
    with pytest.raises(JoinInputError, match="use MINER"):
        MJoin(dict.fromkeys("abcd", SCHEMA), on)


@pytest.mark.parametrize("options", [{"block": 10}, {"max_outer_blocks": 0}, {"max_new_arrivals": -1}])
def test_miner_refuses_options_that_cannot_be_used(options):
    with pytest.raises(JoinInputError):
        MINER(dict.fromkeys("abcd", SCHEMA), CHAIN, **options)


@pytest.mark.parametrize("partitions", [1, 3, 128, True, "16"])
def test_mjoin_refuses_partitions_that_are_no_power_of_two(partitions):
    with pytest.raises(JoinInputError, match="power of 2"):
        MJoin(dict.fromkeys("abcd", SCHEMA), ONE_KEY, partitions=partitions)
