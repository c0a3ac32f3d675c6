"""Surrogate key replacement against a model in plain dicts."""

import random
from decimal import Decimal
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.etl import Dimension, KeyAllocator, KeyRule, Lookup, new_members, number_members, resolve
from headrace.etl.errors import ConservationError, DeclarationError, DimensionError, MissingMembersError
from headrace.joins.errors import StreamSchemaError
from headrace.storage.errors import KeyInputError

AIRPORT = Dimension(
    "airport",
    ("country", "code"),
    "airport_key",
    pa.schema({"country": pa.string(), "code": pa.string(), "name": pa.string()}),
    {"code": KeyRule(("trim", "casefold"))},
)
ON = {"from_code": "code", "from_country": "country"}
PART = st.sampled_from(["a", "b", "ab", "", "A", " b", "\x00", "a\x00", "ß", None])
STREAM = st.lists(st.tuples(PART, PART), max_size=40)
MEMBERS = st.sets(st.tuples(st.sampled_from(["a", "b", "ab", ""]), st.sampled_from(["a", "b", "ab", "\x00"])))


def dimension_rows(members):
    ordered = sorted(members)
    columns = {"country": [c for c, _ in ordered], "code": [c for _, c in ordered]}
    kinds = {"country": pa.string(), "code": pa.string()}
    table = pa.table({name: pa.array(values, kinds[name]) for name, values in columns.items()})
    named = pa.array([f"{a}/{b}" for a, b in ordered], pa.string())
    return number_members(AIRPORT, table.append_column("name", named))


def stream_batches(rows, cuts, order):
    shuffled = [(number, *rows[number]) for number in order]
    schema = pa.schema({"n": pa.int64(), "from_country": pa.string(), "from_code": pa.string()})
    edges = sorted({0, len(shuffled), *(cut % (len(shuffled) + 1) for cut in cuts)})
    for start, stop in pairwise(edges):
        part = shuffled[start:stop]
        yield pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in part], schema=schema)


def normal(row):
    country, code = row
    return None if country is None or not (code or "").strip() else (country, code.strip().casefold())


def model(rows, members, policy, allocator):
    """Return (surrogate key, name, outcome) of each row, as the documentation says."""
    keys = {member: number for number, member in enumerate(sorted(members), start=1)}
    absent = sorted({normal(row) for row in rows} - set(keys) - {None}, key=lambda k: [part.encode() for part in k])
    new = {key: allocator.base + 1 + rank * allocator.shards + allocator.shard for rank, key in enumerate(absent)}
    result = []
    for row in rows:
        key = normal(row)
        if key is None:
            result.append((-1, None, "unknown"))
        elif key in keys:
            result.append((keys[key], "/".join(key), "matched"))
        elif policy == "infer":
            result.append((new[key], None, "inferred"))
        else:
            result.append((-1, None, {"unknown": "unknown", "reject": "rejected"}[policy]))
    return result, new


def run(dict_join, lookup, table, batches, allocator=None, seed=0, **options):
    join = dict_join(table, lookup.operator_on, lookup.operator_columns, seed)
    return list(resolve(lookup, join, batches, allocator, **options))


@given(
    rows=STREAM,
    members=MEMBERS,
    policy=st.sampled_from(["infer", "unknown", "reject"]),
    cuts=st.lists(st.integers(0, 50), max_size=4),
    order=st.randoms(use_true_random=False),
    shards=st.integers(1, 3),
)
def test_every_row_gets_what_the_model_gives_it(dict_join, rows, members, policy, cuts, order, shards):
    lookup = Lookup(AIRPORT, "origin", ON, policy, ("name",))
    allocator = KeyAllocator(len(members) + 5, shards, shards - 1)
    numbers = list(range(len(rows)))
    order.shuffle(numbers)
    out = run(dict_join, lookup, dimension_rows(members), stream_batches(rows, cuts, numbers), allocator)
    got = {row["n"]: row for batch in out for row in batch.to_pylist()}
    expected, new = model(rows, members, policy, allocator)
    assert sum(batch.num_rows for batch in out) == len(rows)
    found = [(got[n]["origin_key"], got[n]["origin_name"], got[n]["_origin_outcome"]) for n in range(len(rows))]
    assert found == expected
    assert [(got[n]["from_country"], got[n]["from_code"]) for n in range(len(rows))] == rows
    assert all((row["_origin_reason"] is not None) == (row["_origin_outcome"] == "rejected") for row in got.values())
    added = new_members(lookup, out).to_pylist()
    assert {(row["country"], row["code"]): row["airport_key"] for row in added} == (new if policy == "infer" else {})
    assert all(row["is_inferred"] and row["name"] is None for row in added)


