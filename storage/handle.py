"""`TableHandle`: an open table file with its current snapshot, the claim on that, its page reader, and its writer."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING

from headrace.storage.commit.locks import Claims, FileLocks, check_wait
from headrace.storage.commit.writer import Writer, open_already
from headrace.storage.errors import ClosedTableError, LockedError, StorageIOError
from headrace.storage.file.backend import FileBackend
from headrace.storage.read.device import load_device
from headrace.storage.read.reader import PageReader
from headrace.storage.tree.snapshot import Snapshot, open_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.storage.read.device import DeviceModel

__all__ = ["TableHandle"]

_LONGEST_COMMIT = 5.0
_WRITERS_THREADS = 4  # more of them contend for the lock when most pages are in memory


class TableHandle:
    """One handle on a table file, at its newest commit.

    Parameters
    ----------
    path
        Path of the table file.
    direct
        Whether reads bypass the page cache where they can.

    Raises
    ------
    TableNotFoundError
        If there is no such file.
    CorruptionError
        If it is not a table, or damaged.
    """

    def __init__(self, path: str | os.PathLike[str], *, direct: bool = True) -> None:
        self._closing: list[Callable[[], None]] = []
        self._closed = False
        self._reader: PageReader | None = None
        self._writer: _OwnWriter | None = None
        self._turn = threading.Lock()  # one thread changes the table at a time: the file's lock is the handle's
        self._whose = 0
        self._open(FileBackend(path, direct=direct))
        try:
            self.snapshot = self._newest()
        except BaseException:
            self.close()
            raise

    def refresh(self) -> Snapshot:
        """Move to the newest commit of the file that now has the table's name, and return it.

        Raises
        ------
        ClosedTableError
            If the handle was closed.
        TableNotFoundError
            If there is no such file any more.
        CorruptionError
            If the file is damaged.
        """
        self._refuse_closed()
        current: Snapshot | None = self.snapshot
        if not self.backend.has_its_name() or os.getpid() != self._process:  # a parent's claims are its own
            self._reopen()
            current = None
        self.snapshot = self._newest(current)
        return self.snapshot

    def reader(self) -> PageReader:
        """Return the page reader of the table, which plans by the costs measured for its disk."""
        self._refuse_closed()
        if self._reader is None:
            page_size = self.snapshot.page_size
            self._reader = PageReader(self.backend, page_size, load_device(self.backend.place, page_size))
            self._closing.append(self._reader.close)
        return self._reader

    @contextlib.contextmanager
    def writing(self, wait: float = 0.0) -> Iterator[Writer]:
        """Hold the writer's lock within a ``with`` block, and move to the newest commit afterwards.

        Raises
        ------
        ClosedTableError
            If the handle was closed.
        LockedError
            If another handle, or another thread through this one, still holds the lock after `wait` seconds.
        InputError
            If this thread has a transaction open.
        PoisonedHandleError
            If an earlier write of this handle failed.
        StorageIOError
            If the file may not be written, the table was replaced by another file, or the handle came from another
            process.
        """
        writer, done = self._begin_writing(wait), False
        try:
            yield writer
            done = True
        finally:
            self._end_writing(writer, done=done)

    def _begin_writing(self, wait: float) -> Writer:
        self._refuse_closed()
        self._refuse_forked()
        if not self._turn.acquire(blocking=False):
            self._wait_for_turn(wait)
        try:
            self._whose = threading.get_ident()
            return self._acquired(wait)
        except BaseException:
            self._end_turn()
            raise

    def _wait_for_turn(self, wait: float) -> None:
        """Wait until no other thread writes through this handle."""
        check_wait(wait)
        if self._whose == threading.get_ident():
            raise open_already()
        if not self._turn.acquire(timeout=min(wait, threading.TIMEOUT_MAX)):
            raise LockedError(
                f"another thread is writing to {self.backend.path} through this handle; "
                "wait for it (wait=SECONDS), or open the table once more"
            )

    def _acquired(self, wait: float) -> Writer:
        self._refuse_replaced()
        if self._writer is None:
            self._writer = _OwnWriter(self.backend, self.reader().device)
        writer = self._writer.writer
        if not self._exclusive:
            writer.acquire(wait)
            try:
                self._refuse_replaced()
            except BaseException:
                writer.release()
                raise
        return writer

    def _end_writing(self, writer: Writer, *, done: bool) -> None:
        """Release the writer's lock; if all was `done`, move to the newest commit."""
        try:
            if done:
                self.adopt(writer.snapshot)
            else:
                writer.abandon()
        finally:
            try:
                if not self._exclusive and self._has(writer):
                    writer.release()
            finally:
                self._end_turn()

    def _end_turn(self) -> None:
        self._whose = 0
        self._turn.release()

    def _has(self, writer: Writer) -> bool:
        """Return whether a writer still belongs to the handle: its file was not closed meanwhile."""
        return self._writer is not None and self._writer.writer is writer

    def stay_writer(self, wait: float = 0.0) -> None:
        """Hold the writer's lock until the handle is closed. Raises as `writing` does."""
        with self.writing(wait) as writer:
            writer.acquire()
            self._exclusive = True

    def adopt(self, snapshot: Snapshot) -> None:
        """Move to a snapshot that the handle's own writer committed.

        While the handle holds the lock for good, only its next commit frees pages of this snapshot. The snapshot is
        then claimed only when the handle leaves it, and only if it is still in use; that is before the freed pages
        are reused.
        """
        if snapshot is self.snapshot:
            return
        if not self._exclusive:
            self._claims.keep(snapshot)
            self.snapshot = snapshot
            return
        left = weakref.ref(self.snapshot)
        self.snapshot = snapshot
        used = left()
        if used is not None:
            self._claims.keep(used)

    def close(self) -> None:
        """Release the file, the claims and the writer's lock; closing twice is allowed.

        Waits for a commit of another thread, but only a few seconds for a transaction that it leaves open.
        """
        others = os.getpid() == self._process and self._whose not in {0, threading.get_ident()}
        taken = others and self._turn.acquire(timeout=_LONGEST_COMMIT)
        try:
            self._close()
        finally:
            if taken:
                self._turn.release()

    def _close(self) -> None:
        if self._writer is not None:
            if self._exclusive and os.getpid() == self._process:
                self._writer.writer.release()
            self._writer.close()
            self._writer = None
        for close in reversed(self._closing):
            close()
        self._closing = []
        self._reader = None
        self._closed = True

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClosedTableError(f"the table {self.backend.path} was closed; open it again")

    def _refuse_forked(self) -> None:
        """Raise if the handle belongs to the parent process: both processes would share one lock."""
        if os.getpid() != self._process:
            raise StorageIOError(
                f"{self.backend.path} was opened before this process was forked; open it again to change it"
            )

    def _refuse_replaced(self) -> None:
        if not self.backend.has_its_name():
            raise StorageIOError(
                f"{self.backend.path} was replaced by another file or removed; refresh the table or open it again"
            )

    def _reopen(self) -> None:
        """Open the file that has the table's name now. The old one stays open for snapshots that are in use."""
        backend = FileBackend(self.backend.place, direct=self.backend.direct)
        if self._writer is not None:
            self._writer.close()
        self._open(backend)

    def _open(self, backend: FileBackend) -> None:
        self._process = os.getpid()
        self.backend = backend
        self._closing.append(backend.close)
        self._locks = FileLocks(backend.fileno(), backend.path)
        self._claims = Claims(self._locks)
        self._closing.append(self._claims.close)
        self._reader = None
        self._writer = None
        self._exclusive = False

    def _newest(self, current: Snapshot | None = None) -> Snapshot:
        with self._claims.newest(self.backend) as superblock:
            if current is not None and current.txid == superblock.txid:
                snapshot = current
            else:
                snapshot = open_snapshot(self.backend, superblock, current)
            self._claims.keep(snapshot)
        return snapshot


class _OwnWriter:
    """A writer with a descriptor of its own, because the handle's descriptor is open for reading only.

    It reads through the page cache of the operating system, which contains what it wrote.
    """

    def __init__(self, read: FileBackend, device: DeviceModel) -> None:
        self._backend = FileBackend(read.place, "w", direct=False)
        self._reader = PageReader(self._backend, device.page_size, device, threads=_WRITERS_THREADS)
        self.writer = Writer(self._backend, FileLocks(self._backend.fileno(), read.path), self._reader)

    def close(self) -> None:
        self._reader.close()
        self._backend.close()
