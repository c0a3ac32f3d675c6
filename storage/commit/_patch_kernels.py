"""Compiled patching of encoded leaves: rows are cut out and put in without decoding the leaf.

A leaf can be patched if the page has room and every new text fits the base and width of its column in that page, or is
in the page's dictionary. If a new number does not fit, its column gets another base and width.

Kernels take named tuples at the entry only: within the loops they were measured to cost 12 % of a change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import njit

from headrace.storage.format._byte_kernels import I64, compare_bytes, copy_bytes, load_u16, load_u64, store_u64
from headrace.storage.format.constants import DIRECTORY_ENTRY, HEADER, SIGN, TEXT_PLAIN, WORD
from headrace.storage.leaf._encode_kernels import RowColumns, bytes_needed

if TYPE_CHECKING:
    from headrace.storage.format.arrays import Bytes, Flags, Int32s, Int64s, Words

__all__ = ["DONE", "FALLBACK", "SAME", "SMALL", "LeafChanges", "patch_leaves"]


_ALL = ~np.uint64(0)
_MIN, _MAX = np.int64(-(2**63)), np.int64(2**63 - 1)
DONE = 0
"""The leaf was patched."""
SAME = 1
"""Nothing in the leaf changes."""
FALLBACK = 2
"""The leaf has to be encoded again."""
SMALL = 3
"""Few rows are left: the leaf has to be joined with a neighbor."""
_UNDERFULL = 4


class LeafChanges(NamedTuple):
    """Changes of the leaves in a buffer, in the order of the leaves.

    Attributes
    ----------
    leaves : int64[leaves]
        Ordinals of the leaves.
    touched : uint64[t]
        Keys whose present rows are removed, ascending.
    upserted : bool[t]
        Which of them are keys of upserts; the others are deletes.
    touched_leaf : int64[t]
        Leaf of each of them.
    keys : uint64[q]
        Keys of the rows to store, ascending.
    fresh : bool[q]
        Which of these rows are inserts.
    leaf : int64[q]
        Leaf of each of these rows.
    """

    leaves: Int64s
    touched: Words
    upserted: Flags
    touched_leaf: Int64s
    keys: Words
    fresh: Flags
    leaf: Int64s


@njit(cache=True, nogil=True, inline="always")
def _number(page: Bytes, at: int, width: int) -> Any:
    if width == 0:
        return 0
    mask = _ALL if width >= WORD else (np.uint64(1) << np.uint64(8 * width)) - np.uint64(1)
    return np.int64(load_u64(page, at) & mask)


@njit(cache=True, nogil=True, inline="always")
def _number_at(page: Bytes, data: int, width: int, row: int) -> Any:
    """Return number `row` of a block of numbers."""
    return _number(page, data + row * width, width)


@njit(cache=True, nogil=True, inline="always")
def _put_number(page: Bytes, at: int, value: np.uint64, width: int) -> None:
    for byte in range(width):
        page[at + byte] = np.uint8((value >> np.uint64(8 * byte)) & np.uint64(0xFF))


@njit(cache=True, nogil=True, inline="always")
def _fits(value: np.uint64, width: int) -> Any:
    return width >= WORD or value < (np.uint64(1) << np.uint64(8 * width))


@njit(cache=True, nogil=True, inline="always")
def _field(page: Bytes, entry: int, at: int) -> Any:
    return load_u16(page, entry + at)


@njit(cache=True, nogil=True)
def _lower_bound(page: Bytes, data: int, width: int, start: int, stop: int, delta: np.uint64) -> int:
    while start < stop:
        middle = (start + stop) >> 1
        if np.uint64(_number(page, data + middle * width, width)) < delta:
            start = middle + 1
        else:
            stop = middle
    return start


@njit(cache=True, nogil=True)
def _plan_edits(
    page: Bytes,
    origin: int,
    touched: Words,
    upserted: Flags,
    t: int,
    t_end: int,
    keys: Words,
    fresh: Flags,
    q: int,
    q_end: int,
    edits: Int64s,
    counts: Int64s,
) -> tuple[int, int]:
    """Find which old rows are removed and where new ones are inserted.

    Returns the number of edits, and a new row whose key stays, or -1. An edit replaces old rows edits[e, 0] up to
    edits[e, 1] by new rows edits[e, 2] up to edits[e, 3]. An edit of nothing at the end of the page follows them.
    """
    entry = origin + HEADER
    rows = np.int64(load_u64(page, origin + 16) >> np.uint64(32))
    base = load_u64(page, entry)
    width = np.int64(page[entry + 14])
    data = origin + _field(page, entry, 8)
    found = 0
    clash = -1
    position = I64(0)  # typed: numba compiles a callee again for a literal
    while t < t_end or q < q_end:
        key = touched[t] if t < t_end and (q == q_end or touched[t] <= keys[q]) else keys[q]
        low = position
        if key >= base:
            low = _lower_bound(page, data, width, position, rows, key - base)
        high = low
        while high < rows and key >= base and np.uint64(_number(page, data + high * width, width)) == key - base:
            high += 1
        stop = q
        replacing = 0
        while stop < q_end and keys[stop] == key:
            replacing += not fresh[stop]
            stop += 1
        if t < t_end and touched[t] == key:
            if high > low:
                counts[1] += replacing
                counts[0] -= replacing
            if not upserted[t]:
                counts[2] += high - low
            t += 1
        else:
            if high > low:
                clash = q
            low = high
        counts[0] += stop - q
        if high > low or stop > q:
            edits[found, 0] = low
            edits[found, 1] = high
            edits[found, 2] = q
            edits[found, 3] = stop
            found += 1
        q = stop
        position = high
    edits[found] = (rows, rows, q_end, q_end)
    return found, clash


@njit(cache=True, nogil=True)
def _dictionary_code(page: Bytes, block: int, heap: Bytes, start: int, end: int) -> int:
    size = load_u16(page, block)
    text = block + 2 + 2 * size
    begin = 0
    for code in range(size):
        stop = load_u16(page, block + 2 + 2 * code)
        if stop - begin == end - start and compare_bytes(page, text + begin, text + stop, heap, start, end) == 0:
            return code
        begin = stop
    return -1


@njit(cache=True, nogil=True, inline="always")
def _text_end(page: Bytes, data: int, width: int, base: int, row: int) -> Any:
    """Return where the text of a row ends; 0 for the row before the first."""
    return (row + 1) * base + _number(page, data + row * width, width) if row >= 0 else 0


@njit(cache=True, nogil=True)
def _dictionary_bytes(page: Bytes, block: int) -> Any:
    size = load_u16(page, block)
    return 2 + 2 * size + (load_u16(page, block + 2 * size) if size > 0 else 0)


@njit(cache=True, nogil=True)
def _frame_of(
    page: Bytes, data: int, base: np.uint64, width: int, edits: Int64s, words: Int64s, absent: Bytes, flip: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """Return base and width of a patched column of numbers as the encoder chooses them."""
    low = _MAX
    high = _MIN
    source = 0
    for edit in range(len(edits)):
        for row in range(source, edits[edit, 0]):
            value = np.int64((base + np.uint64(_number_at(page, data, width, row))) ^ flip)
            low = min(low, value)
            high = max(high, value)
        for row in range(edits[edit, 2], edits[edit, 3]):
            if len(absent) == 0 or absent[row] == 0:
                low = min(low, words[row])
                high = max(high, words[row])
        source = edits[edit, 1]
    return np.uint64(low) ^ flip, np.uint64(bytes_needed(np.uint64(high) - np.uint64(low)))


@njit(cache=True, nogil=True)
def _column_bytes(
    page: Bytes,
    origin: int,
    entry: int,
    edits: Int64s,
    given: Int64s,
    heap: Bytes,
    absent: Bytes,
    codes: Int32s,
    frame: Words,
) -> Any:
    """Return the bytes of a patched column without its nulls, or -1 if a new text does not fit.

    Fills `frame` with base and width of the column, which change only if a new number does not fit. Differences to the
    base have to ascend for keys only; those of other numbers may wrap around 2**64.

    Parameters
    ----------
    given
        New numbers, or for texts their offsets in `heap`.
    """
    rows, ascending = edits[len(edits) - 1, 0], entry == origin + HEADER
    flip = SIGN if ascending else np.uint64(0)
    base = load_u64(page, entry)
    data = origin + _field(page, entry, 8)
    aux = origin + _field(page, entry, 10)
    width = np.int64(page[entry + 14])
    encoding = page[entry + 15]
    frame[0], frame[1] = base, np.uint64(width)
    total = 0
    if encoding == TEXT_PLAIN:
        total = _text_end(page, data, width, np.int64(base), rows - 1)
    after = rows
    fits = True
    for edit in range(len(edits)):
        if encoding == TEXT_PLAIN:
            before = _text_end(page, data, width, np.int64(base), edits[edit, 0] - 1)
            total -= _text_end(page, data, width, np.int64(base), edits[edit, 1] - 1) - before
        after += edits[edit, 3] - edits[edit, 2] - edits[edit, 1] + edits[edit, 0]
        for row in range(edits[edit, 2], edits[edit, 3]):
            null = len(absent) > 0 and absent[row] != 0
            if encoding == 0:
                value = np.uint64(given[row]) ^ flip
                fits &= null or (_fits(value - base, width) and (not ascending or value >= base))
            elif encoding == TEXT_PLAIN:
                length = 0 if null else given[row + 1] - given[row]
                if length < np.int64(base):
                    return -1
                total += length
            elif not null:
                codes[row] = _dictionary_code(page, aux, heap, given[row], given[row + 1])
                if codes[row] < 0:
                    return -1
    if encoding == 0:
        if not fits:
            frame[0], frame[1] = _frame_of(page, data, base, width, edits, given, absent, flip)
        return after * np.int64(frame[1])
    if encoding == TEXT_PLAIN:
        return after * width + total if _fits(np.uint64(total - after * np.int64(base)), width) else -1
    return after * width + _dictionary_bytes(page, aux)


@njit(cache=True, nogil=True)
def _copy_nulls(page: Bytes, old: int, edits: Int64s, absent: Bytes, out: Bytes, at: int) -> None:
    """Write the bitmap of a patched column; `old` is that of the page, 0 if it has none."""
    target = 0
    source = 0
    for edit in range(len(edits)):
        stop = edits[edit, 0]
        for row in range(source, stop):
            if old > 0 and (page[old + (row >> 3)] >> (row & 7)) & 1:
                out[at + (target >> 3)] |= np.uint8(1 << (target & 7))
            target += 1
        for row in range(edits[edit, 2], edits[edit, 3]):
            if len(absent) > 0 and absent[row] != 0:
                out[at + (target >> 3)] |= np.uint8(1 << (target & 7))
            target += 1
        source = edits[edit, 1]


@njit(cache=True, nogil=True)
def _copy_numbers(
    page: Bytes,
    data: int,
    width: int,
    edits: Int64s,
    values: Any,
    base: np.uint64,
    shift: np.uint64,
    after: int,
    flip: np.uint64,
    absent: Bytes,
    out: Bytes,
    at: int,
) -> int:
    """Write numbers, `after` bytes each, as differences to `base`; those that stay grow by `shift`.

    Words are written whole, in ascending order, and zeros after the last number: eight bytes behind the block change.
    """
    source = 0
    for edit in range(len(edits)):
        stop = edits[edit, 0]
        if after == width and shift == 0:
            length = (stop - source) * width
            for byte in range(0, length, WORD):
                store_u64(out, at + byte, load_u64(page, data + source * width + byte))
            at += length
        else:
            for row in range(source, stop):
                store_u64(out, at, np.uint64(_number_at(page, data, width, row)) + shift)
                at += after
        for row in range(edits[edit, 2], edits[edit, 3]):
            value = np.uint64(0)
            if len(absent) == 0 or absent[row] == 0:
                value = (np.uint64(values[row]) ^ flip) - base
            store_u64(out, at, value)
            at += after
        source = edits[edit, 1]
    store_u64(out, at, np.uint64(0))
    return at


@njit(cache=True, nogil=True)
def _copy_text(
    page: Bytes,
    data: int,
    aux: int,
    width: int,
    base: Any,
    edits: Int64s,
    spans: Int64s,
    heap: Bytes,
    absent: Bytes,
    out: Bytes,
    at: int,
    text: Any,
) -> Any:
    """Write end offsets from `at` and texts from `text` on; return where the texts end."""
    begin = text
    target = 0
    source = 0
    for edit in range(len(edits)):
        stop = edits[edit, 0]
        first = _text_end(page, data, width, base, source - 1)
        last = _text_end(page, data, width, base, stop - 1)
        shift = text - begin - first
        for row in range(source, stop):
            end = _text_end(page, data, width, base, row) + shift
            _put_number(out, at + target * width, np.uint64(end - (target + 1) * base), width)
            target += 1
        copy_bytes(page, aux + first, out, text, last - first)
        text += last - first
        for row in range(edits[edit, 2], edits[edit, 3]):
            if len(absent) == 0 or absent[row] == 0:
                copy_bytes(heap, spans[row], out, text, spans[row + 1] - spans[row])
                text += spans[row + 1] - spans[row]
            _put_number(out, at + target * width, np.uint64(text - begin - (target + 1) * base), width)
            target += 1
        source = edits[edit, 1]
    return text


@njit(cache=True, nogil=True)
def _write_column(
    page: Bytes,
    origin: int,
    entry: int,
    edits: Int64s,
    given: Int64s,
    heap: Bytes,
    absent: Bytes,
    codes: Int32s,
    frame: Words,
    out: Bytes,
    out_origin: int,
    at: int,
) -> int:
    """Write a column from `at` on, and its directory entry; return where it ends. See `_column_bytes`."""
    base = load_u64(page, entry)
    data = origin + _field(page, entry, 8)
    aux = origin + _field(page, entry, 10)
    width = I64(page[entry + 14])
    encoding = np.int64(page[entry + 15])
    after = I64(load_u64(out, out_origin + 16) >> np.uint64(32))
    none = np.uint64(0)
    bitmap = 0
    if frame[2] != none:
        old = _field(page, entry, 12)
        _copy_nulls(page, origin + old if old > 0 else 0, edits, absent, out, at)
        bitmap = at - out_origin
        at += (after + 7) >> 3
    width_after = I64(frame[1])
    place = at - out_origin if width_after > 0 else 0
    side = 0
    if encoding == 0:
        flip = SIGN if entry == origin + HEADER else none
        at = _copy_numbers(
            page, data, width, edits, given, frame[0], base - frame[0], width_after, flip, absent, out, at
        )
    elif encoding == TEXT_PLAIN:
        text = at + after * width
        at = _copy_text(page, data, aux, width, np.int64(base), edits, given, heap, absent, out, at, text)
        side = text - out_origin if at > text else 0
    else:
        at = _copy_numbers(page, data, width, edits, codes, none, none, width, none, absent, out, at)
        side = at - out_origin
        size = _dictionary_bytes(page, aux)
        copy_bytes(page, aux, out, at, size)
        at += size
    target = out_origin + (entry - origin)
    store_u64(out, target, frame[0])
    word = np.uint64(place) | (np.uint64(side) << np.uint64(16)) | (np.uint64(bitmap) << np.uint64(32))
    store_u64(out, target + 8, word | (frame[1] << np.uint64(48)) | (np.uint64(encoding) << np.uint64(56)))
    return at


@njit(cache=True, nogil=True, inline="always")
def _given(new: RowColumns, column: int) -> tuple[Int64s, Bytes]:
    """Return the new numbers of a column, or the offsets of its new texts, and which of them are null."""
    is_text, slot, nulls = new.places[column, 0], new.places[column, 1], new.places[column, 2]
    absent = new.nulls[nulls] if nulls >= 0 else new.heap[:0]
    return new.spans[slot] if is_text != 0 else new.words[slot], absent


@njit(cache=True, nogil=True)
def _plan_leaf(
    frames: Bytes, origin: int, edits: Int64s, new: RowColumns, total: int, codes: Int32s, frame: Words
) -> int:
    """Return the bytes of a patched leaf of `total` rows, or -1 if a new text does not fit.

    Fills the dictionary codes of new texts, and base, width and whether there are nulls for each column.
    """
    columns = len(new.places)
    size = HEADER + DIRECTORY_ENTRY * columns
    q, q_end = edits[0, 2], edits[len(edits) - 1, 3]
    for column in range(columns):
        entry = origin + HEADER + DIRECTORY_ENTRY * column
        given, absent = _given(new, column)
        part = _column_bytes(frames, origin, entry, edits, given, new.heap, absent, codes[column], frame[column])
        if part < 0:
            return -1
        nulls = _field(frames, entry, 12) > 0 or (len(absent) > 0 and absent[q:q_end].any())
        frame[column, 2] = np.uint64(nulls)
        size += part + ((total + 7) >> 3 if nulls else 0)
    return size


@njit(cache=True, nogil=True)
def _write_leaf(
    frames: Bytes,
    origin: int,
    edits: Int64s,
    new: RowColumns,
    total: int,
    codes: Int32s,
    frame: Words,
    out: Bytes,
    out_origin: int,
    page_size: int,
) -> None:
    """Write a patched leaf of `total` rows as `_plan_leaf` planned it."""
    out[out_origin : out_origin + page_size] = 0
    store_u64(out, out_origin + 16, np.uint64(1) | (np.uint64(total) << np.uint64(32)))
    at = out_origin + HEADER + DIRECTORY_ENTRY * len(new.places)
    for column in range(len(new.places)):
        entry = origin + HEADER + DIRECTORY_ENTRY * column
        given, absent = _given(new, column)
        at = _write_column(
            frames, origin, entry, edits, given, new.heap, absent, codes[column], frame[column], out, out_origin, at
        )


@njit(cache=True, nogil=True)
def patch_leaves(
    frames: Bytes,
    page_size: int,
    skip: Flags,
    changes: LeafChanges,
    new: RowColumns,
    unique: bool,
    average: int,
    out: Bytes,
    status: Int64s,
    after: Int64s,
    counts: Int64s,
) -> int:
    """Patch the leaves in `frames` into `out`; return a new row whose key is in a unique table already, or -1.

    Parameters
    ----------
    skip
        Leaves that are not patched; their status is FALLBACK.
    changes
        Changes of the leaves.
    new
        Columns of the new rows.
    average
        Average number of rows in a leaf.
    out
        Buffer for as many pages; those of leaves with status DONE follow one another.
    status, after
        Filled with the result for each leaf, and its number of rows.
    counts
        Increased by the rows inserted, updated and deleted in leaves that are DONE or SAME.
    """
    leaves, touched, upserted, touched_leaf, keys, fresh, row_leaf = changes
    columns = len(new.places)
    edits = np.empty((len(touched) + len(keys) + 1, 4), dtype=np.int64)
    codes = np.zeros((columns, len(keys)), dtype=np.int32)
    frame = np.empty((columns, 3), dtype=np.uint64)
    made = np.zeros(3, dtype=np.int64)
    out_origin = t = q = I64(0)  # typed: numba compiles a callee again for a literal
    for leaf in range(len(status)):
        origin = leaf * page_size
        t_end = t
        while t_end < len(touched) and touched_leaf[t_end] <= leaves[leaf]:
            t_end += 1
        q_end = q
        while q_end < len(keys) and row_leaf[q_end] <= leaves[leaf]:
            q_end += 1
        status[leaf] = FALLBACK
        if not skip[leaf]:
            made[:] = 0
            found, clash = _plan_edits(frames, origin, touched, upserted, t, t_end, keys, fresh, q, q_end, edits, made)
            if unique and clash >= 0:
                return clash
            plan = edits[: found + 1]
            total = plan[found, 0]
            for edit in range(found):
                total += plan[edit, 3] - plan[edit, 2] - plan[edit, 1] + plan[edit, 0]
            if found == 0:
                status[leaf] = SAME
            elif total > 0 and _UNDERFULL * total < average:
                status[leaf] = SMALL
            elif 0 < total <= page_size:
                size = _plan_leaf(frames, origin, plan, new, total, codes, frame)
                if 0 <= size <= page_size:
                    _write_leaf(frames, origin, plan, new, total, codes, frame, out, out_origin, page_size)
                    status[leaf] = DONE
                    after[leaf] = total
                    out_origin += page_size
            if status[leaf] <= SAME:
                counts += made
        t = t_end
        q = q_end
    return -1
