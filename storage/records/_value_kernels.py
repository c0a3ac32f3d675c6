"""Compiled code that turns fields of text into values, exactly or not at all. Knows no types of Arrow.

Fields are bytes ``[start, stop)`` of a block; those that are not wanted are passed over. Each kernel leaves the number
of the rule that a field breaks, or 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from headrace.storage.format import I64

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "COARSE",
    "DAY",
    "FORM",
    "FRACTION",
    "NAIVE",
    "RANGE",
    "check_floats",
    "copy_fields",
    "equal_fields",
    "field_lengths",
    "parse_booleans",
    "parse_decimals",
    "parse_integers",
    "parse_patterns",
    "parse_times",
]

FORM, RANGE, FRACTION, DAY, COARSE = 1, 2, 3, 4, 5
NAIVE = 1 << 30
_ZERO, _NINE, _PLUS, _MINUS, _POINT, _COLON = 48, 57, 43, 45, 46, 58
_SECOND = 1_000_000_000
_DIGITS_OF_WORD = 18
_MOST_EXPONENT = 100_000
_SPACE = 32


@njit(cache=True, nogil=True)
def field_lengths(
    starts: NDArray[np.int32], stops: NDArray[np.int32], wanted: NDArray[np.bool_], offsets: NDArray[np.int32]
) -> None:
    """Fill in the offsets of a text column."""
    total = 0
    offsets[0] = 0
    for row in range(wanted.size):
        if wanted[row]:
            total += stops[row] - starts[row]
        offsets[row + 1] = total


@njit(cache=True, nogil=True)
def copy_fields(
    data: NDArray[np.uint8],
    starts: NDArray[np.int32],
    wanted: NDArray[np.bool_],
    offsets: NDArray[np.int32],
    text: NDArray[np.uint8],
) -> None:
    """Copy the wanted fields one after another."""
    for row in range(wanted.size):
        if wanted[row]:
            source = starts[row]
            for target in range(offsets[row], offsets[row + 1]):
                text[target] = data[source]
                source += 1


@njit(cache=True, nogil=True)
def equal_fields(
    data: NDArray[np.uint8],
    starts: NDArray[np.int32],
    stops: NDArray[np.int32],
    spelling: NDArray[np.uint8],
    kinds: NDArray[np.uint8],
    plain: int,
    null: int,
) -> None:
    """Give the plain fields of one spelling the kind of nulls."""
    for row in range(kinds.size):
        if kinds[row] == plain and stops[row] - starts[row] == spelling.size:
            place = 0
            while place < spelling.size and data[starts[row] + place] == spelling[place]:
                place += 1
            if place == spelling.size:
                kinds[row] = null


@njit(cache=True, nogil=True)
def parse_integers(
    data: NDArray[np.uint8],
    starts: NDArray[np.int32],
    stops: NDArray[np.int32],
    wanted: NDArray[np.bool_],
    least: int,
    most: int,
    values: NDArray[np.uint64],
    rules: NDArray[np.uint8],
) -> None:
    """Read whole numbers: digits, with a sign or without.

    Parameters
    ----------
    least, most
        Greatest magnitudes (uint64) of a negative and of another number.
    values
        Receives them, in two's complement.
    """
    ten = np.uint64(10)
    limit = np.uint64(1844674407370955161)
    for row in range(wanted.size):
        if not wanted[row]:
            continue
        position, stop = starts[row], stops[row]
        negative = False
        if position < stop and (data[position] == _MINUS or data[position] == _PLUS):
            negative = data[position] == _MINUS
            position += 1
        if position >= stop:
            rules[row] = FORM
            continue
        value = np.uint64(0)
        rule = 0
        while position < stop:
            digit = data[position] - np.uint8(_ZERO)
            if digit > 9:
                rule = FORM
                break
            digit64 = np.uint64(digit)
            if value > limit or (value == limit and digit64 > np.uint64(5)):
                rule = RANGE
            value = value * ten + digit64
            position += 1
        bound = np.uint64(least) if negative else np.uint64(most)
        if rule == 0 and value > bound:
            rule = RANGE
        rules[row] = rule
        if rule == 0:
            values[row] = np.uint64(0) - value if negative else value


@njit(cache=True, nogil=True)
def _number_form(data: NDArray[np.uint8], position: int, stop: int, point: int) -> tuple[int, int, int, int, bool]:
    """Return where the digits begin and stop, the power of ten of the first one, the rule broken, and the sign."""
    negative = False
    if position < stop and (data[position] == _MINUS or data[position] == _PLUS):
        negative = data[position] == _MINUS
        position += 1
    first = position
    before = 0
    after = 0
    seen = False
    while position < stop:
        byte = data[position]
        if _ZERO <= byte <= _NINE:
            if seen:
                after += 1
            else:
                before += 1
        elif byte == point and not seen:
            seen = True
        else:
            break
        position += 1
    last = position
    if before + after == 0:
        return first, last, 0, FORM, negative
    exponent = 0
    if position < stop and (data[position] == 69 or data[position] == 101):
        position += 1
        minus = False
        if position < stop and (data[position] == _MINUS or data[position] == _PLUS):
            minus = data[position] == _MINUS
            position += 1
        if position >= stop:
            return first, last, 0, FORM, negative
        while position < stop and _ZERO <= data[position] <= _NINE:
            exponent = min(exponent * 10 + (data[position] - _ZERO), _MOST_EXPONENT)
            position += 1
        if minus:
            exponent = -exponent
    if position < stop:
        return first, last, 0, FORM, negative
    return first, last, before - 1 + exponent, 0, negative


@njit(cache=True, nogil=True)
def parse_decimals(
    data: NDArray[np.uint8],
    starts: NDArray[np.int32],
    stops: NDArray[np.int32],
    wanted: NDArray[np.bool_],
    point: int,
    precision: int,
    scale: int,
    words: NDArray[np.uint64],
    rules: NDArray[np.uint8],
) -> None:
    """Read decimal numbers, exactly.

    Parameters
    ----------
    point
        Byte between whole and fraction.
    words
        Receives two words a value, the low one first.
    """
    ten = np.uint64(10)
    half = np.uint64(32)
    mask = np.uint64(0xFFFFFFFF)
    for row in range(wanted.size):
        if not wanted[row]:
            continue
        first, last, power, rule, negative = _number_form(data, starts[row], stops[row], point)
        low = np.uint64(0)
        high = np.uint64(0)
        taken = 0
        position = first
        final = power + 1
        while rule == 0 and (position < last or (taken > 0 and final > -scale)):
            digit = np.uint64(0)
            if position < last:
                byte = data[position]
                position += 1
                if byte == point:
                    continue
                digit = np.uint64(byte - np.uint8(_ZERO))
                place = power
                power -= 1
                if place < -scale:
                    if digit != 0:
                        rule = FRACTION
                    continue
                if place >= precision - scale and digit != 0:
                    rule = RANGE
                    continue
                final = place
                if taken == 0 and digit == 0:
                    continue
            else:
                final -= 1
            taken += 1
            if taken <= _DIGITS_OF_WORD:
                low = low * ten + digit
            else:
                lower = (low & mask) * ten + digit
                upper = (low >> half) * ten + (lower >> half)
                low = (upper << half) | (lower & mask)
                high = high * ten + (upper >> half)
        rules[row] = rule
        if rule == 0:
            if negative:
                low = ~low
                high = ~high
                low = low + np.uint64(1)
                if low == 0:
                    high = high + np.uint64(1)
            words[2 * row] = low
            words[2 * row + 1] = high


@njit(cache=True, nogil=True)
def _is_word(data: NDArray[np.uint8], position: int, stop: int, word: tuple[int, ...]) -> bool:
    """Return whether a field is a word, in any case."""
    if stop - position != len(word):
        return False
    for place in range(len(word)):  # noqa: SIM110 - numba compiles no generator expressions
        if data[position + place] | 32 != word[place]:
            return False
    return True


@njit(cache=True, nogil=True)
def check_floats(
    data: NDArray[np.uint8],
    starts: NDArray[np.int32],
    stops: NDArray[np.int32],
    wanted: NDArray[np.bool_],
    point: int,
    values: NDArray[np.float64],
    exact: NDArray[np.bool_],
    rules: NDArray[np.uint8],
) -> None:
    """Read floating point numbers of few digits; check the form of the others, and give all a point for a comma.

    Parameters
    ----------
    values, exact
        Receive those that one multiplication or division of exact numbers gives, correctly rounded (Clinger, "How to
        read floating point numbers accurately", 1990).
    """
    tens = np.empty(23, dtype=np.float64)
    tens[0] = 1.0
    for power in range(1, 23):
        tens[power] = tens[power - 1] * 10.0
    ten = np.uint64(10)
    for row in range(wanted.size):
        if not wanted[row]:
            continue
        first, last, power, rule, negative = _number_form(data, starts[row], stops[row], point)
        if rule:
            signed = 1 if first > starts[row] else 0
            begin = starts[row] + signed
            infinite = _is_word(data, begin, stops[row], (105, 110, 102, 105, 110, 105, 116, 121)) or _is_word(
                data, begin, stops[row], (105, 110, 102)
            )
            if infinite:
                values[row] = -np.inf if negative else np.inf
                exact[row] = True
            elif not signed and _is_word(data, begin, stops[row], (110, 97, 110)):
                values[row] = np.nan
                exact[row] = True
            else:
                rules[row] = rule
            continue
        whole = np.uint64(0)
        digits = 0
        for position in range(first, last):
            byte = data[position]
            if byte == point:
                data[position] = _POINT
                continue
            if digits > 0 or byte != _ZERO:
                digits += 1
            if digits <= 15:
                whole = whole * ten + np.uint64(byte - np.uint8(_ZERO))
            power -= 1
        power += 1
        if digits <= 15 and -22 <= power <= 22:
            value = np.float64(whole)
            value = value * tens[power] if power >= 0 else value / tens[-power]
            values[row] = -value if negative else value
            exact[row] = True
        elif data[starts[row]] == _PLUS:
            starts[row] += 1


@njit(cache=True, nogil=True)
def parse_booleans(
    data: NDArray[np.uint8],
    starts: NDArray[np.int32],
    stops: NDArray[np.int32],
    wanted: NDArray[np.bool_],
    values: NDArray[np.uint8],
    rules: NDArray[np.uint8],
) -> None:
    """Read ``true`` and ``false``, in any case."""
    for row in range(wanted.size):
        if not wanted[row]:
            continue
        if _is_word(data, starts[row], stops[row], (116, 114, 117, 101)):
            values[row] = 1
        elif _is_word(data, starts[row], stops[row], (102, 97, 108, 115, 101)):
            values[row] = 0
        else:
            rules[row] = FORM


@njit(cache=True, nogil=True)
def _number(data: NDArray[np.uint8], position: int, stop: int, digits: int) -> int:
    """Return the number that exactly so many digits write, or -1."""
    if position + digits > stop:
        return -1
    value = 0
    for place in range(position, position + digits):
        digit = data[place] - np.uint8(_ZERO)
        if digit > 9:
            return -1
        value = value * 10 + digit
    return value


@njit(cache=True, nogil=True)
def _days(year: int, month: int, day: int) -> int:
    """Return the days since 1970 of a date, or `NAIVE` if there is none such."""
    if not (1 <= year <= 9999 and 1 <= month <= 12 and 1 <= day <= 31):
        return NAIVE
    length = 31
    if month in (4, 6, 9, 11):
        length = 30
    elif month == 2:
        length = 29 if (year % 4 == 0 and year % 100 != 0) or year % 400 == 0 else 28
    if day > length:
        return NAIVE
    shifted = year - 1 if month <= 2 else year
    era = shifted // 400
    of_era = shifted - era * 400
    of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5 + day - 1
    return era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468


@njit(cache=True, nogil=True)
def _clock(data: NDArray[np.uint8], position: int, stop: int) -> tuple[int, int, int]:
    """Return the nanoseconds of a time of day, the position after it, and the rule broken."""
    hour = _number(data, position, stop, 2)
    minute = _number(data, position + 3, stop, 2)
    if hour < 0 or minute < 0 or data[position + 2] != _COLON:
        return 0, position, FORM
    position += 5
    second = 0
    nanos = 0
    rule = 0
    if position < stop and data[position] == _COLON:
        second = _number(data, position + 1, stop, 2)
        if second < 0:
            return 0, position, FORM
        position += 3
        if position < stop and data[position] == _POINT:
            position += 1
            digits = 0
            while position < stop and _ZERO <= data[position] <= _NINE:
                if digits < 9:
                    nanos = nanos * 10 + (data[position] - _ZERO)
                elif data[position] != _ZERO:
                    rule = COARSE
                digits += 1
                position += 1
            if digits == 0:
                return 0, position, FORM
            for _ in range(digits, 9):
                nanos *= 10
    if hour > 23 or minute > 59 or second > 59:
        return 0, position, DAY
    return ((hour * 60 + minute) * 60 + second) * _SECOND + nanos, position, rule


@njit(cache=True, nogil=True)
def _zone(data: NDArray[np.uint8], position: int, stop: int) -> tuple[int, int]:
    """Return the seconds east of UTC that a zone's text says, and the position after it or -1."""
    if data[position] == 90 or data[position] == 122:
        return 0, position + 1
    if data[position] != _PLUS and data[position] != _MINUS:
        return 0, -1
    east = data[position] == _PLUS
    hours = _number(data, position + 1, stop, 2)
    position += 3
    minutes = 0
    if position < stop:
        if data[position] == _COLON:
            position += 1
        minutes = _number(data, position, stop, 2)
        position += 2
    if hours < 0 or minutes < 0 or minutes > 59 or hours * 60 + minutes > 18 * 60:
        return 0, -1
    seconds = (hours * 60 + minutes) * 60
    return (seconds if east else -seconds), position


@njit(cache=True, nogil=True)
def parse_times(
    data: NDArray[np.uint8],
    starts: NDArray[np.int32],
    stops: NDArray[np.int32],
    wanted: NDArray[np.bool_],
    has_day: bool,
    has_clock: bool,
    days: NDArray[np.int32],
    nanos: NDArray[np.int64],
    zones: NDArray[np.int32],
    rules: NDArray[np.uint8],
) -> None:
    """Read ISO dates (a day only), times of day (a clock only) and timestamps (a day, and a clock but at midnight).

    Parameters
    ----------
    days, nanos, zones
        Receive days since 1970, nanoseconds of the day, and seconds east of UTC or `NAIVE`.
    """
    for row in range(wanted.size):
        if not wanted[row]:
            continue
        position, stop = I64(starts[row]), I64(stops[row])
        zones[row] = NAIVE
        if has_day:
            year = _number(data, position, stop, 4)
            month = _number(data, position + 5, stop, 2)
            day = _number(data, position + 8, stop, 2)
            if (
                year < 0
                or month < 0
                or day < 0
                or data[position + 4] != _MINUS
                or data[position + 7] != _MINUS
                or (stop > position + 10 and not has_clock)
            ):
                rules[row] = FORM
                continue
            days[row] = _days(year, month, day)
            if days[row] == NAIVE:
                rules[row] = DAY
                continue
            position += 10
            if position == stop:
                continue
            if data[position] != _SPACE and data[position] != 84 and data[position] != 116:
                rules[row] = FORM
                continue
            position += 1
        nanos[row], position, rules[row] = _clock(data, position, stop)
        if rules[row] == FORM or position == stop:
            continue
        if data[position] == _SPACE:
            position += 1
        rule = FORM
        if has_day and position < stop:
            zones[row], position = _zone(data, position, stop)
            rule = rules[row] if position == stop else FORM
        rules[row] = rule


@njit(cache=True, nogil=True)
def _letters(data: NDArray[np.uint8], position: int, stop: int, names: NDArray[np.uint8], base: int) -> tuple[int, int]:
    """Return which of the names, of which each ends with a zero, is next in any case, and the position after it."""
    index = base
    place = 0
    while place < names.size:
        at = position
        while names[place] != 0 and at < stop and (data[at] | 32) == names[place]:
            at += 1
            place += 1
        if names[place] == 0:
            return index, at
        while names[place] != 0:
            place += 1
        place += 1
        index += 1
    return -1, position


@njit(cache=True, nogil=True)
def parse_patterns(
    data: NDArray[np.uint8],
    starts: NDArray[np.int32],
    stops: NDArray[np.int32],
    wanted: NDArray[np.bool_],
    codes: NDArray[np.int32],
    months: NDArray[np.uint8],
    short_months: NDArray[np.uint8],
    days: NDArray[np.int32],
    nanos: NDArray[np.int64],
    zones: NDArray[np.int32],
    rules: NDArray[np.uint8],
) -> None:
    """Read dates and times of a declared pattern.

    Parameters
    ----------
    codes
        The pattern: the letters of its directives, and literal bytes plus 256. A directive with a digit beside it has
        512 added.
    months, short_months
        English names in small letters, a zero behind each.
    """
    for row in range(wanted.size):
        if not wanted[row]:
            continue
        position, stop = I64(starts[row]), I64(stops[row])
        year, month, day = 1970, 1, 1
        hour, minute, second, fraction, afternoon, half = 0, 0, 0, 0, -1, -1
        zones[row] = NAIVE
        ok = True
        for code in codes:
            if 256 <= code < 512:
                ok = position < stop and data[position] == code - 256
                position += 1
            elif code == 122:  # z
                ok = position < stop
                if ok:
                    zones[row], position = _zone(data, position, stop)
                    ok = position >= 0
            elif code == 66:  # B
                month, position = _letters(data, position, stop, months, 1)
                ok = month > 0
            elif code == 98:  # b
                month, position = _letters(data, position, stop, short_months, 1)
                ok = month > 0
            elif code == 112:  # p
                ok = position + 1 < stop and (data[position + 1] | 32) == 109
                if ok:
                    half = 0 if data[position] | 32 == 97 else 1
                    ok = half == 0 or data[position] | 32 == 112
                position += 2
            elif code == 102:  # f
                digits = 0
                while position < stop and _ZERO <= data[position] <= _NINE and digits < 9:
                    fraction = fraction * 10 + (data[position] - _ZERO)
                    digits += 1
                    position += 1
                ok = digits > 0
                for _ in range(digits, 9):
                    fraction *= 10
            else:
                fixed = code >= 512
                letter = code - 512 if fixed else code
                digits = 4 if letter == 89 else 2
                value = _number(data, position, stop, digits)
                if value < 0 and digits == 2 and not fixed:
                    digits = 1
                    value = _number(data, position, stop, digits)
                ok = value >= 0
                position += digits
                if letter == 89:  # Y
                    year = value
                elif letter == 121:  # y
                    year = value + (1900 if value >= 69 else 2000)
                elif letter == 109:  # m
                    month = value
                elif letter == 100:  # d
                    day = value
                elif letter == 72:  # H
                    hour = value
                elif letter == 73:  # I
                    afternoon = value
                elif letter == 77:  # M
                    minute = value
                else:  # S
                    second = value
            if not ok:
                break
        if not ok or position != stop:
            rules[row] = FORM
            continue
        if afternoon >= 0:
            hour = -1 if afternoon == 0 or afternoon > 12 else afternoon % 12 + (12 if half == 1 else 0)
        days[row] = _days(year, month, day)
        if days[row] == NAIVE or hour < 0 or hour > 23 or minute > 59 or second > 59:
            rules[row] = DAY
            continue
        nanos[row] = ((hour * 60 + minute) * 60 + second) * _SECOND + fraction
