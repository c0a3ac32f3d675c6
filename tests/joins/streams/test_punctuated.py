"""`PunctuatedJoin` with punctuations that hold, and with promises that are broken."""

import datetime as dt
import errno
import itertools
import math
import os
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.joins.errors import FinishedError, JoinInputError, MemoryBudgetError, StreamSchemaError
from headrace.joins.streams.punctuated import (
    ANY,
    Between,
    OneOf,
    Pattern,
    PunctuatedJoin,
    PunctuationError,
    Scheduling,
    UniqueKeyError,
    punctuation_of,
)
from headrace.storage.errors import StorageIOError
from headrace.storage.file import FileBackend

EXAMPLES = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
MANY = settings(EXAMPLES, max_examples=400)
KEYS = pa.schema([("k", pa.int64())])
PAIR = {"a": pa.schema([("k", pa.int64())]), "b": pa.schema([("k", pa.int64()), ("v", pa.int64())])}


def rows_of(**columns):
    return pa.record_batch({name: pa.array(values, pa.int64()) for name, values in columns.items()})


def news(*keys):
    return rows_of(k=keys)


def reads(*keys):
    return rows_of(k=keys, v=range(len(keys)))


def make(**options):
    options = {"memory": "1MiB", "purge_every": 1} | options
    return PunctuatedJoin(PAIR, "k", **options)


# A naive twin of patterns and of what may be dropped


def allows(constraint, value):
    if constraint is ANY:
        return True
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return False
    if isinstance(constraint, OneOf):
        return value in constraint.values
    above = constraint.low is None or value > constraint.low or (constraint.include_low and value == constraint.low)
    below = constraint.high is None or value < constraint.high or (constraint.include_high and value == constraint.high)
    return above and below


def matches(pattern, row):
    return all(allows(constraint, row[name]) for name, constraint in pattern.items())


def draw_constraint(rng, table, name):
    """Return a constraint that some value of the column meets; None if the column has no value."""
    values = [v for v in table[name].to_pylist() if v is not None and not (isinstance(v, float) and math.isnan(v))]
    if not values:
        return None
    some = [values[i] for i in rng.integers(0, len(values), 3)]
    kind = rng.integers(0, 5)
    if kind == 0 or isinstance(some[0], bool):
        return OneOf(some[0])
    if kind == 1:
        return OneOf(*some)
    low, high = sorted(some[:2])
    ends = [bool(flag) for flag in rng.random(2) < 0.7]
    limits = [(None, low), (high, None), (low, high)][kind - 2]
    return Between(*limits, *ends)


def draw_pattern(rng, table):
    """Return a pattern over a column or two, rarely over none."""
    names = [n for n in ("x", "y") if n in table.column_names and rng.random() < 0.7]
    names += [n for n in ("w", "flag") if rng.random() < 0.1]
    found = {name: draw_constraint(rng, table, name) for name in names}
    return Pattern({name: constraint for name, constraint in found.items() if constraint is not None})


def with_punctuations(rng, case, share):
    """Return the events of a case, with punctuations that no later tuple of their input matches."""
    tables, arrived, ended, events = list(case.inputs.values()), [0] * len(case.inputs), set(), []
    later = [table.to_pylist() for table in tables]
    for event in case.events:
        events.append(event)
        kind, side, detail = event
        if kind == "push":
            arrived[side] = detail[1]
        elif kind == "end":
            ended.add(side)
        for at in range(len(tables)):
            if at in ended or rng.random() >= share:
                continue
            pattern = draw_pattern(rng, tables[at])
            if not any(matches(pattern, row) for row in later[at][arrived[at] :]):
                events.append(("punctuate", at, pattern))
    return events


def play(join, case, events, seen):
    """Yield the batches that a join gives; note in `seen` the punctuations that it accepted."""
    names = list(case.inputs)
    for kind, side, detail in events:
        if kind == "punctuate":
            seen.append((side, detail))
            yield from join.punctuate(names[side], detail)
        elif kind == "push":
            start, stop, now = detail
            for batch in case.inputs[names[side]].slice(start, stop - start).combine_chunks().to_batches():
                yield from join.push(batch, side=names[side], at=now)
        elif kind == "end":
            yield from join.end(names[side], at=detail)
        elif kind == "tick":
            yield from join.tick(detail)
        else:
            yield from join.idle(detail[0], until=detail[1])
    yield from join.finish()


