"""Compiled steps of the indexes over tuples in memory: hash chains and sorted entries. Arrays in, arrays out.

A probe fills arrays of pairs and stops when they are full; `cursor` says where to go on: the position in the list of
probing tuples, and the place within the matches of that tuple, -1 before the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from headrace.storage.format import I64, compare_bytes, load_u64, prefetch

if TYPE_CHECKING:
    from headrace.storage.format import Bytes, Flags, Int32s, Int64s, Words

__all__ = [
    "KeyedRows",
    "Meetings",
    "chain",
    "chain_all",
    "compact_entries",
    "divide",
    "filter_pairs",
    "join_chains",
    "merge_entries",
    "partitions_of",
    "probe_chains",
    "probe_entries",
    "probed",
    "select_partitions",
    "unlink",
]

_HALF = np.uint64(32)
_HASH = np.uint64(0x9E3779B97F4A7C15)
_OTHER_HASH = np.uint64(0xC2B2AE3D27D4EB4F)
_SIGN = np.uint64(1 << 63)
_ALL = np.uint64(2**64 - 1)
_AHEAD = 16
_NONE = -1
NEVER_MET, MET_IN_TIME, MET_BY_FLAG = 0, 1, 2
_BEFORE = -1


@intrinsic
def _as_float(_typing: Any, bits: Any) -> Any:
    """Return the float with these bits."""
    del bits

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.uint64), generate


class KeyedRows(NamedTuple):
    """Records with one of their keys, as arguments of kernels; see `RowLayout`."""

    records: Bytes
    heap: Bytes
    stride: int
    word_at: int
    digest_at: int
    start_at: int
    end_at: int
    heap_at: int


class Meetings(NamedTuple):
    """What tells in the records of two inputs whether two tuples met before, as an argument of kernels.

    Attributes
    ----------
    kind
        `NEVER_MET`: none did. `MET_IN_TIME`: those whose stays in memory overlap. `MET_BY_FLAG`: those with a flag.
    left, right
        Offset of the arrival stamp, behind which the departure stamp lies; or of the flags.
    flag
        The flag.
    """

    kind: int
    left: int
    right: int
    flag: int = 0


@njit(inline="always")
def _u32(data: Bytes, at: int) -> int:
    return I64(load_u64(data, at) & np.uint64(0xFFFFFFFF))


@njit(inline="always")
def _hashed(rows: KeyedRows, row: int) -> np.uint64:
    """Return what a key is hashed by."""
    at = rows.word_at if rows.digest_at < 0 else rows.digest_at
    return load_u64(rows.records, row * rows.stride + at)


@njit(inline="always")
def _bucket(hashed: np.uint64, shift: np.uint64) -> int:
    mixed = (hashed ^ (hashed >> _HALF)) * _HASH
    return I64(mixed >> shift)


@njit(cache=True, nogil=True)
def partitions_of(rows: KeyedRows, start: int, count: int, bits: int, out: Int64s) -> None:
    """Write the partition of the keys of `count` records from `start` on: a number of so many bits."""
    shift = np.uint64(64 - bits)
    for row in range(count):
        hashed = _hashed(rows, start + row)
        mixed = (hashed ^ (hashed >> _HALF)) * _OTHER_HASH
        out[row] = I64(mixed >> shift)


@njit(cache=True, nogil=True)
def divide(
    rows: KeyedRows, count: int, bits: int, wanted: Flags, index: Int64s, numbers: Int64s, counts: Int64s
) -> int:
    """Divide the first `count` records by whether they are in wanted partitions; return how many are.

    Parameters
    ----------
    bits
        Bits of the number of a partition.
    wanted : bool[partitions]
        Which partitions are wanted.
    index : int64[at least count]
        Filled with the records: those in wanted partitions come first and in order, the others behind them in reverse.
    numbers : int64[at least count]
        Filled with the partitions of those in wanted ones.
    counts : int64[partitions]
        Number of records of each wanted partition, to which these are added.
    """
    shift = np.uint64(64 - bits)
    inside, outside = 0, count - 1
    for row in range(count):
        hashed = _hashed(rows, row)
        number = I64(((hashed ^ (hashed >> _HALF)) * _OTHER_HASH) >> shift)
        if wanted[number]:
            index[inside], numbers[inside] = row, number
            counts[number] += 1
            inside += 1
        else:
            index[outside] = row
            outside -= 1
    return inside


@njit(cache=True, nogil=True)
def select_partitions(rows: KeyedRows, count: int, bits: int, wanted: Flags, out: Int64s) -> int:
    """Write the first records of `count` that are in wanted partitions, as many as fit; return their number."""
    shift = np.uint64(64 - bits)
    found = 0
    for row in range(count):
        if found == len(out):
            break
        hashed = _hashed(rows, row)
        if wanted[I64(((hashed ^ (hashed >> _HALF)) * _OTHER_HASH) >> shift)]:
            out[found] = row
            found += 1
    return found


@njit(cache=True, nogil=True)
def probed(departures: Int64s, starts: Int64s, probes: Int64s, left: Int64s, since: Int64s, until: Int64s) -> Flags:
    """Return for each pair whether the block of its left tuple probed memory while its right tuple was in memory.

    Parameters
    ----------
    departures, starts, probes
        Departure stamp of each block, ascending; where its probes begin, with an end; stamps of its probes, ascending.
    left
        Departure stamps of the left tuples, which name their blocks.
    since, until
        Arrival and departure stamps of the right tuples.
    """
    out = np.zeros(len(left), dtype=np.bool_)
    for i in range(len(left)):
        at = np.searchsorted(departures, left[i])
        if at < len(departures) and departures[at] == left[i]:
            block = probes[starts[at] : starts[at + 1]]
            first = np.searchsorted(block, since[i])
            out[i] = first < len(block) and block[first] < until[i]
    return out


@njit(cache=True, nogil=True)
def _same_bytes(left: KeyedRows, a: int, right: KeyedRows, b: int) -> bool:
    a_record, b_record = a * left.stride, b * right.stride
    a_heap = I64(load_u64(left.records, a_record + left.heap_at)) + 8
    b_heap = I64(load_u64(right.records, b_record + right.heap_at)) + 8
    a_start = 0 if left.start_at < 0 else _u32(left.records, a_record + left.start_at)
    b_start = 0 if right.start_at < 0 else _u32(right.records, b_record + right.start_at)
    a_end, b_end = _u32(left.records, a_record + left.end_at), _u32(right.records, b_record + right.end_at)
    if a_end - a_start != b_end - b_start:
        return False
    return compare_bytes(left.heap, a_heap + a_start, a_heap + a_end, right.heap, b_heap + b_start, b_heap + b_end) == 0


# Loops that inline this function count references to arrays at each step, so the probes do its work themselves.
@njit(inline="always")
def _same_key(left: KeyedRows, a: int, right: KeyedRows, b: int) -> bool:
    if load_u64(left.records, a * left.stride + left.word_at) != load_u64(
        right.records, b * right.stride + right.word_at
    ):
        return False
    return left.digest_at < 0 or bool(_same_bytes(left, a, right, b))


@njit(inline="always")
def _number(word: np.uint64) -> float:
    """Return the float of a key word."""
    flipped = word ^ _SIGN
    bits = flipped ^ ((flipped >> np.uint64(63)) * (_SIGN - np.uint64(1)))
    return _as_float(bits)


@njit(inline="always")
def _near(a: np.uint64, b: np.uint64, words: np.uint64, number: float, floating: bool) -> bool:
    if floating:
        return bool(abs(_number(a) - _number(b)) <= number)
    return bool((a - b if a > b else b - a) <= words)


@njit(cache=True, nogil=True)
def chain(rows: KeyedRows, start: int, stop: int, shift: int, heads: Int32s, links: Int32s) -> None:
    """Add the records from `start` up to `stop` to the chains.

    Parameters
    ----------
    shift
        Bits of a hash that are not part of the bucket number.
    heads : int32[buckets]
        First slot of each chain, or -1.
    links : int32[slots, 2]
        Next slot, or -1; and the slot before, or -2 - bucket for the first one.
    """
    by = np.uint64(shift)
    lines, chains = heads.view(np.uint8), links.reshape(-1).view(np.uint8)
    for slot in range(start, stop):
        if slot + 2 * _AHEAD < stop:
            prefetch(lines, 4 * _bucket(_hashed(rows, slot + 2 * _AHEAD), by))
            ahead = I64(heads[_bucket(_hashed(rows, slot + _AHEAD), by)])
            prefetch(chains, 8 * max(ahead, 0))
        bucket = _bucket(_hashed(rows, slot), by)
        first = heads[bucket]
        links[slot, 0] = first
        links[slot, 1] = -2 - bucket
        if first != _NONE:
            links[first, 1] = slot
        heads[bucket] = slot


@njit(cache=True, nogil=True)
def chain_all(rows: KeyedRows, count: int, shift: int, heads: Int32s, links: Int32s) -> None:
    """Make the chains of the first `count` records, from which none is removed later.

    Parameters
    ----------
    shift, heads
        See `chain`.
    links : int32[at least count]
        Next slot of the chain, or -1.
    """
    by = np.uint64(shift)
    heads[:] = _NONE
    lines = heads.view(np.uint8)
    for slot in range(count):
        if slot + _AHEAD < count:
            prefetch(lines, 4 * _bucket(_hashed(rows, slot + _AHEAD), by))
        bucket = _bucket(_hashed(rows, slot), by)
        links[slot] = heads[bucket]
        heads[bucket] = slot


@njit(cache=True, nogil=True)
def join_chains(
    probing: KeyedRows,
    count: int,
    rows: KeyedRows,
    shift: int,
    heads: Int32s,
    links: Int32s,
    meetings: Meetings,
    cursor: Int64s,
    out_at: Int64s,
    out_slot: Int64s,
) -> int:
    """Find the pairs with equal keys that have not met before; return their number.

    Parameters
    ----------
    probing, count
        Tuples that probe are the first `count`.
    rows, shift, heads, links
        Tuples in memory and their chains, see `chain_all`.
    meetings
        Which pairs met before; the probing tuples are the left ones.
    cursor, out_at, out_slot
        See `probe_chains`.
    """
    left, right, width = probing.records, rows.records, rows.stride
    wide, flag = rows.digest_at >= 0, np.uint8(meetings.flag)
    by = np.uint64(shift)
    at, slot, found = cursor[0], cursor[1], 0
    lines, chains = heads.view(np.uint8), links.view(np.uint8)
    while at < count:
        if slot == _BEFORE:
            if at + 2 * _AHEAD < count:
                prefetch(lines, 4 * _bucket(_hashed(probing, at + 2 * _AHEAD), by))
                ahead = max(I64(heads[_bucket(_hashed(probing, at + _AHEAD), by)]), 0)
                prefetch(chains, 4 * ahead)
                prefetch(right, ahead * width + rows.word_at)
                prefetch(right, (ahead + 1) * width - 1)
            slot = I64(heads[_bucket(_hashed(probing, at), by)])
        word = load_u64(left, at * probing.stride + probing.word_at)
        a_at = at * probing.stride + meetings.left
        while slot != _NONE:
            if found == len(out_at):
                cursor[0], cursor[1] = at, slot
                return found
            if load_u64(right, slot * width + rows.word_at) == word and not (
                wide and not _same_bytes(probing, at, rows, slot)
            ):
                b_at, met = slot * width + meetings.right, False
                if meetings.kind == MET_BY_FLAG:
                    met = (left[a_at] & flag) != 0 and (right[b_at] & flag) != 0
                elif meetings.kind == MET_IN_TIME:
                    since = max(I64(load_u64(left, a_at)), I64(load_u64(right, b_at)))
                    until = min(I64(load_u64(left, a_at + 8)), I64(load_u64(right, b_at + 8)))
                    met = since < until
                if not met:
                    out_at[found], out_slot[found] = at, slot
                    found += 1
            slot = I64(links[slot])
        at += 1
    cursor[0], cursor[1] = at, _BEFORE
    return found


@njit(inline="always")
def _set_next(heads: Int32s, links: Int32s, before: int, slot: int) -> None:
    if before <= -2:  # noqa: PLR2004 - the first of a chain
        heads[-2 - before] = slot
    else:
        links[before, 0] = slot


@njit(inline="always")
def _ask_for_neighbors(lines: Bytes, chains: Bytes, links: Int32s, slots: Int64s, at: int) -> None:
    """Ask for the links of a slot further on, and for those of the neighbors of a slot whose links have come.

    `lines` and `chains` are the bytes of heads and links.
    """
    if at + 2 * _AHEAD < len(slots):
        prefetch(chains, 8 * slots[at + 2 * _AHEAD])
        after, before = I64(links[slots[at + _AHEAD], 0]), I64(links[slots[at + _AHEAD], 1])
        prefetch(chains, 8 * max(after, 0))
        if before <= -2:  # noqa: PLR2004 - the first of a chain
            prefetch(lines, 4 * (-2 - before))
        else:
            prefetch(chains, 8 * before)


@njit(cache=True, nogil=True)
def unlink(heads: Int32s, links: Int32s, removed: Int64s, source: Int64s, target: Int64s) -> None:
    """Take slots out of the chains, then let the tuples of slots `source[i]` be in slots `target[i]`."""
    lines, chains = heads.view(np.uint8), links.reshape(-1).view(np.uint8)
    for i in range(len(removed)):
        _ask_for_neighbors(lines, chains, links, removed, i)
        slot = removed[i]
        after, before = links[slot, 0], links[slot, 1]
        _set_next(heads, links, before, after)
        if after != _NONE:
            links[after, 1] = before
    for i in range(len(source)):
        _ask_for_neighbors(lines, chains, links, source, i)
        after, before = links[source[i], 0], links[source[i], 1]
        links[target[i], 0], links[target[i], 1] = after, before
        _set_next(heads, links, before, target[i])
        if after != _NONE:
            links[after, 1] = target[i]


@njit(cache=True, nogil=True)
def probe_chains(
    probing: KeyedRows,
    index: Int64s,
    rows: KeyedRows,
    shift: int,
    heads: Int32s,
    links: Int32s,
    cursor: Int64s,
    out_at: Int64s,
    out_slot: Int64s,
) -> int:
    """Find the tuples whose keys equal those of probing tuples; return the number of pairs.

    Parameters
    ----------
    probing, index
        Tuples that probe are those at `index`.
    rows, shift, heads, links
        Tuples in memory and their chains, see `chain`.
    cursor : int64[2]
        See the module.
    out_at, out_slot
        Pairs: a position in `index`, and a slot.
    """
    left, right, wide = probing.records, rows.records, rows.digest_at >= 0
    by = np.uint64(shift)
    at, slot, found = cursor[0], cursor[1], 0
    lines, chains = heads.view(np.uint8), links.reshape(-1).view(np.uint8)
    while at < len(index):
        if slot == _BEFORE:
            if at + 2 * _AHEAD < len(index):
                prefetch(lines, 4 * _bucket(_hashed(probing, index[at + 2 * _AHEAD]), by))
                ahead = max(I64(heads[_bucket(_hashed(probing, index[at + _AHEAD]), by)]), 0)
                prefetch(chains, 8 * ahead)
                prefetch(right, ahead * rows.stride + rows.word_at)
            slot = I64(heads[_bucket(_hashed(probing, index[at]), by)])
        word = load_u64(left, index[at] * probing.stride + probing.word_at)
        while slot != _NONE:
            if found == len(out_at):
                cursor[0], cursor[1] = at, slot
                return found
            if load_u64(right, slot * rows.stride + rows.word_at) == word and not (
                wide and not _same_bytes(probing, index[at], rows, slot)
            ):
                out_at[found], out_slot[found] = at, slot
                found += 1
            slot = I64(links[slot, 0])
        at += 1
    cursor[0], cursor[1] = at, _BEFORE
    return found


@njit(cache=True, nogil=True)
def merge_entries(words: Words, slots: Int32s, count: int, new_words: Words, new_slots: Int32s) -> None:
    """Merge sorted new entries into sorted entries, in place; new ones come after equal old ones."""
    old, new = count - 1, len(new_words) - 1
    at = count + len(new_words) - 1
    while new >= 0:
        if old >= 0 and words[old] > new_words[new]:
            words[at], slots[at] = words[old], slots[old]
            old -= 1
        else:
            words[at], slots[at] = new_words[new], new_slots[new]
            new -= 1
        at -= 1


@njit(cache=True, nogil=True)
def compact_entries(words: Words, slots: Int32s, count: int, gone: Flags, kept: int, moved_to: Int64s) -> int:
    """Drop the entries of removed slots and rename those of moved ones, in place; return how many are left.

    Parameters
    ----------
    gone : bool[count]
        Whether a slot is removed.
    kept
        Number of slots that are left. Tuples in slots from there on move.
    moved_to : int64[count - kept]
        New slot of each of these.
    """
    to = 0
    for at in range(count):
        slot = I64(slots[at])
        if not gone[slot]:
            words[to] = words[at]
            slots[to] = slot if slot < kept else moved_to[slot - kept]
            to += 1
    return to


@njit(inline="always")
def _first_near(words: Words, count: int, word: np.uint64, reach: np.uint64, number: float, floating: bool) -> int:
    """Return the first entry that is not below the range of a word."""
    low = 0
    high = count
    least = word - reach if word > reach else np.uint64(0)
    while low < high:
        middle = (low + high) >> 1
        if floating:
            below = words[middle] < word and not _near(words[middle], word, reach, number, floating)
        else:
            below = words[middle] < least
        if below:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def probe_entries(
    probing: KeyedRows,
    index: Int64s,
    rows: KeyedRows,
    words: Words,
    slots: Int32s,
    count: int,
    reach: int,
    number: float,
    floating: bool,
    cursor: Int64s,
    out_at: Int64s,
    out_slot: Int64s,
) -> int:
    """Find the tuples whose keys equal those of probing tuples or are near; return the number of pairs.

    Parameters
    ----------
    probing, index, cursor, out_at, out_slot
        See `probe_chains`.
    rows, words, slots, count
        Tuples in memory, and the entries of their sorted index.
    reach, number, floating
        Greatest distance, see `headrace.joins.streams.tuples.keys.Width`; all 0 for equality.
    """
    by = np.uint64(reach)
    at, entry, found = cursor[0], cursor[1], 0
    while at < len(index):
        word = load_u64(probing.records, index[at] * probing.stride + probing.word_at)
        if entry == _BEFORE:
            entry = _first_near(words, count, word, by, number, floating)
        while entry < count and (words[entry] <= word or _near(words[entry], word, by, number, floating)):
            if found == len(out_at):
                cursor[0], cursor[1] = at, entry
                return found
            slot = I64(slots[entry])
            near = not floating or _near(words[entry], word, by, number, floating)
            if near and (rows.digest_at < 0 or _same_bytes(probing, index[at], rows, slot)):
                out_at[found], out_slot[found] = at, slot
                found += 1
            entry += 1
        entry = _BEFORE
        at += 1
    cursor[0], cursor[1] = at, _BEFORE
    return found


@njit(cache=True, nogil=True)
def filter_pairs(
    left: KeyedRows,
    left_index: Int64s,
    right: KeyedRows,
    right_index: Int64s,
    banded: bool,
    reach: int,
    number: float,
    floating: bool,
    keep: Flags,
) -> None:
    """Clear the flags of pairs that do not meet a condition.

    Parameters
    ----------
    left, left_index, right, right_index
        Pairs.
    banded, reach, number, floating
        Whether the condition is a band, and its width.
    keep : bool[pairs]
        Flags.
    """
    by = np.uint64(reach)
    for i in range(len(keep)):
        if not keep[i]:
            continue
        if banded:
            a = load_u64(left.records, left_index[i] * left.stride + left.word_at)
            b = load_u64(right.records, right_index[i] * right.stride + right.word_at)
            keep[i] = _near(a, b, by, number, floating)
        else:
            keep[i] = _same_key(left, left_index[i], right, right_index[i])
