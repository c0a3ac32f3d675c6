"""Compiled code that finds records and fields in blocks of CSV. Knows neither files nor types.

A field is bytes ``[start, stop)`` of the block, without its quotes. Both kernels walk the same states, so that the
places where `count_records` says a record begins are the places where `split_fields` finds one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BAD_QUOTE",
    "MORE",
    "NULL",
    "PLAIN",
    "QUOTED",
    "UNCLOSED",
    "WRONG_COUNT",
    "check_utf8",
    "count_records",
    "split_fields",
    "unescape_quotes",
]

NULL, PLAIN, QUOTED = 0, 1, 2
_ESCAPED = 128
WRONG_COUNT, BAD_QUOTE = 1, 2
MORE, UNCLOSED = 0, 1
_LF, _CR = 10, 13
_OFF = -1


@njit(cache=True, nogil=True)
def _mark(
    data: NDArray[np.uint8],
    position: int,
    size: int,
    delimiter: int,
    quote: int,
    escape: int,
    marks: NDArray[np.int32],
) -> None:
    """Find all bytes that mean something, without a branch for each; the size of the block stands behind them."""
    special = np.zeros(256, dtype=np.uint8)
    for byte in (_LF, _CR, delimiter, quote, escape):
        if byte >= 0:
            special[byte] = 1
    count = 0
    for place in range(position, size):
        marks[count] = place
        count += special[data[place]]
    marks[count] = marks[count + 1] = marks[count + 2] = size


@njit(cache=True, nogil=True)
def _is_end(byte: int, delimiter: int) -> bool:
    """Return whether a byte ends a field."""
    return byte == delimiter or byte == _LF or byte == _CR  # noqa: PLR1714 - numba compiles this one quicker


@njit(cache=True, nogil=True)
def _field_end(
    data: NDArray[np.uint8],
    marks: NDArray[np.int32],
    mark: int,
    position: int,
    size: int,
    final: bool,
    quote: int,
    escape: int,
) -> tuple[int, int, int, int, int, bool, int]:
    """Find the end of the field that begins at a position.

    Parameters
    ----------
    marks, mark
        The bytes that mean something, and which one is the first at the position or behind it.

    Returns
    -------
    tuple
        Where the text begins and stops, the position after the field and its mark, its kind, whether it is whole, and
        its fault.
    """
    kind = PLAIN
    fault = 0
    begin = position
    at = marks[mark]
    if at == position and at < size and data[at] == quote:
        kind = QUOTED
        begin = position + 1
        mark += 1
        closed = False
        while marks[mark] < size:
            at = marks[mark]
            byte = data[at]
            if byte == escape:
                if escape != quote:
                    kind |= _ESCAPED
                    while marks[mark] <= at + 1 and marks[mark] < size:
                        mark += 1
                    continue
                if at + 1 < size and data[at + 1] == quote:
                    kind |= _ESCAPED
                    mark += 2
                    continue
                if at + 1 >= size and not final:
                    return begin, at, at, mark, kind, False, fault
            mark += 1
            if byte == quote:
                closed = True
                break
        if not closed:
            return begin, size, size, mark, kind, False, fault
        stop = at
        if marks[mark] != at + 1 or (at + 1 < size and (data[at + 1] == quote or data[at + 1] == escape)):
            fault = BAD_QUOTE
        while marks[mark] < size and (data[marks[mark]] == quote or data[marks[mark]] == escape):
            mark += 1
        position = marks[mark]
        return begin, stop, position, mark, kind, final or position < size, fault
    while at < size:
        byte = data[at]
        if byte == quote:
            fault = BAD_QUOTE
            mark += 1
        elif byte == escape:
            kind |= _ESCAPED
            while marks[mark] <= at + 1 and marks[mark] < size:
                mark += 1
        else:
            break
        at = marks[mark]
    if at == begin:
        kind = NULL
    return begin, at, at, mark, kind, final or at < size, fault


@njit(cache=True, nogil=True)
def split_fields(
    data: NDArray[np.uint8],
    position: int,
    size: int,
    final: bool,
    delimiter: int,
    quote: int,
    escape: int,
    starts: NDArray[np.int32],
    stops: NDArray[np.int32],
    kinds: NDArray[np.uint8],
    bounds: NDArray[np.int32],
    faults: NDArray[np.uint8],
    counts: NDArray[np.int32],
    marks: NDArray[np.int32],
) -> tuple[int, int, int]:
    """Find the fields of the records of a block.

    Parameters
    ----------
    data, position, size, final
        The block, where to begin, its length, and whether nothing comes after it.
    delimiter, quote, escape
        Bytes; -1 for a dialect without quotes or escapes.
    starts, stops, kinds
        Receive the fields by column and record.
    bounds, faults, counts
        Receive where each record begins and stops, what is wrong with it, and its number of fields.
    marks
        Room for work, three longer than the block.

    Returns
    -------
    tuple
        Number of records, where the next one begins, and `UNCLOSED` if that one has a quote that is never closed.
    """
    columns, most = starts.shape
    _mark(data, position, size, delimiter, quote, escape, marks)
    mark = 0
    records = 0
    while records < most:
        while position < size and (data[position] == _LF or data[position] == _CR):
            position += 1
            mark += 1
        if position >= size:
            break
        first = position
        column = 0
        fault = 0
        whole = True
        while True:
            # Plain fields, and quoted ones that hold nothing special, are found here; a call for each takes far longer.
            at = int(marks[mark])
            wrong = 0
            if at < size and _is_end(data[at], delimiter):
                begin, stop, position = position, at, at
                kind = PLAIN if at > begin else NULL
            elif (
                at == position
                and marks[mark + 2] < size
                and data[at] == quote
                and data[marks[mark + 1]] == quote
                and marks[mark + 2] == marks[mark + 1] + 1
                and _is_end(data[marks[mark + 2]], delimiter)
            ):
                begin, stop, position = at + 1, int(marks[mark + 1]), int(marks[mark + 2])
                mark += 2
                kind = QUOTED
            else:
                begin, stop, position, mark, kind, whole, wrong = _field_end(
                    data, marks, mark, position, size, final, quote, escape
                )
            if not whole:
                break
            fault |= wrong
            if column < columns:
                starts[column, records] = begin
                stops[column, records] = stop
                kinds[column, records] = kind
            column += 1
            if position >= size or data[position] != delimiter:
                break
            position += 1
            mark += 1
            if position >= size and not final:
                whole = False
                break
        if not whole:
            return records, first, UNCLOSED if final else MORE
        bounds[0, records] = first
        bounds[1, records] = position
        counts[records] = column
        if column != columns:
            fault |= WRONG_COUNT
        if fault:
            for index in range(columns):
                starts[index, records] = first
                stops[index, records] = first
                kinds[index, records] = NULL
        faults[records] = fault
        records += 1
        if position < size:
            position += 1
            mark += 1
    return records, position, MORE


@njit(cache=True, nogil=True)
def unescape_quotes(
    data: NDArray[np.uint8], starts: NDArray[np.int32], stops: NDArray[np.int32], kinds: NDArray[np.uint8], escape: int
) -> None:
    """Replace escaped quotes by quotes, in place, and shorten the fields of one column that have some."""
    for row in range(kinds.size):
        if kinds[row] & _ESCAPED:
            kinds[row] &= ~np.uint8(_ESCAPED)
            target = starts[row]
            position = starts[row]
            while position < stops[row]:
                if data[position] == escape and position + 1 < stops[row]:
                    position += 1
                data[target] = data[position]
                target += 1
                position += 1
            stops[row] = target


@njit(cache=True, nogil=True)
def count_records(
    data: NDArray[np.uint8],
    position: int,
    size: int,
    final: bool,
    delimiter: int,
    quote: int,
    escape: int,
    most: int,
    marks: NDArray[np.int32],
) -> tuple[int, int, int]:
    """Walk over at most so many records of a block.

    Returns
    -------
    tuple
        As `split_fields`.
    """
    _mark(data, position, size, delimiter, quote, escape, marks)
    mark = 0
    records = 0
    while records < most:
        while position < size and (data[position] == _LF or data[position] == _CR):
            position += 1
            mark += 1
        if position >= size:
            break
        first = position
        whole = True
        while True:
            at = int(marks[mark])
            if at < size and _is_end(data[at], delimiter):
                position = at
            else:
                _, _, position, mark, _, whole, _ = _field_end(data, marks, mark, position, size, final, quote, escape)
            if not whole or position >= size or data[position] != delimiter:
                break
            position += 1
            mark += 1
            if position >= size and not final:
                whole = False
                break
        if not whole:
            return records, first, UNCLOSED if final else MORE
        records += 1
        if position < size:
            position += 1
            mark += 1
    return records, position, MORE


@njit(cache=True, nogil=True)
def check_utf8(
    data: NDArray[np.uint8], starts: NDArray[np.int32], stops: NDArray[np.int32], places: NDArray[np.int32]
) -> int:
    """Find the first byte of each record that is not UTF-8, or -1; return how many records have one."""
    found = 0
    for record in range(len(places)):
        places[record] = -1
        position, stop = starts[record], stops[record]
        while position < stop:
            byte = data[position]
            if byte < 0x80:
                position += 1
                continue
            follow = 0
            least, most = 0x80, 0xBF
            if 0xC2 <= byte <= 0xDF:
                follow = 1
            elif 0xE0 <= byte <= 0xEF:
                follow = 2
                if byte == 0xE0:
                    least = 0xA0
                elif byte == 0xED:
                    most = 0x9F
            elif 0xF0 <= byte <= 0xF4:
                follow = 3
                if byte == 0xF0:
                    least = 0x90
                elif byte == 0xF4:
                    most = 0x8F
            ok = follow > 0 and position + follow < stop
            if ok:
                ok = least <= data[position + 1] <= most
                for step in range(2, follow + 1):
                    ok = ok and 0x80 <= data[position + step] <= 0xBF
            if not ok:
                places[record] = position
                found += 1
                break
            position += follow + 1
    return found
