"""Key equality: normalization of text, comparable types, and conversion to the key's type.

Rules are declared once per key column and apply to the dimension's rows, the stream, and shard numbers.

- Null never matches. Blank text is null for a key with the rule ``"trim"`` or ``"blank"``.
- Text compares by bytes after the declared normalization. By default, text is not normalized.
- Integers and decimals compare by value, regardless of width, precision, and scale. A float equals an integer if it
  has exactly that value (so -0.0 equals 0); NaN counts as null; a float never equals a decimal.
- Instants compare in UTC, regardless of display zone and unit. A timestamp without a zone is not an instant and
  compares only with other timestamps without a zone.
- Types that cannot match raise an error before the first row, unless the rule requests conversion (`KeyRule.convert`).

A value that the key's type cannot hold (3,000,000,000 for an int32 key) equals no key; `Conformed.unfit` marks it.
`headrace.storage.format.coercion` does the conversion, so that etl and the joins agree on every value.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from decimal import Context, Decimal
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.errors import DeclarationError
from headrace.etl.special import as_names
from headrace.storage.format import as_array, at_scale, coerce, decoded, stored_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Conformed", "KeyRule", "check_comparable", "check_rule", "conform"]

_NUMBER: Final = r"^[+-]?0*[0-9]{1,38}(\.[0-9]{1,38}0*)?$"
_EXACT: Final = Context(prec=80)
_FIRST_DAY: Final = dt.date.min
_UNNEEDED: Final = (("^(-?)0+([0-9])", r"\1\2"), (r"(\.[0-9]*?)0+$", r"\1"), (r"\.$", ""))  # zeros, and then the point
NORMALISATIONS: Final = ("trim", "casefold", "nfc", "nfkc", "blank")


@dataclass(frozen=True)
class KeyRule:
    """Normalization of one key column before comparison.

    Parameters
    ----------
    normalise
        Any of ``"trim"`` (removes Unicode white space at both ends; blank text is null), ``"casefold"`` (full
        Unicode case folding, ``ß`` equals ``SS``), ``"nfc"`` (canonical composition), ``"nfkc"`` (compatibility
        composition, ``ﬁ`` equals ``fi``), and ``"blank"`` (blank text is null, other text keeps its spaces). The order
        does not matter.
    convert
        Whether text is parsed to match integer, decimal, and date keys (``"007"`` equals 7, ``"2024-02-29"`` is a
        date), and integers and dates are formatted to match text keys. With conversion, blank text is null, and text
        that cannot be parsed equals no key.

    Raises
    ------
    DeclarationError
        If a name is not a valid normalization.

    Examples
    --------
    >>> KeyRule(("trim", "casefold")).apply(pa.array([" Straße", "STRASSE"])).to_pylist()
    ['strasse', 'strasse']
    """

    normalise: tuple[str, ...] = ()
    convert: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "normalise", as_names(self.normalise))
        unknown = [name for name in self.normalise if name not in NORMALISATIONS]
        if unknown:
            raise DeclarationError(
                f"unknown normalisation {unknown[0]!r}; the valid ones are {', '.join(NORMALISATIONS)}"
            )

    @property
    def changes_spelling(self) -> bool:
        """Whether keys with different spellings may be equal."""
        return bool({*self.normalise} - {"blank"}) or self.convert

    def apply(self, text: pa.Array) -> pa.Array:
        """Return normalized text. Case and form together are Unicode's caseless matching (3.13, D145 and D146)."""
        trimmed = pc.utf8_trim_whitespace(text)
        if "trim" in self.normalise:
            text = trimmed
        if {"trim", "blank"} & {*self.normalise}:
            text = pc.if_else(pc.not_equal(trimmed, ""), text, pa.scalar(None, text.type))
        form = "KC" if "nfkc" in self.normalise else "C" if "nfc" in self.normalise else None
        if "casefold" in self.normalise:
            text = _casefold(text if form is None else pc.utf8_normalize(text, form="NF" + form.replace("C", "D")))
            if form == "KC":  # the compatibility mapping of folded text may need another fold
                text = _casefold(pc.utf8_normalize(text, form="NFKD"))
        return text if form is None else pc.utf8_normalize(text, form="NF" + form)


