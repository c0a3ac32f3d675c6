"""The two stages that apply changes, as functions over Arrow batches: they run in Spark's workers or in threads.

`ReadChanges` reads pieces of files and assigns each change to a shard by its member. `ApplyShard` takes the changes of
a shard, brings its replica of entries to the planned version, applies the changes, and writes files that no commit
names yet. A shard has all changes of its members, so the versions that it computes are complete.

There may be more shards than replicas: a multiple, so that a shard needs one replica only. That bounds the memory of a
task, which holds the changes of one shard and the stored entries of the members that they name.

Where the changes are many for the size of the dimension, the stored entries are found by a scan of the Delta table. A
replica would have to follow as many changes at random places, each of which rewrites a page. The rows that the scan
finds come to the shards with the changes.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl import CAUSES_COLUMN, KeyAllocator
from headrace.etl.history import ChangeOutcome, apply_changes
from headrace.etl.history.stored import named_members, stored_entries
from headrace.etl.settlement import CAUSES_TYPE
from headrace.pipelines.batch.error_rows import Origin, error_rows
from headrace.pipelines.batch.steps import Task
from headrace.pipelines.changes.parents import with_lists
from headrace.pipelines.changes.sources import change_columns
from headrace.pipelines.delta.data_files import DataFile, FileSpec, FileWriter
from headrace.pipelines.errors import QualityError
from headrace.pipelines.history.differences import RowDifferences, row_differences
from headrace.pipelines.history.layout import delta_schema, entries_of
from headrace.pipelines.history.moved import moved_rows
from headrace.pipelines.replica.entry_rows import opened_entries
from headrace.pipelines.replica.row_sizes import LONGEST_ROW
from headrace.pipelines.spark.frame import FILE, NOTE, RECORD_NUMBER, SHARD, STATE, ShardRule, State, source_schema
from headrace.pipelines.spark.packing import unpack
from headrace.storage.format import is_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from headrace.etl.history import Applied, History
    from headrace.pipelines.batch.read_step import ReadStep
    from headrace.pipelines.changes.parents import Cascade
    from headrace.pipelines.changes.scanning import StoredScan
    from headrace.pipelines.changes.snapshots import Snapshot
    from headrace.pipelines.replica.catch_up import Reached, ReplicaSpec
    from headrace.storage import Table

__all__ = ["NOTE_SCHEMA", "ApplyShard", "ReadChanges", "Tables", "text_limit"]

NOTE_SCHEMA = pa.schema([(NOTE, pa.string())])
_PAGE_RESERVE = 1 << 13  # for the key, its spellings, columns of fixed width, and the directory of the page
_KEPT = (str(ChangeOutcome.REJECTED), str(ChangeOutcome.ROUTED))


@dataclass(frozen=True)
class ReadChanges:
    """Reads pieces of files. Picklable; called with batches of pieces (`headrace.pipelines.spark.frame.PIECES`).

    Parameters
    ----------
    reader
        Reader of the pieces.
    rule
        Assignment of changes to shards. Records that do not fit their columns go to shard 0.
    """

    reader: ReadStep
    rule: ShardRule

    @property
    def schema(self) -> pa.Schema:
        """Columns of the changes."""
        return pa.schema([*source_schema(self.reader.columns), pa.field(SHARD, pa.int32())])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the changes with their shards."""
        for batch in self.reader.run(batches, Task("", 0)):
            yield self.rule.append_to(batch)


@dataclass(frozen=True)
class Tables:
    """The files that a task writes: versions, their change feed, moved facts, and changes that were not applied."""

    versions: FileSpec
    feed: FileSpec
    moved: FileSpec
    errors: FileSpec