def codes(*values, kind=None):
    return pa.record_batch({"code": pa.array(values, kind)})


CODE = Dimension("code", ("code",), "code_key", pa.schema({"code": pa.string()}))
NUMBER = Dimension("number", ("id",), "number_key", pa.schema({"id": pa.int16()}))


def test_composite_keys_do_not_collide_by_concatenation(dict_join):
    lookup = Lookup(AIRPORT, "origin", ON, "infer")
    batch = pa.record_batch({"from_country": ["a", "ab", "a\x00"], "from_code": ["bc", "c", "bc"]})
    (out,) = run(dict_join, lookup, dimension_rows(set()), [batch], KeyAllocator(0))
    assert len(set(out.column("origin_key").to_pylist())) == 3


def test_shards_never_hand_out_the_same_key():
    keys = [key for shard in range(4) for key in KeyAllocator(7, 4, shard).allocate(25)]
    assert sorted(keys) == list(range(8, 108))


@pytest.mark.parametrize("base", [2**63 - 1, 2**63 - 10, 2**70])
def test_keys_that_do_not_fit_in_64_bits_are_not_handed_out(base):
    with pytest.raises(DimensionError, match="no 5 surrogate keys left"):
        KeyAllocator(base, 2, 1).allocate(5)
    assert KeyAllocator(2**63 - 11, 2, 1).allocate(5)[-1] == 2**63 - 1


@pytest.mark.parametrize(("base", "shards", "shard"), [(-1, 1, 0), (0, 2, 2), (0, 0, 0), (0, 1, -1)])
def test_a_shard_that_is_not_there_is_refused(base, shards, shard):
    with pytest.raises(DeclarationError, match="no such shard"):
        KeyAllocator(base, shards, shard)


def test_a_null_key_is_unknown_even_when_missing_keys_fail(dict_join):
    (out,) = run(
        dict_join,
        Lookup(CODE, "c", {"code": "code"}, "fail"),
        number_members(CODE, pa.table({"code": ["a"]})),
        [codes(None, kind=pa.string())],
    )
    assert out.to_pylist() == [{"code": None, "c_key": -1, "_c_outcome": "unknown", "_c_reason": None}]


def test_fail_names_the_first_ten_missing_keys_in_key_order(dict_join):
    lookup = Lookup(CODE, "c", {"code": "code"}, "fail")
    names = [f"k{i:02}" for i in range(30)]
    random.Random(4).shuffle(names)
    batches = [codes(*names[:11], "k00"), codes(*names[11:])]
    with pytest.raises(MissingMembersError) as caught:
        run(dict_join, lookup, number_members(CODE, pa.table({"code": ["k03"]})), batches)
    message = str(caught.value)
    assert "lookup 'c': 30 rows" in message
    assert "k00; k01; k02; k04; k05; k06; k07; k08; k09; k10; add them" in message


def test_a_value_that_cannot_be_a_key_is_rejected_instead_of_inferred(dict_join):
    lookup = Lookup(NUMBER, "c", {"code": "id"}, "infer")
    out = run(dict_join, lookup, number_members(NUMBER, pa.table({"id": [1]})), [codes(1, 40_000)], KeyAllocator(1))
    rows = {row["code"]: row for batch in out for row in batch.to_pylist()}
    assert rows[1]["_c_outcome"] == "matched"
    assert (rows[40_000]["_c_outcome"], rows[40_000]["_c_reason"]) == ("rejected", "no value of the key's type")


def test_fail_names_values_that_cannot_be_keys(dict_join):
    lookup = Lookup(NUMBER, "c", {"code": "id"}, "fail")
    with pytest.raises(MissingMembersError, match=r"2 rows .*: 7; 40000; add"):
        run(dict_join, lookup, number_members(NUMBER, pa.table({"id": [1]})), [codes(40_000, 1, 7)])


def test_a_key_too_long_to_store_is_rejected_instead_of_inferred(dict_join):
    lookup = Lookup(CODE, "c", {"code": "code"}, "infer")
    batch = codes("x" * 1024, "x" * 1025)
    out = run(dict_join, lookup, number_members(CODE, pa.table({"code": ["a"]})), [batch], KeyAllocator(1))
    outcomes = {len(row["code"]): row["_c_outcome"] for part in out for row in part.to_pylist()}
    assert outcomes == {1024: "inferred", 1025: "rejected"}