@dataclass(frozen=True)
class Conformed:
    """A column converted to its key's type.

    Parameters
    ----------
    values
        Converted values; null where the row is `null` or `unfit`.
    null
        True where the column is null, NaN, or, for a trimmed key, blank: the row identifies no member.
    unfit
        True where the key's type cannot represent the value: no member can have that key.
    """

    values: pa.Array
    null: NDArray[np.bool_]
    unfit: NDArray[np.bool_]


def check_comparable(stream: pa.DataType, key: pa.DataType, column: str, rule: KeyRule | None = None) -> None:
    """Raise unless a stream column can equal a key column.

    Raises
    ------
    KeyInputError
        If no value of one type can equal a value of the other. The message names the column and both types.
    """
    conform(pa.nulls(0, stream), key, rule, column)


def check_rule(rule: KeyRule, key: pa.DataType, column: str) -> None:
    """Raise `DeclarationError` if a text normalization is declared for a key that is not text."""
    if rule.normalise and stored_type(key) != pa.string():
        raise DeclarationError(f"key {column!r} has type {key}; {', '.join(rule.normalise)} applies to text only")
    kinds = (pa.types.is_integer, pa.types.is_decimal, pa.types.is_date32)
    if rule.convert and not (stored_type(key) == pa.string() or any(test(key) for test in kinds)):
        raise DeclarationError(f"key {column!r} has type {key}; text converts to integers, decimals and dates only")


def conform(
    column: pa.Array | pa.ChunkedArray, key: pa.DataType, rule: KeyRule | None = None, name: str = "key"
) -> Conformed:
    """Convert a column to its key's type and normalize it.

    Parameters
    ----------
    column
        Input values.
    key
        Type of the key column.
    rule
        Normalization rule; by default, text is not normalized.
    name
        Name of the column, for messages.

    Raises
    ------
    KeyInputError
        If no value of the column's type can equal a key.

    Examples
    --------
    >>> conform(pa.array([1.0, 1.5, None]), pa.int32()).values.to_pylist()
    [1, None, None]
    """
    array = _plain(column)
    if rule is not None and rule.convert and _converts(array.type, key):
        return _converted(array, key, rule, name)
    if pa.types.is_floating(array.type) and pa.types.is_integer(key):
        array, fractional = _whole_numbers(array)
    else:
        fractional = np.zeros(len(array), dtype=bool)
    null = np.asarray(array.is_null()) & ~fractional
    values, valid = coerce(array, key, name)
    if valid is not None:
        values = pc.if_else(pa.array(valid), values, pa.scalar(None, values.type))
    if rule is not None and rule.normalise:
        values = rule.apply(values)
        null |= np.asarray(values.is_null()) & np.asarray(array.is_valid())
    return Conformed(values, null, np.zeros(len(array), dtype=bool) if valid is None else ~valid & ~null)


def _converts(stream: pa.DataType, key: pa.DataType) -> bool:
    text = pa.types.is_string(stream) or pa.types.is_large_string(stream)
    if stored_type(key) == pa.string():
        return pa.types.is_integer(stream) or pa.types.is_date(stream)
    return text


def _converted(array: pa.Array, key: pa.DataType, rule: KeyRule, name: str) -> Conformed:
    """Parse text into values, or format values as text."""
    without_conversion = KeyRule(rule.normalise)
    if stored_type(key) == pa.string():
        return conform(array.cast(pa.string()), key, without_conversion, name)
    text = pc.utf8_trim_whitespace(array.cast(pa.string()))
    text = pc.if_else(pc.not_equal(text, ""), text, pa.scalar(None, pa.string()))
    scale = key.scale if pa.types.is_decimal(key) else 0
    spelled, values = _days(text) if pa.types.is_date(key) else _numbers(text, scale)
    values = conform(values, key, None, name)
    null = np.asarray(text.is_null())
    unfit = (~spelled | values.unfit) & ~null
    return Conformed(values.values, null, unfit)


