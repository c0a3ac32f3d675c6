"""`PageDescriptors`: where keys and columns of pages in memory are, so that no directory is needed to find a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np

from headrace.storage.format.constants import WORD
from headrace.storage.leaf.decode import FixedRows
from headrace.storage.probe import _probe_kernels as kernels
from headrace.storage.probe.row_hash import RowHash, SlotForm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from headrace.storage.format.layout import LeafLayout, PhysicalColumn

__all__ = ["PageDescriptors"]


class PageDescriptors:
    """A descriptor for each of some frames.

    Parameters
    ----------
    layout
        Leaf layout of the table.
    columns
        Columns of fixed width.
    frames
        Number of frames.

    Attributes
    ----------
    words : uint64[frames, words]
        See `headrace.storage.probe._probe_kernels.describe_pages`.
    guesses : float32[frames, 2 * words]
        The same memory.
    """

    def __init__(self, layout: LeafLayout, columns: Sequence[PhysicalColumn], frames: int) -> None:
        self._layout = layout
        self._columns = columns
        self._entries = FixedRows(columns, 0).entries
        self.words: NDArray[np.uint64] = np.zeros((frames, self.nbytes(columns) // WORD), dtype=np.uint64)
        self.guesses: NDArray[np.float32] = self.words.view(np.float32)

    @staticmethod
    def nbytes(columns: Sequence[PhysicalColumn]) -> int:
        """Return the bytes of a descriptor."""
        return WORD * (kernels.FACTS + kernels.FACTS_OF_A_COLUMN * sum(column.words for column in columns))

    def for_frames(self, frames: int) -> Self:
        """Return descriptors of the same columns for other frames."""
        return type(self)(self._layout, self._columns, frames)

    def describe(self, frames: NDArray[np.uint8], frame: NDArray[np.int64]) -> None:
        """Write the descriptors of the pages that have just come into these frames."""
        kernels.describe_pages(frames, self._layout.page_size, frame, self._entries, self.words, self.guesses)

    def in_key_order(self, frame: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the frames of pages in the order of their keys."""
        return frame[np.argsort(self.words[frame, 0])]

    def rows(self, frame: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many rows the pages in some frames have."""
        return kernels.rows_of(self.words[frame])

    def greatest_key(self, frames: NDArray[np.uint8], frame: NDArray[np.int64]) -> np.uint64:
        """Return the greatest key of the pages in some frames, none of them empty."""
        return np.uint64(kernels.greatest_key(frames, self._layout.page_size, self.words, frame))

    def row_hash(self, form: SlotForm, slots: int, *, ascending: bool) -> RowHash:
        """Return an empty hash table of rows. See `headrace.storage.probe.row_hash.RowHash`."""
        return RowHash(self._columns, form, slots, ascending=ascending)

    def add_rows(
        self,
        table: RowHash,
        frames: NDArray[np.uint8],
        frame: NDArray[np.int64],
        rows: int,
        parts: int = 1,
        run: Callable[..., list[int]] | None = None,
    ) -> bool:
        """Add rows of pages, which are in key order. See `headrace.storage.probe.row_hash.RowHash.add`."""
        return table.add(frames, self._layout.page_size, self.words, frame, rows, parts, run)
