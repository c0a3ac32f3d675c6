"""Whether a path still leads to the file that was opened by it."""

from __future__ import annotations

import os

__all__ = ["FileName"]


class FileName:
    """The name by which a file was opened.

    The name by which the system knows the descriptor is asked first: it says the same of a path without symbolic
    links, and who asks for a file's times makes the system write new ones with the next sync.

    Parameters
    ----------
    place
        The path from the root on.
    fd
        Of the open file.
    """

    def __init__(self, place: str, fd: int) -> None:
        self._place = place
        self._fd = fd
        self._identity = _identity(os.fstat(fd))
        self._name = _name_without_links(place, fd)

    def holds(self) -> bool:
        """Whether the path still leads to this file, not to another or to none."""
        if self._name is not None and _name_of(self._fd) == self._name:
            return True
        try:
            return _identity(os.stat(self._place)) == self._identity  # noqa: PTH116 - the path is text
        except OSError:
            return False


def _name_of(fd: int) -> str | None:
    """Return the path by which the system knows an open file; None if it does not tell."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - on the way of each commit
    except OSError:
        return None


def _name_without_links(place: str, fd: int) -> str | None:
    """Return the name of a descriptor if that is the path from the root on, with no symbolic link on its way.

    A name that looks like what the system says of a removed file proves nothing.
    """
    name = _name_of(fd)
    return name if name == place and not place.endswith(" (deleted)") else None


def _identity(stat: os.stat_result) -> tuple[int, int]:
    """Return what tells a file from all others while it is open."""
    return stat.st_dev, stat.st_ino
