"""`StorageBackend`, the only way in which storage accesses a table file, and `FileBackend`, which uses a real disk.

Every byte that storage reads or writes goes through a `StorageBackend`, so tests can replace it by a simulated disk
with any fault. This module knows nothing about pages, checksums or commits.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.storage.errors import (
    ClosedTableError,
    CorruptionError,
    InputError,
    StorageIOError,
    TableExistsError,
    TableNotFoundError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Buffer", "FileBackend", "Mode", "StorageBackend", "path_text", "sync_folder"]


Buffer: TypeAlias = memoryview | npt.NDArray[np.uint8]
Mode = Literal["r", "w", "x"]

_IOV_MAX = os.sysconf("SC_IOV_MAX") if os.sysconf("SC_IOV_MAX") > 0 else 1024
_PIECE = 1 << 16
"""Maximum bytes of one write. The kernel keeps larger writes in large folios, which slow down later small writes."""
_FLAGS = {"r": os.O_RDONLY, "w": os.O_RDWR, "x": os.O_RDWR | os.O_CREAT | os.O_EXCL}
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT)


class StorageBackend(Protocol):
    """File operations that storage needs. Calls may come from several threads at once; each has its own offset."""

    @property
    def path(self) -> str:
        """Name of the file, for messages."""
        ...

    def pread_into(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Fill all buffers with the bytes from `offset` on, or raise."""
        ...

    def pwrite(self, offset: int, data: Buffer | bytes) -> None:
        """Write all of `data` at `offset`, growing the file as needed, or raise. Durable only after `sync`."""
        ...

    def sync(self) -> None:
        """Return when everything written is durable, or raise."""
        ...

    def size(self) -> int:
        """Return the length of the file in bytes."""
        ...

    def truncate(self, size: int) -> None:
        """Cut or extend the file to `size` bytes."""
        ...

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        ...


