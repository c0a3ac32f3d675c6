"""What is particular to the phases and to single operators."""

import numpy as np
import pyarrow as pa
import pytest

from headrace.joins.errors import JoinInputError, MemoryBudgetError
from headrace.joins.streams import (
    DINER,
    MINER,
    RPJ,
    DoublePipelinedHash,
    HashMerge,
    MJoin,
    Near,
    PRJoin,
    ProgressiveMerge,
    PunctuatedJoin,
    SymmetricHash,
    XJoin,
)

SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.int64())])
INPUTS = {"a": SCHEMA, "b": SCHEMA}


def batch(ids, keys):
    return pa.record_batch([pa.array(ids, pa.int64()), pa.array(keys, pa.int64())], schema=SCHEMA)


def spilled_xjoin(tmp_path, tools, rows=3000, step=0.001):
    """Return XJoin after both inputs arrived, most of them on disk, none ended; and how many results there were."""
    join = XJoin(INPUTS, "x", memory=200_000, spill=tmp_path, clock=tools.SimulatedClock(step))
    rng, early = np.random.default_rng(3), 0
    for start in range(0, rows, 100):
        for side in "ab":
            keys = rng.integers(0, 1000, 100)
            early += join.push(batch(range(start, start + 100), keys), side=side, at=start / 1000).drain()
    return join, early, (rows - 100) / 1000


def test_xjoin_works_while_inputs_are_blocked_and_not_before(tools, tmp_path):
    join, _, last = spilled_xjoin(tmp_path, tools, step=0.0)
    with join:
        assert join.tick(last + 0.01).drain() == 0, "not blocked yet"
        assert join.stats.reactive_steps == 0
        assert join.tick(last + 0.03).drain() > 0
        assert join.stats.reactive_steps == 1, "a tick is one step"
        while join.tick(last + 1).drain():
            pass
        steps = join.stats.reactive_steps
        join.idle(last + 2).drain()
        assert join.stats.reactive_steps <= steps + 1, "nothing new to do"


def test_idle_work_ends_with_the_step_in_which_its_time_is_over(tools, tmp_path):
    join, _, last = spilled_xjoin(tmp_path, tools, step=0.002)
    with join:
        join.idle(last + 1, until=last + 1.05).drain()
        done = join.stats.reactive_steps
        assert 1 <= done <= 25
        join.idle(last + 2, until=last + 2).drain()
        assert join.stats.reactive_steps == done


def test_idle_work_ends_when_tuples_wait(tools, tmp_path):
    join, _, last = spilled_xjoin(tmp_path, tools)
    arrivals = iter([False, False, True])
    with join:
        join.idle(last + 1, waiting=lambda: next(arrivals)).drain()
        assert join.stats.reactive_steps == 3


def test_nothing_is_given_twice_after_reactive_work(tools, tmp_path):
    join, early, last = spilled_xjoin(tmp_path, tools)
    with join:
        reactive = join.idle(last + 1).drain()
        rng = np.random.default_rng(9)
        early += join.push(batch(range(5000, 5300), rng.integers(0, 1000, 300)), side="a", at=last + 2).drain()
        reactive += join.idle(last + 3).drain()
        late = join.finish().drain()
        stats = join.stats
    assert (stats.rows_arriving, stats.rows_reactive, stats.rows_cleanup) == (early, reactive, late)
    rng, keys = np.random.default_rng(3), {"a": [], "b": []}
    for _ in range(0, 3000, 100):
        for side in "ab":
            keys[side] += rng.integers(0, 1000, 100).tolist()
    keys["a"] += np.random.default_rng(9).integers(0, 1000, 300).tolist()
    counts = {side: np.bincount(found, minlength=1000) for side, found in keys.items()}
    assert early + reactive + late == int((counts["a"] * counts["b"]).sum())


def fill(join):
    for start in range(0, 100_000, 1000):
        join.push(batch(range(start, start + 1000), range(start, start + 1000)), side="a").drain()


def test_a_join_in_memory_says_that_its_memory_is_full():
    with (
        SymmetricHash(INPUTS, "x", memory="256KiB") as join,
        pytest.raises(MemoryBudgetError, match=r"hold.* all of them; give the join more memory"),
    ):
        fill(join)


@pytest.mark.parametrize("operator", [XJoin, DoublePipelinedHash])
def test_a_join_that_may_not_spill_says_so(operator):
    with operator(INPUTS, "x", memory="256KiB") as join, pytest.raises(MemoryBudgetError, match="`spill=` a folder"):
        fill(join)


@pytest.mark.parametrize("operator", [XJoin, DoublePipelinedHash])
def test_hash_joins_refuse_what_they_cannot_do(operator):
    with pytest.raises(JoinInputError, match="equal"):
        operator(INPUTS, Near("x", "x", 2))
    with pytest.raises(JoinInputError, match="two inputs"):
        operator({**INPUTS, "c": SCHEMA}, [("a.x", "b.x"), ("b.x", "c.x")])
    with pytest.raises(JoinInputError, match="power of 2"):
        operator(INPUTS, "x", partitions=12)
    with pytest.raises(JoinInputError, match="`how` must be"):
        operator(INPUTS, "x", how="outer")