def test_members_later_than_the_version_joined_with_are_as_if_absent(dict_join):
    table = number_members(CODE, pa.table({"code": ["a", "b"]}))
    out = run(
        dict_join, Lookup(CODE, "c", {"code": "code"}, "infer"), table, [codes("a", "b")], KeyAllocator(1), visible_to=1
    )
    rows = {row["code"]: (row["c_key"], row["_c_outcome"]) for batch in out for row in batch.to_pylist()}
    assert rows == {"a": (1, "matched"), "b": (2, "inferred")}


def test_two_roles_of_one_dimension_do_not_disturb_each_other(dict_join):
    table = number_members(CODE, pa.table({"code": ["a", "b"]}))
    batch = pa.record_batch({"start": ["a", "x"], "stop": ["b", "a"]})
    origin, destination = Lookup(CODE, "origin", {"start": "code"}), Lookup(CODE, "destination", {"stop": "code"})
    out = run(dict_join, destination, table, run(dict_join, origin, table, [batch]))
    rows = {row["start"]: (row["origin_key"], row["destination_key"]) for part in out for row in part.to_pylist()}
    assert rows == {"a": (1, 2), "x": (-1, 1)}


def test_decimals_meet_by_value(dict_join):
    price = Dimension("price", ("p",), "price_key", pa.schema({"p": pa.decimal128(8, 2)}))
    table = number_members(price, pa.table({"p": [Decimal("1.50"), Decimal("2.00")]}))
    batch = codes(Decimal("1.5000"), Decimal("2.0001"), kind=pa.decimal128(12, 4))
    out = run(dict_join, Lookup(price, "c", {"code": "p"}, "reject"), table, [batch])
    rows = {str(row["code"]): row["c_key"] for part in out for row in part.to_pylist()}
    assert rows == {"1.5000": 1, "2.0001": -1}


def test_rows_lost_by_the_operator_are_noticed():
    class Loses:
        def push(self, _batch):
            return ()

        def flush(self):
            return ()

    with pytest.raises(ConservationError, match="lost 1 rows"):
        list(resolve(Lookup(CODE, "c", {"code": "code"}), Loses(), [codes("a")]))


def test_no_input_gives_no_output_and_no_members(dict_join):
    lookup = Lookup(CODE, "c", {"code": "code"}, "infer")
    out = run(dict_join, lookup, number_members(CODE, pa.table({"code": ["a"]})), [], KeyAllocator(1))
    assert out == []
    assert new_members(lookup, out).schema.equals(CODE.table_schema)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on": {"code": "kode"}}, "name each column once"),
        ({"on": {"code": "code"}, "policy": "ignore"}, "infer, unknown, reject, fail"),
        ({"on": {"code": "code"}, "carry": ("name",)}, "no attribute 'name'"),
        ({"on": [("code", "code")]}, "`on` maps stream columns"),
    ],
)
def test_a_wrong_declaration_says_what_is_valid(arguments, message):
    with pytest.raises(DeclarationError, match=message):
        Lookup(CODE, "c", **arguments)


def test_a_missing_stream_column_is_named_with_those_that_are_there():
    with pytest.raises(DeclarationError, match="no column 'kode'; it has code"):
        Lookup(CODE, "c", {"kode": "code"}).check(codes("a").schema)


def test_a_column_that_is_taken_is_named():
    schema = pa.schema({"code": pa.string(), "c_key": pa.int64()})
    with pytest.raises(DeclarationError, match="adds a column 'c_key'"):
        Lookup(CODE, "c", {"code": "code"}).check(schema)


def test_text_never_meets_a_number():
    with pytest.raises(KeyInputError, match="'code'"):
        Lookup(NUMBER, "c", {"code": "id"}).check(codes("1").schema)


def test_an_inferring_lookup_needs_numbers_to_give():
    with pytest.raises(DeclarationError, match="KeyAllocator"):
        resolve(Lookup(CODE, "c", {"code": "code"}, "infer"), None, [])


@pytest.mark.parametrize(
    ("target", "key", "outcome"),
    [
        ("unknown", -1, "unknown"),
        ("not_applicable", -2, "unknown"),
        ("invalid", -3, "unknown"),
        ("reject", -1, "rejected"),
    ],
)
def test_null_and_unfit_keys_go_where_the_lookup_says(dict_join, target, key, outcome):
    plane = Dimension("plane", ("n",), "plane_key", pa.schema({"n": pa.int8()}))
    lookup = Lookup(plane, "plane", {"m": "n"}, "infer", null_key=target, unfit_key=target)
    table = number_members(plane, pa.table({"n": pa.array([1], pa.int8())}))
    join = dict_join(table, lookup.operator_on, lookup.operator_columns)
    stream = pa.record_batch({"m": pa.array([None, 300], pa.int64())})
    found = pa.Table.from_batches(resolve(lookup, join, [stream], KeyAllocator(1)))
    assert found.column("plane_key").to_pylist() == [key, key]
    assert found.column("_plane_outcome").to_pylist() == [outcome, outcome]


