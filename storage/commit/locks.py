"""Locks of a table file: the writer's lock, and the claims of readers on snapshots. Both are byte-range locks.

The locks are those of an open file description (OFD): they belong to the descriptor they were taken through, work
between processes and between handles of one process, and vanish when the descriptor is closed or its process dies.
They are far beyond the end of any table, so they never block access to its bytes:

    2^62            exclusive: the writer
    2^62 + 1 + t    shared: a reader of the snapshot of transaction `t`

A claim is such a shared lock: readers of one snapshot share one byte, their number is not limited, a reader needs no
permission to write, and one that dies leaves nothing behind. The locks belong to the file, not to its name: a table
that was replaced by a rename keeps those of its old readers.

Why a claim is never too late: a reader takes its claim and then reads the superblock again. If that still names the
claimed transaction, the claim stood before any later commit was durable, and a writer looks for claims only after
its previous commit was. Otherwise the reader claims the newer snapshot.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
import weakref
from typing import TYPE_CHECKING

from headrace.storage.errors import InputError, LockedError, StorageIOError
from headrace.storage.format.slots import read_superblock

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.storage.file.backend import StorageBackend
    from headrace.storage.format.superblock import Superblock
    from headrace.storage.tree.snapshot import Snapshot

__all__ = ["Claims", "FileLocks", "check_wait", "claim_newest"]

_WRITER = 1 << 62
_CLAIMS = _WRITER + 1
_FLOCK = struct.Struct("@hhqqi0q")
_TAKEN = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.1


def check_wait(wait: float) -> None:
    """Raise unless `wait` is a time to wait.

    Raises
    ------
    InputError
        If it is not a number of seconds.
    """
    if not isinstance(wait, int | float) or not wait >= 0:
        raise InputError(f"the time to wait for another writer is a number of seconds from 0 on, not {wait!r}")


class FileLocks:
    """The locks of one open table file.

    Parameters
    ----------
    fd
        Descriptor of the table file; for the writer's lock it must be open for writing.
    path
        Name of the table, for messages.
    clock, pause
        Clock in seconds, and what to call to let time pass, while waiting for the writer's lock.
    """

    def __init__(
        self,
        fd: int,
        path: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._fd = fd
        self._path = path
        self._clock = clock
        self._pause = pause

    def take_writer(self, wait: float = 0.0) -> None:
        """Take the writer's lock.

        Parameters
        ----------
        wait
            Seconds to wait for another writer to finish.

        Raises
        ------
        LockedError
            If another handle still has the lock after that time.
        InputError
            If the time is not a number of seconds.
        StorageIOError
            If the file system has no locks.
        """
        check_wait(wait)
        until = self._clock() + wait
        pause = _FIRST_PAUSE
        while not self._lock(fcntl.F_WRLCK, _WRITER):
            if self._clock() >= until:
                raise LockedError(
                    f"{self._path} is being written by another process or handle; close that one, "
                    "or wait for it (wait=SECONDS), or open the table for reading (mode='r')"
                )
            self._pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def release_writer(self) -> None:
        """Release the writer's lock."""
        self._lock(fcntl.F_UNLCK, _WRITER)

    def claim(self, txid: int) -> None:
        """Claim a snapshot, so that its pages are not reused."""
        self._lock(fcntl.F_RDLCK, _CLAIMS + txid)

    def release(self, txid: int) -> None:
        """Release a claim."""
        self._lock(fcntl.F_UNLCK, _CLAIMS + txid)

    def oldest_claim(self, before: int) -> int | None:
        """Return the lowest transaction id below `before` that another handle claims, or None.

        Claims taken through this descriptor are not included; a handle tracks its own.
        """
        found = None
        end = before
        while end > 0:
            held = self._conflict(_CLAIMS, end)
            if held is None:
                return found
            found = end = max(held - _CLAIMS, 0)
        return found

    def _lock(self, kind: int, start: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, 1, 0))
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            raise self._refused(error) from error
        return True

    def _conflict(self, start: int, length: int) -> int | None:
        """Return where a lock of another handle in the range begins, or None."""
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        try:
            kind, _, begin, _, _ = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, request))
        except OSError as error:
            raise self._refused(error) from error
        return None if kind == fcntl.F_UNLCK else int(begin)

    def _refused(self, error: OSError) -> StorageIOError:
        hint = "; its file system has no byte-range locks, so keep the table on a local disk"
        return StorageIOError(
            f"cannot lock {self._path}: {os.strerror(error.errno or 0)}{hint if error.errno in _UNSUPPORTED else ''}"
        )


def claim_newest(backend: StorageBackend, locks: FileLocks) -> Superblock:
    """Claim the newest snapshot of a file and return its superblock; the caller releases the claim."""
    superblock = read_superblock(backend)
    while True:
        locks.claim(superblock.txid)
        newest = read_superblock(backend)
        if newest.txid == superblock.txid:
            return newest
        locks.release(superblock.txid)
        superblock = newest


class Claims:
    """Claims of one handle: each lasts as long as a snapshot of its transaction is in use.

    A process that is forked shares the locks of its parent, so it releases none of them.

    Parameters
    ----------
    locks
        Locks of the handle's file.
    """

    def __init__(self, locks: FileLocks) -> None:
        self._locks = locks
        self._count: dict[int, int] = {}
        self._kept: dict[weakref.ref[Snapshot], int] = {}
        self._guard = threading.RLock()  # a snapshot may be collected while this very thread holds it
        self._process = os.getpid()
        self._closed = False

    def keep(self, snapshot: Snapshot) -> None:
        """Claim a snapshot until it is collected; one that is claimed already is claimed once."""
        with self._guard:
            if weakref.ref(snapshot) in self._kept:
                return
            self._locks.claim(snapshot.txid)
            self._count[snapshot.txid] = self._count.get(snapshot.txid, 0) + 1
            self._kept[weakref.ref(snapshot, self._drop)] = snapshot.txid

    def give_up(self, txid: int) -> None:
        """Release a claim for which no snapshot was opened."""
        with self._guard:
            if not self._closed and txid not in self._count and os.getpid() == self._process:
                self._locks.release(txid)

    def close(self) -> None:
        """Forget all claims; the locks go with the file."""
        with self._guard:
            self._closed = True

    def _drop(self, snapshot: weakref.ref[Snapshot]) -> None:
        with self._guard:
            txid = self._kept.pop(snapshot)
            self._count[txid] -= 1
            if self._count[txid] == 0:
                del self._count[txid]
                self.give_up(txid)