def _numbers(text: pa.Array, scale: int) -> tuple[NDArray[np.bool_], pa.Array]:
    """Return a mask of text that is a number representable at this scale, and those numbers."""
    spelled = pc.fill_null(pc.match_substring_regex(text, _NUMBER), fill_value=False)
    digits = pc.if_else(spelled, pc.replace_substring(text, "+", ""), pa.scalar(None, pa.string()))
    for pattern, kept in _UNNEEDED:
        digits = pc.replace_substring_regex(digits, pattern, kept)
    exact = digits.cast(pa.decimal256(76, 38))
    numbers = at_scale(exact, scale)
    limit = pa.scalar(Decimal(10**38 - 1).scaleb(-scale, _EXACT), numbers.type)
    holds = pc.and_(pc.equal(at_scale(numbers, exact.type.scale), exact), pc.less_equal(pc.abs(numbers), limit))
    fits = pc.and_(spelled, pc.fill_null(holds, fill_value=False))
    numbers = pc.if_else(fits, numbers, pa.scalar(None, numbers.type)).cast(pa.decimal128(38, scale))
    return np.asarray(fits, dtype=np.bool_), numbers


def _days(text: pa.Array) -> tuple[NDArray[np.bool_], pa.Array]:
    """Return a mask of text that is an ISO 8601 date from the year 1 on, and those dates."""
    shaped = pc.fill_null(pc.match_substring_regex(text, "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"), fill_value=False)
    days = pc.strptime(
        pc.if_else(shaped, text, pa.scalar(None, pa.string())), format="%Y-%m-%d", unit="s", error_is_null=True
    ).cast(pa.date32())
    exact = pc.and_(pc.equal(days.cast(pa.string()), text), pc.greater_equal(days, _FIRST_DAY))
    exact = pc.fill_null(exact, fill_value=False)
    return np.asarray(exact, dtype=np.bool_), pc.if_else(exact, days, pa.scalar(None, pa.date32()))


def _plain(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return one array without dictionary encoding."""
    return decoded(as_array(column))


def _whole_numbers(array: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Return floats as exact decimals (NaN as null), and a mask of values that no integer type can represent."""
    given = np.asarray(array.cast(pa.float64()).fill_null(np.nan))
    fractional = ~np.isnan(given) & ((np.trunc(given) != given) | (np.abs(given) >= 2.0**64))
    usable = ~(np.isnan(given) | fractional)
    whole = pa.array(np.where(usable, given, 0.0)).cast(pa.decimal128(38, 0))
    return pc.if_else(pa.array(usable), whole, pa.scalar(None, whole.type)), fractional


def _casefold(text: pa.Array) -> pa.Array:
    """Fold a column as one string: folding is context-free, so folding the joined string folds every value."""
    if pc.all(pc.string_is_ascii(text)).as_py() is not False:
        return pc.utf8_lower(text)
    joined, mark = _join(pc.fill_null(text.cast(pa.large_string()), ""))
    parts = pc.split_pattern(pa.array([joined.casefold()], pa.large_string()), mark)[0].values
    return pc.if_else(pc.is_valid(text), parts.cast(text.type), pa.scalar(None, text.type))


def _join(text: pa.Array) -> tuple[str, str]:
    """Join a column with a private-use character that it does not contain. Unicode has 137,468 such characters."""
    whole = pa.LargeListArray.from_arrays(pa.array([0, len(text)], pa.int64()), text)
    for mark in map(chr, chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))):
        joined: str = pc.binary_join(whole, pa.scalar(mark, pa.large_string()))[0].as_py()
        if joined.count(mark) == len(text) - 1:
            return joined, mark
    raise DeclarationError("text that holds every private-use character of Unicode cannot be case folded")
