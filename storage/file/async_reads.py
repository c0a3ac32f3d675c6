"""Many reads in flight without threads: the kernel's asynchronous I/O (Linux, `io_submit`), called directly.

It takes reads of files opened with `O_DIRECT` and returns at once; waiting for them is a call of its own, so that the
caller works while the disk does. Where the kernel has it not, or refuses it, `open_kernel_queue` gives None and reads
are made by threads. Knows nothing of pages.
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
        The kernel's side of the queue.
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
        self._close.atexit = False  # the kernel takes back what a process leaves

    @property
    def usable(self) -> bool:
        """Whether the queue is this process's own: it does not outlive a fork."""
        return self._context.own

    def submit(self, offsets: NDArray[np.int64], lengths: NDArray[np.int64], addresses: NDArray[np.int64]) -> None:
        """Begin to read; at most `depth` reads, and none before those before have been waited for."""
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
        """Return, once all are done, which of the submitted reads, of these lengths, did not bring all of its bytes."""
        brought = np.zeros(0, dtype=np.int64)
        done, context = 0, self._context
        while done < context.submitted:
            most = ctypes.c_long(context.submitted - done)
            got = _call(_EVENTS, context.name, most, most, self._first_event, None)
            if got == len(lengths) and self._events[:got, _EVENT_RESULT].sum() == lengths.sum():
                context.submitted = 0
                return _NONE  # no read brings more than its bytes, and a failure brings less than none
            if got > 0:
                brought = np.zeros(len(lengths), dtype=np.int64) if done == 0 else brought
                brought[self._events[:got, _EVENT_DATA]] = self._events[:got, _EVENT_RESULT]
                done += got
            elif ctypes.get_errno() != errno.EINTR:
                raise StorageIOError(f"cannot wait for reads: {os.strerror(ctypes.get_errno())}")
        context.submitted = 0
        return np.flatnonzero(brought != lengths) if done else np.arange(len(lengths))

    def settle(self) -> None:
        """Return when nothing is in flight any more, whatever became of it."""
        if self._context.submitted and self._close.alive:
            self.wait(np.zeros(self._context.submitted, dtype=np.int64))
        self._context.submitted = 0

    def close(self) -> None:
        """Give the queue back; what is in flight ends first."""
        self._close()


class _Context:
    """The kernel's side of a queue: its name, and how many reads it was given that have not been waited for."""

    def __init__(self, name: ctypes.c_ulong) -> None:
        self.name = name
        self.submitted = 0
        self._process = os.getpid()

    @property
    def own(self) -> bool:
        """Whether it was made by this process."""
        return self._process == os.getpid()

    def destroy(self) -> None:
        """Give it back. The kernel takes a tenth of a second over that, so a thread waits if nothing is in flight."""
        if not self.own:
            return
        if self.submitted:  # the frames may be freed next
            _call(_DESTROY, self.name)
        else:  # not `threading`, whose lock may be held where garbage is collected
            _thread.start_new_thread(_call, (_DESTROY, self.name))


def open_kernel_queue(descriptor: int, depth: int) -> KernelQueue | None:
    """Return a queue for a file opened with `O_DIRECT`, None if the kernel gives none."""
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