@dataclass(frozen=True)
class ApplyShard:
    """Applies the changes of one shard. Picklable; called with the batches of a partition.

    Parameters
    ----------
    history
        The declaration.
    replica
        Replicas of the entries.
    version, base
        Version that the changes are planned at, and the greatest surrogate key ever given at that version.
    shards
        Number of shards: a multiple of the number of replicas.
    memory
        Memory in bytes of the join with the replica.
    tables
        Files to write.
    origin
        Batch that the changes come from.
    snapshot
        Snapshot that the rows belong to, with the declaration of `snapshot_history`; None for changes.
    scan
        Scan of the Delta table that finds the stored rows; None if the entries are found in replicas.
    cascade
        Parents of the dimension; None if it has none.
    """

    history: History
    replica: ReplicaSpec
    version: int
    base: int
    shards: int
    memory: int
    tables: Tables
    origin: Origin
    snapshot: Snapshot | None = None
    scan: StoredScan | None = None
    cascade: Cascade | None = None

    @property
    def looks_for_missing(self) -> bool:
        """Whether members that a snapshot lacks are deleted."""
        return self.snapshot is not None and self.snapshot.missing == "delete"

    @property
    def needs_every_shard(self) -> bool:
        """Whether shards without changes have work: a search for missing members, or for children of parents."""
        return self.looks_for_missing or self._follows

    @property
    def _follows(self) -> bool:
        return self.cascade is not None and self.cascade.follows is not None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Apply the packed changes of a partition, and yield one note; nothing for a partition without work."""
        packed = [batch for batch in batches if batch.num_rows]
        if packed or self.needs_every_shard:
            shard = int(packed[0].column(SHARD)[0].as_py()) if packed else _partition()
            given = [rows for batch in packed for rows in unpack(batch)]
            names = delta_schema(self.history).names
            stored = [rows for rows in given if rows.schema.names == names]
            changes = [rows for rows in given if rows.schema.names != names]
            note = json.dumps(self.run(shard, changes, stored))
            yield pa.RecordBatch.from_arrays([pa.array([note])], schema=NOTE_SCHEMA)

    def run(
        self, shard: int, batches: Sequence[pa.RecordBatch], stored: Sequence[pa.RecordBatch] = ()
    ) -> dict[str, Any]:
        """Apply the changes of a shard, and return the note: counts, and the files that were written.

        Parameters
        ----------
        shard
            Number of the shard.
        batches
            Its changes, as `ReadChanges` yields them.
        stored
            Rows of the members that the changes name, and perhaps others, if the table is scanned.
        """
        began = time.monotonic()
        malformed, changes = _divided(batches)
        note: dict[str, Any] = {"shard": shard, "rows": malformed.num_rows + changes.num_rows}
        note["malformed"] = malformed.num_rows
        with FileWriter(self.tables.errors) as errors:
            self._keep(errors, malformed)
            del malformed
            if changes.num_rows or self.needs_every_shard:
                note = _summed(note, self._applied(shard, changes, stored, errors))
            note["errors"] = _files(errors)
        return note | {"seconds": time.monotonic() - began}

    def _applied(
        self, shard: int, rows: pa.Table, stored: Sequence[pa.RecordBatch], errors: FileWriter
    ) -> dict[str, Any]:
        """Apply changes, or the rows of a snapshot, and return the counts of what was done."""
        given = rows.num_rows
        rows = self._fitting(rows, errors)
        long = given - rows.num_rows
        changes, same, entries, replica = self._met(shard, rows, stored)
        if self.cascade is not None:
            changes = self._whole(self.cascade.changes(self.history, entries, changes, self.memory))
        allocator = KeyAllocator(self.base, self.shards, shard)
        applied = apply_changes(self.history, entries, changes, allocator)
        differences = row_differences(self.history, entries, applied)
        del entries
        self._keep(errors, _not_applied(self.history.dimension.name, changes, applied))
        outcomes = Counter({str(outcome): count for outcome, count in applied.counts.items()})
        outcomes[str(ChangeOutcome.UNCHANGED)] += same
        outcomes[str(ChangeOutcome.REJECTED)] += long
        return {
            "rows": changes.num_rows + same + long - given,
            "replica": replica,
            "outcomes": dict(outcomes),
            "late": pc.sum(applied.outcomes.column("late")).as_py() or 0,
            **self._written(applied, differences),
        }

    def _met(self, shard: int, rows: pa.Table, stored: Sequence[pa.RecordBatch]) -> tuple[pa.Table, int, pa.Table, str]:
        """Return the changes, the number of snapshot rows that are none, the stored entries of members, and a note."""
        if self.cascade is not None and self._follows:
            with self._replica(shard) as (table, reached):
                members = self.cascade.children(table.scan(), self.shards, shard)
                entries = stored_entries(self.history, table, members, self.memory)
            return self._no_changes(), 0, entries, reached.action
        rows = with_lists(self.history, rows, self._repeated)
        if self.scan is not None:
            return rows, 0, entries_of(self.history, self._stored_rows(stored)), "scanned"
        with self._replica(shard) as (table, reached):
            changes, same = self._changes(shard, rows, table)
            entries = stored_entries(self.history, table, named_members(self.history, changes), self.memory)
        return changes, same, entries, reached.action

    def _stored_rows(self, stored: Sequence[pa.RecordBatch]) -> pa.Table:
        schema = delta_schema(self.history)
        return pa.Table.from_batches([batch.select(schema.names) for batch in stored], schema).combine_chunks()

    @property
    def _repeated(self) -> frozenset[str]:
        parents = () if self.cascade is None else self.cascade.parents
        return frozenset(name for each in parents for name in each.reference.carry)

    def _no_changes(self) -> pa.Table:
        schema = change_columns(self.history, repeated=self._repeated)
        kinds = {name: kind for name, kind in schema.items() if name != self.history.partial}
        return pa.schema([*kinds.items(), (FILE, pa.string()), (RECORD_NUMBER, pa.int64())]).empty_table()

    def _whole(self, changes: pa.Table) -> pa.Table:
        """Raise an error if what follows from a parent does not fit in a page of a replica with its member."""
        limit, name = text_limit(self.history), self.history.dimension.name
        size = _text_bytes(self.history, changes)
        if len(size) and size.max() > limit:
            raise QualityError(
                f"dimension {name!r}: the texts that a member repeats of its parents and its own are longer than "
                f"{limit} bytes; nothing was committed. Shorten them, or carry fewer attributes"
            )
        return changes

    def _fitting(self, rows: pa.Table, errors: FileWriter) -> pa.Table:
        """Return the changes whose entries fit in a page of a replica, and keep the others as rejected."""
        limit = text_limit(self.history)
        names = [field.name for field in self.history.dimension.attributes if is_bytes(field.type)]
        if not rows.num_rows or not names:
            return rows
        size = _text_bytes(self.history, rows)
        if size.max() <= limit:
            return rows
        fits = pa.array(size <= limit)
        long = rows.filter(pc.invert(fits)).select([FILE, RECORD_NUMBER])
        reasons = pa.repeat(f"the change has more than {limit} bytes of text, which fit in no page", long.num_rows)
        self._keep(errors, _with_causes(long, self.history.dimension.name, reasons))
        return rows.filter(fits)

    def _replica(self, shard: int) -> AbstractContextManager[tuple[Table, Reached]]:
        """Open the replica of a shard at the planned version."""
        return opened_entries(self.replica, shard % self.replica.shards, self.version, self.base)

    def _changes(self, shard: int, rows: pa.Table, table: Table) -> tuple[pa.Table, int]:
        """Return the changes that rows stand for, and the number of snapshot rows that are no change."""
        if self.snapshot is None:
            return rows, 0
        if not rows.num_rows:
            rows = self._no_changes()
        changes = self.snapshot.changes(self.history, rows)
        named = named_members(self.history, changes)
        stored = stored_entries(self.history, table, named, self.memory)
        differs = self.snapshot.differing(self.history, changes, stored)
        del stored
        found = [changes.filter(pa.array(differs))]
        if self.snapshot.missing == "delete":
            deletes = self.snapshot.deletes(self.history, named, table.scan(), self.shards, shard)
            found.append(deletes.drop_columns([name for name in self._repeated if name in deletes.column_names]))
        return pa.concat_tables(found, promote_options="default"), int((~differs).sum())

    def _written(self, applied: Applied, differences: RowDifferences) -> dict[str, Any]:
        """Write the rows of the dimension and of its moved facts, and return what was written."""
        tables = self.tables
        moved = moved_rows(self.history, applied, differences)
        surrogate = applied.inserted.column(self.history.dimension.surrogate_key)
        files = {
            "versions": _write(tables.versions, differences.after),
            "feed": _write(tables.feed, differences.feed),
            "moved": _write(tables.moved, moved),
        }
        return {
            **files,
            "inserted": applied.inserted.num_rows,
            "updated": differences.before.num_rows - applied.retired.num_rows,
            "retired": applied.retired.num_rows,
            "moved_ranges": moved.num_rows,
            "greatest_key": pc.max(surrogate).as_py(),
        }

    def _keep(self, errors: FileWriter, rows: pa.Table) -> None:
        for batch in rows.combine_chunks().to_batches():
            errors.write(error_rows(batch, self.origin))


def _text_bytes(history: History, rows: pa.Table) -> NDArray[np.int64]:
    """Return the bytes of text in the attributes of each row."""
    names = [field.name for field in history.dimension.attributes if is_bytes(field.type)]
    size = np.zeros(rows.num_rows, dtype=np.int64)
    for name in names:
        if name in rows.column_names:
            size += np.asarray(pc.fill_null(pc.binary_length(rows.column(name)), 0))
    return size


def text_limit(history: History) -> int:
    """Return the bytes of text that a change may have, so that every entry fits in a page of a replica.

    An entry has the text of its own change, and for each type of attribute whose value other changes decide, text of
    one other change.
    """
    texts = [name for name in history.recorded if is_bytes(history.entry_schema.field(name).type)]
    kinds = {history.type_of(name) for name in texts}
    return (LONGEST_ROW - _PAGE_RESERVE) // (1 + len(kinds))


def _divided(batches: Sequence[pa.RecordBatch]) -> tuple[pa.Table, pa.Table]:
    """Return the records that do not fit their columns, and the others."""
    if not batches:
        return pa.table({}), pa.table({})
    rows = pa.Table.from_batches(batches)
    rows = rows.drop_columns([name for name in (SHARD,) if name in rows.column_names])
    is_open = pc.equal(rows.column(STATE), int(State.OPEN))
    return rows.filter(pc.invert(is_open)), rows.filter(is_open)


def _summed(note: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return {**note, **more, "rows": note["rows"] + more["rows"]}


def _partition() -> int:
    """Return the number of this task's partition in Spark, which is its shard."""
    from pyspark import TaskContext  # noqa: PLC0415 - pyspark is heavy

    context = TaskContext.get()
    assert context is not None
    return int(context.partitionId())


