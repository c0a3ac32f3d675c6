"""Many reads in flight without threads: the kernel's asynchronous I/O (Linux, `io_submit`), called directly.

It takes reads of files opened with `O_DIRECT` and returns at once; waiting for them is a call of its own, so that the
caller works while the disk does. Where the kernel has it not, or refuses it, `open_kernel_queue` gives None and reads
are made by threads. Knows nothing of pages.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import weakref
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["READ_NBYTES", "KernelQueue", "open_kernel_queue"]

_SETUP, _DESTROY, _EVENTS, _SUBMIT = 0, 1, 2, 3
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_CONTROL_BLOCK = np.dtype(
    [
        ("data", "<u8"), ("key", "<u4"), ("flags", "<u4"), ("operation", "<u2"), ("priority", "<i2"),
        ("descriptor", "<u4"), ("address", "<u8"), ("length", "<u8"), ("offset", "<i8"), ("reserved", "<u8"),
        ("more_flags", "<u4"), ("event_descriptor", "<u4"),
    ]
)  # fmt: skip
_EVENT = np.dtype([("data", "<u8"), ("control_block", "<u8"), ("result", "<i8"), ("second", "<i8")])
READ_NBYTES = _CONTROL_BLOCK.itemsize + _EVENT.itemsize + 8
"""Bytes that a queue holds for each read it may have in flight."""


class KernelQueue:
    """Reads of one file, so many at a time. Made by `open_kernel_queue`; belongs to one thread of one process.

    Parameters
    ----------
    descriptor
        Of a file opened with `O_DIRECT`.
    depth
        Most reads in flight.
    context
        The kernel's name for the queue.
    """

    def __init__(self, descriptor: int, depth: int, context: ctypes.c_ulong) -> None:
        self.depth = depth
        self._context = context
        self._process = os.getpid()
        self._blocks = np.zeros(depth, dtype=_CONTROL_BLOCK)
        self._blocks["descriptor"] = descriptor
        self._blocks["data"] = np.arange(depth)
        self._pointers = self._blocks.ctypes.data + _CONTROL_BLOCK.itemsize * np.arange(depth, dtype=np.uint64)
        self._events = np.zeros(depth, dtype=_EVENT)
        self._submitted = 0
        self._close = weakref.finalize(self, _destroy, context, self._process)

    @property
    def usable(self) -> bool:
        """Whether the queue is this process's own: it does not outlive a fork."""
        return self._process == os.getpid()

    def submit(self, offsets: NDArray[np.int64], lengths: NDArray[np.int64], addresses: NDArray[np.uint64]) -> None:
        """Begin to read; at most `depth` reads, and none before those before have been waited for."""
        size = len(offsets)
        blocks = self._blocks[:size]
        blocks["offset"], blocks["length"], blocks["address"] = offsets, lengths, addresses
        self._submitted = 0
        while self._submitted < size:
            pointer = ctypes.c_void_p(self._pointers.ctypes.data + 8 * self._submitted)
            taken = _call(_SUBMIT, self._context, ctypes.c_long(size - self._submitted), pointer)
            if taken <= 0:
                break
            self._submitted += taken

    def wait(self, size: int) -> NDArray[np.int64]:
        """Return, once all are done, how many bytes each of the `size` reads has brought, or less than 0 if it failed.

        A read that the kernel did not take has brought 0 bytes.
        """
        results = np.zeros(size, dtype=np.int64)
        done = 0
        while done < self._submitted:
            most = ctypes.c_long(self._submitted - done)
            got = _call(_EVENTS, self._context, most, most, ctypes.c_void_p(self._events.ctypes.data), None)
            if got > 0:
                results[self._events["data"][:got]] = self._events["result"][:got]
                done += got
            elif not _interrupted():
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._submitted = 0
        return results

    def close(self) -> None:
        """Give the queue back; what is in flight ends first."""
        self._close()


def open_kernel_queue(descriptor: int, depth: int) -> KernelQueue | None:
    """Return a queue for a file opened with `O_DIRECT`, None if the kernel gives none."""
    if not sys.platform.startswith("linux") or platform.machine() not in _NUMBERS:
        return None
    context = ctypes.c_ulong(0)
    if _call(_SETUP, ctypes.c_uint(depth), ctypes.byref(context)) < 0:
        return None
    return KernelQueue(descriptor, depth, context)


@cache
def _system_call() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


def _call(function: int, *arguments: object) -> int:
    return _system_call()(ctypes.c_long(_NUMBERS[platform.machine()][function]), *arguments)


def _interrupted() -> bool:
    return ctypes.get_errno() == errno.EINTR


def _destroy(context: ctypes.c_ulong, process: int) -> None:
    if process == os.getpid():
        _call(_DESTROY, context)
