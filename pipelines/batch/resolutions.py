"""Resolutions of rejected rows: an append-only table next to the error table, and the rows that a retry adds to it.

A rejected row is identified by the stream and the batch that rejected it, its file and its record number. A retry adds
one row `retried` for each row that it takes, and one row `rejected` for each of them that the present rules reject
again. A row is therefore loaded if a retry took it and did not reject it. Both rows name the retry's batch in
`by_stream` and `by_batch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.etl.settlement import CAUSES_TYPE
from headrace.pipelines.spark.frame import FILE, RECORD_NUMBER

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["IDENTITY", "RESOLUTION_SCHEMA", "Action", "RetryOf", "resolution_rows"]

IDENTITY = pa.schema([("stream", pa.string()), ("batch", pa.int64()), (FILE, pa.string()), (RECORD_NUMBER, pa.int64())])
RESOLUTION_SCHEMA = pa.schema(
    [
        ("pipeline", pa.string()),
        *IDENTITY,
        ("action", pa.string()),
        ("reason", pa.string()),
        ("causes", CAUSES_TYPE),
        ("by_stream", pa.string()),
        ("by_batch", pa.int64()),
        ("at", pa.timestamp("us", "UTC")),
    ]
)


class Action(StrEnum):
    """What a resolution says about a rejected row."""

    RETRIED = "retried"
    REJECTED = "rejected"
    DISMISSED = "dismissed"


@dataclass(frozen=True)
class RetryOf:
    """The rejected rows that a batch retries.

    Parameters
    ----------
    rows
        Identities of the rows, with the columns of `IDENTITY`. All rows of a file come from one batch of one stream.
    """

    rows: pa.Table

    @property
    def origins(self) -> dict[str, tuple[str, int]]:
        """Stream and batch that rejected the rows, by file."""
        seen = self.rows.select(["stream", "batch", FILE]).group_by(["stream", "batch", FILE]).aggregate([])
        return {row[FILE]: (row["stream"], row["batch"]) for row in seen.to_pylist()}

    def summary(self) -> dict[str, Any]:
        """Return the description for the note of the facts' commit; the resolutions name each row."""
        taken = self.rows.group_by(["stream", "batch"]).aggregate([([], "count_all")])
        return {"rows": self.rows.num_rows, "of": [list(row.values()) for row in taken.to_pylist()]}

    def resolutions(self, pipeline: str, stream: str, batch: int, seconds: float) -> pa.RecordBatch:
        """Return the row `retried` of each row, for a retry that is a batch of a stream."""
        given = {name: self.rows.column(name) for name in IDENTITY.names}
        by = (pipeline, stream, batch, datetime.fromtimestamp(seconds, UTC))
        (rows,) = resolution_rows(given, Action.RETRIED, *by).combine_chunks().to_batches()
        return rows


def resolution_rows(
    identity: Mapping[str, Any],
    action: Action,
    pipeline: str,
    by_stream: str | None,
    by_batch: int | None,
    at: datetime,
    *,
    reason: Any = None,
    causes: Any = None,
) -> pa.Table:
    """Return rows of the table of resolutions.

    Parameters
    ----------
    identity
        Columns of `IDENTITY`, by name.
    action
        What the rows say.
    pipeline
        Name of the pipeline.
    by_stream, by_batch
        Stream and batch of the retry; None for other actions.
    at
        Time of the action.
    reason, causes
        Reason of each row as text, one text for all, or None; and the causes of each row.
    """
    rows = len(identity["batch"])

    def same(value: Any, kind: pa.DataType) -> Any:
        return value if isinstance(value, pa.Array | pa.ChunkedArray) else pa.repeat(pa.scalar(value, kind), rows)

    given = {
        "pipeline": pipeline,
        **identity,
        "action": str(action),
        "reason": reason,
        "causes": pa.nulls(rows, CAUSES_TYPE) if causes is None else causes,
        "by_stream": by_stream,
        "by_batch": by_batch,
        "at": at,
    }
    return pa.table([same(given[field.name], field.type) for field in RESOLUTION_SCHEMA], schema=RESOLUTION_SCHEMA)
