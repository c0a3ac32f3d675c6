"""Lengths of replica rows, and the page size that holds them.

A row occupies one page, together with the page's header and directory, and a text key takes at most a quarter of a page
(`storage/FORMAT.md`). Replicas use pages of 8 KiB, or larger ones up to 64 KiB if a row needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.ranking import key_text
from headrace.pipelines.errors import DeltaTableError
from headrace.storage.format import PAGE_SIZES, LeafLayout, as_array, is_bytes, key_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["DEFAULT_PAGE_SIZE", "LONGEST_KEY", "LONGEST_ROW", "RowSizes", "long_row"]

DEFAULT_PAGE_SIZE: Final = 8192
_ANY_SIZE: Final = 1 << 30
_SHOWN: Final = 60
LONGEST_ROW: Final = max(PAGE_SIZES)
LONGEST_KEY: Final = key_limit(LONGEST_ROW)


@dataclass(frozen=True)
class RowSizes:
    """Measures the rows of a clustered table.

    Parameters
    ----------
    schema
        Schema of the clustered table.
    key
        Key columns of the clustered table.

    Examples
    --------
    >>> sizes = RowSizes(pa.schema({"name": pa.string(), "id": pa.int64()}), pa.schema({"name": pa.string()}))
    >>> sizes.page_size(pa.table({"name": ["a" * 5000], "id": [1]}))
    32768
    """

    schema: pa.Schema
    key: pa.Schema

    def page_size(self, rows: pa.Table, least: int = DEFAULT_PAGE_SIZE) -> int | None:
        """Return the smallest page size of at least `least` that holds every row; None if a row fits in no page."""
        needs = self.needs(rows, least)
        return next((size for size in PAGE_SIZES if size >= max(least, needs)), None)

    def needs(self, rows: pa.Table, least: int = 0) -> int:
        """Return the page bytes that the longest row needs, or 0 if it certainly needs no more than `least`."""
        if not rows.num_rows or self._bound(rows) <= least:
            return 0
        return int(self.of_each(rows).max())

    def of_each(self, rows: pa.Table) -> NDArray[np.int64]:
        """Return the page bytes that each row needs: int64[rows]."""
        keys = self._key_bytes(rows)
        size = np.full(rows.num_rows, self._overhead, dtype=np.int64) + keys
        for stored in self._layout.columns:
            column = rows.column(stored.name)
            if is_bytes(column.type):
                size += _lengths(column)
            size += stored.entries * np.asarray(column.is_null(), dtype=np.int64)
        least = np.maximum(size, keys * (LONGEST_ROW // LONGEST_KEY))
        return np.maximum(least, 2 * self._overhead)  # the directory fills at most half of a page

    @property
    def _layout(self) -> LeafLayout:
        return LeafLayout(self.schema, self.key.names, _ANY_SIZE)

    @property
    def _overhead(self) -> int:
        """Page bytes that are not available to rows: the header and the directory."""
        return self._layout.heap_start

    def _bound(self, rows: pa.Table) -> int:
        """Return an upper bound of `needs` without measuring each row."""
        texts = {field.name: _longest(rows.column(field.name)) for field in self.schema if is_bytes(field.type)}
        key = sum(2 * texts[name] + 2 if name in texts else 16 for name in self.key.names)
        own = sum(length for name, length in texts.items() if name not in self.key.names)
        whole = self._overhead + key + own + 2 * len(self.schema)
        return max(2 * self._overhead, whole, key * (LONGEST_ROW // LONGEST_KEY))

    def _key_bytes(self, rows: pa.Table) -> NDArray[np.int64]:
        from headrace.storage.format import KeyCodec  # noqa: PLC0415 - numba comes in only when rows are long

        codec = KeyCodec(self.schema, self.key.names)
        if codec.kind == "u64":
            return np.zeros(rows.num_rows, dtype=np.int64)
        keys = codec.pack([as_array(rows.column(name)) for name in self.key.names])
        assert keys.offsets is not None
        return np.diff(keys.offsets)


def long_row(label: str, path: str, row: pa.Table, key: Sequence[str], needs: int) -> DeltaTableError:
    """Return the error for a row that fits in no page of a replica."""
    named = key_text(row.select(list(key)).columns)[0].as_py()
    named = named if len(named) <= _SHOWN else f"{named[:_SHOWN]}... ({len(named)} characters)"
    return DeltaTableError(
        f"{label}: the row {named} of the Delta table {path} needs {needs} bytes of a page; a replica holds rows of up "
        f"to {LONGEST_ROW} bytes and keys of up to {LONGEST_KEY}; shorten its texts, or carry fewer attributes"
    )


def _longest(column: pa.ChunkedArray) -> int:
    return int(pc.max(pc.binary_length(column)).as_py() or 0)


def _lengths(column: pa.ChunkedArray) -> NDArray[np.int64]:
    return np.asarray(pc.fill_null(pc.binary_length(column), 0), dtype=np.int64)
