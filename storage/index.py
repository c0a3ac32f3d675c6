"""The index of one commit in memory: an entry for each leaf, and the inner nodes above."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.storage.tree import Entries, InnerLevel

__all__ = ["Index"]


@dataclass(frozen=True, slots=True)
class Index:
    """What the inner nodes say. Commits that move few leaves share it.

    Attributes
    ----------
    written
        One entry for each leaf, in key order, as the inner nodes have it.
    levels
        The inner nodes, root first.
    """

    written: Entries
    levels: tuple[InnerLevel, ...]
