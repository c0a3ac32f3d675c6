"""As-of joins with versions of members: the shape that dimensions with history have.

The key is the natural key, of one or more columns, and the time from which a version is valid. Versions are added
between batches, so the last version of a member gets a successor: an answer that was right before is wrong then.
"""

import datetime as dt
from decimal import Decimal

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.joins import SSIJ, AsOf

START = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
NATURAL_KEYS = {
    "integer": {"id": pa.int64()},
    "short integer, one word with a date": {"id": pa.int32()},
    "text": {"id": pa.string()},
    "text and text": {"country": pa.string(), "id": pa.string()},
    "text and integer": {"country": pa.string(), "id": pa.int32()},
    "date and decimal": {"day": pa.date32(), "id": pa.decimal128(9, 2)},
}
TIMES = {"timestamp": pa.timestamp("us"), "instant": pa.timestamp("us", "UTC"), "date": pa.date32()}


def members(numbers, dtype):
    """Return values of a natural key's column. Texts include prefixes of each other and the escaped byte."""
    if pa.types.is_string(dtype):
        return pa.array(
            [None if n is None else ["", "a", "a\0", "ab", "doc-7", "doc-71"][n % 6] for n in numbers], dtype
        )
    if pa.types.is_decimal(dtype):
        return pa.array([None if n is None else Decimal(n) for n in numbers], dtype)
    return pa.array(numbers, pa.int32()).cast(dtype)


def moments(steps, dtype):
    """Return times that many hours, or for dates days, after the start."""
    if pa.types.is_date32(dtype):
        return pa.array([None if s is None else (START + dt.timedelta(days=s)).date() for s in steps], dtype)
    at = [None if s is None else START + dt.timedelta(hours=s) for s in steps]
    return pa.array([time and (time if dtype.tz else time.replace(tzinfo=None)) for time in at], dtype)


def distinct_versions(numbers, natural, moment, first):
    """Return a table of versions, of which no two have the same key."""
    taken, kept = set(), []
    for number in numbers:
        columns = [members([part], dtype)[0].as_py() for part, dtype in zip(number, natural.values(), strict=False)]
        if (key := (*columns, number[-1])) not in taken:
            taken.add(key)
            kept.append(number)
    parts = {name: members([number[at] for number in kept], dtype) for at, (name, dtype) in enumerate(natural.items())}
    valid_from = moments([number[-1] for number in kept], moment)
    return pa.table({**parts, "valid_from": valid_from, "version": np.arange(first, first + len(kept))})


