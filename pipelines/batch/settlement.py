"""Destinations of a batch's rows in the last stage: facts, rejected rows and routed duplicates.

Each kind of row goes into files of its table, which the driver commits, or travels on with the notes for Spark to
write.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import pyarrow as pa

from headrace.etl import Duplicates, Lookup, OutcomeCounts, settle
from headrace.pipelines.batch.error_rows import Origin, rejected_rows
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.spark.frame import FILE, REJECTED, ROUTED, STATE, State, conform, with_state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from numpy.typing import NDArray

    from headrace.etl.history import AsOfLookup

__all__ = ["AUDIT_SCHEMA", "Settlement", "Settling"]

_BATCH: Final = "_batch"
_LOADED_AT: Final = "_loaded_at"
AUDIT_SCHEMA: Final = pa.schema([(FILE, pa.string()), (_BATCH, pa.int64()), (_LOADED_AT, pa.timestamp("us", "UTC"))])


@dataclass(frozen=True)
class Settlement:
    """Rules by which the last stage of a batch assigns each row to its destination.

    Parameters
    ----------
    lookups, duplicates
        All lookups, and the declared key of the duplicates or None.
    duplicate_schema
        Schema of routed duplicates.
    facts, rejected, routed
        File specifications for the three kinds of row; None if Spark writes them.
    origin
        Batch that the rows originate from.
    """

    lookups: tuple[Lookup | AsOfLookup, ...]
    duplicates: Duplicates | None
    duplicate_schema: pa.Schema
    facts: FileSpec | None
    rejected: FileSpec | None
    routed: FileSpec | None
    origin: Origin


class Settling:
    """Writes the rows of one task to their destinations; a context manager.

    An error in the block removes the unfinished files.
    """

    def __init__(self, settlement: Settlement) -> None:
        self._settlement = settlement
        self._stack = ExitStack()
        self._counts = _Counts()

    def __enter__(self) -> Self:
        given = self._settlement
        self._facts = self._writer(given.facts)
        self._rejected = self._writer(given.rejected)
        self._routed = self._writer(given.routed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def take(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Settle stream rows; yield the rows that Spark writes, and the notes and members of earlier stages."""
        state = np.asarray(batch.column(STATE))
        passing, malformed = state >= State.MEMBER, state == State.MALFORMED
        if passing.any():
            yield batch.filter(pa.array(passing))
        judged = _those(batch, ~(passing | malformed))
        settled = settle(judged, self._settlement.lookups, self._settlement.duplicates)
        self._counts.outcomes += settled.counts
        self._counts.malformed += int(malformed.sum())
        yield from self._put(self._facts, self._audited(settled.loaded), None, State.OPEN)
        routed = conform(settled.routed, self._settlement.duplicate_schema)
        yield from self._put(self._routed, routed, ROUTED, State.DUPLICATE)
        for rejected in (settled.rejected, _those(batch, malformed)):
            if rejected.num_rows:
                yield from self._put(
                    self._rejected, rejected_rows(rejected, self._settlement.origin), REJECTED, State.REJECTED
                )

    def note(self) -> dict[str, Any]:
        """Complete the files, and return the task's note of the files and the counts."""
        writers = {"facts": self._facts, "errors": self._rejected, "duplicates": self._routed}
        files = {
            part: [asdict(file) for file in writer.close()] for part, writer in writers.items() if writer is not None
        }
        return {"files": files, "settled": self._counts.outcomes.as_dict(), "malformed": self._counts.malformed}

    def _writer(self, spec: FileSpec | None) -> FileWriter | None:
        return None if spec is None else self._stack.enter_context(FileWriter(spec))

    def _audited(self, facts: pa.RecordBatch) -> pa.RecordBatch:
        origin = self._settlement.origin
        rows = facts.num_rows
        batch = pa.repeat(pa.scalar(origin.batch, pa.int64()), rows)
        loaded_at = pa.repeat(pa.scalar(origin.loaded_at, AUDIT_SCHEMA.field(_LOADED_AT).type), rows)
        return facts.append_column(_BATCH, batch).append_column(_LOADED_AT, loaded_at)

    @staticmethod
    def _put(
        writer: FileWriter | None, rows: pa.RecordBatch, channel: str | None, state: State
    ) -> Iterator[pa.RecordBatch]:
        """Write rows into files, or yield them, either unchanged or packed as structs into one column."""
        if not rows.num_rows:
            return
        if writer is not None:
            writer.write(rows)
            return
        if channel is not None:
            rows = pa.RecordBatch.from_arrays([rows.to_struct_array()], names=[channel])
        yield with_state(rows, pa.repeat(pa.scalar(value=True), rows.num_rows), state)


@dataclass
class _Counts:
    """Counts of a task."""

    outcomes: OutcomeCounts = field(default_factory=OutcomeCounts)
    malformed: int = 0


def _those(batch: pa.RecordBatch, wanted: NDArray[np.bool_]) -> pa.RecordBatch:
    return batch if wanted.all() else batch.filter(pa.array(wanted))
