import decimal
import math
import unicodedata
from datetime import UTC, date, datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.etl.equality import KeyRule, check_comparable, check_rule, conform
from headrace.etl.errors import DeclarationError
from headrace.storage.errors import KeyInputError

# Without characters that Python's Unicode does not know yet: Arrow may be newer.
TEXT = st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=12)


def values(column, kind, rule=None):
    return conform(column, kind, rule).values.to_pylist()


@given(st.lists(st.none() | TEXT))
@example(["ẞ", "ß", "SS"])
@example([None, "", "\ue000", "İ", "ς"])
def test_casefold_is_pythons_casefold(texts):
    folded = KeyRule(("casefold",)).apply(pa.array(texts, pa.string()))
    assert folded.to_pylist() == [None if text is None else text.casefold() for text in texts]


@given(st.lists(st.none() | TEXT))
def test_nfc_is_unicodes_nfc(texts):
    composed = KeyRule(("nfc",)).apply(pa.array(texts, pa.string())).to_pylist()
    for text, result in zip(texts, composed, strict=True):
        assert result == text or result == unicodedata.normalize("NFC", text)


@given(st.lists(TEXT), st.sets(st.sampled_from(("trim", "casefold", "nfc"))))
def test_normalising_twice_changes_nothing(texts, normalise):
    rule = KeyRule(tuple(normalise))
    once = rule.apply(pa.array(texts, pa.string()))
    assert rule.apply(once).equals(once)


@pytest.mark.parametrize("steps", [("trim",), ("trim", "casefold", "nfc")])
def test_a_trimmed_key_that_is_blank_is_null(steps):
    texts = pa.array(["a", " ", "\t\u00a0\u2003", "", None, " b "])
    found = conform(texts, pa.string(), KeyRule(steps))
    assert found.values.to_pylist() == ["a", None, None, None, None, "b"]
    assert found.null.tolist() == [False, True, True, True, True, False]
    assert not found.unfit.any()
    assert not conform(texts, pa.string(), KeyRule(("nfc",))).null[:4].any()


def test_nothing_is_normalised_by_default():
    texts = [" a", "A", "e\u0301"]
    assert values(pa.array(texts), pa.string()) == texts


def test_composed_and_decomposed_letters_meet_whatever_their_case():
    rule = KeyRule(("nfc", "casefold"))
    assert len(set(rule.apply(pa.array(["É", "e\u0301", "E\u0301", "é"])).to_pylist())) == 1


def test_normalised_slices_keep_their_rows():
    texts = pa.array([None, "ÄB", "c", None, "ÉÉ"])
    assert KeyRule(("casefold",)).apply(texts.slice(1, 3)).to_pylist() == ["äb", "c", None]


def test_an_unknown_normalisation_names_the_valid_ones():
    with pytest.raises(DeclarationError, match="trim, casefold, nfc"):
        KeyRule(("lower",))


def test_a_rule_for_text_is_refused_on_a_number():
    with pytest.raises(DeclarationError, match="applies to text only"):
        check_rule(KeyRule(("trim",)), pa.int64(), "k")


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)))
def test_integers_that_the_key_type_cannot_hold_are_unfit(numbers):
    conformed = conform(pa.array(numbers, pa.int64()), pa.int16())
    fits = [None if n is None or not -(2**15) <= n < 2**15 else n for n in numbers]
    assert conformed.values.to_pylist() == fits
    assert conformed.null.tolist() == [n is None for n in numbers]
    assert conformed.unfit.tolist() == [n is not None and fit is None for n, fit in zip(numbers, fits, strict=True)]


@given(st.lists(st.none() | st.floats() | st.integers(-(2**62), 2**62).map(float)))
@example([-0.0, math.nan, math.inf, 2.0**63, -(2.0**63), 0.5])
def test_a_float_equals_the_integer_that_it_is(numbers):
    conformed = conform(pa.array(numbers, pa.float64()), pa.int64())
    null = [n is None or math.isnan(n) for n in numbers]
    whole = [
        int(n) if not empty and math.isfinite(n) and n == int(n) and -(2**63) <= n < 2**63 else None
        for n, empty in zip(numbers, null, strict=True)
    ]
    assert conformed.values.to_pylist() == whole
    assert conformed.null.tolist() == null
    assert conformed.unfit.tolist() == [w is None and not n for w, n in zip(whole, null, strict=True)]


DECIMALS = st.decimals(-10_000, 10_000, allow_nan=False, allow_infinity=False, places=3)


@given(st.lists(DECIMALS))
def test_decimals_meet_by_value_whatever_their_scale(numbers):
    found = values(pa.array(numbers, pa.decimal128(20, 5)), pa.decimal128(6, 2))
    cent = decimal.Decimal("0.01")
    expected = [n if n == n.quantize(cent) and abs(n) < 10_000 else None for n in numbers]
    assert found == expected


def test_an_integer_meets_the_decimal_of_its_value():
    assert values(pa.array([5, 10_000]), pa.decimal128(6, 2)) == [decimal.Decimal("5.00"), None]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("1." + "0" * 80, pa.int64(), 1),
        ("0" * 100 + "1.50" + "0" * 80, pa.decimal128(5, 2), decimal.Decimal("1.50")),
        ("0." + "0" * 80, pa.decimal128(38, 38), decimal.Decimal(0)),
        (str(2**64 - 1), pa.uint64(), 2**64 - 1),
        ("0000-01-01", pa.date32(), None),
        ("0001-01-01", pa.date32(), date(1, 1, 1)),
    ],
)
def test_text_converts_to_exactly_the_value_that_it_spells(text, key, value):
    converted = conform(pa.array([text]), key, KeyRule(convert=True))
    assert converted.values.to_pylist() == [value]
    assert converted.unfit.tolist() == [value is None]


