"""Emitter of results: turns matches into result batches of a bounded size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from headrace.joins import _result_kernels as kernels
from headrace.joins.errors import JoinInputError
from headrace.storage.format import fixed_type, null_array, repeated, take
from headrace.storage.leaf import gather, gather_runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.storage.tree import Snapshot

__all__ = ["Emitter", "How", "Matches", "check_how", "output_schema", "rows_at"]

How = Literal["inner", "left"]
_SUFFIX = "_right"
_DECAY = 0.9  # per batch, of the largest row seen: one long text must not make all later batches small


def check_how(how: str) -> How:
    """Return the join type, or refuse an unknown one."""
    if isinstance(how, str) and how == "inner":
        return "inner"
    if isinstance(how, str) and how == "left":
        return "left"
    raise JoinInputError(f"`how` must be 'inner' or 'left', not {how!r}")


def output_schema(stream: pa.Schema, relation: pa.Schema, columns: Sequence[str], how: How) -> pa.Schema:
    """Return the schema of the results: the stream's columns, then the relation's.

    A relation column whose name is taken gets the suffix ``_right``, repeated if necessary.
    """
    fields, taken = list(stream), set(stream.names)
    for column in columns:
        field, name = relation.field(column), column
        while name in taken:
            name += _SUFFIX
        taken.add(name)
        fields.append(field.with_name(name).with_nullable(field.nullable or how == "left"))
    return pa.schema(fields, metadata=stream.metadata)


@dataclass(frozen=True, slots=True)
class Matches:
    """Matches of stream rows in cache frames.

    Match `i` is the `count[i]` relation rows from `row[i]` on in frame `frame[i]`. Frame -1 is a row of nulls.

    Attributes
    ----------
    frame, row, count : int32[n]
        Frame, first row, and number of rows of each match.
    source : int32[n] or None
        Stream row of each match; None if match `i` belongs to row `i`.
    """

    frame: NDArray[np.int32]
    row: NDArray[np.int32]
    count: NDArray[np.int32]
    source: NDArray[np.int32] | None = None


class Emitter:
    """Builds result batches of a bounded size.

    Parameters
    ----------
    snapshot
        Snapshot that relation rows come from.
    columns
        Relation columns of the result.
    schema
        Schema of the result.
    nbytes
        Target size of a batch in bytes.
    """

    def __init__(self, snapshot: Snapshot, columns: Sequence[str], schema: pa.Schema, nbytes: int) -> None:
        self.snapshot = snapshot
        self.schema = schema
        self.columns = list(columns)
        self._nbytes = nbytes
        self._row_bytes = _relation_row_bytes(snapshot, columns)
        self._stream_bytes = 0.0

    def row_bytes(self, stream_row_bytes: float) -> float:
        """Return the expected bytes of a result row, estimated from earlier batches."""
        self._stream_bytes = max(self._stream_bytes, stream_row_bytes)
        return self._row_bytes + self._stream_bytes

    @property
    def most_rows(self) -> int:
        """Most result rows in a batch, estimated from earlier batches."""
        return max(1, int(self._nbytes / (self._row_bytes + self._stream_bytes)))

    def emit(self, rows: pa.RecordBatch, matches: Matches, frames: NDArray[np.uint8]) -> Iterator[pa.RecordBatch]:
        """Yield the result rows in the order of the matches."""
        ends = np.cumsum(matches.count, dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        if total == 0:
            return
        if matches.source is None and total == len(ends) and int(matches.count.max()) == 1:
            yield from self._emit_all(rows, matches, frames)
            return

        start = 0
        while start < total:
            stop = min(start + self.most_rows, total)
            yield self._between(rows, matches, ends, frames, start, stop)
            start = stop

    def emit_placed(
        self,
        rows: pa.RecordBatch,
        place: NDArray[np.int32],
        frame: NDArray[np.int32],
        row: NDArray[np.int32],
        frames: NDArray[np.uint8],
    ) -> Iterator[pa.RecordBatch]:
        """Yield the results of stream rows that have at most one match each, in stream order.

        Relation rows are gathered in key order and then permuted. If every stream row has a result, the stream's
        columns pass through without a copy.

        Parameters
        ----------
        rows
            Stream rows.
        place : int32[len(rows)]
            Match of each stream row; -1 for no result, -2 for a row of nulls.
        frame, row : int32[n]
            Frame and row of the matches, in key order.
        frames
            Frames of the page cache.
        """
        target = np.full(len(frame), -1, dtype=np.int32)
        limit = self.most_rows
        for start in range(0, len(rows), limit):
            part = place[start : start + limit]
            near, at = np.empty(len(part) + 1, dtype=np.int32), np.empty(len(part) + 1, dtype=np.int32)
            index = np.empty(len(part), dtype=np.int32)
            gathered, results = kernels.in_key_order(part, frame, row, target, near, at, index)
            if results == 0:
                continue
            stream = rows.slice(start, len(part))
            if results < len(part):
                stream = rows_at(stream, np.flatnonzero(part != -1).astype(np.int32))
            columns = gather(self.snapshot.layout, frames, near[:gathered], at[:gathered], self.columns)
            places = pa.array(index[:results])
            yield self.finished(stream, [take(column, places) for column in columns])

    def emit_found(
        self, rows: pa.RecordBatch, source: NDArray[np.int32], columns: list[pa.Array]
    ) -> Iterator[pa.RecordBatch]:
        """Yield results whose relation columns were gathered before.

        Parameters
        ----------
        rows
            Stream rows.
        source : int32[results]
            Stream row of each result, strictly ascending.
        columns
            Relation columns of the results.
        """
        limit = self.most_rows
        for start in range(0, len(source), limit):
            stop = min(start + limit, len(source))
            part = rows.slice(start, stop - start) if len(source) == len(rows) else rows_at(rows, source[start:stop])
            yield self.finished(part, [column.slice(start, stop - start) for column in columns])

    def nulls(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield the stream rows with nulls in the relation's columns."""
        start = 0
        while start < len(rows):
            part = rows.slice(start, self.most_rows)
            start += len(part)
            nulls = [null_array(len(part), field.type) for field in list(self.schema)[rows.num_columns :]]
            yield pa.RecordBatch.from_arrays([*part.columns, *nulls], schema=self.schema)

    def _emit_all(self, rows: pa.RecordBatch, matches: Matches, frames: NDArray[np.uint8]) -> Iterator[pa.RecordBatch]:
        """Emit matches where every stream row has one, so the stream's columns pass through without a copy."""
        start = 0
        while start < len(rows):
            stop = min(start + self.most_rows, len(rows))
            part = rows.slice(start, stop - start)
            yield self._batch(part, matches.frame[start:stop], matches.row[start:stop], frames)
            start = stop

    def _between(
        self,
        rows: pa.RecordBatch,
        matches: Matches,
        ends: NDArray[np.int64],
        frames: NDArray[np.uint8],
        start: int,
        stop: int,
    ) -> pa.RecordBatch:
        """Return result rows by number. `ends` are the cumulative counts of the matches."""
        first, last = np.searchsorted(ends, [start, stop - 1], side="right").tolist()
        match, frame, row = np.empty((3, last + 1 - first), dtype=np.int32)
        upto = np.empty(last + 1 - first, dtype=np.int64)
        size = kernels.runs_between(ends, matches.frame, matches.row, start, stop, first, match, frame, row, upto)
        match, frame, row, upto = match[:size], frame[:size], row[:size], upto[:size]
        source = match if matches.source is None else matches.source[match]
        gathered = gather_runs(self.snapshot.layout, frames, frame, row, upto, self.columns)
        return self.finished(repeated(rows_at(rows, source), upto), gathered)

    def _batch(
        self, rows: pa.RecordBatch, frame: NDArray[np.int32], row: NDArray[np.int32], frames: NDArray[np.uint8]
    ) -> pa.RecordBatch:
        return self.finished(rows, gather(self.snapshot.layout, frames, frame, row, self.columns))

    def finished(self, rows: pa.RecordBatch, gathered: list[pa.Array]) -> pa.RecordBatch:
        """Return a result batch of stream rows and the relation's columns for them."""
        if gathered:
            seen = sum(array.nbytes for array in gathered) / len(rows)
            self._row_bytes = max(seen, _DECAY * self._row_bytes)
        return pa.RecordBatch.from_arrays([*rows.columns, *gathered], schema=self.schema)


def rows_at(rows: pa.RecordBatch, index: NDArray[np.int32]) -> pa.RecordBatch:
    """Return the rows at these positions, without a copy if those are all rows in order."""
    if len(index) == len(rows) and bool((index == np.arange(len(rows), dtype=np.int32)).all()):
        return rows
    return take(rows, index)


def _relation_row_bytes(snapshot: Snapshot, columns: Sequence[str]) -> float:
    """Return a first estimate: fixed widths, and for text an even share of a row's bytes on its page."""
    rows_per_page = max(1.0, snapshot.rows / max(1, snapshot.leaves))
    text = snapshot.page_size / rows_per_page / max(1, len(snapshot.schema))
    total = 1.0
    for column in columns:
        fixed = fixed_type(snapshot.schema.field(column).type)
        total += 4 + text if fixed is None else fixed.width
    return total
