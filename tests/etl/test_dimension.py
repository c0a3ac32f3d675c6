from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from headrace.etl import (
    UNKNOWN_KEY,
    Dimension,
    KeyRule,
    SpecialMembers,
    greatest_key,
    member_rows,
    number_members,
    without_blank_keys,
)
from headrace.etl.errors import DeclarationError, DimensionError
from headrace.storage.errors import KeyInputError

PLANE = Dimension(
    "plane",
    ("tailnum",),
    "plane_key",
    pa.schema({"tailnum": pa.string(), "seats": pa.int32()}),
    {"tailnum": KeyRule(("trim",))},
)


def test_the_table_has_the_surrogate_key_first_and_flags_inferred_members():
    assert PLANE.table_schema.names == ["plane_key", "tailnum", "seats", "is_inferred"]
    assert PLANE.key_schema.names == ["tailnum"]
    assert PLANE.attributes.names == ["seats"]


def test_a_dimension_without_the_flag_has_no_such_column():
    plain = Dimension("plane", ("tailnum",), "plane_key", PLANE.schema, inferred_flag=None)
    assert plain.table_schema.names == ["plane_key", "tailnum", "seats"]
    assert plain.unknown_member().to_pylist() == [{"plane_key": -1, "tailnum": None, "seats": None}]


def test_columns_that_are_not_there_are_named():
    with pytest.raises(DeclarationError, match=r"no column 'tail'.*tailnum, seats"):
        Dimension("plane", ("tail",), "plane_key", PLANE.schema)


@pytest.mark.parametrize(
    ("natural_key", "surrogate_key"),
    [(("tailnum", "tailnum"), "plane_key"), (("tailnum",), "tailnum"), (("tailnum",), "is_inferred")],
)
def test_each_purpose_has_a_column_of_its_own(natural_key, surrogate_key):
    with pytest.raises(DeclarationError, match=r"names '\w+' twice"):
        Dimension("plane", natural_key, surrogate_key, PLANE.schema)


def test_a_single_name_is_a_natural_key_of_one_column():
    assert Dimension("plane", "tailnum", "plane_key", PLANE.schema).natural_key == ("tailnum",)


def test_a_dimension_needs_a_natural_key():
    with pytest.raises(DeclarationError, match="no natural key"):
        Dimension("plane", (), "plane_key", PLANE.schema)


def test_a_blank_key_that_is_trimmed_names_no_member():
    with pytest.raises(DimensionError, match="natural key column 'tailnum' of row 1 is ' ', which is not a valid key"):
        number_members(PLANE, pa.table({"tailnum": ["A", " "], "seats": [1, 2]}), base=0)
    inferred_before = PLANE.members(pa.table({"tailnum": ["", "A"]}), [1, 2], inferred=True)
    assert member_rows(PLANE, inferred_before).column("tailnum").to_pylist() == ["A"]
    assert without_blank_keys(PLANE, inferred_before).column("plane_key").to_pylist() == [2]


def test_members_are_numbered_in_key_order_above_the_base():
    source = pa.table({"seats": [1, 2, 3], "tailnum": ["C", " A", "B"]})
    members = number_members(PLANE, source, base=10)
    assert members.schema.equals(PLANE.table_schema)
    assert members.to_pylist() == [
        {"plane_key": 11, "tailnum": "A", "seats": 2, "is_inferred": False},
        {"plane_key": 12, "tailnum": "B", "seats": 3, "is_inferred": False},
        {"plane_key": 13, "tailnum": "C", "seats": 1, "is_inferred": False},
    ]


def test_the_numbers_do_not_depend_on_the_order_of_the_source():
    source = pa.table({"tailnum": [f"N{i}" for i in range(50)], "seats": range(50)})
    assert number_members(PLANE, source).equals(number_members(PLANE, source.take(list(reversed(range(50))))))


def test_attributes_that_the_source_lacks_are_null():
    assert number_members(PLANE, pa.table({"tailnum": ["A"]})).column("seats").null_count == 1