def test_a_target_that_is_no_special_member_is_refused():
    with pytest.raises(DeclarationError, match="the valid ones are unknown, not_applicable, invalid, reject"):
        Lookup(AIRPORT, "from", ON, null_key="nowhere")


@pytest.mark.parametrize(("carry", "name"), [(("name", "name"), "c_name"), ("key", "c_key"), (("outcome",), None)])
def test_a_lookup_that_would_add_a_column_twice_is_refused(carry, name):
    attributes = {"code": pa.string(), "name": pa.string(), "key": pa.string(), "outcome": pa.string()}
    dimension = Dimension("code", ("code",), "code_key", pa.schema(attributes))
    if name is None:
        assert "c_outcome" in Lookup(dimension, "c", {"code": "code"}, carry=carry).added_schema().names
        return
    with pytest.raises(DeclarationError, match=f"adds two columns '{name}'"):
        Lookup(dimension, "c", {"code": "code"}, carry=carry)


def test_batches_of_several_schemas_are_refused_even_if_none_of_their_rows_is_joined(dict_join):
    lookup = Lookup(CODE, "c", {"code": "code"}, "infer")
    rows = [pa.record_batch({"code": ["z"]}), pa.record_batch({"code": pa.array([None], pa.string()), "more": [1]})]
    table = number_members(CODE, pa.table({"code": ["a"]}))
    with pytest.raises(StreamSchemaError, match="this one has code: string, more: int64"):
        run(dict_join, lookup, table, rows, KeyAllocator(1))
    with pytest.raises(StreamSchemaError, match="to_batches"):
        run(dict_join, lookup, table, pa.table({"code": ["z"]}), KeyAllocator(1))


def test_a_column_that_arrow_cannot_take_rows_from_is_refused_with_what_helps(dict_join):
    lookup = Lookup(CODE, "c", {"code": "code"})
    view = pa.array(["x", "y"], pa.string_view())
    table = number_members(CODE, pa.table({"code": ["a"]}))
    with pytest.raises(StreamSchemaError, match=r"'x' has type string_view, .* convert it to string, or leave"):
        run(dict_join, lookup, table, [pa.record_batch({"code": ["a", None], "x": view})])
    out = run(dict_join, lookup, table, [pa.record_batch({"code": ["a", None], "x": view.cast(pa.string())})])
    assert {row["x"]: row["c_key"] for batch in out for row in batch.to_pylist()} == {"x": 1, "y": -1}


def test_a_key_column_that_is_there_twice_is_refused():
    schema = pa.schema([("code", pa.string()), ("code", pa.string())])
    with pytest.raises(DeclarationError, match="2 columns 'code'; rename"):
        Lookup(CODE, "c", {"code": "code"}).check(schema)


def test_new_members_of_dictionaries_that_do_not_fit_into_one(dict_join):
    lookup = Lookup(CODE, "c", {"code": "code"}, "infer")
    kind = pa.dictionary(pa.int8(), pa.string())
    names = [f"k{number:03}" for number in range(200)]
    batches = [codes(*names[start : start + 100]).cast(pa.schema({"code": kind})) for start in (0, 100)]
    out = run(dict_join, lookup, number_members(CODE, pa.table({"code": ["a"]})), batches, KeyAllocator(1))
    assert new_members(lookup, out).column("code").to_pylist() == names


def test_new_members_of_something_else_are_refused(dict_join):
    lookup = Lookup(CODE, "c", {"code": "code"}, "infer")
    with pytest.raises(DeclarationError, match="output of `resolve` has no column 'c_key'; it has code"):
        new_members(lookup, [codes("a")])
    out = run(dict_join, lookup, number_members(CODE, pa.table({"code": ["a"]})), [codes("z")], KeyAllocator(1))
    with pytest.raises(DeclarationError, match="no column 'seen'"):
        new_members(lookup, out, order=("seen",))


def test_an_allocator_takes_whole_numbers():
    with pytest.raises(DeclarationError, match="whole numbers"):
        KeyAllocator(1.5)
