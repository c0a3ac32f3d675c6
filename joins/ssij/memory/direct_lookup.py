"""Direct look-ups of unique keys of one word, in stream order: nothing is sorted, and results are written in place.

They use a descriptor of each cached page: where its keys and columns are, and how its keys can be interpolated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.leaf import FixedRows, gather
from headrace.storage.probe import LeafRanges, PageDescriptors, RowHash
from headrace.storage.probe import _nearest_kernels as nearest_kernels
from headrace.storage.probe import _probe_kernels as kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.predicates import NearestWords
    from headrace.storage.format import KeyWords, PhysicalColumn
    from headrace.storage.tree import Snapshot

__all__ = ["DirectLookup", "LookupResult"]

_ROOM = 50  # memory it needs, in multiples of its own bytes: with less, the pages it displaces are worth more


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Results of some tuples.

    Attributes
    ----------
    source : int32[results]
        Tuple of each result.
    columns
        Relation columns of the results.
    """

    source: NDArray[np.int32]
    columns: list[pa.Array]


class DirectLookup:
    """Finds leaves by their key ranges, and rows by the descriptor of each cached page.

    Parameters
    ----------
    snapshot
        Snapshot of the relation.
    columns
        Relation columns of the results.
    frames
        Frames of the page cache.

    Attributes
    ----------
    descriptors
        Descriptors of the pages in these frames.
    """

    def __init__(self, snapshot: Snapshot, columns: Sequence[str], frames: int) -> None:
        self._layout = snapshot.layout
        self._names = list(columns)
        self._fixed = _fixed_columns(snapshot, columns)
        self.descriptors = PageDescriptors(snapshot.layout, self._fixed, frames)
        self._ranges = LeafRanges(snapshot)

    @staticmethod
    def possible(snapshot: Snapshot, columns: Sequence[str], spare: int) -> bool:
        """Return whether the relation's keys allow it, and `spare` bytes beyond the least memory have room for it."""
        own = DirectLookup.leaves_nbytes(snapshot) + DirectLookup.frame_nbytes(snapshot, columns)
        return snapshot.unique and snapshot.codec.kind == "u64" and _ROOM * own <= spare

    @staticmethod
    def frame_nbytes(snapshot: Snapshot, columns: Sequence[str]) -> int:
        """Return the bytes for each frame of the page cache."""
        return PageDescriptors.nbytes(_fixed_columns(snapshot, columns))

    @staticmethod
    def leaves_nbytes(snapshot: Snapshot) -> int:
        """Return the bytes for all leaves."""
        return LeafRanges.nbytes(len(snapshot.leaf_pages))

    def install(self, snapshot: Snapshot) -> None:
        """Switch to another snapshot. Pages that stay cached are unchanged."""
        self._ranges = LeafRanges(snapshot)

    def describe(self, frames: NDArray[np.uint8], frame: NDArray[np.int64]) -> None:
        """Write the descriptors of the pages that have just come into these frames."""
        self.descriptors.describe(frames, frame)

    def locate(self, keys: KeyWords, frame_of: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        """Find leaves and frames. See `headrace.storage.probe.leaf_ranges.LeafRanges.locate`."""
        return self._ranges.locate(keys, frame_of)

    def probe(self, frames: NDArray[np.uint8], keys: KeyWords, frame: NDArray[np.int32], outer: bool) -> LookupResult:
        """Find keys in cached pages. See `headrace.storage.probe._probe_kernels.probe_pages`."""
        fixed, pages = FixedRows(self._fixed, len(keys)), self.descriptors
        row, source = np.empty((2, len(keys)), dtype=np.int32)
        results = kernels.probe_pages(
            frames, self._layout.page_size, pages.words, pages.guesses, keys.words, keys.above, frame, outer,
            fixed.sizes, fixed.starts, fixed.out, fixed.valid, fixed.missing, row, source,
        )  # fmt: skip
        source = source[:results]
        return LookupResult(source, self._in_order(fixed.arrays(results), frames, frame, row, source))

    def resume(self, words: NearestWords, leaf: NDArray[np.int32], frame_of: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the frames of the leaves that keys go on to, whose own leaf could not decide.

        -1 is a leaf in no frame, -2 one that cannot have a match.
        """
        separators, far = self._ranges.separators, words.far_ends
        inside = (leaf >= 0) & (leaf < len(separators))
        place = np.clip(leaf, 0, len(separators) - 1)
        bound = separators[np.minimum(place + 1, len(separators) - 1) if words.last else place]
        possible = inside & ((far < bound) if words.last else (far >= bound))
        return np.where(possible, frame_of[place], np.int32(-2))

    def probe_nearest(
        self,
        frames: NDArray[np.uint8],
        words: NearestWords,
        leaf: NDArray[np.int32],
        frame: NDArray[np.int32],
        frame_of: NDArray[np.int32],
        outer: bool,
    ) -> LookupResult:
        """Find the nearest rows in cached pages. See `headrace.storage.probe._nearest_kernels.probe_nearest`."""
        fixed, pages = FixedRows(self._fixed, len(words)), self.descriptors
        row, source = np.empty((2, len(words)), dtype=np.int32)
        results = nearest_kernels.probe_nearest(
            frames, self._layout.page_size, pages.words, pages.guesses, words.near, words.far, words.span,
            words.last, self._ranges.separators, frame_of, leaf, frame, outer, fixed.sizes, fixed.starts, fixed.out,
            fixed.valid, fixed.missing, row, source,
        )  # fmt: skip
        source = source[:results]
        return LookupResult(source, self._in_order(fixed.arrays(results), frames, frame, row, source))

    @property
    def fixed(self) -> bool:
        """Whether all columns have a fixed width, so that rows can be kept beside their pages."""
        return len(self._fixed) == len(self._names)

    def find_rows(self, table: RowHash, keys: KeyWords, outer: bool) -> LookupResult:
        """Find keys in it. See `headrace.storage.probe.row_hash.RowHash.find`."""
        return LookupResult(*table.find(keys, outer))

    def _in_order(
        self,
        fixed: list[pa.Array],
        frames: NDArray[np.uint8],
        frame: NDArray[np.int32],
        row: NDArray[np.int32],
        source: NDArray[np.int32],
    ) -> list[pa.Array]:
        """Return all columns in the order requested. Columns without a fixed width are gathered now."""
        if len(fixed) == len(self._names):
            return fixed
        known = dict(zip((column.name for column in self._fixed), fixed, strict=True))
        others = [name for name in self._names if name not in known]
        at = row[source]
        where = np.where(at < 0, np.int32(-1), frame[source])
        known.update(zip(others, gather(self._layout, frames, where, at, others), strict=True))
        return [known[name] for name in self._names]


def _fixed_columns(snapshot: Snapshot, columns: Sequence[str]) -> list[PhysicalColumn]:
    by_name = snapshot.layout.by_name
    return [by_name[name] for name in columns if name in by_name and by_name[name].words]