class FileBackend:
    """A file on disk, read with `O_DIRECT` if the file system and the buffers allow it.

    Reads that `O_DIRECT` refuses (unaligned memory, offset or length, or a file system without it) are served
    through the page cache. Writes always go through the page cache and become durable with `sync`.

    Parameters
    ----------
    path
        Path of the table file.
    mode
        ``"r"`` reads, ``"w"`` reads and writes an existing file, ``"x"`` creates a new one.
    direct
        Whether to try `O_DIRECT`.

    Raises
    ------
    TableNotFoundError
        If there is no such file and `mode` is not ``"x"``.
    TableExistsError
        If there is one and `mode` is ``"x"``.
    InputError
        If the path is not a valid path.
    StorageIOError
        If the operating system refuses for another reason.
    """

    def __init__(self, path: str | os.PathLike[str], mode: Mode = "r", *, direct: bool = True) -> None:
        self._path = path_text(path)
        self._place = os.path.abspath(self._path)  # noqa: PTH100 - keeps links
        self._fd = _open(self._path, _FLAGS[mode])
        self._direct_fd = _open_direct(self._path) if direct else None
        self._identity = _identity(os.fstat(self._fd))
        name = _name_of(self._fd)  # not used if it has links, or ends as that of a removed file does
        self._name = name if name == self._place and not name.endswith(" (deleted)") else None
        self._open = True

    @property
    def path(self) -> str:
        """Name of the file, for messages."""
        return self._path

    @property
    def place(self) -> str:
        """Absolute path, which does not depend on the working folder of the process."""
        return self._place

    @property
    def direct(self) -> bool:
        """Whether aligned reads bypass the page cache."""
        return self._direct_fd is not None

    @property
    def direct_descriptor(self) -> int | None:
        """Descriptor for reads that bypass the page cache, or None."""
        self._refuse_closed()
        return self._direct_fd

    def fileno(self) -> int:
        """Return the descriptor that carries the table's locks."""
        self._refuse_closed()
        return self._fd

    def has_its_name(self) -> bool:
        """Whether the path still names this file.

        The path that the system reports for the descriptor is compared first, which is equivalent for a path without
        symbolic links. `stat` is avoided: after it the system writes new file times with the next sync.
        """
        if self._name is not None and _name_of(self._fd) == self._name:
            return True
        try:
            return _identity(os.stat(self._place)) == self._identity  # noqa: PTH116 - the path is text
        except OSError:
            return False

    def pread_into(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Fill all buffers with the bytes from `offset` on.

        Raises
        ------
        ClosedTableError
            If the file was closed.
        CorruptionError
            If the file ends before the buffers are full.
        StorageIOError
            If the operating system refuses.
        """
        self._refuse_closed()
        fd = self._fd if self._direct_fd is None else self._direct_fd
        while buffers:
            try:
                got = os.preadv(fd, buffers[:_IOV_MAX], offset)  # type: ignore[arg-type] # see `_bytes_of`
            except OSError as error:
                if fd == self._direct_fd and error.errno in _NOT_DIRECT:
                    fd = self._fd
                    continue
                raise _refused("read", self._path, error, offset) from error
            if got == 0:
                raise self._truncated(offset)
            offset += got
            buffers = _after(buffers, got)

    def pwrite(self, offset: int, data: Buffer | bytes) -> None:
        """Write all of `data` at `offset`.

        Raises
        ------
        StorageIOError
            If the operating system refuses, for instance because the disk is full.
        """
        self._refuse_closed()
        left = len(data) if isinstance(data, bytes) else data.nbytes
        while left:
            piece = data if left <= _PIECE else _bytes_of(data)[:_PIECE]
            try:
                written = os.pwrite(self._fd, piece, offset)  # type: ignore[arg-type] # see `_bytes_of`
            except OSError as error:
                raise _refused("write", self._path, error, offset) from error
            left -= written
            offset += written
            if left:
                data = _bytes_of(data)[written:]

    def sync(self) -> None:
        """Return when everything written is durable."""
        self._refuse_closed()
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise _refused("sync", self._path, error) from error

    def size(self) -> int:
        """Return the length of the file in bytes."""
        self._refuse_closed()
        try:
            return os.lseek(self._fd, 0, os.SEEK_END)  # not `fstat`: see `has_its_name`
        except OSError as error:
            raise _refused("seek in", self._path, error) from error

    def truncate(self, size: int) -> None:
        """Cut or extend the file to `size` bytes."""
        self._refuse_closed()
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise _refused("resize", self._path, error) from error

    def _truncated(self, offset: int) -> CorruptionError:
        return CorruptionError(
            f"{self._path} ends at byte {self.size()}, but bytes from {offset} on belong to the table: "
            "the file has been truncated; restore it or build it again"
        )

    def close(self) -> None:
        """Close the file. Locks held through it are released."""
        if not self._open:
            return
        self._open = False
        os.close(self._fd)
        if self._direct_fd is not None:
            os.close(self._direct_fd)

    def _refuse_closed(self) -> None:
        """Raise if the file was closed: its descriptor may belong to another file by now."""
        if not self._open:
            raise ClosedTableError(f"the table {self._path} was closed; open it again")


def path_text(path: object) -> str:
    """Return a path as text.

    Raises
    ------
    InputError
        If it is not a path: not text, empty, or with a zero byte.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InputError(f"{path!r} is not the path of a file or folder")
    return text


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make the creation, renaming and removal of files in a folder durable.

    Raises
    ------
    StorageIOError
        If the operating system refuses.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise _refused("sync", os.fspath(folder), error) from error


def _open(path: str, flags: int) -> int:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)  # a pipe is refused instead of blocking
    except FileNotFoundError as error:
        raise TableNotFoundError(_missing(path, creating=bool(flags & os.O_CREAT))) from error
    except FileExistsError as error:
        raise TableExistsError(f"{path} exists already; name another file or ask to overwrite it") from error
    except OSError as error:
        raise _refused("open", path, error) from error
    if not os.path.isfile(path):  # noqa: PTH113 - path is text here
        os.close(fd)
        raise StorageIOError(f"cannot open {path}: it is not a regular file")
    return fd


def _missing(path: str, *, creating: bool) -> str:
    folder = Path(path).parent
    if creating or not folder.exists():
        return f"cannot open {path}: the folder {folder} does not exist; create it or correct the path"
    return f"there is no table at {path}; build one with `headrace table build` or correct the path"


def _open_direct(path: str) -> int | None:
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    with contextlib.suppress(OSError):  # without O_DIRECT, reads go through the page cache
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
    return None


def _refused(what: str, path: str, error: OSError, offset: int | None = None) -> StorageIOError:
    where = path if offset is None else f"{path} at byte {offset}"
    remedy = {
        errno.ENOSPC: "; free space on the disk and try again",
        errno.EDQUOT: "; the quota is used up",
        errno.EACCES: "; check the permissions",
        errno.EROFS: "; the file system is read-only",
    }.get(error.errno or 0, "")
    return StorageIOError(f"cannot {what} {where}: {os.strerror(error.errno or 0)}{remedy}")


def _bytes_of(data: Buffer | bytes) -> memoryview:
    return memoryview(data).cast("B")  # type: ignore[arg-type] # numpy declares its buffer from Python 3.12 on


def _after(buffers: Sequence[Buffer], done: int) -> Sequence[Buffer]:
    for at, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [_bytes_of(buffer)[done:], *buffers[at + 1 :]]
        done -= buffer.nbytes
    return []


def _name_of(fd: int) -> str | None:
    """Return the path that the system reports for an open file, or None."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - part of each commit
    except OSError:
        return None


def _identity(stat: os.stat_result) -> tuple[int, int]:
    """Return the identity of a file while it is open."""
    return stat.st_dev, stat.st_ino
