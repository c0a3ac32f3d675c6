"""Band, range and as-of joins return what a database and pandas say, whatever the data, the memory and the batches."""

import datetime as dt
import itertools
from dataclasses import dataclass
from decimal import Decimal
from functools import partial

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.joins import SSIJ, AsOf, Band, IndexNestedLoops, MeshJoin, Range
from headrace.joins.errors import JoinInputError, StreamSchemaError
from headrace.joins.predicates.offsets import ticks
from headrace.storage.errors import KeyInputError

HOW = pytest.mark.parametrize("how", ["inner", "left"])
OPERATORS = pytest.mark.parametrize("operator", [SSIJ, partial(SSIJ, index="paged"), IndexNestedLoops])


@dataclass(frozen=True)
class Kind:
    """Types of key and value, and how many steps of a common line a unit of each is."""

    key: pa.DataType
    value: pa.DataType
    key_step: int = 1
    value_step: int = 1
    by: pa.DataType | None = None
    behind: bool = False


KINDS = {
    "int64": Kind(pa.int64(), pa.int64()),
    "int32 within a word": Kind(pa.int32(), pa.int16(), by=pa.int32()),
    "unsigned": Kind(pa.uint64(), pa.int64()),
    "date by timestamp": Kind(pa.date32(), pa.timestamp("s"), key_step=86_400),
    "coarse timestamp": Kind(pa.timestamp("ms"), pa.timestamp("us"), key_step=1000),
    "fine timestamp by text": Kind(
        pa.timestamp("us", "UTC"), pa.timestamp("ms", "UTC"), value_step=1000, by=pa.string()
    ),
    "timestamp by text, and more": Kind(pa.timestamp("us"), pa.timestamp("us"), by=pa.string(), behind=True),
    "decimal": Kind(pa.decimal128(9, 2), pa.decimal128(12, 3), key_step=10),
}


def typed(numbers, dtype):
    """Return numbers of a type's steps; None stays null."""
    if pa.types.is_decimal(dtype):
        values = [None if n is None else Decimal(int(n)).scaleb(-dtype.scale) for n in numbers]
        return pa.array(values, dtype)
    plain = pa.array([None if n is None else int(n) for n in numbers], pa.int64())
    if pa.types.is_date32(dtype):
        return plain.cast(pa.int32()).cast(dtype)
    return plain.cast(dtype)


def groups(numbers, dtype):
    if dtype is None:
        return {}
    if pa.types.is_string(dtype):
        return {"g": pa.array([None if n is None else f"\0{'group' * n}" for n in numbers], dtype)}
    return {"g": pa.array(numbers, dtype)}


@dataclass
class Sides:
    kind: Kind
    relation: pa.Table
    stream: pa.Table
    key: list
    by: list
    unique: bool


