"""An open table file: the snapshot it stands at, the claim on it, its page reader, and its writer once it has one."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from storage.backend import FileBackend
from storage.commit import Writer
from storage.device import load_device
from storage.errors import StorageIOError
from storage.locks import Claims, FileLocks, claim_newest
from storage.reader import PageReader
from storage.snapshot import Snapshot, open_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from storage.device import DeviceModel

__all__ = ["TableHandle"]


class TableHandle:
    """One handle on a table file, at its newest commit.

    Parameters
    ----------
    path
        The file.
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
        self.backend = FileBackend(path, direct=direct)
        self._locks = FileLocks(self.backend.fileno(), self.backend.path)
        self._claims = Claims(self._locks)
        self._reader: PageReader | None = None
        self._writer: _OwnWriter | None = None
        self._exclusive = False
        try:
            self.snapshot = self._newest()
        except BaseException:
            self.backend.close()
            raise

    def refresh(self) -> Snapshot:
        """Go to the newest commit and return it."""
        self.snapshot = self._newest(self.snapshot)
        return self.snapshot

    def reader(self) -> PageReader:
        """Return what reads the table's pages, by the costs measured for its disk."""
        if self._reader is None:
            page_size = self.snapshot.page_size
            self._reader = PageReader(self.backend, page_size, load_device(self.backend.path, page_size))
        return self._reader

    @contextlib.contextmanager
    def writing(self, wait: float = 0.0) -> Iterator[Writer]:
        """Be the table's writer within, and stand at the newest commit afterwards.

        Raises
        ------
        LockedError
            If another handle is the writer and still is after `wait` seconds.
        PoisonedHandleError
            If a write of this handle failed before.
        StorageIOError
            If the file may not be written, or the table was replaced by another file.
        """
        if self._writer is None:
            self._writer = _OwnWriter(self.backend, self.reader().device)
        writer = self._writer.writer
        if not self._exclusive:
            writer.acquire(wait)
        try:
            yield writer
            self.adopt(writer.snapshot)
        finally:
            if not self._exclusive:
                writer.release()

    def stay_writer(self, wait: float = 0.0) -> None:
        """Be the table's writer until the handle is closed. Raises as `writing` does."""
        with self.writing(wait) as writer:
            writer.acquire()
            self._exclusive = True

    def adopt(self, snapshot: Snapshot) -> None:
        """Stand at a snapshot that the handle's own writer committed."""
        if snapshot is not self.snapshot:
            self._claims.keep(snapshot)
            self.snapshot = snapshot

    def close(self) -> None:
        """Give the file, the claims and the writer's lock back; closing twice is allowed."""
        self._claims.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self.backend.close()

    def _newest(self, current: Snapshot | None = None) -> Snapshot:
        superblock = claim_newest(self.backend, self._locks)
        if current is not None and current.txid == superblock.txid:
            return current
        try:
            snapshot = open_snapshot(self.backend, superblock)
        except BaseException:
            self._claims.give_up(superblock.txid)
            raise
        self._claims.keep(snapshot)
        return snapshot


class _OwnWriter:
    """A writer with a descriptor of its own, for the handle's is open for reading only."""

    def __init__(self, read: FileBackend, device: DeviceModel) -> None:
        self._backend = FileBackend(read.path, "w", direct=read.direct)
        if not os.path.sameopenfile(read.fileno(), self._backend.fileno()):
            self._backend.close()
            raise StorageIOError(f"{read.path} was replaced by another file; close the table and open it again")
        self._reader = PageReader(self._backend, device.page_size, device)
        self.writer = Writer(self._backend, FileLocks(self._backend.fileno(), read.path), self._reader)

    def close(self) -> None:
        self._reader.close()
        self._backend.close()
