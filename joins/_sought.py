"""What tuples look for, in normalised form: a key each, or a range of keys each, all rows of it or the nearest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from headrace.storage.format import Keys
from headrace.storage.leaf import search, search_nearest, search_range

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.storage.tree import Snapshot

__all__ = ["KeyRanges", "Nearest", "Sought", "find", "locate"]

Nearest = Literal["last", "first"]


@dataclass(frozen=True, slots=True)
class KeyRanges:
    """A range of keys for each tuple.

    Attributes
    ----------
    low, high
        Its ends.
    closed
        Whether the high end is part of it; the low one is.
    nearest
        Which row of the range alone is wanted; None for all of them.
    """

    low: Keys
    high: Keys
    closed: bool = True
    nearest: Nearest | None = None

    def __len__(self) -> int:
        return len(self.low)

    @property
    def prefix(self) -> NDArray[np.uint64]:
        """Of the end that is looked for first."""
        return self.high.prefix if self.nearest == "last" else self.low.prefix

    def slice(self, start: int, stop: int) -> KeyRanges:
        """Return the ranges from `start` up to `stop`."""
        return KeyRanges(self.low.slice(start, stop), self.high.slice(start, stop), self.closed, self.nearest)

    def take(self, index: NDArray[np.integer]) -> KeyRanges:
        """Return the ranges at these positions."""
        return KeyRanges(self.low.take(index), self.high.take(index), self.closed, self.nearest)


Sought: TypeAlias = Keys | KeyRanges


def locate(snapshot: Snapshot, sought: Sought) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the first and the last leaf that may hold what each tuple looks for; see `Snapshot.locate`."""
    if isinstance(sought, Keys):
        return snapshot.locate(sought)
    return snapshot.locate(sought.low)[0], snapshot.locate(sought.high)[1]


def find(
    snapshot: Snapshot, frames: NDArray[np.uint8], frame: NDArray[np.int32], sought: Sought
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the first row in one page that each tuple looks for, and how many there are; see `storage.leaves`.

    A count of -1 says that the nearest row may be in the neighbouring leaf.
    """
    layout = snapshot.layout
    if isinstance(sought, Keys):
        return search(layout, frames, frame, sought, unique=snapshot.unique)
    if sought.nearest is None:
        return search_range(layout, frames, frame, sought.low, sought.high, closed=sought.closed)
    return search_nearest(layout, frames, frame, sought.low, sought.high, last=sought.nearest == "last")
