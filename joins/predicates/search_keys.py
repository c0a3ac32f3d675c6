"""What stream tuples search for, in normalized form.

That is a key for each tuple, or a range of keys of which it wants all rows or the nearest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from headrace.storage.format import Keys
from headrace.storage.leaf import search, search_nearest, search_range

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.storage.tree import Snapshot

__all__ = ["KeyRanges", "Nearest", "NearestWords", "SearchKeys", "find", "locate"]

Nearest = Literal["last", "first"]


@dataclass(frozen=True, slots=True)
class KeyRanges:
    """A range of keys for each tuple.

    Attributes
    ----------
    low, high
        Ends of the ranges.
    closed
        Whether the high end belongs to the range. The low end always does.
    nearest
        Which row of the range is wanted; None for all of them.
    """

    low: Keys
    high: Keys
    closed: bool = True
    nearest: Nearest | None = None

    def __len__(self) -> int:
        return len(self.low)

    @property
    def prefix(self) -> NDArray[np.uint64]:
        """Leading word of the end that is searched first."""
        return self.high.prefix if self.nearest == "last" else self.low.prefix

    def slice(self, start: int, stop: int) -> KeyRanges:
        """Return the ranges from `start` up to `stop`."""
        return KeyRanges(self.low.slice(start, stop), self.high.slice(start, stop), self.closed, self.nearest)

    def take(self, index: NDArray[np.integer]) -> KeyRanges:
        """Return the ranges at these positions."""
        return KeyRanges(self.low.take(index), self.high.take(index), self.closed, self.nearest)


@dataclass(frozen=True, slots=True)
class NearestWords:
    """Keys of one word to find the nearest row of.

    Attributes
    ----------
    near : uint64[n]
        The keys.
    far : uint64[n] or uint64[0]
        Farthest key that matches; empty if keys match that agree with `near` in all bits outside of `span`.
    span
        Bits of a key in which a match may differ.
    last
        Whether to find the last row at or before each key instead of the first one at or after it.
    valid : bool[n] or None
        False for keys without a match; None if all may have one.
    """

    near: NDArray[np.uint64]
    far: NDArray[np.uint64]
    span: np.uint64
    last: bool
    valid: NDArray[np.bool_] | None

    def __post_init__(self) -> None:
        self.near.flags.writeable = False  # always, so that kernels are compiled once
        self.far.flags.writeable = False

    def __len__(self) -> int:
        return len(self.near)

    @property
    def far_ends(self) -> NDArray[np.uint64]:
        """Farthest key that matches, for each key."""
        if len(self.far):
            return self.far
        return self.near & ~self.span if self.last else self.near | self.span


SearchKeys: TypeAlias = Keys | KeyRanges


def locate(snapshot: Snapshot, keys: SearchKeys) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the first and the last leaf that may hold what each tuple searches for. See `Snapshot.locate`."""
    if isinstance(keys, Keys):
        return snapshot.locate(keys)
    return snapshot.locate(keys.low)[0], snapshot.locate(keys.high)[1]


def find(
    snapshot: Snapshot, frames: NDArray[np.uint8], frame: NDArray[np.int32], keys: SearchKeys
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the first matching row in one page for each tuple, and the number of matching rows. See `storage.leaves`.

    A count of -1 means that the nearest row may be in the neighboring leaf.
    """
    layout = snapshot.layout
    if isinstance(keys, Keys):
        return search(layout, frames, frame, keys, unique=snapshot.unique)
    if keys.nearest is None:
        return search_range(layout, frames, frame, keys.low, keys.high, closed=keys.closed)
    return search_nearest(layout, frames, frame, keys.low, keys.high, last=keys.nearest == "last")
