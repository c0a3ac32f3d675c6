"""Compiled bytes: unaligned loads and stores, comparison, copying and XXH64. Holds nothing that knows a page.

Every kernel takes flat uint8 arrays and int64 offsets. `load_u64` and `store_u64` touch eight bytes whatever the
width of the value, so arrays that they meet carry `SLACK` bytes after their last value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from headrace.storage.format.arrays import Bytes, Int64s

__all__ = [
    "I64",
    "bswap_u64",
    "compare_bytes",
    "copy_blocks",
    "copy_bytes",
    "load_u16",
    "load_u64",
    "prefetch",
    "store_u64",
    "xxh64",
]

I64: Any = np.int64
"""`np.int64` in kernels: numba knows the scalar, and mypy would not let it meet an int."""

_READ, _KEEP, _DATA = 0, 3, 1  # of llvm.prefetch

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)


def _address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, bits: int) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), ir.IntType(bits).as_pointer())


@intrinsic
def load_u64(_typing: Any, array: Any, offset: Any) -> Any:
    """Load the little-endian uint64 at a byte offset, aligned or not."""
    del offset

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_address(context, builder, signature.args[0], args[0], args[1], 64), align=1)

    return types.uint64(array, types.int64), generate


@intrinsic
def load_u16(_typing: Any, array: Any, offset: Any) -> Any:
    """Load the little-endian uint16 at a byte offset as int64."""
    del offset

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        short = builder.load(_address(context, builder, signature.args[0], args[0], args[1], 16), align=1)
        return builder.zext(short, ir.IntType(64))

    return types.int64(array, types.int64), generate


@intrinsic
def store_u64(_typing: Any, array: Any, offset: Any, value: Any) -> Any:
    """Store a uint64 little-endian at a byte offset, aligned or not."""
    del offset, value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _address(context, builder, signature.args[0], args[0], args[1], 64), align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


@intrinsic
def prefetch(_typing: Any, array: Any, offset: Any) -> Any:
    """Ask for the line of memory with a byte of a uint8 array, without waiting for it."""
    del offset

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], args[0], args[1], 8)
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
        builder.call(function, [address, flag(_READ), flag(_KEEP), flag(_DATA)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def bswap_u64(_typing: Any, value: Any) -> Any:
    """Reverse the bytes of a uint64."""
    del value

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bswap(args[0])

    return types.uint64(types.uint64), generate


@njit(cache=True, nogil=True)
def copy_bytes(source: Bytes, start: int, target: Bytes, at: int, length: int) -> None:
    """Copy `length` bytes and touch no byte beyond them."""
    done = 0
    while done + 8 <= length:
        store_u64(target, at + done, load_u64(source, start + done))
        done += 8
    while done < length:
        target[at + done] = source[start + done]
        done += 1


@njit(cache=True, nogil=True)
def copy_blocks(source: Bytes, source_block: Int64s, target: Bytes, target_block: Int64s, size: int) -> None:
    """Copy block `source_block[i]` of one array to block `target_block[i]` of another, for all i."""
    for i in range(len(source_block)):
        copy_bytes(source, source_block[i] * size, target, target_block[i] * size, size)


@njit(cache=True, nogil=True)
def compare_bytes(left: Bytes, left_start: int, left_end: int, right: Bytes, right_start: int, right_end: int) -> int:
    """Compare as memcmp does, a proper prefix first; the sign of the result is the order."""
    left_length = left_end - left_start
    right_length = right_end - right_start
    common = min(left_length, right_length)
    at = 0
    while at + 8 <= common:
        a = load_u64(left, left_start + at)
        b = load_u64(right, right_start + at)
        if a != b:
            return -1 if bswap_u64(a) < bswap_u64(b) else 1
        at += 8
    if at < common and common >= 8:  # noqa: PLR2004 - bytes of a word
        # The last word overlaps the one before, whose bytes are equal.
        a = load_u64(left, left_start + common - 8)
        b = load_u64(right, right_start + common - 8)
        if a != b:
            return -1 if bswap_u64(a) < bswap_u64(b) else 1
        at = common
    while at < common:
        if left[left_start + at] != right[right_start + at]:
            return -1 if left[left_start + at] < right[right_start + at] else 1
        at += 1
    return left_length - right_length


@njit(cache=True, nogil=True, inline="always")
def _rotate(value: Any, by: Any) -> Any:
    return (value << np.uint64(by)) | (value >> np.uint64(64 - by))


@njit(cache=True, nogil=True, inline="always")
def _round(lane: Any, word: Any) -> Any:
    return _rotate(lane + word * _P2, 31) * _P1


@njit(cache=True, nogil=True, inline="always")
def _merge(digest: Any, lane: Any) -> Any:
    return (digest ^ _round(np.uint64(0), lane)) * _P1 + _P4


@njit(cache=True, nogil=True)
def xxh64(data: Bytes, start: int, length: int, seed: int) -> int:
    """Return the XXH64 digest of `data[start:start + length]`, as the reference implementation defines it.

    Parameters
    ----------
    data : uint8 array
    start, length : int64
    seed : uint64

    Returns
    -------
    uint64
    """
    at = start
    end = start + length
    if length >= 32:  # noqa: PLR2004 - one stripe of four lanes
        a = seed + _P1 + _P2
        b = seed + _P2
        c = seed + np.uint64(0)
        d = seed - _P1
        while at + 32 <= end:
            a = _round(a, load_u64(data, at))
            b = _round(b, load_u64(data, at + 8))
            c = _round(c, load_u64(data, at + 16))
            d = _round(d, load_u64(data, at + 24))
            at += 32
        digest = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
        digest = _merge(_merge(_merge(_merge(digest, a), b), c), d)
    else:
        digest = seed + _P5
    digest += np.uint64(length)
    while at + 8 <= end:
        digest = _rotate(digest ^ _round(np.uint64(0), load_u64(data, at)), 27) * _P1 + _P4
        at += 8
    if at + 4 <= end:
        word = np.uint64(load_u16(data, at)) | (np.uint64(load_u16(data, at + 2)) << np.uint64(16))
        digest = _rotate(digest ^ (word * _P1), 23) * _P2 + _P3
        at += 4
    while at < end:
        digest = _rotate(digest ^ (np.uint64(data[at]) * _P5), 11) * _P1
        at += 1
    digest = (digest ^ (digest >> np.uint64(33))) * _P2
    digest = (digest ^ (digest >> np.uint64(29))) * _P3
    return digest ^ (digest >> np.uint64(32))
