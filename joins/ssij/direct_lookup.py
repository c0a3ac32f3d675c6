"""Look-ups of unique keys of one word in the order of the stream: nothing is sorted, results are made in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.leaf import gather
from headrace.storage.probe import FixedRows, LeafRanges, RowHash, SlotForm
from headrace.storage.probe import _probe_kernels as kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.storage.format import KeyWords
    from headrace.storage.tree import Snapshot

__all__ = ["DirectLookup", "Found"]

_WORD = 8
_ROOM = 50  # times its own bytes: with less, each page that it takes the place of is worth more


@dataclass(frozen=True, slots=True)
class Found:
    """Results of some tuples.

    Attributes
    ----------
    source : int32[results]
        Of each result: its tuple.
    columns
        Of the relation, one value to a result.
    """

    source: NDArray[np.int32]
    columns: list[pa.Array]


class DirectLookup:
    """Finds leaves without looking at the keys before, and rows by what is known of each cached page.

    Parameters
    ----------
    snapshot
        The relation.
    columns
        Of the results.
    frames
        Of the page cache.
    """

    def __init__(self, snapshot: Snapshot, columns: Sequence[str], frames: int) -> None:
        self._layout = snapshot.layout
        self._names = list(columns)
        self._fixed = [snapshot.layout.by_name[name] for name in _fixed_names(snapshot, columns)]
        self._entries = FixedRows(self._fixed, 0).entries
        self._facts = np.zeros((frames, _facts(snapshot, columns)), dtype=np.uint64)
        self._ranges = LeafRanges(snapshot)

    @staticmethod
    def possible(snapshot: Snapshot, columns: Sequence[str], spare: int) -> bool:
        """Return whether the relation has keys for it, and so many bytes beyond the least memory have the room."""
        own = DirectLookup.leaves_nbytes(snapshot) + DirectLookup.frame_nbytes(snapshot, columns)
        return snapshot.unique and snapshot.codec.kind == "u64" and _ROOM * own <= spare

    @staticmethod
    def frame_nbytes(snapshot: Snapshot, columns: Sequence[str]) -> int:
        """Return the bytes for each frame of the page cache."""
        return _WORD * _facts(snapshot, columns)

    @staticmethod
    def leaves_nbytes(snapshot: Snapshot) -> int:
        """Return the bytes for all leaves."""
        return LeafRanges.nbytes(len(snapshot.leaf_pages))

    def install(self, snapshot: Snapshot) -> None:
        """Go on with another snapshot. Pages that stay cached are as they were."""
        self._ranges = LeafRanges(snapshot)

    def describe(self, frames: NDArray[np.uint8], frame: NDArray[np.int64]) -> None:
        """Note what is to be known of the pages that have just come into these frames."""
        kernels.describe_pages(frames, self._layout.page_size, frame, self._entries, self._facts, self._guesses)

    def locate(self, keys: KeyWords, frame_of: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        """Find leaves and frames; see `headrace.storage.probe.leaf_ranges.LeafRanges.locate`."""
        return self._ranges.locate(keys, frame_of)

    def probe(self, frames: NDArray[np.uint8], keys: KeyWords, frame: NDArray[np.int32], outer: bool) -> Found:
        """Find keys in cached pages; see `headrace.storage.probe._probe_kernels.probe_pages`."""
        fixed = FixedRows(self._fixed, len(keys))
        row, source = np.empty((2, len(keys)), dtype=np.int32)
        results = kernels.probe_pages(
            frames, self._layout.page_size, self._facts, self._guesses, keys.words, keys.above, frame, outer,
            fixed.sizes, fixed.starts, fixed.out, fixed.valid, fixed.missing, row, source,
        )  # fmt: skip
        source = source[:results]
        return Found(source, self._in_order(fixed.arrays(results), frames, frame, row, source))

    # Rows apart from their pages

    @property
    def fixed(self) -> bool:
        """Whether all columns are of fixed width, so that rows can be kept apart from their pages."""
        return len(self._fixed) == len(self._names)

    def form(self, frames: NDArray[np.uint8], frame: NDArray[np.int64]) -> SlotForm | None:
        """Return what slots for the rows of cached pages look like, None if there can be none. No page is empty."""
        greatest = kernels.greatest_key(frames, self._layout.page_size, self._facts, frame)
        return SlotForm.of(self._facts[frame], greatest)

    def rows(self, frame: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many rows the pages in some frames have."""
        return kernels.rows_of(self._facts[frame])

    def rows_apart(self, form: SlotForm, slots: int) -> RowHash:
        """Return room for rows."""
        return RowHash(self._fixed, form, slots)

    def put_apart(self, apart: RowHash, frames: NDArray[np.uint8], frame: NDArray[np.int64], rows: int) -> bool:
        """Put rows of cached pages there; see `headrace.storage.probe.row_hash.RowHash.add`."""
        return apart.add(frames, self._layout.page_size, self._facts, frame, rows)

    def find_apart(self, apart: RowHash, keys: KeyWords, outer: bool) -> Found:
        """Find keys there; see `headrace.storage.probe.row_hash.RowHash.find`."""
        return Found(*apart.find(keys, outer))

    @property
    def _guesses(self) -> NDArray[np.float32]:
        return self._facts.view(np.float32)

    def _in_order(
        self,
        fixed: list[pa.Array],
        frames: NDArray[np.uint8],
        frame: NDArray[np.int32],
        row: NDArray[np.int32],
        source: NDArray[np.int32],
    ) -> list[pa.Array]:
        """Return all columns as they were asked for: those of other widths are gathered now."""
        if len(fixed) == len(self._names):
            return fixed
        known = dict(zip((column.name for column in self._fixed), fixed, strict=True))
        others = [name for name in self._names if name not in known]
        at = row[source]
        where = np.where(at < 0, np.int32(-1), frame[source])
        known.update(zip(others, gather(self._layout, frames, where, at, others), strict=True))
        return [known[name] for name in self._names]


def _fixed_names(snapshot: Snapshot, columns: Sequence[str]) -> list[str]:
    by_name = snapshot.layout.by_name
    return [name for name in columns if name in by_name and by_name[name].words]


def _facts(snapshot: Snapshot, columns: Sequence[str]) -> int:
    """Return how many words are known of a page."""
    words = sum(snapshot.layout.by_name[name].words for name in _fixed_names(snapshot, columns))
    return kernels.FACTS + kernels.FACTS_OF_A_COLUMN * words