def test_natural_keys_that_occur_twice_are_named():
    with pytest.raises(DimensionError, match=r"1 natural keys occur more than once.*: A; keep"):
        number_members(PLANE, pa.table({"tailnum": ["A", "B", "A "]}))


def test_a_null_natural_key_is_named_by_row():
    with pytest.raises(DimensionError, match="'tailnum' of row 1 is missing"):
        number_members(PLANE, pa.table({"tailnum": pa.array(["A", None])}))


def test_a_key_of_a_type_that_cannot_match_is_refused():
    with pytest.raises(KeyInputError, match="tailnum"):
        number_members(PLANE, pa.table({"tailnum": [1]}))


def test_a_source_without_the_natural_key_is_refused():
    with pytest.raises(DimensionError, match="no natural key column 'tailnum'; it has seats"):
        number_members(PLANE, pa.table({"seats": [1]}))


def test_the_stored_rows_leave_out_the_unknown_member_and_are_normalised():
    given = pa.concat_tables([PLANE.unknown_member(), PLANE.members(pa.table({"tailnum": [" A "]}), [1])])
    stored = member_rows(PLANE, given.select(list(reversed(given.column_names))))
    assert stored.schema.equals(PLANE.table_schema)
    assert stored.column("tailnum").to_pylist() == ["A"]


def test_a_member_without_a_surrogate_key_is_refused():
    with pytest.raises(DimensionError, match="no surrogate key"):
        member_rows(PLANE, PLANE.members(pa.table({"tailnum": ["A"]}), [None]))


def test_rows_that_lack_a_column_are_refused():
    with pytest.raises(DimensionError, match="no column 'is_inferred'"):
        member_rows(PLANE, PLANE.members(pa.table({"tailnum": ["A"]}), [1]).drop_columns("is_inferred"))


@pytest.mark.parametrize(("keys", "greatest"), [([], 0), ([UNKNOWN_KEY], 0), ([-1, 7, 3], 7), ([None], 0)])
def test_the_greatest_key_is_at_least_zero(keys, greatest):
    assert greatest_key(pa.array(keys, pa.int64())) == greatest


def test_large_text_is_declared_as_plain_text():
    assert (
        Dimension("d", ("k",), "d_key", pa.schema({"k": pa.large_string()})).key_schema.field("k").type == pa.string()
    )


def test_a_floating_point_number_is_no_natural_key():
    with pytest.raises(DeclarationError, match=r"'weight' is double, which cannot be a key.*decimal"):
        Dimension("parcel", ("weight",), "parcel_key", pa.schema({"weight": pa.float64()}))


@pytest.mark.parametrize(
    ("value", "given", "declared"),
    [
        (0.1, pa.float64(), pa.float32()),
        (5, pa.int64(), pa.bool_()),
        (1, pa.timestamp("us"), pa.date32()),
        (1, pa.timestamp("ns"), pa.timestamp("us")),
        (0, pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (0, pa.timestamp("us", "UTC"), pa.timestamp("us")),
        (5, pa.int64(), pa.timestamp("us")),
        ("007", pa.string(), pa.int64()),
        (7, pa.int64(), pa.string()),
        (Decimal("1.005"), pa.decimal128(4, 3), pa.decimal128(4, 2)),
        (Decimal("0.1"), pa.decimal128(4, 3), pa.float64()),
        (2**63, pa.uint64(), pa.int64()),
    ],
    ids=str,
)
def test_an_attribute_that_would_change_is_refused_by_name(value, given, declared):
    dimension = Dimension("d", ("k",), "d_key", pa.schema({"k": pa.int64(), "a": declared}))
    rows = pa.table({"k": [1, 2], "a": pa.array([None, value], given)})
    with pytest.raises(DimensionError, match=r"dimension 'd': column 'a' does not fit its type .*cast"):
        number_members(dimension, rows)


def test_members_have_the_values_of_their_rows_whatever_the_layout():
    schema = pa.schema({"k": pa.string(), "a": pa.decimal128(6, 2), "k_spelled": pa.string()})
    dimension = Dimension("d", ("k",), "d_key", schema, {"k": KeyRule(("casefold",))}, spellings={"k": "k_spelled"})
    rows = pa.table({"k": pa.array(["b", "A"], pa.string_view()), "a": pa.array([2, 1]).dictionary_encode()})
    assert number_members(dimension, rows).drop_columns("is_inferred").to_pylist() == [
        {"d_key": 1, "k": "a", "a": Decimal("1.00"), "k_spelled": "A"},
        {"d_key": 2, "k": "b", "a": Decimal("2.00"), "k_spelled": "b"},
    ]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1.5, pa.int64()),
        (5, pa.date32()),
        (True, pa.int64()),
        (1e300, pa.float32()),
        (2**64, pa.int64()),
        (datetime(2024, 1, 1, 12, tzinfo=UTC), pa.date32()),
        (datetime(2024, 1, 1, 12, tzinfo=UTC), pa.timestamp("us")),
    ],
    ids=str,
)
def test_a_special_member_with_a_value_that_would_change_is_refused(value, kind):
    with pytest.raises(DeclarationError, match=r"of member 'unknown' does not fit 'a'"):
        Dimension("d", "k", "d_key", pa.schema({"k": pa.int64(), "a": kind}), special=SpecialMembers({"a": value}))


