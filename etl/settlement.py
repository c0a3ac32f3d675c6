"""Destination of every row after lookups and duplicate detection, and the row counts.

The most severe outcome of a row decides: a rejected row goes to the error table with all its causes, a duplicate
follows the declared action, and every other row goes to the facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from headrace.etl.duplicates import DUPLICATE_COLUMN, DuplicateAction, Duplicates
from headrace.etl.errors import DeclarationError
from headrace.etl.inputs import check_names
from headrace.etl.outcomes import Outcome, OutcomeCounts, most_severe, outcome_text, tally
from headrace.etl.ranking import key_text
from headrace.storage.records import shown_texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.etl.history.as_of import AsOfLookup
    from headrace.etl.lookup import Lookup

__all__ = ["CAUSES_COLUMN", "CAUSES_TYPE", "OUTCOME_COLUMN", "Settled", "causes", "row_severity", "settle"]

OUTCOME_COLUMN: Final = "_outcome"
CAUSES_COLUMN: Final = "_causes"
CAUSES_TYPE: Final = pa.list_(
    pa.struct({"role": pa.string(), "column": pa.string(), "value": pa.string(), "reason": pa.string()})
)


@dataclass(frozen=True)
class Settled:
    """The rows of a batch by destination.

    Parameters
    ----------
    loaded
        Facts: the stream's columns, the columns that lookups added, and `_outcome`.
    routed
        Rows for the duplicates table: the stream's columns and `_duplicate`. Empty unless the action is `route`.
    rejected
        Rows for the error table: the stream's columns and `_causes`, a list of role, column, value as text, and reason.
    counts
        Reconciled row counts.
    """

    loaded: pa.RecordBatch
    routed: pa.RecordBatch
    rejected: pa.RecordBatch
    counts: OutcomeCounts


def row_severity(batch: pa.RecordBatch, lookups: Sequence[Lookup | AsOfLookup]) -> NDArray[np.int8]:
    """Return the severity of each row's outcome, from its lookups and from `_duplicate` if present."""
    severity = most_severe([batch.column(lookup.outcome_column) for lookup in lookups], batch.num_rows)
    if DUPLICATE_COLUMN in batch.schema.names:
        repeats = np.asarray(batch.column(DUPLICATE_COLUMN).is_valid())
        severity[repeats] = np.maximum(severity[repeats], Outcome.DUPLICATE.severity)
    return severity


def causes(batch: pa.RecordBatch, lookups: Sequence[Lookup | AsOfLookup]) -> pa.Array:
    """Return the causes of rejection of each row: one for each lookup that rejected it, in lookup order."""
    rows: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    parts: list[pa.Array] = [pa.array([], CAUSES_TYPE.value_type)]
    for lookup in lookups:
        reasons = batch.column(lookup.reason_column)
        rejected = np.flatnonzero(np.asarray(reasons.is_valid()))
        wanted = pa.array(rejected)
        names = ", ".join(lookup.stream_columns)
        value = key_text([batch.column(name).take(wanted) for name in lookup.stream_columns])
        fixed = [pa.repeat(text, len(rejected)) for text in (lookup.role, names)]
        fields = [*fixed, shown_texts(value).cast(pa.string()), reasons.take(wanted)]
        rows.append(rejected)
        parts.append(pa.StructArray.from_arrays(fields, fields=list(CAUSES_TYPE.value_type)))
    row = np.concatenate(rows)
    ends = np.cumsum(np.bincount(row, minlength=batch.num_rows))
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    listed = pa.concat_arrays(parts).take(pa.array(np.argsort(row, kind="stable")))
    return pa.ListArray.from_arrays(pa.array(offsets), listed).cast(CAUSES_TYPE)


def settle(
    batch: pa.RecordBatch, lookups: Sequence[Lookup | AsOfLookup], duplicates: Duplicates | None = None
) -> Settled:
    """Split a batch, with resolved lookups and marked duplicates, by destination.

    Parameters
    ----------
    batch
        Output of `resolve` for every lookup, and of `mark_duplicates` if duplicates are declared.
    lookups
        All lookups of the stream.
    duplicates
        Declaration of duplicates; None to skip duplicate detection.

    Raises
    ------
    ConservationError
        If rows were lost or added.
    DeclarationError
        If the batch lacks a column of a lookup, or has it twice.
    """
    for lookup in lookups:
        names = [*lookup.stream_columns, *lookup.added_schema().names]
        where = f"lookup {lookup.role!r}: the batch to settle"
        check_names(batch.schema.names, names, where, DeclarationError)
    severity = row_severity(batch, lookups)
    action = duplicates.action if duplicates is not None else DuplicateAction.FLAG
    rejected = severity == Outcome.REJECTED.severity
    repeated = severity == Outcome.DUPLICATE.severity
    routed = repeated & (action == DuplicateAction.ROUTE)
    dropped = repeated & (action == DuplicateAction.DROP)
    loaded = ~(rejected | routed | dropped)
    inner = {name for look in lookups for name in (look.outcome_column, look.reason_column)} | {DUPLICATE_COLUMN}
    added = {name for lookup in lookups for name in lookup.added_schema().names} | inner
    facts = batch.select([at for at, name in enumerate(batch.schema.names) if name not in inner])
    stream = batch.select([at for at, name in enumerate(batch.schema.names) if name not in added])
    outcome = outcome_text(severity)
    return Settled(
        loaded=_those(facts.append_column(OUTCOME_COLUMN, outcome), loaded),
        routed=_routed(batch, stream, routed),
        rejected=_those(stream.append_column(CAUSES_COLUMN, causes(batch, lookups)), rejected),
        counts=OutcomeCounts(
            rows_in=batch.num_rows,
            loaded=int(loaded.sum()),
            dropped=int(dropped.sum()),
            routed=int(routed.sum()),
            rejected=int(rejected.sum()),
            rows=tally(outcome),
            lookups={lookup.role: tally(batch.column(lookup.outcome_column)) for lookup in lookups},
        ).check(),
    )


def _routed(batch: pa.RecordBatch, stream: pa.RecordBatch, routed: NDArray[np.bool_]) -> pa.RecordBatch:
    kind = pa.nulls(batch.num_rows, pa.string())
    if DUPLICATE_COLUMN in batch.schema.names:
        kind = batch.column(DUPLICATE_COLUMN)
    return _those(stream.append_column(DUPLICATE_COLUMN, kind), routed)


def _those(batch: pa.RecordBatch, wanted: NDArray[np.bool_]) -> pa.RecordBatch:
    """Return the selected rows, without a copy if all or no rows are selected."""
    if wanted.all():
        return batch
    return batch.filter(pa.array(wanted)) if wanted.any() else batch.slice(0, 0)