def expected(facts, versions, natural, how):
    """Return (fact, version) as DuckDB finds them."""
    connection = duckdb.connect()
    connection.register("facts", facts)
    connection.register("versions", versions)
    equal = " AND ".join(f"facts.fact_{name} = versions.{name}" for name in natural)
    query = f"""SELECT n, version FROM facts ASOF {how.upper()} JOIN versions
        ON {equal} AND facts.event_time >= versions.valid_from"""
    return sorted(connection.sql(query).fetchall(), key=str)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_each_fact_meets_the_version_valid_at_its_time(build, tools, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    natural = NATURAL_KEYS[data.draw(st.sampled_from(list(NATURAL_KEYS)))]
    moment = TIMES[data.draw(st.sampled_from(list(TIMES)))]
    how, reach = data.draw(st.sampled_from(["inner", "left"])), data.draw(st.sampled_from([5, 400]))
    predicate = AsOf("event_time", "valid_from", by=[(f"fact_{name}", name) for name in natural])

    def versions(rows, first):
        return distinct_versions(rng.integers(0, reach, (rows, len(natural) + 1)).tolist(), natural, moment, first)

    def facts(rows):
        """Return facts, of which some have no member, no version yet, no key, or no time."""
        drawn = rng.integers(-2, reach + 2, (rows, len(natural) + 1))
        asked = [[None if rng.random() < 0.05 else max(n, 0) for n in row[:-1]] for row in drawn.tolist()]
        times = [None if rng.random() < 0.05 else int(n) for n in drawn[:, -1]]
        keys = {f"fact_{name}": members([row[at] for row in asked], natural[name]) for at, name in enumerate(natural)}
        one_way = pa.table({"n": np.arange(rows), **keys, "event_time": moments(times, moment)})
        return pa.concat_tables([one_way, one_way.slice(0, rows // 3)]).combine_chunks()  # a third comes twice

    table_rows = versions(data.draw(st.sampled_from([0, 1, 30, 3000])), 0)
    with build(table_rows, [*natural, "valid_from"], unique=True, page_size=4096) as table:
        spare = data.draw(st.sampled_from([30_000, 200_000, 4_000_000]))
        memory = tools.least_memory(SSIJ, table, predicate) + spare
        with SSIJ(table, on=predicate, how=how, memory=memory, columns=["version"]) as join:
            for _ in range(data.draw(st.integers(1, 3))):
                stream = facts(data.draw(st.sampled_from([1, 40, 400])))
                (batch,) = stream.to_batches()
                results = [*join.push(batch), *join.flush()]
                found = pa.Table.from_batches(results, join.output_schema(stream.schema)).select(["n", "version"])
                pairs = zip(*found.to_pydict().values(), strict=True)
                assert sorted(pairs, key=str) == expected(stream, table_rows, natural, how)
                added = versions(data.draw(st.sampled_from([0, 1, 50])), len(table_rows))
                keys = [*natural, "valid_from"]
                added = added.join(table_rows.select(keys), keys, join_type="left anti").select(added.column_names)
                table_rows = pa.concat_tables([table_rows, added]).combine_chunks()
                results = list(join.apply(upserts=added))
                assert not results


@pytest.mark.parametrize("memory", ["200KiB", "64MiB"])
def test_a_version_ends_where_the_next_one_begins(build, memory):
    """Intervals are half-open: [valid_from, the next valid_from)."""
    history = pa.table({"id": ["a", "a", "b"], "valid_from": [10, 20, 15], "version": [1, 2, 3]})
    facts = pa.record_batch({"id": ["a"] * 5 + ["b", "c", None, "a"], "at": [9, 10, 19, 20, 10**9, 14, 15, 15, None]})
    with build(history, ["id", "valid_from"], unique=True, page_size=4096) as table:
        on = AsOf("at", "valid_from", by=["id"])
        with SSIJ(table, on=on, how="left", memory=memory, columns=["version"]) as join:
            results = pa.Table.from_batches([*join.push(facts), *join.finish()])
    found = {(row["id"], row["at"]): row["version"] for row in results.to_pylist()}
    assert found == {
        ("a", 9): None,
        ("a", 10): 1,
        ("a", 19): 1,
        ("a", 20): 2,
        ("a", 10**9): 2,
        ("b", 14): None,
        ("c", 15): None,
        (None, 15): None,
        ("a", None): None,
    }


def test_a_new_version_takes_over_from_its_time_on(build):
    """A member's last version is cached; the one that is added lies in the future of one fact, not of the other."""
    history = pa.table({"id": ["a", "b"], "valid_from": [10, 10], "version": [1, 2]})
    facts = pa.record_batch({"id": ["a", "a"], "at": [19, 21]})
    with build(history, ["id", "valid_from"], unique=True, page_size=4096) as table:
        on = AsOf("at", "valid_from", by=["id"])
        with SSIJ(table, on=on, memory="1MiB", columns=["version"]) as join:
            before = [*join.push(facts), *join.flush()]
            list(join.apply(upserts=pa.table({"id": ["a"], "valid_from": [20], "version": [3]})))
            after = [*join.push(facts), *join.finish()]
    assert sorted(pa.Table.from_batches(before)["version"].to_pylist()) == [1, 1]
    assert sorted(pa.Table.from_batches(after)["version"].to_pylist()) == [1, 3]