@pytest.mark.parametrize("base", [2**63 - 3, -1])
def test_members_beyond_the_surrogate_keys_are_refused(base):
    rows = pa.table({"tailnum": ["A", "B", "C"]})
    with pytest.raises(DimensionError, match=f"3 surrogate keys above {base} .* another `base`"):
        number_members(PLANE, rows, base)
    assert number_members(PLANE, rows, 2**63 - 4).column("plane_key").to_pylist()[-1] == 2**63 - 1


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("plane_key", ["1"], "string is not int64"),
        ("plane_key", pa.array([2**64 - 1], pa.uint64()), "is not a value of int64"),
        ("seats", [2**40], "is not a value of int32"),
        ("is_inferred", [5], "int64 is not bool"),
    ],
)
def test_a_stored_row_keeps_its_values_or_is_refused(name, values, why):
    rows = number_members(PLANE, pa.table({"tailnum": ["A"]}))
    rows = rows.set_column(rows.schema.get_field_index(name), name, pa.array(values))
    with pytest.raises(DimensionError, match=f"column '{name}' does not fit its type .*{why}"):
        member_rows(PLANE, rows)


@pytest.mark.parametrize("kind", [pa.string_view(), pa.dictionary(pa.int8(), pa.string_view())], ids=str)
def test_stored_rows_may_have_views(kind):
    rows = number_members(PLANE, pa.table({"tailnum": ["A", "B"]}))
    text = pa.array(["A", "B"], pa.string_view())
    if pa.types.is_dictionary(kind):
        text = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), text)
    given = rows.set_column(1, "tailnum", text)
    assert member_rows(PLANE, given) == rows
    assert number_members(PLANE, pa.table({"tailnum": text})) == rows


@pytest.mark.parametrize("name", ["tailnum", "seats"])
def test_a_source_with_a_column_twice_is_refused(name):
    columns = {"tailnum": ["A"], "seats": [1]}
    names = [*columns, name]
    rows = pa.Table.from_arrays([pa.array(columns[n]) for n in names], names=names)
    with pytest.raises(DimensionError, match=f"the source has 2 columns '{name}'"):
        number_members(PLANE, rows)
    with pytest.raises(DeclarationError, match=f"has 2 columns '{name}'"):
        Dimension("plane", ("tailnum",), "plane_key", rows.schema)


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.null(), pa.decimal256(50), pa.uuid()], ids=str)
def test_a_natural_key_of_a_type_that_cannot_be_stored_is_refused(kind):
    with pytest.raises(DeclarationError, match=r"natural key column 'k' is .* cannot be a key; use an integer"):
        Dimension("d", ("k",), "d_key", pa.schema({"k": kind}))
