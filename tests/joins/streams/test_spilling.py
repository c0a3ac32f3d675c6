"""What hash joins share that spill by partition: buffers on their way to disk, and joins of blocks in threads."""

import contextlib

import numpy as np
import pyarrow as pa
import pytest

from headrace.joins.memory import MemoryBudget
from headrace.joins.streams import DoublePipelinedHash, JoinGraph, XJoin
from headrace.joins.streams.base.lanes import AHEAD, in_lanes
from headrace.joins.streams.base.spool import Spool
from headrace.joins.streams.hashing import partitions
from headrace.joins.streams.tuples.layout import MET, RowLayout
from headrace.joins.streams.tuples.rows import Rows, RowsEncoder
from headrace.storage.errors import StorageIOError
from headrace.storage.spill import SpillFolder

OPERATORS = [XJoin, DoublePipelinedHash]
HOWS = ["full", *(pytest.param(how, marks=pytest.mark.slow) for how in ("inner", "left", "right"))]


def case_of(tools, rows, domain, how="inner", *, kind="int64", seed=5):
    rng = np.random.default_rng(seed)
    inputs = {name: tools.make_input(rng, [kind], rows, domain) for name in "ab"}
    return tools.Case(inputs, ["x"], "a.x = b.x", how, tools.schedule(rng, [rows, rows], 200))


def make(tools, operator, case, folder, memory, **options):
    clock = tools.SimulatedClock(0.001)
    return operator(case.schemas, case.on, case.how, memory, spill=folder, clock=clock, **options)


@pytest.fixture
def several_lanes(monkeypatch):
    """Let few tuples and little memory be worth threads."""
    monkeypatch.setattr(partitions, "most_lanes", lambda: 3)
    monkeypatch.setattr(partitions, "_LEAST_LANE", 1)
    monkeypatch.setattr(partitions, "_LEAST_ROWS", 1)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.usefixtures("several_lanes")
