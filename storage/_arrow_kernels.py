"""Compiled reading of Arrow's C data interface: record batches all of whose columns are of whole numbers of bytes.

Takes addresses of `ArrowSchema` and `ArrowArray`, as the specification lays them out, on a machine of 64 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["open_array", "open_schema", "read_words", "same_columns"]

_WORD = 8
_FORMAT, _NAME, _METADATA, _FIELDS, _FIELD, _FIELD_VALUES = 0, 8, 16, 32, 40, 48  # in an ArrowSchema
_NULLS, _OFFSET, _BUFFERS, _COLUMN = 8, 16, 40, 48  # in an ArrowArray


def _load(builder: Any, address: Any, bits: int) -> Any:
    """Load an integer of so many bits, aligned or not, as one of 64."""
    word = ir.IntType(bits)
    return builder.zext(builder.load(builder.inttoptr(address, word.as_pointer()), align=1), ir.IntType(64))


@intrinsic
def _word(_typing: Any, address: Any) -> Any:
    """Load the word at an address."""
    del address
    return types.int64(types.int64), lambda _context, builder, _signature, args: _load(builder, args[0], 64)


@intrinsic
def _byte(_typing: Any, address: Any) -> Any:
    """Load the byte at an address as int64."""
    del address
    return types.int64(types.int64), lambda _context, builder, _signature, args: _load(builder, args[0], 8)


def _opened(name: str) -> Any:
    """Return what generates code that asks a `PyCapsule` of this name for the address that it holds."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        module, pointer = builder.module, ir.IntType(8).as_pointer()
        kind = ir.FunctionType(pointer, [pointer, pointer])
        function = cgutils.get_or_insert_function(module, kind, "PyCapsule_GetPointer")
        capsule = builder.inttoptr(args[0], pointer)
        address = builder.call(function, [capsule, context.insert_const_string(module, name)])
        return builder.ptrtoint(address, ir.IntType(64))

    return generate


@intrinsic
def open_schema(_typing: Any, capsule: Any) -> Any:
    """Return the address in a capsule with an `ArrowSchema`. Only for code that holds the interpreter's lock."""
    del capsule
    return types.int64(types.int64), _opened("arrow_schema")


@intrinsic
def open_array(_typing: Any, capsule: Any) -> Any:
    """Return the address in a capsule with an `ArrowArray`. Only for code that holds the interpreter's lock."""
    del capsule
    return types.int64(types.int64), _opened("arrow_array")


@njit(cache=True, nogil=True)
def _same_text(left: int, right: int) -> bool:
    """Whether two texts that end with a zero byte are the same."""
    at = 0
    while _byte(left + at) == _byte(right + at):
        if _byte(left + at) == 0:
            return True
        at += 1
    return False


@njit(cache=True, nogil=True)
def same_columns(schema: int, expected: int) -> bool:
    """Whether a schema has columns of the expected names and types in this order, and says nothing more of any."""
    columns = _word(expected + _FIELDS)
    if _word(schema + _FIELDS) != columns:
        return False
    for column in range(columns):
        field, other = _word(_word(schema + _FIELD) + column * _WORD), _word(_word(expected + _FIELD) + column * _WORD)
        if _word(field + _METADATA) != 0 or _word(field + _FIELD_VALUES) != 0:
            return False
        if not _same_text(_word(field + _FORMAT), _word(other + _FORMAT)):
            return False
        if not _same_text(_word(field + _NAME), _word(other + _NAME)):
            return False
    return True


@njit(cache=True, nogil=True)
def _read_column(batch: int, column: int, width: int, signed: bool, words: NDArray[np.int64]) -> bool:
    """Fill `words` with a column; return False if it may have nulls."""
    array = _word(_word(batch + _COLUMN) + column * _WORD)
    buffers = _word(array + _BUFFERS)
    if _word(buffers) != 0 and _word(array + _NULLS) != 0:
        return False
    at = _word(buffers + _WORD) + (_word(array + _OFFSET) + _word(batch + _OFFSET)) * width
    above = np.int64(64 - 8 * width)
    for row in range(len(words)):
        value = np.int64(0)
        for byte in range(width):
            value |= _byte(at + row * width + byte) << np.int64(8 * byte)
        words[row] = (value << above) >> above if signed else value
    return True


@njit(cache=True, nogil=True)
def read_words(batch: int, columns: NDArray[np.int64], words: NDArray[np.int64]) -> bool:
    """Fill a row of `words` with each of these columns; return False if one may have nulls.

    Parameters
    ----------
    columns : int64[n, 3]
        Of each: its number, its bytes, and whether it is signed.
    """
    for place in range(len(columns)):
        column, width, signed = columns[place, 0], columns[place, 1], columns[place, 2] != 0
        if not _read_column(batch, column, width, signed, words[place]):
            return False
    return True
