"""The same functions over clustered tables and the real operators."""

import numpy as np
import pyarrow as pa
import pytest

from headrace.etl import (
    Dimension,
    Duplicates,
    KeyAllocator,
    KeyRule,
    Lookup,
    build_table,
    mark_duplicates,
    member_rows,
    new_members,
    number_members,
    resolve,
    settle,
)
from headrace.joins import SSIJ, IndexNestedLoops, MeshJoin
from headrace.storage import Table
from headrace.storage.errors import KeyInputError

PLANE = Dimension(
    "plane",
    ("airline", "tail"),
    "plane_key",
    pa.schema({"airline": pa.string(), "tail": pa.string(), "seats": pa.int32(), "model": pa.string()}),
    {"tail": KeyRule(("trim", "casefold"))},
)
ON = {"carrier": "airline", "tailnum": "tail"}
MEMBERS = 3_000
BUDGET = "2MiB"


def members():
    numbers = np.arange(MEMBERS)
    return number_members(
        PLANE,
        pa.table(
            {
                "airline": pa.array([f"A{n % 7}" for n in numbers]),
                "tail": pa.array([f"N{n:05}" for n in numbers]),
                "seats": pa.array(numbers, pa.int32()),
                "model": pa.array([f"model {n % 11}" for n in numbers]),
            }
        ),
    )


def flights(rng, rows=5_000, absent=200):
    numbers = rng.integers(0, MEMBERS + absent, rows)
    tails = [f" n{n:05}" if n % 2 else f"N{n:05} " for n in numbers]
    nulls = rng.random(rows) < 0.02
    return pa.record_batch(
        {
            "flight": pa.array(np.arange(rows)),
            "carrier": pa.array([f"A{n % 7}" for n in numbers]),
            "tailnum": pa.array(tails, mask=nulls),
        }
    )


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("dimension") / "plane.headrace"
    rows = pa.concat_tables([PLANE.unknown_member(), members()])
    with build_table(PLANE, str(path), rows.to_batches(max_chunksize=500)) as built:
        yield built


def by_flight(batches):
    return {row["flight"]: row for batch in batches for row in batch.to_pylist()}


@pytest.mark.parametrize("operator", [SSIJ, MeshJoin, IndexNestedLoops])
def test_every_flight_finds_its_plane(table, rng, dict_join, operator):
    lookup = Lookup(PLANE, "plane", ON, "infer", ("model", "seats"))
    stream = flights(rng)
    pieces = [stream.slice(start, 900) for start in range(0, len(stream), 900)]
    join = operator(table, on=lookup.operator_on, how="left", memory=BUDGET, columns=lookup.operator_columns)
    out = list(resolve(lookup, join, pieces, KeyAllocator(MEMBERS, 2, 1)))
    model = dict_join(members(), lookup.operator_on, lookup.operator_columns)
    expected = list(resolve(lookup, model, [stream], KeyAllocator(MEMBERS, 2, 1)))
    assert by_flight(out) == by_flight(expected)
    assert new_members(lookup, out).equals(new_members(lookup, expected))


def test_one_operator_serves_one_input_after_another(table, rng):
    lookup = Lookup(PLANE, "plane", ON, "reject")
    join = SSIJ(table, on=lookup.operator_on, how="left", memory=BUDGET, columns=lookup.operator_columns)
    for _ in range(3):
        stream = flights(rng, rows=700)
        out = list(resolve(lookup, join, [stream]))
        counts = [settle(batch, [lookup]).counts for batch in out]
        assert sum(count.rows_in for count in counts) == len(stream)


def test_members_inferred_by_one_input_are_matched_by_the_next(tmp_path, rng):
    lookup = Lookup(PLANE, "plane", ON, "infer")
    stream = flights(rng, rows=1_000)
    path = tmp_path / "plane.headrace"
    build_table(PLANE, str(path), members().to_batches()).close()
    with Table.open(path, mode="w") as table:
        options = {"how": "left", "memory": BUDGET, "columns": lookup.operator_columns}
        first = list(resolve(lookup, SSIJ(table, on=lookup.operator_on, **options), [stream], KeyAllocator(MEMBERS)))
        table.apply(upserts=member_rows(PLANE, new_members(lookup, first)))
        table.refresh()
        again = SSIJ(table, on=lookup.operator_on, **options)
        second = list(resolve(lookup, again, [stream], KeyAllocator(2 * MEMBERS)))
    keys = [{flight: row["plane_key"] for flight, row in by_flight(out).items()} for out in (first, second)]
    assert keys[0] == keys[1]
    assert {row["_plane_outcome"] for row in by_flight(second).values()} == {"matched", "unknown"}


def test_records_loaded_before_are_duplicates(tmp_path, rng):
    duplicates = Duplicates(pa.schema({"carrier": pa.string(), "flight": pa.int64()}))
    stream = flights(rng, rows=1_000)
    loaded = duplicates.loaded_keys(stream.slice(0, 400), 1)
    with Table.build(tmp_path / "loaded.headrace", loaded, key=["carrier", "flight"], unique=True) as table:
        options = {"how": "left", "memory": BUDGET, "columns": duplicates.operator_columns}
        join = SSIJ(table, on=duplicates.operator_on, **options)
        pieces = [stream.slice(300), stream.slice(900)]
        out = pa.Table.from_batches(mark_duplicates(duplicates, pieces, join)).to_pylist()
    marks = {row["flight"]: set() for row in out}
    for row in out:
        marks[row["flight"]].add(row["_duplicate"])
    assert all(marks[flight] == {"loaded"} for flight in range(300, 400))
    assert all(marks[flight] == {None} for flight in range(400, 900))
    assert all(marks[flight] == {None, "batch"} for flight in range(900, 1_000))


def test_a_type_that_can_never_match_is_refused_before_the_first_row(table):
    lookup = Lookup(PLANE, "plane", ON)
    join = SSIJ(table, on=lookup.operator_on, how="left", memory=BUDGET, columns=lookup.operator_columns)
    with pytest.raises(KeyInputError, match="'carrier'"):
        list(resolve(lookup, join, [pa.record_batch({"carrier": [1], "tailnum": ["N1"]})]))