def test_instants_meet_whatever_zone_they_are_shown_in():
    moment = datetime(2013, 7, 1, 12, tzinfo=UTC)
    east = moment.astimezone(timezone(timedelta(hours=5)))
    utc = conform(pa.array([moment], pa.timestamp("us", "UTC")), pa.timestamp("us", "UTC")).values
    other = conform(pa.array([east], pa.timestamp("ms", "Asia/Karachi")), pa.timestamp("us", "UTC")).values
    assert utc.equals(other)


def test_an_instant_finer_than_the_keys_unit_is_unfit():
    nanos = pa.array([1_000, 1_001], pa.timestamp("ns", "UTC"))
    assert conform(nanos, pa.timestamp("us", "UTC")).unfit.tolist() == [False, True]


@pytest.mark.parametrize(
    ("stream", "key"),
    [
        (pa.string(), pa.int64()),
        (pa.int64(), pa.string()),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.timestamp("us", "UTC"), pa.timestamp("us")),
        (pa.float64(), pa.decimal128(6, 2)),
        (pa.binary(), pa.string()),
        (pa.date32(), pa.int32()),
        (pa.bool_(), pa.int8()),
        (pa.float64(), pa.string()),
        (pa.list_(pa.int64()), pa.int64()),
    ],
)
def test_types_that_can_never_be_equal_are_refused_before_the_first_row(stream, key):
    with pytest.raises(KeyInputError, match="'code'"):
        check_comparable(stream, key, "code")


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())])
def test_text_meets_text_however_arrow_holds_it(kind):
    column = pa.array(["a", None, "b"]).cast(kind) if not pa.types.is_dictionary(kind) else None
    column = pa.array(["a", None, "b"]).dictionary_encode() if column is None else column
    assert values(column, pa.string()) == ["a", None, "b"]


def test_a_column_of_nothing_but_nulls_meets_any_key():
    assert conform(pa.nulls(2), pa.string()).null.tolist() == [True, True]


def test_chunks_are_one_column():
    assert values(pa.chunked_array([["a"], ["B"]]), pa.string(), KeyRule(("casefold",))) == ["a", "b"]


def test_masks_are_of_every_row():
    conformed = conform(pa.array([1, 2, 3]), pa.int64())
    assert not np.any(conformed.null)
    assert conformed.unfit.shape == (3,)


@given(st.lists(st.none() | TEXT))
@example(["ﬁ", "①", "㎏", "\u017f"])
def test_compatibility_form_is_unicodes(texts):
    formed = KeyRule(("nfkc",)).apply(pa.array(texts, pa.string()))
    assert formed.to_pylist() == [None if text is None else unicodedata.normalize("NFKC", text) for text in texts]


@given(TEXT, st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]), st.booleans())
def test_compatible_caseless_keys_do_not_depend_on_form_and_case(text, form, upper):
    other = unicodedata.normalize(form, text.casefold() if upper else text)
    same = KeyRule(("nfkc", "casefold")).apply(pa.array([text, other], pa.string())).to_pylist()
    assert same[0] == same[1]


def test_blank_text_is_null_and_other_text_keeps_its_spaces():
    assert values(pa.array(["", " \t", " a ", None]), pa.string(), KeyRule(("blank",))) == [None, None, " a ", None]


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**6), max_value=10**6))
@example(decimal.Decimal("-0.000"))
def test_text_meets_the_number_that_it_spells(number):
    for text in (f"{number:f}", f" {number:f}00", f"{number:+f}"):
        assert values(pa.array([text]), pa.decimal128(18, 3), KeyRule(convert=True)) == [number]


@pytest.mark.parametrize("text", ["x", "1e3", "0x10", "1,5", ".5", "5.", "--1", "1 2", "٣", "9" * 39])
def test_text_that_spells_no_number_equals_no_key(text):
    found = conform(pa.array([text]), pa.decimal128(38, 0), KeyRule(convert=True))
    assert (found.values.to_pylist(), found.null.tolist(), found.unfit.tolist()) == ([None], [False], [True])


def test_a_number_of_38_digits_is_exact():
    text = "1234567890" * 3 + "12345678"
    assert values(pa.array([text]), pa.decimal128(38, 0), KeyRule(convert=True)) == [decimal.Decimal(text)]


def test_text_meets_days_only_as_iso():
    texts = ["2024-02-29", "2023-02-29", "29.02.2024", " 2024-02-29 ", "", None]
    found = conform(pa.array(texts), pa.date32(), KeyRule(convert=True))
    leap = datetime(2024, 2, 29, tzinfo=UTC).date()
    assert found.values.to_pylist() == [leap, None, None, leap, None, None]
    assert found.unfit.tolist() == [False, True, True, False, False, False]


def test_numbers_meet_text_keys_by_their_usual_spelling():
    assert values(pa.array([7, -1, None]), pa.string(), KeyRule(convert=True)) == ["7", "-1", None]


def test_without_conversion_text_and_numbers_are_refused():
    with pytest.raises(KeyInputError):
        conform(pa.array(["7"]), pa.int64(), KeyRule())


def test_conversion_to_what_text_does_not_spell_is_refused():
    with pytest.raises(DeclarationError, match="integers, decimals and dates"):
        check_rule(KeyRule(convert=True), pa.binary(), "k")
