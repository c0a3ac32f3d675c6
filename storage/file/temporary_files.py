"""What a build that was killed leaves behind: told from what a live one works on by a claim, and removed.

A claim is an exclusive `flock` on the file or folder. It belongs to a descriptor, so it goes with its process however
that ends, and process ids, which are given again, need not be trusted. A file system without such locks keeps remains.
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

__all__ = ["claimed", "remove_remains", "scratch_folder"]

_SCRATCH = ".headrace-sort-"


@contextlib.contextmanager
def claimed(make: Callable[[], Path]) -> Iterator[Path]:
    """Make a file or folder, and claim it for as long as the context lasts.

    Parameters
    ----------
    make
        Makes it and returns where it is. Called again if another build took it for remains before it was claimed.
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
    """Give a new folder that is removed at the end of the context, or by a later call if the process is killed."""
    remove_remains(parent, re.compile(re.escape(_SCRATCH) + ".*"))
    with claimed(lambda: Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))) as folder:
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def remove_remains(folder: Path, names: re.Pattern[str]) -> None:
    """Remove the files and folders in a folder whose whole names match and that nobody has claimed."""
    for path in folder.iterdir():
        if names.fullmatch(path.name):
            with contextlib.suppress(OSError):  # claimed, gone by now, or another user's: no matter for this build
                _remove_unclaimed(path)


def _claim(path: Path) -> int | None:
    """Return a descriptor that holds the claim, or None if the path was removed before it could."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):  # without such locks nobody can take the path for remains either
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
