"""Temporary files and folders, and removal of those that a killed process left behind.

A process claims its temporary file or folder by an exclusive `flock`. The lock belongs to a descriptor, so it
disappears with the process, and process ids, which are reused, need not be trusted. On a file system without such locks
nothing is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["claimed", "remove_remains", "removed", "scratch_folder"]

_SCRATCH = ".headrace-sort-"


@contextlib.contextmanager
def claimed(make: Callable[[], Path]) -> Iterator[Path]:
    """Create a file or folder, and claim it within the context.

    Parameters
    ----------
    make
        Creates it and returns its path. Called again if another process removed it before it was claimed.
    """
    while True:
        path = make()
        fd = _claim(path)
        if fd is not None:
            break
    try:
        yield path
    finally:
        os.close(fd)


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder that is removed at the end of the context, or by a later call if the process is killed."""
    remove_remains(parent, re.compile(re.escape(_SCRATCH) + ".*"))
    with claimed(lambda: Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))) as folder:
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def remove_remains(folder: Path, names: re.Pattern[str]) -> None:
    """Remove the files and folders in a folder whose whole names match and that no process has claimed."""
    for path in folder.iterdir():
        if names.fullmatch(path.name):
            with contextlib.suppress(
                OSError
            ):  # claimed, removed meanwhile, or another user's: none of these matters here
                _remove_unclaimed(path)


def removed(path: Path) -> bool:
    """Remove a file, if possible; return whether there is none now."""
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a read-only file system refuses this even where there is no file
        return not path.exists()
    return True


def _claim(path: Path) -> int | None:
    """Return a descriptor that holds the claim, or None if the path was removed before."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):  # without such locks no process removes the path either
        fcntl.flock(fd, fcntl.LOCK_EX)
    if _leads_to(path, fd):
        return fd
    os.close(fd)
    return None


def _remove_unclaimed(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _leads_to(path, fd):
            return
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    finally:
        os.close(fd)


def _leads_to(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