def _not_applied(dimension: str, changes: pa.Table, applied: Applied) -> pa.Table:
    """Return the origin and the causes of changes that were rejected, or that a type 0 attribute routed out."""
    chosen = pc.is_in(applied.outcomes.column("outcome"), value_set=pa.array(_KEPT))
    rows = changes.select([FILE, RECORD_NUMBER]).filter(chosen)
    reasons = applied.outcomes.column("cause").filter(chosen).combine_chunks()
    return _with_causes(rows, dimension, reasons)


def _with_causes(rows: pa.Table, dimension: str, reasons: pa.Array) -> pa.Table:
    """Return the origin of changes with the reason why each was not applied."""
    nothing = pa.nulls(len(reasons), pa.string())
    fields = [pa.repeat(pa.scalar(dimension), len(reasons)), nothing, nothing, reasons]
    structs = pa.StructArray.from_arrays(fields, fields=list(CAUSES_TYPE.value_type))
    offsets = pa.array(np.arange(len(reasons) + 1, dtype=np.int32))
    return rows.append_column(CAUSES_COLUMN, pa.ListArray.from_arrays(offsets, structs).cast(CAUSES_TYPE))


def _write(spec: FileSpec, rows: pa.Table) -> list[dict[str, Any]]:
    with FileWriter(spec) as writer:
        for batch in rows.combine_chunks().to_batches():
            writer.write(batch)
        return _files(writer)


def _files(writer: FileWriter) -> list[dict[str, Any]]:
    files: list[DataFile] = writer.close()
    return [asdict(file) for file in files]
