"""The index of one commit in memory: an entry for each leaf, and the inner nodes above."""

from __future__ import annotations

from typing import TYPE_CHECKING

from storage.moved import moved_entries

if TYPE_CHECKING:
    from storage.tree import Entries, InnerLevel

__all__ = ["Index"]


class Index:
    """An index. Commits that move few leaves share all of it but the list of these.

    Parameters
    ----------
    written
        One entry for each leaf, in key order, as the inner nodes have it.
    levels
        The inner nodes, root first.
    moved
        Leaves that have moved since, see `storage.moved`.
    """

    __slots__ = ("_entries", "levels", "moved", "written")

    def __init__(self, written: Entries, levels: tuple[InnerLevel, ...], moved: bytes = b"") -> None:
        self._entries: Entries | None = None
        self.written = written
        self.levels = levels
        self.moved = moved

    @property
    def entries(self) -> Entries:
        """One for each leaf as it is now. Made when it is asked for, and kept then."""
        if self._entries is None:
            self._entries = moved_entries(self.written, self.moved)
        return self._entries