def check_propagated(join, case, accepted, batches):
    """Assert that each punctuation came out once, in the names of the result, and that no later row matches it."""
    starts = np.cumsum([0, *(table.num_columns for table in case.inputs.values())])
    tables = list(case.inputs.values())
    wanted = []
    for side, pattern in accepted:
        names = dict(zip(tables[side].column_names, join.schema.names[starts[side] :], strict=False))
        wanted.append(Pattern({names[name]: constraint for name, constraint in pattern.items()}))
    came = [punctuation_of(batch) for batch in batches if punctuation_of(batch) is not None]
    assert sorted(map(repr, came)) == sorted(map(repr, wanted))
    closed = []
    for batch in batches:
        pattern = punctuation_of(batch)
        if pattern is not None:
            assert len(batch) == 0
            closed.append(pattern)
        elif closed:
            for earlier in closed:
                assert not earlier.matches(batch).any(), (earlier, batch.to_pylist())


@st.composite
def scenarios(draw, tools):
    """Draw a case, options of the join, and events."""
    case = tools.replace(draw(tools.cases(tools.OPERATORS["punctuated"])), how="inner")
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    options = {"purge_every": draw(st.sampled_from([1, 2, 7, 1000])), "partitions": draw(st.sampled_from([2, 16]))}
    if draw(st.booleans()):
        options["scheduling"] = Scheduling(
            draw(st.sampled_from([1, 5, 100])),
            tuple(draw(st.permutations(list(case.inputs)))),
            draw(st.sampled_from(["value", "sequential"])),
        )
    if len(case.inputs) == 2 and draw(st.booleans()):
        case = promised(case, draw, options)
    return case, options, with_punctuations(rng, case, draw(st.sampled_from([0.0, 0.2, 0.6])))


def promised(case, draw, options):
    """Return a case in which an input has each key once, perhaps the other in clusters, and say so in the options."""
    names = list(case.inputs)
    one = draw(st.sampled_from(names))
    other = names[1 - names.index(one)]
    tables = dict(case.inputs)
    keys = {name: [c for c in ("x", "y") if c in tables[name].column_names] for name in names}
    seen, kept = set(), []
    for at, row in enumerate(tables[one].to_pylist()):
        key = tuple(row[name] for name in keys[one])
        if None in key or key not in seen:
            kept.append(at)
        seen.add(key)
    tables[one] = tables[one].take(pa.array(kept, pa.int64()))
    options["one"] = one
    if pa.types.is_integer(tables[other].schema.field("x").type) and "y" not in keys[other] and draw(st.booleans()):
        tables[other] = tables[other].sort_by("x")
        options["clustered"] = [other]
    sizes = [len(table) for table in tables.values()]
    clipped = [
        (kind, side, (min(detail[0], sizes[side]), min(detail[1], sizes[side]), detail[2])) if kind == "push"
        else (kind, side, detail)
        for kind, side, detail in case.events
    ]  # fmt: skip
    return replace(case, inputs=tables, events=clipped)


@given(data=st.data())
@EXAMPLES
def test_true_punctuations_change_no_result(tools, tmp_path, data):
    check_scenario(tools, tmp_path, data)


@pytest.mark.slow
@given(data=st.data())
@MANY
def test_true_punctuations_change_no_result_in_many_cases(tools, tmp_path, data):
    check_scenario(tools, tmp_path, data)


