"""Locks of a table file: the writer's lock, and the claims of readers on snapshots. Both are byte-range locks.

The locks are those of an open file description (OFD): they belong to the descriptor they were taken through, work
between processes and between handles of one process, and vanish when the descriptor is closed or its process dies.
They are far beyond the end of any table, so they never block access to its bytes:

    2^62 - 1        exclusive: the next writer, while it waits
    2^62            exclusive: the writer
    2^62 + 1 + t    shared: a reader of the snapshot of transaction `t`

A claim is such a shared lock: readers of one snapshot share one byte, their number is not limited, a reader needs no
permission to write, and one that dies leaves nothing behind. The locks belong to the file, not to its name: a table
that was replaced by a rename keeps those of its old readers.

A writer takes the next writer's lock first and releases it as soon as it has the other one. So a writer that commits
again and again does not overtake one that waits.

Why a claim is never too late: a claim on `t` also protects every later snapshot, because a writer reuses no page that
a transaction after the oldest claim freed. A reader therefore first claims a transaction that is at most the newest
one, and then reads the superblock. The snapshot that it finds was the newest at some moment under that claim. Its pages
are freed by later transactions only, and a writer that reuses them looks for claims after those; it finds the first
claim, or the one on the snapshot itself, which is taken before the first is released. This takes the same number of
reads however often a writer commits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
import weakref
from typing import TYPE_CHECKING

from headrace.storage.errors import InputError, LockedError, StorageIOError
from headrace.storage.format.slots import oldest_txid, read_superblock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.storage.file.backend import StorageBackend
    from headrace.storage.format.superblock import Superblock
    from headrace.storage.tree.snapshot import Snapshot

__all__ = ["Claims", "FileLocks", "check_wait"]

_WRITER = 1 << 62
_NEXT_WRITER = _WRITER - 1
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
        self._wait_for(_NEXT_WRITER, until)
        try:
            self._wait_for(_WRITER, until)
        finally:
            self._lock(fcntl.F_UNLCK, _NEXT_WRITER)

    def _wait_for(self, byte: int, until: float) -> None:
        pause = _FIRST_PAUSE
        while not self._lock(fcntl.F_WRLCK, byte):
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
        self._held: dict[object, int] = {}
        self._guard = threading.RLock()  # a snapshot may be collected while this very thread holds it
        self._process = os.getpid()
        self._closed = False

    def keep(self, snapshot: Snapshot) -> None:
        """Claim a snapshot until it is collected."""
        holder = weakref.ref(snapshot, self._drop)  # equal to one made before, as long as the snapshot lives
        with self._guard:
            if holder not in self._held:
                self._hold(holder, snapshot.txid)

    @contextlib.contextmanager
    def newest(self, backend: StorageBackend) -> Iterator[Superblock]:
        """Yield the newest superblock of a file. Its snapshot is claimed within the ``with`` block, unless kept longer.

        Raises
        ------
        NotATableError
            If the file has no superblock.
        FormatVersionError
            If the table has another format version.
        """
        holder = object()
        self._hold(holder, oldest_txid(backend))
        try:
            yield read_superblock(backend)
        finally:
            self._drop(holder)

    def close(self) -> None:
        """Forget all claims; the locks go with the file."""
        with self._guard:
            self._closed = True

    def _hold(self, holder: object, txid: int) -> None:
        with self._guard:
            self._held[holder] = txid  # first: a snapshot of this transaction may be collected before the next line
            try:
                self._locks.claim(txid)
            except BaseException:
                del self._held[holder]
                raise

    def _drop(self, holder: object) -> None:
        with self._guard:
            txid = self._held.pop(holder)
            if not self._closed and txid not in list(self._held.values()) and os.getpid() == self._process:
                self._locks.release(txid)
