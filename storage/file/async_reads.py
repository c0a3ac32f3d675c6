"""Asynchronous reads without threads: direct calls of the kernel's asynchronous I/O (Linux, `io_submit`).

Reads of files opened with `O_DIRECT` are submitted by one call and awaited by another, so the caller works while the
disk does. If the kernel does not support or refuses this, `open_kernel_queue` returns None and threads make the reads.
Knows nothing about pages.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import os
import platform
import sys
import weakref
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.errors import StorageIOError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["READ_NBYTES", "KernelQueue", "open_kernel_queue"]

_SETUP, _DESTROY, _EVENTS, _SUBMIT = 0, 1, 2, 3
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_CONTROL_BLOCK_WORDS, _EVENT_WORDS, _WORD = 8, 4, 8
_DATA, _DESCRIPTOR, _ADDRESS, _LENGTH, _OFFSET = 0, 2, 3, 4, 5  # words of a control block
_READ, _DESCRIPTOR_BIT = 0, 32
_EVENT_DATA, _EVENT_RESULT = 0, 2  # words of an event
_NONE = np.zeros(0, dtype=np.intp)
READ_NBYTES = (_CONTROL_BLOCK_WORDS + _EVENT_WORDS + 1) * _WORD
"""Bytes of memory of a queue for each read in flight."""


class KernelQueue:
    """Queue of reads of one file. Created by `open_kernel_queue`; belongs to one thread of one process.

    Parameters
    ----------
    descriptor
        Descriptor of a file opened with `O_DIRECT`.
    depth
        Maximum number of reads in flight.
    context
        Handle of the queue in the kernel.
    """

    def __init__(self, descriptor: int, depth: int, context: _Context) -> None:
        self.depth = depth
        self._context = context
        self._blocks = np.zeros((depth, _CONTROL_BLOCK_WORDS), dtype=np.int64)
        self._blocks[:, _DATA] = np.arange(depth)
        self._blocks[:, _DESCRIPTOR] = _READ | descriptor << _DESCRIPTOR_BIT
        self._pointers = self._blocks.ctypes.data + _CONTROL_BLOCK_WORDS * _WORD * np.arange(depth, dtype=np.uint64)
        self._first_pointer = self._pointers.ctypes.data
        self._events = np.zeros((depth, _EVENT_WORDS), dtype=np.int64)
        self._first_event = ctypes.c_void_p(self._events.ctypes.data)
        self._close = weakref.finalize(self, context.destroy)
        self._close.atexit = False  # the kernel frees the queue when the process ends

    @property
    def usable(self) -> bool:
        """Whether the queue belongs to this process: it does not survive a fork."""
        return self._context.own

    def submit(self, offsets: NDArray[np.int64], lengths: NDArray[np.int64], addresses: NDArray[np.int64]) -> None:
        """Submit at most `depth` reads. All earlier reads must have been awaited."""
        size = len(offsets)
        blocks = self._blocks[:size]
        blocks[:, _OFFSET], blocks[:, _LENGTH], blocks[:, _ADDRESS] = offsets, lengths, addresses
        context = self._context
        context.submitted = 0
        while context.submitted < size:
            pointer = ctypes.c_void_p(self._first_pointer + _WORD * context.submitted)
            taken = _call(_SUBMIT, context.name, ctypes.c_long(size - context.submitted), pointer)
            if taken <= 0:
                break
            context.submitted += taken

    def wait(self, lengths: NDArray[np.int64]) -> NDArray[np.intp]:
        """Wait for all submitted reads, of these lengths, and return the positions of those that were short."""
        brought = np.zeros(0, dtype=np.int64)
        done, context = 0, self._context
        while done < context.submitted:
            most = ctypes.c_long(context.submitted - done)
            got = _call(_EVENTS, context.name, most, most, self._first_event, None)
            if got == len(lengths) and self._events[:got, _EVENT_RESULT].sum() == lengths.sum():
                context.submitted = 0
                return _NONE  # no read returns more than its length, and an error is negative
            if got > 0:
                brought = np.zeros(len(lengths), dtype=np.int64) if done == 0 else brought
                brought[self._events[:got, _EVENT_DATA]] = self._events[:got, _EVENT_RESULT]
                done += got
            elif ctypes.get_errno() != errno.EINTR:
                raise StorageIOError(f"cannot wait for reads: {os.strerror(ctypes.get_errno())}")
        context.submitted = 0
        return np.flatnonzero(brought != lengths) if done else np.arange(len(lengths))

    def settle(self) -> None:
        """Wait until no read is in flight, and ignore the results."""
        if self._context.submitted and self._close.alive:
            self.wait(np.zeros(self._context.submitted, dtype=np.int64))
        self._context.submitted = 0

    def close(self) -> None:
        """Free the queue, after the reads in flight."""
        self._close()


class _Context:
    """Handle of a queue in the kernel, and the number of submitted reads that were not awaited yet."""

    def __init__(self, name: ctypes.c_ulong) -> None:
        self.name = name
        self.submitted = 0
        self._process = os.getpid()

    @property
    def own(self) -> bool:
        """Whether this process created it."""
        return self._process == os.getpid()

    def destroy(self) -> None:
        """Free the queue. The kernel takes a tenth of a second, so a thread does it if nothing is in flight."""
        if not self.own:
            return
        if self.submitted:  # the caller may free the frames next
            _call(_DESTROY, self.name)
        else:  # not `threading`: its lock may be held during garbage collection
            _thread.start_new_thread(_call, (_DESTROY, self.name))


def open_kernel_queue(descriptor: int, depth: int) -> KernelQueue | None:
    """Return a queue for a file opened with `O_DIRECT`, or None if the kernel refuses one."""
    if not sys.platform.startswith("linux") or platform.machine() not in _NUMBERS:
        return None
    name = ctypes.c_ulong(0)
    if _call(_SETUP, ctypes.c_uint(depth), ctypes.byref(name)) < 0:
        return None
    return KernelQueue(descriptor, depth, _Context(name))


@cache
def _system_call(function: int) -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return partial(call, ctypes.c_long(_NUMBERS[platform.machine()][function]))


def _call(function: int, *arguments: object) -> int:
    return _system_call(function)(*arguments)