def make_sides(rng, kind, rows, length, domain, unique, text_length=10):
    """Return both sides; `t` is the place of each row on the common line, as the database is to see it."""
    number = rng.choice(domain, min(rows, domain), replace=False) if unique else rng.integers(0, domain, rows)
    size = len(number)
    group = rng.integers(0, 4, size)
    behind = rng.integers(-2, 3, size)
    key = {**groups(group.tolist(), kind.by), "k": typed(number, kind.key)}
    if kind.behind:
        key["behind"] = pa.array(behind, pa.int16())
    words = rng.choice(["", "ß", "x" * text_length], size).astype(object)
    relation = pa.table({**key, "id": np.arange(size), "t": number * kind.key_step, "w": pa.array(words, pa.string())})
    wanted = [None if rng.random() < 0.1 else int(n) for n in rng.integers(0, domain + 2, length)]
    wanted = [n if n is None else n * kind.key_step // kind.value_step + int(rng.integers(-1, 2)) for n in wanted]
    wide = [None if rng.random() < 0.1 else n and n + int(rng.integers(-3, domain)) for n in wanted]
    who = [None if rng.random() < 0.05 else int(n) for n in rng.integers(0, 5, length)]
    steps = {name: [n if n is None else n * kind.value_step for n in ns] for name, ns in (("st", wanted), ("su", wide))}
    stream = pa.table(
        {
            "n": np.arange(length),
            **{f"s{name}": column for name, column in groups(who, kind.by).items()},
            "v": typed(wanted, kind.value),
            "u": typed(wide, kind.value),
            **{name: pa.array(values, pa.int64()) for name, values in steps.items()},
        }
    )
    return Sides(kind, relation, stream, list(key), [("sg", "g")] if kind.by else [], unique)


def batches(stream, cuts):
    bounds = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    for start, stop in itertools.pairwise(bounds):
        yield from stream.slice(start, stop - start).combine_chunks().to_batches()


def pairs_of(join, stream, cuts=()):
    """Run a join to its end and return the (stream row, relation row) pairs."""
    results = []
    for batch in batches(stream, cuts):
        results.extend(join.push(batch))
    results.extend(join.finish())
    table = pa.Table.from_batches(results, join.output_schema(stream.schema))
    return sorted(zip(table["n"].to_pylist(), table["id"].to_pylist(), strict=True), key=str), table


def oracle(sides, condition, how):
    connection = duckdb.connect()
    connection.register("stream", sides.stream)
    connection.register("relation", sides.relation)
    equal = "".join(f" AND stream.{left} = relation.{right}" for left, right in sides.by)
    query = f"SELECT n, id FROM stream {how} JOIN relation ON {condition}{equal}"
    return sorted(connection.sql(query).fetchall(), key=str)


def as_of_oracle(sides, predicate, how, tolerance):
    """Return what pandas says."""
    stream, relation = sides.stream.select(["n", "st"]).to_pandas(), sides.relation.select(["id", "t"]).to_pandas()
    by = {}
    if sides.by:
        known = {value: code for code, value in enumerate(set(sides.relation["g"].to_pylist()))}
        stream["g"] = np.array([known.get(value, -1) for value in sides.stream["sg"].to_pylist()], dtype=np.int64)
        relation["g"] = np.array([known[value] for value in sides.relation["g"].to_pylist()], dtype=np.int64)
        by = {"by": "g"}
    order = [("g", "ascending")] if sides.by else []
    behind = [("behind", "ascending")] if sides.kind.behind else []
    ranked = sides.relation.sort_by([*order, ("t", "ascending"), *behind])
    relation = relation.set_index("id").loc[ranked["id"].to_pylist()].reset_index()
    asked = stream.dropna().astype({"st": np.int64}).sort_values("st", kind="stable")
    found = pd.merge_asof(
        asked,
        relation.astype({"t": np.int64}).sort_values("t", kind="stable"),
        left_on="st",
        right_on="t",
        direction=predicate.direction,
        tolerance=tolerance,
        allow_exact_matches=not predicate.strict,
        **by,
    )
    ids = dict(zip(found["n"], found["id"], strict=True))
    pairs = [(n, None if pd.isna(ids.get(n, np.nan)) else int(ids[n])) for n in sides.stream["n"].to_pylist()]
    return sorted((pair for pair in pairs if how == "left" or pair[1] is not None), key=str)


def offset_of(kind, steps):
    """Return a distance on the common line as users write it."""
    if pa.types.is_decimal(kind.key):
        return Decimal(steps).scaleb(-3)
    if pa.types.is_date32(kind.key):
        return dt.timedelta(seconds=steps)
    if pa.types.is_timestamp(kind.key):
        return np.timedelta64(steps, "us")
    return steps


@st.composite
def sides_of(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = KINDS[draw(st.sampled_from(list(KINDS)))]
    domain = draw(st.sampled_from([3, 60, 5000]))
    rows = draw(st.sampled_from([0, 1, 40, 2500]))
    length = draw(st.sampled_from([0, 1, 30, 300 if rows < 2500 or domain > 60 else 30]))
    return make_sides(rng, kind, rows, length, domain, draw(st.booleans()), draw(st.sampled_from([5, 150])))


def reserve(draw, tools, operator, table, predicate):
    spare = draw(st.sampled_from([0, 3_000, 60_000, 4_000_000]))
    return tools.least_memory(operator, table, predicate) + spare


@OPERATORS
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_band_join_equals_a_database(build, tools, operator, data):
    sides, how = data.draw(sides_of()), data.draw(st.sampled_from(["inner", "left"]))
    below, above = data.draw(st.sampled_from([(0, 0), (1, 0), (7, 3), (-2, 5), (4000, 2500), (10**6, 10**6)]))
    predicate = Band("v", "k", offset_of(sides.kind, below), offset_of(sides.kind, above), by=sides.by)
    with build(sides.relation, sides.key, unique=sides.unique and not sides.kind.behind, page_size=4096) as table:
        memory = reserve(data.draw, tools, operator, table, predicate)
        join = operator(table, on=predicate, how=how, memory=memory, columns=["id"])
        found, _ = pairs_of(join, sides.stream, data.draw(st.lists(st.integers(0, 300), max_size=4)))
    assert found == oracle(sides, f"t BETWEEN st - {below} AND st + {above}", how)
    assert join.stats.rows_held == 0
    assert join.stats.rows_done == len(sides.stream)
    assert join.stats.memory.peak <= join.stats.memory.limit


@OPERATORS
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_range_join_equals_a_database(build, tools, operator, data):
    sides, how = data.draw(sides_of()), data.draw(st.sampled_from(["inner", "left"]))
    inclusive = data.draw(st.sampled_from(["both", "left", "right", "neither"]))
    predicate = Range("v", "u", "k", by=sides.by, inclusive=inclusive)
    low, high = ">=" if inclusive in {"both", "left"} else ">", "<=" if inclusive in {"both", "right"} else "<"
    with build(sides.relation, sides.key, page_size=4096) as table:
        memory = reserve(data.draw, tools, operator, table, predicate)
        join = operator(table, on=predicate, how=how, memory=memory, columns=["id"])
        found, _ = pairs_of(join, sides.stream, data.draw(st.lists(st.integers(0, 300), max_size=4)))
    assert found == oracle(sides, f"t {low} st AND t {high} su", how)
    assert join.stats.rows_held == 0
    assert join.stats.memory.peak <= join.stats.memory.limit


@OPERATORS
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_an_as_of_join_equals_pandas(build, tools, operator, data):
    sides, how = data.draw(sides_of()), data.draw(st.sampled_from(["inner", "left"]))
    reach = data.draw(st.sampled_from([None, 0, 2, 90_000]))
    predicate = AsOf(
        "v",
        "k",
        sides.by,
        data.draw(st.sampled_from(["backward", "forward"])),
        None if reach is None else offset_of(sides.kind, reach),
        strict=data.draw(st.booleans()),
    )
    with build(sides.relation, sides.key, page_size=4096) as table:
        memory = reserve(data.draw, tools, operator, table, predicate)
        join = operator(table, on=predicate, how=how, memory=memory, columns=["id"])
        found, _ = pairs_of(join, sides.stream, data.draw(st.lists(st.integers(0, 300), max_size=4)))
    assert found == as_of_oracle(sides, predicate, how, reach)
    assert join.stats.rows_held == 0
    assert join.stats.rows_done == len(sides.stream)
    assert join.stats.memory.peak <= join.stats.memory.limit


@HOW
@OPERATORS
@pytest.mark.parametrize("inclusive", ["both", "left", "right", "neither"])
def test_a_range_of_text(build, operator, how, inclusive, rng):
    words = sorted({"", "a", "a\0", "ab", "b", "ß", *(f"w{n}" for n in rng.integers(0, 3000, 900))})
    relation = pa.table({"k": words, "id": np.arange(len(words))})
    low, high = rng.choice(words, 60).tolist(), rng.choice(words, 60).tolist()
    stream = pa.table({"n": np.arange(62), "low": [*low, None, "a"], "high": [*high, "x", "a"]})
    with build(relation, ["k"], unique=True, page_size=4096) as table:
        join = operator(
            table, on=Range("low", "high", "k", inclusive=inclusive), how=how, memory="4MiB", columns=["id"]
        )
        found, _ = pairs_of(join, stream)
    wanted = []
    for n, (bottom, top) in enumerate(zip(stream["low"].to_pylist(), stream["high"].to_pylist(), strict=True)):
        ids = [
            i
            for i, word in enumerate(words)
            if bottom is not None
            and (bottom.encode() < word.encode() or (bottom == word and inclusive in {"both", "left"}))
            and (word.encode() < top.encode() or (top == word and inclusive in {"both", "right"}))
        ]
        wanted += [(n, i) for i in ids or [None] * (how == "left")]
    assert found == sorted(wanted, key=str)


@OPERATORS
def test_equal_rows_over_many_pages(build, operator):
    """Backward takes the last of them, forward the first, a band all."""
    relation = pa.table({"k": np.repeat([10, 20, 30], [3, 4000, 3]), "id": np.arange(4006)})
    stream = pa.table({"n": [0, 1, 2], "v": [9, 20, 25]})
    with build(relation, ["k"], page_size=4096) as table:
        results = {
            predicate: pairs_of(operator(table, on=predicate, memory="200KiB", columns=["id"]), stream)[0]
            for predicate in (AsOf("v", "k"), AsOf("v", "k", direction="forward"), AsOf("v", "k", strict=True))
        }
        everything, _ = pairs_of(operator(table, on=Band("v", "k", 5, 5), memory="200KiB", columns=["id"]), stream)
    assert list(results.values()) == [[(1, 4002), (2, 4002)], [(0, 0), (1, 3), (2, 4003)], [(1, 2), (2, 4002)]]
    assert len(everything) == 3 + 4000 + 4000 + 3


@OPERATORS
@pytest.mark.parametrize("dtype", [pa.int8(), pa.int64(), pa.uint64(), pa.timestamp("ns"), pa.date32()])
def test_bands_stop_at_the_ends_of_a_type(build, operator, dtype):
    bits = dtype.bit_width
    least, most = (0, 2**64 - 1) if dtype == pa.uint64() else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    width = pa.int32() if bits == 32 else pa.int64()
    values = pa.array([least, most], dtype if pa.types.is_integer(dtype) else width)
    values = values if values.type == dtype else values.view(dtype)
    stream = pa.table({"n": [0, 1], "v": values})
    with build(pa.table({"k": values, "id": [0, 1]}), ["k"], unique=True) as table:
        small, _ = pairs_of(operator(table, on=Band("v", "k", 3, 3), columns=["id"]), stream)
        large, _ = pairs_of(operator(table, on=Band("v", "k", 2**70, 2**70), columns=["id"]), stream)
        beyond, _ = pairs_of(operator(table, on=Band("v", "k", -1, 3), columns=["id"]), stream)
        strict, _ = pairs_of(operator(table, on=AsOf("v", "k", strict=True), how="left", columns=["id"]), stream)
    assert small == [(0, 0), (1, 1)]
    assert large == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert beyond == []
    assert strict == [(0, None), (1, 0)]


@OPERATORS
def test_values_outside_of_a_narrow_key_type(build, operator):
    stream = pa.table({"n": [0, 1, 2], "v": pa.array([-(2**62), 130, 2**62])})
    with build(pa.table({"k": pa.array([-128, 127], pa.int8()), "id": [0, 1]}), ["k"], unique=True) as table:
        assert pairs_of(operator(table, on=AsOf("v", "k"), columns=["id"]), stream)[0] == [(1, 1), (2, 1)]
        assert pairs_of(operator(table, on=Band("v", "k", 5, 5), columns=["id"]), stream)[0] == [(1, 1)]
        forward = AsOf("v", "k", direction="forward")
        assert pairs_of(operator(table, on=forward, columns=["id"]), stream)[0] == [(0, 0)]


@OPERATORS
def test_the_key_that_is_ranged_over_is_in_the_result(build, operator):
    prices = pa.table({"symbol": ["A", "A", "B"], "time": [10, 20, 15], "price": [1.0, 1.5, 7.0]})
    trades = pa.table({"n": [0], "symbol": ["A"], "at": [19]})
    with build(prices, ["symbol", "time"], unique=True) as table:
        join = operator(table, on=AsOf("at", "time", by="symbol"))
        (result,) = [*join.push(trades.to_batches()[0]), *join.finish()]
    assert result.to_pylist() == [{"n": 0, "symbol": "A", "at": 19, "time": 10, "price": 1.0}]


def test_changes_under_way_are_seen_from_then_on(build):
    stream = pa.table({"n": np.arange(40), "v": np.arange(40) * 100})
    (batch,) = stream.to_batches()
    with build(pa.table({"k": np.arange(0, 4000, 2), "id": np.arange(0, 4000, 2)}), ["k"], page_size=4096) as table:
        join = SSIJ(table, on=AsOf("v", "k", strict=True), how="left", memory="150KiB", columns=["id"])
        results = list(join.push(batch))
        results += list(join.apply(deletes=pa.table({"k": np.arange(0, 4000, 4)})))
        before = sorted(row["id"] or 0 for result in results for row in result.to_pylist())
        results = list(join.push(batch))
        results += list(join.refresh())
        after = sorted(row["id"] or 0 for result in results for row in result.to_pylist())
    assert before == [0, *(n * 100 - 2 for n in range(1, 40))]
    assert after == [0, *(n * 100 - 2 for n in range(1, 40))]


def test_a_predecessor_in_the_leaf_before_once_rows_are_gone(build, rng):
    """Deleting the first rows of leaves leaves separators behind that lie below the first key."""
    keys = np.arange(0, 60_000, 3)
    with build(pa.table({"k": keys, "id": keys}), ["k"], unique=True, page_size=4096) as table:
        starts = keys[np.cumsum(table.snapshot().leaf_rows)[:-1]]
        gone = np.unique((starts[:, None] + 3 * np.arange(-4, 9)).ravel())
        table.apply(deletes=pa.table({"k": gone[(gone > 0) & (gone < 60_000)]}))
        left = np.setdiff1d(keys, gone)
        asked = rng.permutation(np.concatenate([starts + n for n in (-1, 0, 1, 10, 25)]))
        stream = pa.table({"n": np.arange(len(asked)), "v": asked})
        for memory in ("100KiB", "16MiB"):
            back, _ = pairs_of(SSIJ(table, on=AsOf("v", "k"), memory=memory, columns=["id"]), stream, [50, 90])
            ahead = SSIJ(table, on=AsOf("v", "k", direction="forward"), memory=memory, columns=["id"])
            ahead, _ = pairs_of(ahead, stream, [50, 90])
            places = np.searchsorted(left, asked)
            exact = left[np.minimum(places, len(left) - 1)] == asked
            wanted = left[np.where(exact, places, places - 1)]
            assert back == sorted(zip(range(len(asked)), wanted.tolist(), strict=True), key=str)
            assert ahead == sorted(zip(range(len(asked)), left[places].tolist(), strict=True), key=str)


def test_no_page_is_read_twice_in_a_join_phase(build):
    """A stream tuple that spans pages, and others that want the same ones, share the reads."""
    relation = pa.table({"k": np.arange(200_000), "id": np.arange(200_000)})
    stream = pa.table({"n": np.arange(50), "v": np.arange(50) * 100 + 50_000})
    with build(relation, ["k"], unique=True, page_size=4096) as table:
        leaves = len(table.snapshot().leaf_pages)
        join = SSIJ(table, on=Band("v", "k", 20_000, 20_000), memory="500KiB", columns=["id"])
        rows = sum(result.num_rows for batch in stream.to_batches() for result in join.push(batch))
        rows += join.finish().drain()
    assert rows == 50 * 40_001
    assert join.stats.join_phases == 1
    assert join.stats.pages_wanted < leaves // 3
    assert join.stats.memory.peak <= join.stats.memory.limit


def test_results_of_a_wide_band_come_in_small_batches(build):
    relation = pa.table({"k": np.arange(50_000), "id": np.arange(50_000)})
    with build(relation, ["k"], unique=True) as table:
        join = SSIJ(table, on=Band("v", "k", 10**6, 10**6), memory="1MiB")
        sizes = [batch.nbytes for batch in join.push(pa.record_batch({"v": np.arange(30)}))]
        sizes += [batch.nbytes for batch in join.finish()]
        assert join.stats.rows_out == 30 * 50_000
    assert max(sizes) < 300_000


def test_deadlines_hold_for_ranges(build):
    now = [0.0]
    with build(pa.table({"k": np.arange(30_000), "id": np.arange(30_000)}), ["k"], page_size=4096) as table:
        join = SSIJ(table, on=AsOf("v", "k"), deadline=1.0, memory="300KiB", clock=lambda: now[0])
        assert list(join.push(pa.record_batch({"v": np.arange(0, 30_000, 1000)}), at=0.0)) == []
        assert 0.0 < join.due < 1.0
        now[0] = join.due
        assert sum(len(batch) for batch in join.tick()) == 30
        assert join.stats.deadline_misses == 0


@pytest.mark.parametrize(
    ("on", "message"),
    [
        (Band("v", "other", 1, 1), "begins with the columns of `by`"),
        (Band("v", "k", 1, 1), "begins with the columns of `by`"),
        (Band("v", "g", 1, 1), "cannot range over 'g' of type string"),
        (Band("v", "k", -2, 1, by=["g"]), "is empty"),
        (Band("v", "k", 1.5, 1, by=["g"]), "`below` must be a distance"),
        (Band("v", "k", "5s", 1, by=["g"]), "`below` must be a distance"),
        (Band("v", "k", True, 1, by=["g"]), "`below` must be a distance"),  # noqa: FBT003 - not a number
        (Range("v", "v", "k", by=["g"], inclusive="some"), "`inclusive` must be 'both' or"),
        (Range("v", "v", "g"), None),
        (AsOf("v", "k", by=["g"], direction="nearest"), "`direction` must be 'backward' or 'forward'"),
        (AsOf("v", "k", by=["g"], tolerance=-1), "`tolerance` must not be negative"),
        (AsOf("v", "g"), "cannot range over 'g'"),
        (AsOf("v", "k", by=[3]), "column names and"),
        (AsOf("v", "k", by=None), "column names and"),
        (AsOf("v", "k", by=["g"], direction=["backward"]), "`direction` must be"),
        (Range("v", "v", "k", by=["g"], inclusive=[]), "`inclusive` must be"),
        (Band("v", 5, 1, 1, by=["g"]), "continues with 5"),
        (Band("v", ["k"], 1, 1, by=["g"]), "continues with"),
        (AsOf("v", "k", by=["g", "g"]), "begins with the columns of `by`"),
        (AsOf, "column names and"),
    ],
)
def test_what_cannot_be_is_refused_at_once(build, on, message):
    with build(pa.table({"g": ["a"], "k": [1]}), ["g", "k"]) as table:
        if message is None:
            SSIJ(table, on=on)
            return
        with pytest.raises(JoinInputError, match=message):
            SSIJ(table, on=on)


@pytest.mark.parametrize("name", [5, None, ["v"]])
def test_a_stream_column_that_is_no_name_is_refused(build, name):
    with (
        build(pa.table({"k": [1]}), ["k"]) as table,
        pytest.raises(StreamSchemaError, match="must have one column"),
    ):
        SSIJ(table, on=AsOf(name, "k")).push(pa.record_batch({"v": [1]}))


def test_text_behind_what_is_ranged_over_is_refused(build):
    with (
        build(pa.table({"k": [1], "name": ["a"]}), ["k", "name"]) as table,
        pytest.raises(JoinInputError, match="key column 'name' is text"),
    ):
        SSIJ(table, on=Band("v", "k", 1, 1))


def test_meshjoin_refuses_ranges(build):
    with (
        build(pa.table({"k": [1]}), ["k"]) as table,
        pytest.raises(JoinInputError, match="MeshJoin finds matches by hashing"),
    ):
        MeshJoin(table, on=Band("v", "k", 1, 1))


@OPERATORS
@pytest.mark.parametrize("dtype", [pa.string(), pa.float64(), pa.timestamp("us"), pa.bool_(), pa.decimal128(30, 2)])
def test_columns_without_a_common_order_are_refused(build, operator, dtype):
    with build(pa.table({"k": [1]}), ["k"]) as table:
        join = operator(table, on=AsOf("v", "k"))
        with pytest.raises(KeyInputError, match="no common order"):
            join.push(pa.record_batch({"v": pa.nulls(1, dtype)}))
        with pytest.raises(StreamSchemaError, match="one column 'v'"):
            join.push(pa.record_batch({"w": [1]}))


@pytest.mark.parametrize("offset", [Decimal("1e99999999"), Decimal("1e-99999999"), Decimal("NaN")])
def test_a_distance_beyond_all_keys_is_refused_at_once(offset):
    with pytest.raises(JoinInputError, match="distance between keys"):
        ticks(offset, pa.int64(), "below")


@pytest.mark.parametrize(("memory", "larger"), [("400KiB", True), ("64MiB", False)])
def test_ranges_have_a_larger_workspace_where_memory_is_small(build, memory, larger):
    with (
        build(pa.table({"k": np.arange(2000), "id": np.arange(2000)}), ["k"], page_size=4096) as table,
        SSIJ(table, on=Band("v", "k", 1, 1), memory=memory) as ranges,
        SSIJ(table, on="k", memory=memory) as keys,
    ):
        assert (ranges.store.workspace > keys.store.workspace) == larger
        assert ranges.stats.memory.peak <= ranges.stats.memory.limit


def test_tuples_that_go_on_to_the_next_leaf_fit_the_memory(build):
    """The cache has taken all memory that the waiting tuples left, up to less than a page."""
    one = pa.table({"t": [0], "text": ["x"]})
    stream = pa.record_batch({"at": np.arange(3000)})
    with build(one, ["t"], page_size=4096) as table:
        for memory in range(1_000_000, 1_004_096, 128):
            join = SSIJ(table, on=AsOf("at", "t", direction="forward"), memory=memory, columns=["t"])
            found = pa.Table.from_batches([*join.push(stream), *join.finish()], join.output_schema(stream.schema))
            assert found.to_pylist() == [{"at": 0, "t": 0}]
            assert join.stats.memory.peak <= memory
