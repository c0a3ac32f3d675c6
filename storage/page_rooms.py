"""Memory for pages that is used again and again: to get fresh memory takes the system longer than to fill it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.storage.tree import aligned_pages

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["PageRooms"]


class PageRooms:
    """Rooms for so many pages each. Several threads may take them, and give them back when they are done.

    Parameters
    ----------
    pages, page_size
        How many fit in a room, and the bytes of one.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self._pages = pages
        self._page_size = page_size
        self._idle: list[NDArray[np.uint8]] = []

    def take(self) -> NDArray[np.uint8]:
        """Return a room, with anything in it."""
        try:
            return self._idle.pop()
        except IndexError:
            return aligned_pages(self._pages, self._page_size)

    def give(self, *rooms: NDArray[np.uint8]) -> None:
        """Take rooms back."""
        self._idle.extend(rooms)
