"""Compiled code that finds the fields of JSON objects, one a line. Knows neither files nor types.

A value is bytes ``[start, stop)`` of the block, without quotes. The grammar is that of RFC 8259 and no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from headrace.storage.format import I64

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BOOLEAN",
    "MISSING",
    "NESTED",
    "NOT_JSON",
    "NOT_OBJECT",
    "NULL",
    "NUMBER",
    "REPEATED_FIELD",
    "STRING",
    "TOO_DEEP",
    "UNKNOWN_FIELD",
    "count_lines",
    "split_objects",
]

NULL, NUMBER, STRING, BOOLEAN, NESTED, MISSING = 0, 1, 2, 3, 4, 5
NOT_JSON, NOT_OBJECT, UNKNOWN_FIELD, REPEATED_FIELD, TOO_DEEP = 1, 2, 3, 4, 5
_LF, _CR, _TAB, _SPACE = 10, 13, 9, 32
_QUOTE, _BACKSLASH, _COMMA, _COLON, _MINUS, _POINT, _PLUS = 34, 92, 44, 58, 45, 46, 43
_OPEN, _CLOSE, _OPEN_LIST, _CLOSE_LIST = 123, 125, 91, 93
_ZERO, _NINE = 48, 57
_DEPTH = 512


@njit(cache=True, nogil=True)
def _blank(data: NDArray[np.uint8], position: int, stop: int) -> int:
    while position < stop and data[position] in (_SPACE, _TAB, _CR):
        position += 1
    return position


@njit(cache=True, nogil=True)
def _hex(data: NDArray[np.uint8], position: int, stop: int) -> int:
    """Return the number that four hexadecimal digits write, or -1."""
    if position + 4 > stop:
        return -1
    value = 0
    for place in range(position, position + 4):
        byte = data[place]
        if _ZERO <= byte <= _NINE:
            digit = byte - _ZERO
        elif 65 <= byte <= 70:
            digit = byte - 55
        elif 97 <= byte <= 102:
            digit = byte - 87
        else:
            return -1
        value = value * 16 + digit
    return value


@njit(cache=True, nogil=True)
def _string_end(data: NDArray[np.uint8], position: int, stop: int) -> tuple[int, bool]:
    """Return where the quote is that ends a string, or -1 if it is not valid, and whether it has escapes."""
    escaped = False
    while position < stop:
        byte = data[position]
        if byte == _QUOTE:
            return position, escaped
        if byte < _SPACE:
            return -1, escaped
        if byte == _BACKSLASH:
            escaped = True
            position += 1
            if position >= stop:
                return -1, escaped
            letter = data[position]
            if letter == 117:  # u
                code = _hex(data, position + 1, stop)
                if code < 0 or 0xDC00 <= code <= 0xDFFF:
                    return -1, escaped
                position += 4
                if 0xD800 <= code <= 0xDBFF:
                    if position + 6 >= stop or data[position + 1] != _BACKSLASH or data[position + 2] != 117:
                        return -1, escaped
                    low = _hex(data, position + 3, stop)
                    if low < 0xDC00 or low > 0xDFFF:
                        return -1, escaped
                    position += 6
            elif letter not in (_QUOTE, _BACKSLASH, 47, 98, 102, 110, 114, 116):  # / b f n r t
                return -1, escaped
        position += 1
    return -1, escaped


@njit(cache=True, nogil=True)
def _unescape(data: NDArray[np.uint8], start: int, stop: int) -> int:
    """Replace the escapes of a valid string, in place; return where it stops now."""
    target = start
    position = start
    while position < stop:
        byte = data[position]
        if byte != _BACKSLASH:
            data[target] = byte
            target += 1
            position += 1
            continue
        letter = data[position + 1]
        position += 2
        if letter != 117:
            if letter == 98:
                letter = 8
            elif letter == 102:
                letter = 12
            elif letter == 110:
                letter = _LF
            elif letter == 114:
                letter = _CR
            elif letter == 116:
                letter = _TAB
            data[target] = letter
            target += 1
            continue
        code = _hex(data, position, stop)
        position += 4
        if 0xD800 <= code <= 0xDBFF:
            code = 0x10000 + ((code - 0xD800) << 10) + (_hex(data, position + 2, stop) - 0xDC00)
            position += 6
        if code < 0x80:
            data[target] = code
            target += 1
        elif code < 0x800:
            data[target] = 0xC0 | (code >> 6)
            data[target + 1] = 0x80 | (code & 0x3F)
            target += 2
        elif code < 0x10000:
            data[target] = 0xE0 | (code >> 12)
            data[target + 1] = 0x80 | ((code >> 6) & 0x3F)
            data[target + 2] = 0x80 | (code & 0x3F)
            target += 3
        else:
            data[target] = 0xF0 | (code >> 18)
            data[target + 1] = 0x80 | ((code >> 12) & 0x3F)
            data[target + 2] = 0x80 | ((code >> 6) & 0x3F)
            data[target + 3] = 0x80 | (code & 0x3F)
            target += 4
    for rest in range(target, stop):
        data[rest] = _SPACE  # what is left over is valid text, too
    return target


@njit(cache=True, nogil=True)
def _digits_end(data: NDArray[np.uint8], position: int, stop: int) -> int:
    while position < stop and _ZERO <= data[position] <= _NINE:
        position += 1
    return position


@njit(cache=True, nogil=True)
def _number_end(data: NDArray[np.uint8], position: int, stop: int) -> int:
    """Return the position after a number, or -1 if it is not valid."""
    if position < stop and data[position] == _MINUS:
        position += 1
    end = _digits_end(data, position, stop)
    if end == position or (data[position] == _ZERO and end > position + 1):
        return -1
    position = end
    if position < stop and data[position] == _POINT:
        end = _digits_end(data, position + 1, stop)
        if end == position + 1:
            return -1
        position = end
    if position < stop and data[position] in (69, 101):  # E e
        position += 1
        if position < stop and data[position] in (_PLUS, _MINUS):
            position += 1
        end = _digits_end(data, position, stop)
        if end == position:
            return -1
        position = end
    return position


@njit(cache=True, nogil=True)
def _word_end(data: NDArray[np.uint8], position: int, stop: int) -> tuple[int, int]:
    """Return the position after ``true``, ``false`` or ``null`` and its kind, or -1."""
    kind = NULL
    word = (110, 117, 108, 108, 0)
    length = 4
    if data[position] == 116:
        kind = BOOLEAN
        word = (116, 114, 117, 101, 0)
    elif data[position] == 102:
        kind = BOOLEAN
        word = (102, 97, 108, 115, 101)
        length = 5
    if position + length > stop:
        return -1, kind
    for place in range(length):
        if data[position + place] != word[place]:
            return -1, kind
    return position + length, kind


@njit(cache=True, nogil=True)
def _scalar_end(data: NDArray[np.uint8], position: int, stop: int) -> tuple[int, int, bool]:
    """Return the position after a plain value (of a string, its last quote), its kind, and if it has escapes."""
    if position >= stop:
        return -1, NULL, False
    byte = data[position]
    if byte == _QUOTE:
        end, escaped = _string_end(data, position + 1, stop)
        return end, STRING, escaped
    if byte == _MINUS or _ZERO <= byte <= _NINE:
        return _number_end(data, position, stop), NUMBER, False
    end, kind = _word_end(data, position, stop)
    return end, kind, False


@njit(cache=True, nogil=True)
def _nested_end(data: NDArray[np.uint8], position: int, stop: int) -> int:
    """Return the position after an object or array, -1 if it is not valid, -2 if it is too deep."""
    objects = np.zeros(_DEPTH, dtype=np.bool_)
    depth = 0
    while True:  # at a value
        position = _blank(data, position, stop)
        if position >= stop:
            return -1
        byte = data[position]
        if byte in (_OPEN, _OPEN_LIST):
            if depth == _DEPTH:
                return -2
            objects[depth] = byte == _OPEN
            depth += 1
            position = _blank(data, position + 1, stop)
            if position >= stop:
                return -1
            closing = _CLOSE if objects[depth - 1] else _CLOSE_LIST
            if data[position] != closing:
                if objects[depth - 1]:
                    position = _name_end(data, position, stop)
                    if position < 0:
                        return -1
                continue
        else:
            end, kind, _ = _scalar_end(data, position, stop)
            if end < 0:
                return -1
            position = end + 1 if kind == STRING else end
            position = _blank(data, position, stop)
        while True:  # after a value: at what closes, or at a comma
            if position >= stop:
                return -1
            byte = data[position]
            if byte == (_CLOSE if objects[depth - 1] else _CLOSE_LIST):
                depth -= 1
                position += 1
                if depth == 0:
                    return position
                position = _blank(data, position, stop)
                continue
            if byte != _COMMA:
                return -1
            position = _blank(data, position + 1, stop)
            if objects[depth - 1]:
                position = _name_end(data, position, stop)
                if position < 0:
                    return -1
            break


@njit(cache=True, nogil=True)
def _name_end(data: NDArray[np.uint8], position: int, stop: int) -> int:
    """Return the position after a name and its colon, or -1."""
    if position >= stop or data[position] != _QUOTE:
        return -1
    end, _ = _string_end(data, position + 1, stop)
    if end < 0:
        return -1
    position = _blank(data, end + 1, stop)
    return position + 1 if position < stop and data[position] == _COLON else -1


@njit(cache=True, nogil=True)
def _column_of(
    data: NDArray[np.uint8],
    start: int,
    stop: int,
    names: NDArray[np.uint8],
    ends: NDArray[np.int64],
    guess: int,
) -> int:
    """Return the column of a name, looked for from the guess on, or -1."""
    count = ends.size - 1
    for step in range(count):
        column = guess + step
        if column >= count:
            column -= count
        first = ends[column]
        if ends[column + 1] - first != stop - start:
            continue
        place = 0
        while place < stop - start and data[start + place] == names[first + place]:
            place += 1
        if place == stop - start:
            return column
    return -1


@njit(cache=True, nogil=True)
def _object(
    data: NDArray[np.uint8],
    position: int,
    stop: int,
    names: NDArray[np.uint8],
    ends: NDArray[np.int64],
    ignore: bool,
    row: int,
    starts: NDArray[np.int32],
    stops: NDArray[np.int32],
    kinds: NDArray[np.uint8],
) -> tuple[int, int, int]:
    """Find the fields of one object; return its fault, and the bytes that it is about."""
    position = _blank(data, position, stop)
    if position >= stop or data[position] != _OPEN:
        return NOT_OBJECT, position, stop
    position = _blank(data, position + 1, stop)
    if position < stop and data[position] == _CLOSE:
        position = _blank(data, position + 1, stop)
        return (0 if position == stop else NOT_JSON), position, stop
    guess = I64(0)  # typed: numba compiles a callee again for a literal
    while True:
        if position >= stop or data[position] != _QUOTE:
            return NOT_JSON, position, stop
        first = position + 1
        end, escaped = _string_end(data, first, stop)
        if end < 0:
            return NOT_JSON, position, stop
        position = _blank(data, end + 1, stop)
        if position >= stop or data[position] != _COLON:
            return NOT_JSON, position, stop
        position = _blank(data, position + 1, stop)
        last = _unescape(data, first, end) if escaped else end
        column = _column_of(data, first, last, names, ends, guess)
        if column < 0 and not ignore:
            return UNKNOWN_FIELD, first, last
        if column >= 0 and kinds[column, row] != MISSING:
            return REPEATED_FIELD, first, last
        begin = position
        if position < stop and data[position] in (_OPEN, _OPEN_LIST):
            position = _nested_end(data, position, stop)
            if position < 0:
                return (NOT_JSON if position == -1 else TOO_DEEP), begin, stop
            kind, until = NESTED, position
        else:
            until, kind, escaped = _scalar_end(data, position, stop)
            if until < 0:
                return NOT_JSON, begin, stop
            position = until
            if kind == STRING:
                begin += 1
                position = until + 1
                if escaped:
                    until = _unescape(data, begin, until)
        if column >= 0:
            starts[column, row] = begin
            stops[column, row] = until
            kinds[column, row] = kind
            guess = column + 1
        position = _blank(data, position, stop)
        if position >= stop:
            return NOT_JSON, position, stop
        if data[position] == _CLOSE:
            position = _blank(data, position + 1, stop)
            return (0 if position == stop else NOT_JSON), position, stop
        if data[position] != _COMMA:
            return NOT_JSON, position, stop
        position = _blank(data, position + 1, stop)


@njit(cache=True, nogil=True)
def split_objects(
    data: NDArray[np.uint8],
    position: int,
    size: int,
    final: bool,
    names: NDArray[np.uint8],
    ends: NDArray[np.int64],
    ignore: bool,
    starts: NDArray[np.int32],
    stops: NDArray[np.int32],
    kinds: NDArray[np.uint8],
    bounds: NDArray[np.int32],
    faults: NDArray[np.uint8],
    places: NDArray[np.int32],
) -> tuple[int, int]:
    """Find the fields of the objects of a block, one a line; lines of blanks are passed over.

    Parameters
    ----------
    data, position, size, final
        The block, where to begin, its length, and whether nothing comes after it. Escapes are replaced in place.
    names, ends
        The columns' names one after another, and where each begins; one more end than names.
    ignore
        Pass over fields that are no column.
    starts, stops, kinds
        Receive the values by column and record.
    bounds, faults, places
        Receive where each record begins and stops, what is wrong with it, and which bytes that is about.

    Returns
    -------
    tuple
        Number of records, and where the next one begins.
    """
    columns, most = starts.shape
    records = I64(0)  # typed: numba compiles a callee again for a literal
    while records < most and position < size:
        first = position
        while position < size and data[position] != _LF:
            position += 1
        if position >= size and not final:
            return records, first
        stop = position
        position += 1
        while stop > first and data[stop - 1] == _CR:
            stop -= 1
        if _blank(data, first, stop) == stop:
            continue
        for column in range(columns):
            starts[column, records] = first
            stops[column, records] = first
            kinds[column, records] = MISSING
        fault, begin, until = _object(data, first, stop, names, ends, ignore, records, starts, stops, kinds)
        bounds[0, records] = first
        bounds[1, records] = stop
        faults[records] = fault
        places[0, records] = begin
        places[1, records] = until
        if fault:
            for column in range(columns):
                kinds[column, records] = NULL
        records += 1
    return records, min(position, size)


@njit(cache=True, nogil=True)
def count_lines(data: NDArray[np.uint8], position: int, size: int, final: bool) -> tuple[int, int]:
    """Count the lines of a block that `split_objects` takes for records; also return where the next one begins."""
    records = 0
    while position < size:
        first = position
        while position < size and data[position] != _LF:
            position += 1
        if position >= size and not final:
            return records, first
        if _blank(data, first, position) < position:
            records += 1
        position += 1
    return records, min(position, size)
