"""Records as they are read: rows of the declared columns, their numbers, and why some are rejected."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["REJECTS", "Records", "Rejections", "shown", "shown_texts"]

REJECTS = pa.schema(
    [
        pa.field("row", pa.int64()),
        pa.field("column", pa.string()),
        pa.field("value", pa.string()),
        pa.field("reason", pa.string()),
    ]
)
_SHOWN = 1000


@dataclass(frozen=True)
class Records:
    """Some records of a file.

    Attributes
    ----------
    rows
        Declared columns; values that do not fit their type are null.
    numbers
        Number of each record in its file (int64), from 1; a heading and blank lines are not counted.
    rejects
        One row for each rule that a record breaks: the row in `rows`, and the column, value and rule. The column and
        the value are null where the record as a whole is wrong.
    """

    rows: pa.RecordBatch
    numbers: pa.Array
    rejects: pa.Table


def shown(value: str) -> str:
    """Return a value as causes show it; of a long one, the beginning."""
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}… ({len(value):,} characters)"


def shown_texts(values: pa.Array) -> pa.Array:
    """Return values as causes show them, see `shown`; nulls stay null."""
    if not pc.any(pc.greater(pc.utf8_length(values), _SHOWN)).as_py():
        return values
    return pa.array([None if value is None else shown(value) for value in values.to_pylist()], values.type)


@dataclass
class Rejections:
    """What is wrong with rows, as it is found."""

    rows: list[int] = field(default_factory=list)
    columns: list[str | None] = field(default_factory=list)
    values: list[str | None] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def add(self, row: int, column: str | None, value: str | None, reason: str) -> None:
        """Add a rule that a row breaks."""
        self.rows.append(row)
        self.columns.append(column)
        self.values.append(None if value is None else shown(value))
        self.reasons.append(reason)

    def table(self) -> pa.Table:
        """Return all of them in the order of the rows."""
        if not self.rows:
            return REJECTS.empty_table()
        order: NDArray[np.int64] = np.argsort(np.array(self.rows), kind="stable")
        columns = [self.rows, self.columns, self.values, self.reasons]
        arrays = [pa.array(values, kind.type) for values, kind in zip(columns, REJECTS, strict=True)]
        return pa.Table.from_arrays(arrays, schema=REJECTS).take(pa.array(order))
