"""`StagedRows`: rows that are gathered from pages a few at a time, and become Arrow arrays at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.storage.format.copies import concat_arrays
from headrace.storage.leaf.decode import FixedColumn, gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.storage.format.layout import LeafLayout

__all__ = ["StagedRows"]


class StagedRows:
    """Rows in the order in which they were added.

    Parameters
    ----------
    layout
        Leaf layout of the table.
    columns
        Names of the columns; key columns are allowed.
    room
        Maximum number of rows.
    """

    def __init__(self, layout: LeafLayout, columns: Sequence[str], room: int) -> None:
        self._layout = layout
        self._names = list(columns)
        self._room = room
        self._fixed = {
            name: FixedColumn(layout.by_name[name], room)
            for name in columns
            if name in layout.by_name and layout.by_name[name].words
        }
        self._others = [name for name in columns if name not in self._fixed]
        self._parts: list[list[pa.Array]] = []
        self.rows = 0

    @property
    def free(self) -> int:
        """Number of rows that still fit."""
        return self._room - self.rows

    def add(self, frames: NDArray[np.uint8], frame: NDArray[np.int32], row: NDArray[np.int32]) -> None:
        """Append rows; a frame of -1 gives nulls. See `headrace.storage.leaf.decode.gather` for the parameters."""
        for column in self._fixed.values():
            column.write(self.rows, frames, self._layout.page_size, frame, row)
        if self._others:
            self._parts.append(gather(self._layout, frames, frame, row, self._others))
        self.rows += len(frame)

    def arrays(self) -> list[pa.Array]:
        """Return the columns. At least one row must have been added, and none can be added afterwards."""
        others = {name: concat_arrays([part[at] for part in self._parts]) for at, name in enumerate(self._others)}
        return [others[name] if name in others else self._fixed[name].array(self.rows) for name in self._names]