@pytest.mark.parametrize("operator", [DINER, MINER, RPJ, PRJoin, HashMerge, MJoin, ProgressiveMerge, PunctuatedJoin])
@pytest.mark.parametrize("how", ["left", "right", "full"])
def test_an_outer_join_is_refused_with_the_operators_that_make_one(operator, how):
    with pytest.raises(JoinInputError, match=f"not '{how}'; SymmetricHash, XJoin and DoublePipelinedHash"):
        operator(INPUTS, "x", how)
    for able in (SymmetricHash, XJoin, DoublePipelinedHash):
        able(INPUTS, "x", how).close()


def test_an_unknown_join_type_is_refused():
    with pytest.raises(JoinInputError, match=r"not 'outer'$"):
        DINER(INPUTS, "x", "outer")


HASHED = [XJoin, RPJ, PRJoin, MJoin, DoublePipelinedHash, PunctuatedJoin]
SPILLING = [*HASHED, DINER, MINER, HashMerge, ProgressiveMerge]


@pytest.mark.parametrize("operator", HASHED)
@pytest.mark.parametrize("partitions", [0, 1, 3, 128, -2, True, 2.0, float("nan"), "16", []])
def test_partitions_are_a_power_of_2(operator, partitions):
    with pytest.raises(JoinInputError, match="`partitions` must be a power of 2 from 2 to 64"):
        operator(INPUTS, "x", partitions=partitions)


@pytest.mark.parametrize("operator", SPILLING)
def test_what_creates_spill_files_is_a_function(operator):
    with pytest.raises(JoinInputError, match="`backend` must be a function, not 5"):
        operator(INPUTS, "x", backend=5)


@pytest.mark.parametrize("operator", [DINER, MINER])
def test_a_block_that_is_not_a_size_is_refused_by_its_name(operator):
    with pytest.raises(JoinInputError, match="`block`: not a size: 'x'"):
        operator(INPUTS, "x", block="x")


@pytest.mark.parametrize("operator", [*SPILLING, SymmetricHash])
def test_arguments_of_idle_are_checked(operator):
    with operator(INPUTS, "x") as join:
        for until in (None, "1s", float("nan"), True):
            with pytest.raises(JoinInputError, match="`until` must be a number of seconds"):
                join.idle(until=until)
        with pytest.raises(JoinInputError, match="`waiting` must be a function, not 5"):
            join.idle(waiting=5)


def test_tuples_without_a_match_come_when_the_other_input_has_ended():
    with SymmetricHash(INPUTS, "x", how="left") as join:
        assert join.push(batch([0, 1, 2], [7, 8, None]), side="a").to_table().to_pylist() == [
            {"id": 2, "x": None, "id_right": None, "x_right": None}
        ]
        join.push(batch([5], [8]), side="b").drain()
        (alone,) = join.end("b").to_table().to_pylist()
        assert (alone["id"], alone["id_right"]) == (0, None)
        (late,) = join.push(batch([3], [9]), side="a").to_table().to_pylist()
        assert (late["id"], late["id_right"]) == (3, None)
        assert join.stats.rows_in_memory == 1
        assert join.finish().drain() == 0


def test_what_no_tuple_can_match_is_not_kept(tmp_path):
    with XJoin(INPUTS, "x", spill=tmp_path) as join:
        join.push(batch(range(100), range(100)), side="a").drain()
        join.end("a").drain()
        join.push(batch(range(50), range(50)), side="b").drain()
        assert join.stats.rows_in_memory == 100, "those of a, which others may match"


def test_one_key_with_many_matches_comes_in_bounded_batches():
    with SymmetricHash(INPUTS, "x", memory="1MiB") as join:
        join.push(batch(range(3000), [1] * 3000), side="a").drain()
        sizes = [len(result) for result in join.push(batch(range(300), [1] * 300), side="b")]
        assert sum(sizes) == 900_000
        assert max(sizes) <= 16_384
        assert join.stats.memory.peak <= join.stats.memory.limit


def texts(size):
    return pa.record_batch({"x": [1], "text": ["y" * size]})


@pytest.mark.parametrize("operator", [SymmetricHash, XJoin, DINER, DoublePipelinedHash, MINER, RPJ, PRJoin])
def test_the_memory_that_a_large_tuple_needs_is_enough(operator, tmp_path):
    batch = texts(1_000_000)
    schemas, spill = {"a": batch.schema, "b": batch.schema}, {} if operator is SymmetricHash else {"spill": tmp_path}
    with pytest.raises(MemoryBudgetError) as refusal, operator(schemas, "x", memory="8MiB", **spill) as join:
        join.push(batch, side="a").drain()
    with operator(schemas, "x", memory=refusal.value.least, **spill) as join:
        outputs = [*join.push(batch, side="a"), *join.push(batch, side="b"), *join.finish()]
    assert pa.Table.from_batches(outputs).to_pydict() == {
        "x": [1], "text": ["y" * 1_000_000], "x_right": [1], "text_right": ["y" * 1_000_000]
    }  # fmt: skip


@pytest.mark.parametrize("memory", ["64MiB", "1GiB"])
def test_a_tuple_that_no_memory_is_enough_for_is_refused_without_advice_to_give_more(memory, tmp_path):
    batch = texts(10_000_000)
    with (
        pytest.raises(MemoryBudgetError, match=r"however much memory it has; leave its largest column out"),
        XJoin({"a": batch.schema, "b": batch.schema}, "x", memory=memory, spill=tmp_path) as join,
    ):
        join.push(batch, side="a").drain()
    assert list(tmp_path.iterdir()) == []
    with XJoin({"a": batch.schema, "b": SCHEMA}, "x", memory=memory, spill=tmp_path) as join:
        assert join.push(texts(10), side="a").drain() == 0
