"""`LeafLayout`: the physical columns of a table's leaves. `FORMAT.md` has diagrams of a leaf."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.storage.errors import SchemaError, nearest
from headrace.storage.format.columns import fixed_type
from headrace.storage.format.constants import DIRECTORY_ENTRY, HEADER
from headrace.storage.format.keys import KeyCodec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LeafLayout", "PhysicalColumn"]


_KEY_COLUMNS = 1


@dataclass(frozen=True, slots=True)
class PhysicalColumn:
    """A payload column in the leaf's directory.

    Attributes
    ----------
    name, dtype
        Name and type of the logical column.
    first
        First entry of the column in the directory.
    words
        Number of 64-bit words, each with an entry, most significant first. 0 means one entry of bytes.
    """

    name: str
    dtype: pa.DataType
    first: int
    words: int

    @property
    def entries(self) -> int:
        """Entries in the directory."""
        return max(self.words, 1)


class LeafLayout:
    """The physical columns of a table's leaves. Entry 0 of the directory is the normalized key.

    Parameters
    ----------
    schema
        Schema of the table, in stored types.
    key
        Names of the key columns.
    page_size
        Page size in bytes.

    Raises
    ------
    SchemaError
        If the directory alone fills more than half a page.
    """

    def __init__(self, schema: pa.Schema, key: Sequence[str], page_size: int) -> None:
        self.schema = schema
        self.names: list[str] = schema.names  # pyarrow makes a new list, and new fields, each time
        self.key = tuple(key)
        self.page_size = page_size
        self.codec = KeyCodec(schema, self.key)
        self.payload = pa.schema([field for field in schema if field.name not in self.key])
        self.fields: list[pa.Field] = list(self.payload)
        self.columns = _physical(self.payload)
        self.entries = _KEY_COLUMNS + sum(column.entries for column in self.columns)
        self.by_name = {column.name: column for column in self.columns}
        if self.heap_start > page_size // 2:
            raise SchemaError(
                f"{len(schema)} columns need {self.heap_start} bytes of each page of {page_size}; use larger pages"
            )

    @property
    def heap_start(self) -> int:
        """First byte after the directory."""
        return HEADER + DIRECTORY_ENTRY * self.entries

    def select(self, columns: Sequence[str] | None) -> list[str]:
        """Return names of columns, by default those of the payload; a single name is allowed.

        Raises
        ------
        SchemaError
            If a name is not a column of the table.
        """
        if columns is None:
            return list(self.payload.names)
        if isinstance(columns, str):
            columns = (columns,)
        if not isinstance(columns, Iterable):
            raise SchemaError(f"columns are chosen by a list of their names, not by {columns!r}")
        for name in columns:
            if name not in self.schema.names:
                raise SchemaError(
                    f"the table has no column {name!r}{nearest(name, self.schema.names)}; its columns are "
                    f"{', '.join(map(repr, self.schema.names))}"
                )
        return list(columns)


def _physical(payload: pa.Schema) -> tuple[PhysicalColumn, ...]:
    columns, first = [], _KEY_COLUMNS
    for field in payload:
        fixed = fixed_type(field.type)
        column = PhysicalColumn(field.name, field.type, first, 0 if fixed is None else fixed.words)
        columns.append(column)
        first += column.entries
    return tuple(columns)
