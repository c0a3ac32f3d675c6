"""Streams with dictionaries: those of waiting tuples are combined where Arrow can, and each is counted once."""

import numpy as np
import pyarrow as pa
import pytest

from headrace.joins import SSIJ, AsOf, Band, workers
from headrace.joins.dictionaries import HeldDictionaries, WaitingDictionaries, combinable, combined_nbytes, own_nbytes
from headrace.joins.errors import MemoryBudgetError, StreamSchemaError

ROWS = 3000


def encoded(values, index=None, of=None):
    """Return values with a dictionary of all values `of`, or of those that occur."""
    index = index or pa.int32()
    known = pa.array(of) if of is not None else pa.array(values).unique()
    return pa.DictionaryArray.from_arrays(pa.compute.index_in(pa.array(values), known).cast(index), known)


def batch_of(array):
    return pa.record_batch({"x": array})


@pytest.fixture(scope="module")
def table(build):
    with build(pa.table({"k": np.arange(ROWS), "v": np.arange(ROWS)}), ["k"], unique=True, page_size=4096) as table:
        yield table


# What can be combined

NARROW = {"int8": 127, "uint8": 255, "int16": 2**15 - 1, "uint16": 2**16 - 1}


@pytest.mark.parametrize("index", NARROW)
def test_dictionaries_are_combinable_up_to_the_number_of_values_that_arrow_combines(index):
    most = NARROW[index]
    for values in (most - 1, most, most + 1, most + 2):
        names = [str(number) for number in range(values)]
        parts = [names[: most // 2], names[most // 2 : most], names[most:]]
        arrays = [encoded(part, pa.type_for_alias(index)) for part in parts if part]
        assert combinable([batch_of(array) for array in arrays]) == (values <= most)
        if values <= most:
            assert pa.concat_arrays(arrays).to_pylist() == names
        else:
            with pytest.raises(pa.ArrowInvalid, match="cannot be combined"):
                pa.concat_arrays(arrays)


def test_one_dictionary_is_combinable_with_itself_whatever_it_holds():
    for known in ([str(number) for number in range(300)], ["a", None]):
        array = pa.DictionaryArray.from_arrays(pa.array([0, 1, 1], pa.int8()), pa.array(known))
        again = pa.DictionaryArray.from_arrays(pa.array([1], pa.int8()), pa.array(known))
        assert combinable([batch_of(array), batch_of(array.slice(1)), batch_of(again)])
        assert len(pa.concat_arrays([array, array.slice(1), again])) == 6


def test_dictionaries_with_nulls_are_combinable_with_equal_ones_only():
    one, other = (pa.DictionaryArray.from_arrays(pa.array([0]), pa.array(known)) for known in (["a", None], ["b"]))
    assert combinable([batch_of(one), batch_of(one)])
    assert not combinable([batch_of(one), batch_of(other)])


def in_list(array):
    return pa.ListArray.from_arrays(np.arange(len(array) + 1, dtype=np.int32), array)


NESTED = {
    "list": in_list,
    "fixed list": lambda array: pa.FixedSizeListArray.from_arrays(array, 1),
    "struct": lambda array: pa.StructArray.from_arrays([pa.array(range(len(array))), array], ["a", "b"]),
    "map": lambda array: pa.MapArray.from_arrays(
        np.arange(len(array) + 1, dtype=np.int32), pa.array(range(len(array))), array
    ),
    "list in struct": lambda array: pa.StructArray.from_arrays([in_list(array)], ["a"]),
}


@pytest.mark.parametrize("nest", NESTED.values(), ids=NESTED)
def test_nested_dictionaries_are_found(nest):
    names = [str(number) for number in range(150)]
    first, second, third = (
        batch_of(nest(encoded(part, pa.int8()))) for part in (names[:100], names[50:120], names[100:])
    )
    assert combinable([first, second])
    assert not combinable([first, third])
    assert own_nbytes(first) == first.nbytes - pa.array(names[:100]).nbytes
    assert combined_nbytes([first, third]) == sum(pa.array(part).nbytes for part in (names[:100], names[100:]))
    assert combined_nbytes([first, first.slice(3)]) == 0


def test_a_dictionary_that_batches_share_is_counted_once():
    one, other = batch_of(encoded(["a", "b"])), batch_of(encoded(["longer"]))
    nbytes = pa.array(["a", "b"]).nbytes
    held = HeldDictionaries()
    assert held.growth(one) == nbytes
    held.add(one)
    held.add(one.slice(1))
    assert (held.nbytes, held.growth(one), held.growth(other)) == (nbytes, 0, pa.array(["longer"]).nbytes)
    held.remove(one)
    assert held.nbytes == nbytes
    held.remove(one.slice(1))
    assert (held.nbytes, held.growth(one)) == (0, nbytes)


@pytest.mark.parametrize("nest", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("index", ["int8", "int32"])
def test_what_is_known_of_waiting_dictionaries_agrees_with_looking_at_all(rng, nest, index):
    waiting, known, looks = [], WaitingDictionaries(), 0
    dtype, refused = pa.type_for_alias(index), 0

    def look():
        nonlocal looks
        looks += 1
        return waiting

    for _ in range(300):
        names = pa.array([str(number) for number in rng.integers(0, 140, 3)])
        if rng.random() < 0.02:
            names = pa.array(["a", None])
        batch = batch_of(nest(pa.DictionaryArray.from_arrays(pa.array(range(len(names)), dtype), names)))
        wanted = combinable([*waiting, batch])
        assert known.admit(batch, look) == wanted
        refused += not wanted
        waiting = [*waiting, batch] if wanted else [batch]
        if rng.random() < 0.03:  # some leave
            waiting = waiting[len(waiting) // 2 :]
    assert refused >= 3
    assert looks < 150


def test_many_small_batches_are_not_looked_at_again_for_each():
    known, batches, looks = WaitingDictionaries(), [], []
    for number in range(2000):
        batch = batch_of(encoded([str(number % 90)], pa.int8()))
        assert known.admit(batch, lambda: looks.append(len(batches)) or batches)
        batches.append(batch)
    assert sum(looks) <= 2 * len(batches)


# Joins


def batches_of(rng, columns, batches=12, rows=100):
    """Yield batches of a stream, with new values in each, and the rows that the join returns."""
    for number in range(batches):
        keys = rng.integers(0, ROWS + 300, rows)
        names = [f"value {number}-{at}" for at in range(rows)]
        yield (
            pa.record_batch({"s": keys} | columns(names)),
            [(int(key), name, int(key) if key < ROWS else None) for key, name in zip(keys, names, strict=True)],
        )


def narrow(nest):
    return lambda names: {"x": nest(encoded(names, pa.int8()))}


def with_null(names):
    known = pa.array([None, *names])
    return {"x": pa.DictionaryArray.from_arrays(pa.array(range(1, len(known))), known)}


COLUMNS = {"narrow": narrow(lambda array: array), "null": with_null} | {
    name: narrow(nest) for name, nest in NESTED.items()
}


def name_of(value):
    """Return the text in a value of any of the columns."""
    while not isinstance(value, str):
        value = list(value.values())[-1] if isinstance(value, dict) else value[-1]
    return value


@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("deadline", [None, 5.0])
def test_batches_whose_dictionaries_cannot_be_combined_are_joined(table, operator, tools, rng, columns, how, deadline):
    if deadline is not None and operator not in {SSIJ, tools.paged}:
        pytest.skip("no deadlines")
    options = {} if deadline is None else {"deadline": deadline, "clock": lambda: 0.0}
    memory = tools.least_memory(operator, table, [("s", "k")]) + 65_536
    wanted, got = [], []
    with operator(table, on=[("s", "k")], how=how, memory=memory, **options) as join:
        for batch, rows in batches_of(rng, columns):
            wanted += [row for row in rows if how == "left" or row[2] is not None]
            got += list(join.push(batch))
        got += list(join.finish())
        assert join.stats.memory.peak <= memory
    found = [(row["s"], name_of(row["x"]), row["v"]) for batch in got for row in batch.to_pylist()]
    assert sorted(found, key=str) == sorted(wanted, key=str)


def test_batches_that_cannot_be_combined_may_arrive_while_results_are_taken(table, tools, rng):
    memory = tools.least_memory(SSIJ, table, [("s", "k")]) + 65_536
    wanted, got = [], []
    with SSIJ(table, on=[("s", "k")], how="left", memory=memory) as join:
        for batch, rows in batches_of(rng, COLUMNS["narrow"]):
            wanted += rows
            output = join.push(batch)
            got += [result for _, result in zip(range(1), output, strict=False)]
        got += list(join.finish())
    found = [(row["s"], row["x"], row["v"]) for batch in got for row in batch.to_pylist()]
    assert sorted(found, key=str) == sorted(wanted, key=str)


def test_batches_of_few_values_wait_together(table, rng):
    """Different dictionaries of the same values cost no join phase each."""
    names = [str(number) for number in range(100)]
    with SSIJ(table, on=[("s", "k")], memory="1MiB", record_tier=False) as join:
        for _ in range(10):
            column = encoded(rng.choice(names, 50), pa.int8())
            join.push(pa.record_batch({"s": rng.integers(0, ROWS, 50), "x": column})).drain()
        assert join.stats.rows_held == 500
        assert join.finish().drain() == 500


def test_neighbors_are_found_for_batches_that_cannot_be_combined(table, tools, rng):
    memory = tools.least_memory(SSIJ, table, AsOf("s", "k")) + 65_536
    wanted, got = [], []
    with SSIJ(table, on=AsOf("s", "k"), how="left", memory=memory) as join:
        for batch, rows in batches_of(rng, COLUMNS["narrow"]):
            wanted += [(key, name, min(key, ROWS - 1)) for key, name, _ in rows]
            got += list(join.push(batch))
        got += list(join.finish())
    assert sorted((row["s"], row["x"], row["v"]) for batch in got for row in batch.to_pylist()) == sorted(wanted)


@pytest.mark.parametrize("dtype", [pa.float16(), pa.float32(), pa.float64()], ids=str)
def test_dictionaries_of_floats_are_refused_and_decoded_ones_are_not(table, operator, dtype):
    numbers = pa.array(np.array([1.5, -0.0], dtype=dtype.to_pandas_dtype()))
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1]), numbers)
    batch = pa.record_batch({"s": [1, 2], "x": column})
    with operator(table, on=[("s", "k")]) as join:
        with pytest.raises(StreamSchemaError, match=f"'x' has type dictionary.*decode it to {dtype} first"):
            join.push(batch)
        plain = batch.set_column(1, "x", column.dictionary_decode())
        results = [*join.push(plain), *join.finish()]
    found = {row["s"]: row["x"] for result in results for row in result.to_pylist()}
    assert found == {1: 1.5, 2: 0.0}
    assert np.signbit(found[2])


# Memory


def joined(table, on, stream, memory, **options):
    """Return the rows that a join returns, and whether it said at some tuple that it alone does not fit."""
    join = SSIJ(table, on=on, how="left", memory=memory, **options)
    rows = []
    try:
        for batch in stream:
            for result in join.push(batch):
                rows += result.to_pylist()
        for result in join.finish():
            rows += result.to_pylist()
    except MemoryBudgetError as error:
        if "one stream tuple of" not in str(error):
            raise
        return None, error.least
    finally:
        join.close()
        assert join.stats.memory.peak <= memory
    return rows, 0


PREDICATES = {
    "equality": "k",
    "pairs": [("k", "k"), ("g", "g")],
    "band": Band("k", "k", 40, 40),
    "as of": AsOf("k", "k", direction="forward"),
    "as of by": AsOf("k", "k", by=["g"]),
}


def oracle(predicate, table, batch):
    """Return the rows that a stream's batch gives, with -1 for no match."""
    keys, groups, relation = batch["k"].to_numpy(), batch["g"].to_numpy(), table.to_pydict()
    known, of = np.array(relation["k"]), np.array(relation["g"])
    for key, group, text in zip(keys.tolist(), groups.tolist(), batch["x"].to_pylist(), strict=True):
        match predicate:
            case "equality":
                found = np.flatnonzero(known == key)
            case "pairs":
                found = np.flatnonzero((known == key) & (of == group))
            case "band":
                found = np.flatnonzero(np.abs(known - key) <= 40)
            case "as of":
                found = np.flatnonzero(known >= key)[:1]
            case _:
                found = np.flatnonzero((known <= key) & (of == group))[-1:]
        for at in found.tolist() or [None]:
            yield key, group, text, -1 if at is None else relation["v"][at]


@pytest.mark.parametrize("predicate", PREDICATES)
@pytest.mark.parametrize("seed", range(20))
def test_large_dictionaries_end_no_join(build, tools, monkeypatch, predicate, seed):
    """Only a tuple that does not fit alone is refused, and the memory that the error advises joins it."""
    monkeypatch.setattr(workers, "_LEAST_ROWS", 16)
    rng, stored = np.random.default_rng(seed), 4000
    relation = pa.table(
        {
            "k": np.sort(rng.choice(3 * stored, stored, replace=False)),
            "g": rng.integers(0, 2, stored),
            "v": range(stored),
        }
    )
    key = {"equality": ["k"], "as of": ["k"], "band": ["k"], "pairs": ["k", "g"], "as of by": ["g", "k"]}[predicate]
    on, unique = PREDICATES[predicate], predicate == "equality"
    values, length = int(rng.choice([1, 50, 1000, 4000])), int(rng.choice([4, 40, 200]))
    known = [[f"{number}-{at}".rjust(length) for at in range(values)] for number in range(3)]
    stream, index = [], pa.int32()
    for size in rng.choice([1, 7, 60, 400], 8).tolist():
        names = known[int(rng.integers(0, 3))]
        text = encoded(rng.choice(names, size).tolist(), index, names)
        keys = rng.integers(-5, 3 * stored + 5, size)
        stream.append(pa.record_batch({"k": keys, "g": rng.integers(0, 2, size), "x": text}))
    wanted = sorted(row for batch in stream for row in oracle(predicate, relation, batch))
    with build(relation, key, unique=unique, page_size=4096) as table:
        memory = tools.least_memory(SSIJ, table, on) + int(2 ** rng.uniform(0, 20))
        while True:
            rows, needed = joined(table, on, stream, memory, threads=int(rng.integers(1, 4)))
            if rows is not None:
                break
            assert needed > memory
            memory = needed
    got = sorted((row["k"], row["g"], row["x"], -1 if row["v"] is None else row["v"]) for row in rows)
    assert got == wanted