def test_partitions_that_are_joined_at_a_time_give_the_same_results_each_time(tools, tmp_path, operator, how):
    case, runs = case_of(tools, 2000, 1000, how), []
    for _ in range(2):
        with make(tools, operator, case, tmp_path, 300_000, partitions=8) as join:
            runs.append(tools.run(join, case))
            assert join.algorithm._lanes(8) == 3
            assert join.stats.rows_cleanup
            assert join.stats.memory.peak <= join.stats.memory.limit
    tools.assert_same_rows(runs[0], tools.expected(case))
    assert runs[0] == runs[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("how", HOWS)
def test_partitions_that_exceed_the_memory_are_joined_in_chunks(tools, tmp_path, operator, how):
    case = case_of(tools, 3000, 2000, how, kind="text")
    with make(tools, operator, case, tmp_path, 150_000, partitions=2) as join:
        tools.assert_same_rows(tools.run(join, case), tools.expected(case))
        assert join.stats.bytes_read > 1.2 * join.stats.bytes_spilled, "some blocks are read for each chunk"
        assert join.stats.memory.peak <= join.stats.memory.limit


@pytest.mark.parametrize("how", HOWS)
def test_tuples_that_no_buffer_takes_are_blocks_of_their_own(tools, tmp_path, how):
    case = case_of(tools, 500, 200, how)
    rng = np.random.default_rng(1)
    for name, table in case.inputs.items():
        lengths = np.where(rng.random(len(table)) < 0.05, rng.integers(5_000, 40_000, len(table)), 9)
        texts = pa.array([f"{name}{at % 7}" * (length // 2) for at, length in enumerate(lengths)])
        case.inputs[name] = table.append_column("long", texts)
    with make(tools, DoublePipelinedHash, case, tmp_path, 2_500_000) as join:
        tools.assert_same_rows(tools.run(join, case), tools.expected(case))
        assert join.stats.rows_spilled
        assert join.stats.memory.peak <= join.stats.memory.limit


def test_tuples_wider_than_a_buffer_spill_too(tools, tmp_path):
    wide, keys = pa.array([b"w" * 9000] * 300, pa.binary(9000)), pa.array(np.arange(300) % 200)
    inputs = {name: pa.table({"x": keys, "id": pa.array(range(300)), "w": wide}) for name in "ab"}
    case = tools.Case(inputs, ["x"], "a.x = b.x", events=tools.schedule(np.random.default_rng(2), [300, 300], 20))
    with make(tools, DoublePipelinedHash, case, tmp_path, 1_500_000) as join:
        result = tools.run(join, case)
        assert join.stats.rows_spilled
    wanted = [(a, b) for a in range(300) for b in range(300) if a % 200 == b % 200]
    assert sorted(zip(result["id"].to_pylist(), result["id_right"].to_pylist(), strict=True)) == wanted
    assert set(result["w"].to_pylist()) == {b"w" * 9000}


def test_an_error_of_the_writing_thread_reaches_the_caller_and_ends_the_thread(tools, tmp_path):
    case = case_of(tools, 10_000, 5000)

    def backend(path):
        raise OSError(f"no file {path}")

    with (
        make(tools, DoublePipelinedHash, case, tmp_path, "512KiB", backend=backend) as join,
        pytest.raises(OSError, match="no file"),
    ):
        tools.run(join, case)
    assert list(tmp_path.iterdir()) == []


SCHEMA = pa.schema([("x", pa.int64()), ("t", pa.string()), ("u", pa.int8())])


@pytest.mark.parametrize("lengths", [(0, 8), (0, 3000)], ids=["short", "long"])
def test_a_spool_writes_each_tuple_once_into_the_file_of_its_partition(tmp_path, lengths):
    graph, rng = JoinGraph({"a": SCHEMA, "b": SCHEMA}, [("a.t", "b.t")]), np.random.default_rng(4)
    layouts = [RowLayout.of(SCHEMA, [key.wide for key in keys], "a") for keys in graph.keys]
    budget, written = MemoryBudget(2 << 20), {(side, number): [] for side in range(2) for number in range(4)}
    with SpillFolder(tmp_path) as folder:
        files = {place: folder.file(str(place)) for place in written}
        spool = Spool(budget, layouts, 4, lambda side, number: files[side, number])
        assert budget.use().used == spool.nbytes
        for step in range(12):
            side, rows = step % 2, 200
            texts = [f"{at % 7}" * n for at, n in enumerate(rng.integers(*lengths, rows).tolist())]
            small = pa.array([1, None] * (rows // 2), pa.int8())
            data = pa.record_batch({"x": rng.integers(0, 9, rows), "t": texts, "u": small}, SCHEMA)
            encoded, _ = RowsEncoder(layouts[side], graph.keys[side]).encode(data)
            assert spool.too_large(side, encoded) is None
            index, numbers = rng.permutation(rows)[:150], rng.integers(0, 4, 150)
            if side:
                spool.add(side, encoded, index, numbers, MET)
            else:
                spool.start(side, encoded, index, numbers)
                spool.settle()
            for at, number in zip(index.tolist(), numbers.tolist(), strict=True):
                written[side, number].append(data.slice(at, 1).to_pylist()[0])
        spool.finish()
        assert budget.use().used == 0
        for (side, number), wanted in written.items():
            file, layout, found = files[side, number], spool.layouts[side], []
            for ref in file.scan():
                content = file.read(ref)
                block = Rows(layout, ref.tag, content, content[ref.tag * layout.stride :])
                found += block.batch().to_pylist()
                assert (block.flags == (MET if side else 0)).all()
            assert found == wanted


def test_a_failed_addition_is_told_once_and_not_by_the_count():
    def no_file(side, number):
        raise StorageIOError(f"no file {side}-{number}")

    graph = JoinGraph({"a": SCHEMA, "b": SCHEMA}, [("a.t", "b.t")])
    layouts = [RowLayout.of(SCHEMA, [key.wide for key in keys], "a") for keys in graph.keys]
    spool = Spool(MemoryBudget(256 << 10), layouts, 2, no_file)
    data = pa.record_batch({"x": range(999), "t": ["some text"] * 999, "u": pa.nulls(999, pa.int8())}, SCHEMA)
    rows, _ = RowsEncoder(layouts[0], graph.keys[0]).encode(data)
    with contextlib.closing(spool):
        spool.start(0, rows, np.arange(999), np.zeros(999, dtype=np.int64))
        assert spool.count > 0
        with pytest.raises(StorageIOError, match="no file 0-0"):
            spool.settle()
        spool.settle()


def counting(number, items, log):
    try:
        for item in range(items):
            yield number, item
    finally:
        log.append(number)


def test_lanes_take_turns_and_tell_which_tasks_have_ended():
    log, ended = [], []
    tasks = [lambda number=number: counting(number, (2, 0, 3, 1)[number], log) for number in range(4)]
    assert list(in_lanes(tasks, 2, ended.append)) == [(0, 0), (0, 1), (2, 0), (2, 1), (3, 0), (2, 2)]
    assert ended == [1, 0, 3, 2]
    assert sorted(log) == [0, 1, 2, 3]
    assert list(in_lanes(tasks, 1, ended.append)) == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2), (3, 0)]


def test_tasks_that_are_left_early_are_closed():
    log = []
    items = in_lanes([lambda number=number: counting(number, 9, log) for number in range(3)], 2, lambda _: None)
    assert next(items) == (0, 0)
    items.close()
    assert sorted(log) == [0, 1]


def test_a_lane_computes_a_few_items_ahead_and_no_more():
    log = []

    def logged(number):
        for item in range(9 * AHEAD):
            log.append(number)
            yield item

    items = in_lanes([lambda: logged(0), lambda: logged(1)], 2, lambda _: None)
    assert [next(items) for _ in range(3)] == [0, 0, 1]
    items.close()
    assert 2 <= log.count(0) <= 2 + AHEAD
    assert 1 <= log.count(1) <= 1 + AHEAD


def test_an_error_of_a_task_closes_the_others():
    def failing():
        yield "failing", 0
        raise ValueError("broken")

    log = []
    items = in_lanes([failing, lambda: counting(1, 9, log)], 2, lambda _: None)
    with pytest.raises(ValueError, match="broken"):
        list(items)
    assert log == [1]
