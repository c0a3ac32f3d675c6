"""Compiled code that reads and writes a file, through the C functions that its `StorageBackend` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.storage.backend import DESCRIPTOR, END_OF_FILE, PREAD, PWRITE, SYNC

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["read_bytes", "sync_file", "write_bytes"]

_INT, _LONG = ir.IntType(32), ir.IntType(64)
_EINTR, _EIO = 4, 5


def _called(builder: Any, result: Any, address: Any, descriptor: Any, *others: Any) -> Any:
    """Call the C function at an address with a descriptor and words; return its result as a word."""
    kind = ir.FunctionType(result, [_INT, *(_LONG for _ in others)])
    function = builder.inttoptr(address, kind.as_pointer())
    returned = builder.call(function, [builder.trunc(descriptor, _INT), *others])
    return returned if result is _LONG else builder.sext(returned, _LONG)


@intrinsic
def _transfer(_typing: Any, address: Any, descriptor: Any, memory: Any, length: Any, offset: Any) -> Any:
    """Call `pread` or `pwrite`."""
    del address, descriptor, memory, length, offset
    word = types.int64
    return word(word, word, word, word, word), lambda _context, builder, _signature, args: _called(
        builder, _LONG, *args
    )


@intrinsic
def _sync(_typing: Any, address: Any, descriptor: Any) -> Any:
    """Call `fdatasync`."""
    del address, descriptor
    word = types.int64
    return word(word, word), lambda _context, builder, _signature, args: _called(builder, _INT, *args)


@intrinsic
def _errno(_typing: Any) -> Any:
    """Return why the last C function failed."""

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        kind = ir.FunctionType(_INT.as_pointer(), [])
        location = cgutils.get_or_insert_function(builder.module, kind, "__errno_location")
        return builder.sext(builder.load(builder.call(location, [])), _LONG)

    return types.int64(), generate


@njit(cache=True, nogil=True)
def _why() -> int:
    """Return why the last C function failed; never 0, which would mean that it did not."""
    error = _errno()
    return _EIO if error == 0 else error


@njit(cache=True, nogil=True)
def _transfer_all(call: int, descriptor: int, memory: int, length: int, offset: int) -> int:
    """Read or write all bytes; return 0, the number of the error, or `END_OF_FILE`."""
    done = 0
    while done < length:
        count = _transfer(call, descriptor, memory + done, length - done, offset + done)
        if count > 0:
            done += count
        elif count == 0:
            return END_OF_FILE
        else:
            error = _why()
            if error != _EINTR:
                return error
    return 0


@njit(cache=True, nogil=True)
def read_bytes(calls: NDArray[np.int64], buffer: NDArray[np.uint8], start: int, length: int, offset: int) -> int:
    """Fill part of a buffer from a file; return 0, the number of the error, or `END_OF_FILE`."""
    return _transfer_all(calls[PREAD], calls[DESCRIPTOR], buffer.ctypes.data + start, length, offset)


@njit(cache=True, nogil=True)
def write_bytes(calls: NDArray[np.int64], buffer: NDArray[np.uint8], start: int, length: int, offset: int) -> int:
    """Write part of a buffer to a file; return 0 or the number of the error."""
    error = _transfer_all(calls[PWRITE], calls[DESCRIPTOR], buffer.ctypes.data + start, length, offset)
    return _EIO if error == END_OF_FILE else error


@njit(cache=True, nogil=True)
def sync_file(calls: NDArray[np.int64]) -> int:
    """Make all that was written durable; return 0 or the number of the error."""
    while _sync(calls[SYNC], calls[DESCRIPTOR]) != 0:
        error = _why()
        if error != _EINTR:
            return error
    return 0