def check_scenario(tools, tmp_path, data):
    case, options, events = data.draw(scenarios(tools))
    factor = data.draw(st.sampled_from([1.5, 4.0, None]))
    memory = 32 << 20
    contestant = tools.replace(
        tools.OPERATORS["punctuated"], make=lambda *args, **more: PunctuatedJoin(*args, **more, **options)
    )
    if factor is not None:
        punctuations = sum(event[0] == "punctuate" for event in events)
        memory = int(factor * (tools.least_memory(contestant, case, tmp_path) + 8192 * punctuations))
    accepted = []
    with contestant.make(
        case.schemas, case.on, "inner", memory, spill=tmp_path, clock=tools.SimulatedClock(0.001)
    ) as join:
        batches = list(play(join, case, events, accepted))
        assert join.stats.memory.peak <= join.stats.memory.limit
        assert join.stats.punctuations_in == join.stats.punctuations_out == len(accepted)
        check_propagated(join, case, accepted, batches)
        result = pa.Table.from_batches(batches, join.schema)
        assert join.stats.rows_out == len(result)
    tools.assert_same_rows(result, tools.expected(case))
    assert list(tmp_path.iterdir()) == []


@given(data=st.data())
@EXAMPLES
def test_the_state_is_what_a_naive_twin_keeps(data):
    """Immediate purging in memory keeps exactly the tuples that later ones may match."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    count, unique = data.draw(st.integers(2, 4)), data.draw(st.booleans())
    names = "abcd"[:count]
    one = "a" if count == 2 and unique else None
    join = PunctuatedJoin(
        dict.fromkeys(names, KEYS), [(f"{left}.k", f"{right}.k") for left, right in itertools.pairwise(names)],
        memory="4MiB", purge_every=1, one=one,
    )  # fmt: skip
    held, patterns, used = {name: [] for name in names}, {name: [] for name in names}, set()
    for _ in range(40):
        name = str(rng.choice(list(names)))
        keys = [int(k) for k in rng.integers(0, 30, rng.integers(0, 6))]
        keys = [k for k in keys if not any(matches(p, {"k": k}) for p in patterns[name])]
        if name == one:
            keys = sorted(set(keys) - used)
            used |= set(keys)
        join.push(news(*keys), side=name, at=0.0).drain()
        held[name] += keys
        if rng.random() < 0.6:
            side = str(rng.choice(list(names)))
            low = int(rng.integers(0, 30))
            pattern = [Pattern({"k": low}), Pattern({"k": OneOf(low, low + 2)}), Pattern({"k": Between(low, low + 3)})][
                int(rng.integers(0, 3))
            ]
            patterns[side].append(pattern)
            join.punctuate(side, pattern).drain()
        for side in names:
            others = [patterns[other] for other in names if other != side]
            held[side] = [k for k in held[side] if not all(any(matches(p, {"k": k}) for p in o) for o in others)]
        if one:
            held["b"] = [k for k in held["b"] if k not in used]
        stores = join.algorithm.state.stores
        found = [sorted(c for b in [s.rows.batch()] for c in b.column(0).to_pylist()) for s in stores]
        assert found == [sorted(held[side]) for side in names]


@given(data=st.data())
@EXAMPLES
def test_patterns_match_and_combine_as_a_naive_twin_says(tools, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    kind = data.draw(st.sampled_from(["int64", "int32", "text", "float", "time"]))
    table = tools.make_input(rng, [kind, "int64"], 40, 12)
    batch = table.combine_chunks().to_batches()[0]
    first, second = draw_pattern(rng, table), draw_pattern(rng, table)
    rows = table.to_pylist()
    assert first.matches(batch).tolist() == [matches(first, row) for row in rows]
    both = first & second
    assert both.matches(batch).tolist() == [matches(first, row) and matches(second, row) for row in rows]
    assert not (both.empty and both.matches(batch).any())
    carrier = first.bind(batch.schema).batch(batch.schema, batch.schema.names)
    assert punctuation_of(carrier).matches(batch).tolist() == first.matches(batch).tolist()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (pa.int8(), 300),
        (pa.int64(), 2.5),
        (pa.int64(), "5"),
        (pa.timestamp("s"), dt.datetime(2020, 1, 1, microsecond=5)),  # noqa: DTZ001 - of a column without a zone
        (pa.string(), 5),
        (pa.float64(), math.nan),
        (pa.float64(), np.float32("nan")),
        (pa.float64(), pa.scalar(math.nan)),
        (pa.int64(), None),
        (pa.int64(), pa.scalar(None, pa.int64())),
        (pa.timestamp("s"), np.datetime64("NaT", "s")),
        (pa.decimal128(10, 2), 0.126),
        (pa.decimal128(10, 2), Decimal("0.126")),
        (pa.date32(), dt.datetime(2020, 1, 1, 5)),  # noqa: DTZ001 - of a column without a zone
        (pa.time32("s"), dt.datetime(2020, 1, 1, 5)),  # noqa: DTZ001 - of a column without a zone
        (pa.timestamp("s"), dt.datetime(2020, 1, 1, tzinfo=dt.UTC)),
        (pa.timestamp("s", "UTC"), dt.datetime(2020, 1, 1)),  # noqa: DTZ001 - refused for that
        (pa.int32(), dt.date(2020, 1, 1)),
        (pa.bool_(), 5),
        (pa.binary(), "5"),
        (pa.string(), b"5"),
        (pa.string(), "\ud800"),
    ],
)
def test_values_that_a_column_cannot_have_are_refused(dtype, value):
    for constraint in (OneOf, Between)[: 1 if value is None else 2]:  # a limit of None is no limit
        with pytest.raises(JoinInputError, match=r"cannot have the value"):
            Pattern({"k": constraint(value)}).bind(pa.schema([("k", dtype)]))


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (pa.decimal128(10, 2), [1, 2, 3]),
        (pa.decimal32(5, 2), [1, 2, 3]),
        (pa.decimal256(50, 2), [1, 2, 3]),
        (pa.int16(), [Decimal(1), Decimal(2), Decimal(3)]),
        (pa.dictionary(pa.int8(), pa.int64()), [1, 2, 3]),
        (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "c"]),
        (pa.string_view(), ["a", "b", "c"]),
        (pa.large_string(), ["a", "b", "c"]),
        (pa.binary_view(), [b"a", b"b", b"c"]),
        (pa.binary(1), [b"a", b"b", b"c"]),
        (pa.float16(), [1.0, 2.0, 3.0]),
        (pa.date64(), [dt.date(2020, 1, day) for day in (1, 2, 3)]),
        (pa.duration("ns"), [dt.timedelta(seconds=n) for n in (1, 2, 3)]),
    ],
)
def test_columns_of_each_type_are_matched(dtype, values):
    array = pa.array(list(map(int, values)) if dtype == pa.int16() else values, getattr(dtype, "value_type", dtype))
    array = array.dictionary_encode().cast(dtype) if pa.types.is_dictionary(dtype) else array
    batch = pa.record_batch({"k": array})
    assert Pattern({"k": values[1]}).matches(batch).tolist() == [False, True, False]
    assert Pattern({"k": OneOf(*values[:2])}).matches(batch).tolist() == [True, True, False]
    assert Pattern({"k": Between(values[1])}).matches(batch).tolist() == [False, True, True]
    carried = Pattern({"k": Between(values[1])}).bind(batch.schema).batch(batch.schema, ["k"])
    assert punctuation_of(carried).matches(batch).tolist() == [False, True, True]


@pytest.mark.parametrize("dtype", [pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.null()])
def test_a_column_whose_values_cannot_be_tested_is_refused(dtype):
    with pytest.raises(JoinInputError, match="which a punctuation cannot constrain; leave the column out"):
        Pattern({"k": 1}).bind(pa.schema([("k", dtype)]))


def test_a_time_that_python_has_no_value_for_is_carried():
    schema = pa.schema([("k", pa.date32())])
    far = pa.scalar(10**8, pa.int32()).cast(pa.date32())
    carried = punctuation_of(Pattern({"k": far}).bind(schema).batch(schema, ["k"]))
    assert carried.matches(pa.record_batch({"k": pa.array([far], pa.date32())})).tolist() == [True]


def test_equal_values_of_arrow_and_of_python_are_one():
    time = dt.datetime(2020, 1, 1)  # noqa: DTZ001 - of a column without a zone
    both = Pattern({"k": pa.scalar(time, pa.timestamp("ns"))}) & Pattern({"k": OneOf(time, pa.scalar(5))})
    assert both == Pattern({"k": time})


@pytest.mark.parametrize("wrong", [None, 5, "k", [1], {5: 1}, {"k": [1, 2]}, {"k": {"a": 1}}])
def test_what_is_not_a_pattern_is_refused(wrong):
    with pytest.raises(JoinInputError, match=r"a pattern (is a mapping of names|has single values)"):
        Pattern(wrong)


def test_a_pattern_is_matched_with_schemas_and_batches():
    with pytest.raises(JoinInputError, match="pyarrow schema, not to NoneType"):
        Pattern({"k": 1}).bind(None)
    for call in (Pattern({"k": 1}).matches, punctuation_of):
        with pytest.raises(StreamSchemaError, match="record batches, not as NoneType"):
            call(None)


# Keys whose types differ


@pytest.mark.parametrize(
    ("types", "key", "constraint"),
    [
        ((pa.int32(), pa.int64()), 5, Between(0, 2**40)),
        ((pa.int32(), pa.int64()), 5, OneOf(5, 2**40)),
        ((pa.decimal128(10, 2), pa.int64()), 5, Between(0, 10**12)),
        ((pa.time32("s"), pa.time32("ms")), dt.time(5), Between(high=dt.time(5, microsecond=500_000))),
    ],
)
def test_a_punctuation_that_the_type_of_the_key_cannot_express_waits_for_its_tuples(types, key, constraint):
    schemas = {name: pa.schema([("k", dtype)]) for name, dtype in zip("ab", types, strict=True)}
    join = PunctuatedJoin(schemas, "k", memory="1MiB", purge_every=1)
    rows = {
        name: pa.record_batch([pa.array([key], schema.field(0).type)], schema=schema)
        for name, schema in schemas.items()
    }
    join.push(rows["b"], side="b").drain()
    assert list(join.punctuate("b", {"k": constraint})) == [], "a tuple that it matches is held"
    assert join.push(rows["a"], side="a").drain() == 1
    with pytest.raises(PunctuationError):
        join.push(rows["b"], side="b").drain()


def test_a_punctuation_purges_keys_of_another_type():
    prices = pa.record_batch({"k": pa.array([5, 6], pa.decimal128(10, 2))})
    join = PunctuatedJoin({"a": prices.schema, "b": KEYS}, "k", memory="1MiB", purge_every=1)
    join.push(prices, side="a").drain()
    join.punctuate("b", {"k": 5}).drain()
    assert join.stats.rows_in_memory == 1


# Triggers of purging (section 5.2)


def test_a_punctuation_purges_at_once_or_in_batches():
    for every, left in ((1, [2, 1, 0]), (2, [3, 1, 1]), (5, [3, 3, 3])):
        join = make(purge_every=every)
        join.push(news(1, 2, 3), side="a", at=0.0).drain()
        found = []
        for key in (1, 2, 3):
            join.punctuate("b", {"k": key}, at=0.0).drain()
            found.append(join.stats.rows_in_memory)
        assert found == left


def test_a_blocked_time_purges_what_a_batch_has_not():
    join = make(purge_every=100)
    join.push(news(1, 2, 3), side="a", at=0.0).drain()
    join.punctuate("b", {"k": OneOf(1, 2)}, at=0.0).drain()
    join.tick(0.01).drain()
    assert join.stats.rows_in_memory == 3
    join.tick(1.0).drain()
    assert join.stats.rows_in_memory == 1


def test_full_memory_purges_before_it_spills(tmp_path):
    join = make(purge_every=10**6, memory="256KiB", spill=tmp_path)
    for start in range(0, 20_000, 100):
        join.push(news(*range(start, start + 100)), side="a", at=0.0).drain()
        join.punctuate("b", {"k": Between(high=start + 99)}, at=0.0).drain()
    assert join.stats.rows_spilled == 0
    assert join.stats.purges > 1
    join.close()


def test_the_end_of_an_input_purges_the_others():
    join = make(purge_every=100)
    join.push(news(1, 2, 3), side="a", at=0.0).drain()
    join.end("b").drain()
    assert join.stats.rows_in_memory == 0
    join.push(news(4), side="a").drain()
    assert join.stats.rows_passed == 1


def test_punctuations_in_order_take_the_memory_of_one():
    join = make(memory="128KiB")
    for key in range(100):
        join.punctuate("b", {"k": key}).drain()
    used = join.stats.memory.used
    for key in range(100, 200):
        join.punctuate("b", {"k": key}).drain()
    assert join.stats.memory.used == used
    assert join.stats.punctuations_out == 200


def test_the_end_of_an_input_frees_its_punctuations():
    join = make()
    before = join.stats.memory.used
    for value in range(20):
        join.punctuate("b", {"v": value}).drain()
    assert join.stats.memory.used > before
    join.end("b").drain()
    assert join.stats.memory.used == before


def test_more_punctuations_than_memory_are_an_error():
    join = make(memory="80KiB")
    with pytest.raises(MemoryBudgetError, match="ranges of keys that touch"):  # noqa: PT012 - at some point
        for key in range(5000):
            join.punctuate("b", {"k": 2 * key}).drain()


# 1-N joins


def test_a_tuple_of_many_is_dropped_once_it_has_joined():
    join = make(one="a")
    join.push(reads(1, 1, 2), side="b", at=0.0).drain()
    assert join.stats.rows_in_memory == 3
    assert join.push(news(1), side="a", at=0.0).drain() == 2
    assert join.stats.rows_in_memory == 2  # 2 of `b`, 1 of `a`
    assert join.push(reads(1, 3), side="b", at=0.0).drain() == 1
    assert join.stats.rows_in_memory == 3
    assert join.stats.rows_passed == 1


def test_a_punctuation_of_many_comes_when_the_last_tuple_that_it_matches_has_joined():
    join = make(one="a", purge_every=1)
    join.push(reads(1, 2), side="b").drain()
    assert list(join.punctuate("b", {"k": 1})) == []
    assert [punctuation_of(batch) for batch in join.push(news(2), side="a")] == [None], "a tuple with 1 is held"
    assert [punctuation_of(batch) for batch in join.push(news(1), side="a")] == [None, Pattern({"k_right": 1})]


def test_a_blocked_time_propagates_what_joined_since_the_last_purge():
    join = make(one="a", purge_every=100, clock=lambda: 0.0)
    join.push(reads(1), side="b", at=0.0).drain()
    join.punctuate("b", {"k": 1}, at=0.0).drain()
    assert list(join.idle(1.0)) == [], "a tuple with 1 is held"
    join.push(news(1), side="a", at=1.0).drain()
    assert [punctuation_of(batch) for batch in join.idle(3.0)] == [Pattern({"k_right": 1})]


def test_a_spilled_tuple_of_many_joins_once_and_is_gone_from_disk(tmp_path):
    join = make(one="a", memory="192KiB", spill=tmp_path, clock=lambda: 0.0, partitions=2)
    count = 6000
    for start in range(0, count, 500):
        join.push(reads(*range(start, start + 500)), side="b", at=0.0).drain()
    on_disk = join.stats.rows_on_disk
    assert on_disk > 0
    found = join.push(news(*range(100)), side="a", at=0.0).drain()
    found += join.idle(1.0, until=math.inf).drain()
    assert found == 100
    assert join.stats.rows_on_disk == on_disk
    join.punctuate("a", {"k": Between(high=count // 2)}, at=1.0).drain()
    assert join.idle(2.0).drain() == 0
    assert join.stats.rows_on_disk < on_disk
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert written < 100 * (join.stats.rows_on_disk + 1000)
    assert join.finish().drain() == 0
    join.close()


def test_a_repeated_key_of_one_is_reported(tmp_path):
    join = make(one="a")
    join.push(news(1), side="a").drain()
    with pytest.raises(UniqueKeyError, match=r"has k = 1 twice"):
        join.push(news(2, 1), side="a").drain()
    join = make(one="a")
    with pytest.raises(UniqueKeyError, match=r"has k = 7 twice"):
        join.push(news(7, 2, 7), side="a").drain()
    join = make(one="a", memory="128KiB", spill=tmp_path)
    with pytest.raises(UniqueKeyError, match=r"has k = 5 twice"):  # noqa: PT012 - in memory or on disk
        for start in range(0, 12_000, 200):
            join.push(news(*range(start, start + 200)), side="a").drain()
            if start == 6000:
                join.push(news(5), side="a").drain()
        join.finish().drain()
    join.close()


def test_the_end_of_a_cluster_is_a_punctuation():
    join = make(one="a", clustered=["b"])
    join.push(news(1, 2, 3), side="a", at=0.0).drain()
    assert join.push(reads(1, 1), side="b", at=0.0).drain() == 2
    assert join.stats.rows_in_memory == 3
    join.push(reads(1, 2), side="b", at=0.0).drain()
    assert join.stats.rows_in_memory == 2
    with pytest.raises(PunctuationError, match=r"arrived after .*: k = 1"):
        join.push(reads(2, 3, 1), side="b", at=0.0).drain()


def test_clusters_that_begin_again_are_left_out_if_asked():
    out = []
    join = make(clustered=["b"], on_violation=lambda side, batch: out.append((side, batch.column("k").to_pylist())))
    join.push(reads(1, 2, 1, 3), side="b", at=0.0).drain()
    join.push(reads(3, 2, 4), side="b", at=0.0).drain()
    assert out == [("b", [1]), ("b", [2])]
    assert join.push(news(1, 2, 3, 4), side="a", at=0.0).to_table().num_rows == 5
    assert join.stats.rows_violating == 2


def test_a_cluster_that_begins_again_while_tuples_wait_is_reported():
    join = make(clustered=["b"], scheduling=Scheduling(quota=100))
    join.push(reads(1, 1, 2), side="b", at=0.0).drain()
    join.push(reads(1), side="b", at=0.0).drain()
    with pytest.raises(PunctuationError, match=r"k = 1"):
        join.tick(1.0).drain()


# Scheduling


def test_other_inputs_wait_for_a_substream_of_the_preferred_one():
    join = make(one="a", scheduling=Scheduling(quota=4))
    assert join.push(reads(1, 2, 3), side="b", at=0.0).drain() == 0
    assert (join.stats.rows_waiting, join.stats.rows_in_memory) == (3, 0)
    join.push(news(1, 2, 3), side="a", at=0.0).drain()
    assert (join.stats.rows_waiting, join.stats.rows_in_memory) == (3, 3)
    assert join.push(reads(3), side="b", at=0.0).drain() == 4
    assert (join.stats.rows_waiting, join.stats.rows_passed) == (0, 4)


def test_waiting_tuples_are_joined_when_no_more_come():
    join = make(scheduling=Scheduling(quota=100))
    join.push(news(1), side="a", at=0.0).drain()
    join.push(reads(1), side="b", at=0.0).drain()
    assert join.tick(1.0).drain() == 1


def test_a_punctuation_lets_its_tuples_overtake_others():
    for order, waiting in (("value", 3), ("sequential", 0)):
        join = make(one="a", scheduling=Scheduling(quota=100, tuples=order))
        join.push(news(1, 2), side="a", at=0.0).drain()
        join.push(reads(1, 2, 1, 2, 3), side="b", at=0.0).drain()
        results = list(join.punctuate("b", {"k": 1}, at=0.0))
        assert sum(map(len, results)) == 2 + (0 if waiting else 2)
        assert punctuation_of(results[-1]) == Pattern({"k_right": 1})
        assert join.stats.rows_waiting == waiting


def test_a_turn_lasts_until_the_end_of_a_cluster():
    join = make(clustered=["b"], scheduling=Scheduling(quota=2, priority=("a",)))
    join.push(reads(1), side="b", at=0.0).drain()
    join.push(reads(1, 1, 1, 2), side="b", at=0.0).drain()
    assert join.stats.rows_waiting == 1


# Broken promises, and misuse


@pytest.mark.parametrize("pattern", [{"k": 1}, {"v": Between(low=0)}, {"k": Between(0, 1), "v": ANY}, {}])
def test_a_tuple_after_its_punctuation_is_reported(pattern):
    join = make()
    join.punctuate("b", pattern).drain()
    with pytest.raises(PunctuationError, match=r"'b' arrived after a punctuation that excludes it: k = 1, v = 0"):
        join.push(reads(1), side="b").drain()
    out = []
    join = make(on_violation=lambda side, batch: out.append((side, batch.to_pylist())))
    join.punctuate("b", {"k": 1}).drain()
    join.push(news(1, 2), side="a").drain()
    assert join.push(reads(1, 2), side="b").drain() == 1
    assert out == [("b", [{"k": 1, "v": 0}])]


def test_text_keys_are_punctuated_exactly_and_by_range():
    schema = pa.schema([("k", pa.string())])
    join = PunctuatedJoin({"a": schema, "b": schema}, "k", memory="1MiB", purge_every=1)
    keys = [f"a long common prefix {n}" for n in range(6)]
    join.push(pa.record_batch({"k": keys}), side="a").drain()
    for pattern, left in ((keys[0], 5), (OneOf(keys[1], "absent"), 4), (Between(high=keys[3]), 2), (keys[0], 2)):
        join.punctuate("b", {"k": pattern}).drain()
        assert join.stats.rows_in_memory == left
    with pytest.raises(PunctuationError):
        join.push(pa.record_batch({"k": [keys[1]]}), side="b").drain()


def test_calls_of_the_join_are_checked():
    join = make()
    with pytest.raises(StreamSchemaError, match="must have one column 'z'"):
        join.punctuate("b", {"z": 1})
    with pytest.raises(JoinInputError, match="no input 'z'"):
        join.punctuate("z", {"k": 1})
    with pytest.raises(JoinInputError, match="Pattern or a mapping"):
        join.punctuate("b", 5)
    join.end("b").drain()
    with pytest.raises(FinishedError, match="before `end`"):
        join.punctuate("b", {"k": 1})
    for options, name in (
        ({"purge_every": 0}, "purge_every"),
        ({"clustered": "b"}, "clustered"),
        ({"clustered": None}, "clustered"),
        ({"scheduling": 5}, "scheduling"),
        ({"scheduling": Scheduling(5, tuples=[])}, "scheduling"),
        ({"scheduling": Scheduling(0)}, "quota"),
        ({"scheduling": Scheduling(5, priority="ab")}, "priority"),
        ({"scheduling": Scheduling(5, priority=None)}, "priority"),
        ({"on_violation": 5}, "on_violation"),
    ):
        with pytest.raises(JoinInputError, match=f"`{name}` must"):
            make(**options)
    three = dict.fromkeys("abc", pa.schema([("k", pa.int64()), ("l", pa.int64())]))
    with pytest.raises(JoinInputError, match="one key that all inputs share"):
        PunctuatedJoin(three, [("a.k", "b.k"), ("b.l", "c.l")])
    with pytest.raises(JoinInputError, match="two inputs"):
        PunctuatedJoin(three, [("a.k", "b.k"), ("b.k", "c.k")], one="a")


class Full(FileBackend):
    """A disk that is full while the disk part of a partition is written again."""

    full = False

    def pwrite(self, offset, data):
        if type(self).full:
            raise StorageIOError(f"cannot write {self.path}: {os.strerror(errno.ENOSPC)}; free space and try again")
        super().pwrite(offset, data)


def test_a_full_disk_during_the_purge_of_the_disk_ends_the_join(tmp_path):
    backend = type("Backend", (Full,), {})
    join = make(memory="128KiB", spill=tmp_path, backend=lambda path: backend(path, "x"), clock=lambda: 0.0)
    for start in range(0, 6000, 200):
        join.push(news(*range(start, start + 200)), side="a", at=0.0).drain()
    join.punctuate("b", {"k": Between(high=3000)}, at=0.0).drain()
    backend.full = True
    with pytest.raises(StorageIOError, match="free space"):
        join.idle(1.0).drain()
    with pytest.raises(Exception, match="failed before"):
        join.finish()
    join.close()
    assert list(tmp_path.iterdir()) == []
