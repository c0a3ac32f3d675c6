"""Commits of corrected facts without `MERGE`: the places of the facts are known, so nothing is joined again.

A candidate names the data file and the position of its fact. Tasks read these rows, replace their key and carried
columns, and write them into new files; deletion vectors remove the old rows. A table without deletion vectors gets each
of these data files again, with the corrected rows in place. The commit is made only if the files are still as they were
read, so each fact is corrected once, whatever other writers add meanwhile.

Tables with features that need Spark's writer are corrected by `MERGE` (`headrace.pipelines.restate.corrections`), and
so are the rest of the facts if another writer changed a file.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import pyarrow as pa

from headrace.etl.history.values import rows_differ, single
from headrace.pipelines.delta.commits import Commit, publish_next
from headrace.pipelines.delta.data_files import DataFile, FileSpec, FileWriter
from headrace.pipelines.delta.deletion_vectors import DeletionVector, write_vectors
from headrace.pipelines.delta.live_files import LiveFile, LiveFiles, read_live_file
from headrace.pipelines.delta.reads import plain_schema
from headrace.pipelines.delta.row_changes import (
    feed_files,
    listed_feed,
    remaining_file,
    removed_file,
    rows_of,
)
from headrace.pipelines.delta.support import describe, takes_files
from headrace.pipelines.delta.tables import CHANGE_TYPE
from headrace.pipelines.errors import ConservationError, DeltaTableError, TableMovedError
from headrace.pipelines.restate.candidates import FILE_ID, OLD, ROW, file_id, old_columns
from headrace.pipelines.restate.scanning import found_facts
from headrace.pipelines.spark.columns import quoted, spark_schema
from headrace.pipelines.spark.frame import conform

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from deltalake import DeltaTable
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

    from headrace.etl.history import AsOfLookup
    from headrace.pipelines.delta.support import Described
    from headrace.pipelines.delta.tables import DeltaHandle

__all__ = ["CorrectFacts", "FactFiles"]

_LOG = logging.getLogger(__name__)
_NOTE: Final = pa.schema([("note", pa.string())])
_PLAIN_PATH: Final = re.compile(r"[A-Za-z0-9._/=-]+")
_PREIMAGE, _POSTIMAGE = "update_preimage", "update_postimage"


class FactFiles:
    """The data files of a fact table at a version, and what corrections made of them since.

    Parameters
    ----------
    handle
        The fact table, as of the version that the facts are read at.
    lookup
        Lookup of the role to restate.

    Attributes
    ----------
    usable
        Whether facts can be corrected by files. It becomes false when another writer changes one of them.
    """

    def __init__(self, handle: DeltaHandle, lookup: AsOfLookup) -> None:
        self._handle = handle
        self._form = _form(handle)
        self._columns = tuple(old_columns(lookup))
        self._described = describe(handle.table, handle.path)
        self._live = LiveFiles(handle.path)
        self._files = _found(self._described, handle.table, self._live, lookup)
        self.usable = bool(self._files)

    def find(self, spark: SparkSession, lookup: AsOfLookup, moved: DataFrame) -> DataFrame | None:
        """Return the facts in the ranges that moved, or None (`headrace.pipelines.restate.scanning.found_facts`)."""
        if not self.usable:
            return None
        return found_facts(spark, lookup, self._handle.path, self._files, _data_columns(self._described), moved)

    def read(self, spark: SparkSession, version: int) -> DataFrame:
        """Return the facts at a version, with the places of their rows as metadata if facts can be corrected by files.

        Spark tells positions in the files of a Delta table only if the table may have deletion vectors, so the files of
        other tables are read as Parquet.
        """
        if not self.usable or _may_have_vectors(self._described):
            return spark.read.format("delta").option("versionAsOf", version).load(self._handle.path)
        reader = spark.read.schema(spark_schema(_data_columns(self._described))).option("recursiveFileLookup", "true")
        return reader.parquet(*(f"{self._handle.path}/{file.place}" for file in self._files.values()))

    def correct(self, rows: DataFrame, lookup: AsOfLookup, expected: int, commit: Commit) -> None:
        """Give facts their new values in one commit.

        Parameters
        ----------
        rows
            Facts to correct, with their places, and the old and the new values.
        lookup
            Lookup of the role.
        expected
            Number of facts.
        commit
            Description of the commit, for an application whose transactions are numbered by versions of the table.

        Raises
        ------
        TableMovedError
            If another writer changed one of the data files, or the schema, since the facts were read. Nothing was
            committed, and facts can no longer be corrected by files.
        ConservationError
            If not all facts were found at their places. Nothing was committed.
        """
        try:
            notes = _run(
                rows, old_columns(lookup), self.task(row[0] for row in rows.select(FILE_ID).distinct().collect())
            )
            self.commit(notes, expected, commit)
        except TableMovedError:
            self.usable = False
            raise

    def task(self, ids: Iterable[int]) -> CorrectFacts:
        """Return the task that corrects facts of some data files, given by id.

        Raises
        ------
        TableMovedError
            If a correction left no file of an id.
        """
        path, properties = self._handle.path, self._described.properties
        ids = list(ids)
        if not self._files.keys() >= set(ids):
            raise TableMovedError(f"facts are in files that {path} no longer has")
        files = {each: self._files[each] for each in ids}
        return CorrectFacts(
            path,
            {each: replace(file, statistics={"numRecords": rows_of(path, file)}) for each, file in files.items()},
            _data_columns(self._described),
            self._columns,
            vectors=properties.get("delta.enableDeletionVectors") == "true",
            feed=properties.get("delta.enableChangeDataFeed") == "true",
        )

    def commit(self, notes: Sequence[Mapping[str, Any]], expected: int, commit: Commit) -> None:
        """Replace the old rows by the corrected rows of tasks, as `correct` does, and follow what became of the files.

        Parameters
        ----------
        notes
            Notes of the tasks.
        expected, commit
            As in `correct`.
        """
        corrected = sum(note["rows"] for note in notes)
        if corrected != expected:
            raise ConservationError(
                f"{expected} facts of {self._handle.path} were to be restated, and {corrected} were found; nothing was "
                "committed, run again"
            )
        handle, table = self._handle, self._handle.table
        old = {int(each): self._files[int(each)] for note in notes for each in note["files"]}
        new = {int(each): _after(old[int(each)], done) for note in notes for each, done in note["files"].items()}
        added = [DataFile(**file) for note in notes for file in note["added"]]
        feed = [DataFile(**file) for note in notes for file in note["feed"]]
        while True:
            handle.latest()
            there = {(file.path, file.vector) for file in self._live.at(table.version())}
            if _form(handle) != self._form or any((file.path, file.vector) not in there for file in old.values()):
                raise TableMovedError(f"another writer changed {handle.path} after its facts were read")
            gone = [file.path for file in feed if not (Path(handle.path) / file.path).exists()]
            if gone:
                raise TableMovedError(f"{handle.path}/{gone[0]} was removed before it was committed")
            more = [*_actions(old, new), *({"cdc": listed_feed(file)} for file in feed)]
            if publish_next(handle.path, table, added, replace(commit, transaction=table.version() + 1), more):
                break
        self._files = {each: file for each, file in {**self._files, **new}.items() if file is not None}


def _form(handle: DeltaHandle) -> tuple[Any, ...]:
    """Return what decides how the table's rows are written."""
    metadata = handle.table.metadata()
    settings = {name: text for name, text in metadata.configuration.items() if name.startswith("delta.")}
    return str(metadata.id), handle.table.schema().to_json(), settings, str(handle.table.protocol())


def _data_columns(table: Described) -> pa.Schema:
    """Return the columns of the table's data files."""
    kept = [each for each in plain_schema(table.schema) if each.name not in table.partition_columns]
    return pa.schema(kept).remove_metadata()


def _may_have_vectors(table: Described) -> bool:
    return "deletionVectors" in table.reader_features


def _found(table: Described, opened: DeltaTable, live: LiveFiles, lookup: AsOfLookup) -> dict[int, LiveFile]:
    """Return the data files by id; none if the table's facts cannot be corrected by files."""
    read = {*lookup.stream_columns, *([] if lookup.event_time is None else [lookup.event_time])}
    fixed = set(old_columns(lookup)) if _may_have_vectors(table) else {*old_columns(lookup), *read}
    if (
        not takes_files(opened)
        or table.properties.get("delta.appendOnly") == "true"
        or fixed & set(table.partition_columns)
        or any(pa.types.is_nested(each.type) for each in table.schema)
    ):
        return {}
    try:
        files = live.at(table.version)
    except DeltaTableError as error:
        _LOG.info("facts of %s are restated by MERGE: %s", table.path, error)
        return {}
    found = {file_id(Path(file.place).name): file for file in files}
    # Spark would take other paths for patterns, and may show other names in another form.
    plain = all(_PLAIN_PATH.fullmatch(f"{table.path}/{file.place}") for file in files)
    return found if plain and len(found) == len(files) else {}


def _run(rows: DataFrame, columns: Sequence[str], task: CorrectFacts) -> list[dict[str, Any]]:
    """Run the tasks, each with all facts of its files in order, and return their notes."""
    # `mapInArrow` does not take columns whose names have dots or backticks, so columns have numbers.
    values = [rows[quoted(OLD + name)].alias(f"_old_{at}") for at, name in enumerate(columns)]
    values += [rows[quoted(name)].alias(f"_new_{at}") for at, name in enumerate(columns)]
    parts = rows.sparkSession.sparkContext.defaultParallelism
    frame = rows.select(FILE_ID, ROW, *values).repartition(parts, FILE_ID).sortWithinPartitions(FILE_ID, ROW)
    return [json.loads(row[0]) for row in frame.mapInArrow(task, spark_schema(_NOTE)).collect()]


def _after(file: LiveFile, done: Mapping[str, Any]) -> LiveFile | None:
    """Return what became of a file: another file, the same one with a deletion vector, or nothing."""
    if done["file"] is not None:
        new = DataFile(**done["file"])
        return LiveFile(new.path, new.partition, new.size, new.written, json.loads(new.statistics), None)
    if done["vector"] is None:
        return None
    statistics = {**file.statistics, "numRecords": done["rows"], "tightBounds": False}
    return replace(file, vector=DeletionVector.of(done["vector"]), statistics=statistics)


def _actions(old: Mapping[int, LiveFile], new: Mapping[int, LiveFile | None]) -> Iterator[dict[str, Any]]:
    """Yield the actions that remove the old rows; new files are among those that the commit adds."""
    now = int(time.time() * 1000)
    for each, file in old.items():
        yield {"remove": removed_file(file, now)}
        left = new[each]
        if left is not None and left.vector is not None:
            yield {"add": remaining_file(left, left.statistics["numRecords"], left.vector.descriptor())}


@dataclass(frozen=True)
class CorrectFacts:
    """Corrects facts. Picklable; called with the facts of some data files, by file and position.

    Parameters
    ----------
    path
        Path of the fact table.
    files
        Data files by id, with their numbers of rows.
    schema
        Columns of the data files.
    columns
        Columns to replace.
    vectors
        Whether deletion vectors remove the old rows; if not, a file without one is written again.
    feed
        Whether the table has a change feed.
    """

    path: str
    files: Mapping[int, LiveFile]
    schema: pa.Schema
    columns: tuple[str, ...]
    vectors: bool
    feed: bool

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Correct the facts, and yield one note with the files that were written; nothing if there are no facts."""
        with _Written(self) as written:
            for each, rows in _by_file(batches):
                written.correct(each, rows)
            note = written.note()
        if note["rows"]:
            yield pa.RecordBatch.from_arrays([pa.array([json.dumps(note)])], schema=_NOTE)


class _Written:
    """The files that a task writes. An error in the block removes them."""

    def __init__(self, task: CorrectFacts) -> None:
        self._task = task
        self._stack = ExitStack()
        self._rows: dict[tuple[tuple[str, str | None], ...], FileWriter] = {}
        self._feed: dict[tuple[tuple[str, str | None], ...], FileWriter] = {}
        self._again: list[DataFile] = []
        self._done: dict[int, dict[str, Any]] = {}
        self._counts = Counter[str]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def correct(self, each: int, rows: pa.Table) -> None:
        """Correct the facts of a data file, given in the order of their positions."""
        file = self._task.files[each]
        positions = np.asarray(single(rows.column(ROW)))
        if self._task.vectors or file.vector is not None:
            found = sum(
                self._moved(file, part, self._writer(self._rows, file)) for part in _parts(self._task, file, rows)
            )
            self._done[each] = self._vector(file, positions)
        else:
            found, written = self._written_again(file, rows)
            self._again.append(written)
            self._done[each] = {"file": asdict(written), "vector": None, "rows": written.rows}
        if found != len(positions):
            raise TableMovedError(
                f"{len(positions)} facts of {self._task.path}/{file.place} are corrected, {found} found"
            )
        self._counts["rows"] += found

    def note(self) -> dict[str, Any]:
        """Complete the files and return the note."""
        added = [*_closed(self._rows), *self._again]
        return {
            "rows": self._counts["rows"],
            "added": [asdict(file) for file in added],
            "feed": [asdict(file) for file in _closed(self._feed)],
            "files": self._done,
        }

    def _moved(self, file: LiveFile, part: _Part, writer: FileWriter) -> int:
        """Write the corrected rows of a batch of a file, and return their number."""
        if len(part.at):
            writer.write(part.corrected)
            self._note_changes(file, part)
        return len(part.at)

    def _written_again(self, file: LiveFile, rows: pa.Table) -> tuple[int, DataFile]:
        """Write a data file again with corrected rows; return the number of these, and the new file."""
        found = 0
        with FileWriter(FileSpec(self._task.path, self._task.schema)) as writer:
            for part in _parts(self._task, file, rows, whole=True):
                writer.write(part.whole)
                if len(part.at):
                    self._note_changes(file, part)
                found += len(part.at)
            (written,) = writer.close()
        return found, replace(written, partition=dict(file.partition))

    def _note_changes(self, file: LiveFile, part: _Part) -> None:
        """Write the rows before and after the correction to the change feed, if the table has one."""
        if self._task.feed:
            writer = self._writer(self._feed, file)
            writer.write(_typed(part.before, _PREIMAGE))
            writer.write(_typed(part.corrected, _POSTIMAGE))

    def _writer(self, writers: dict[tuple[tuple[str, str | None], ...], FileWriter], file: LiveFile) -> FileWriter:
        """Return the writer for the partition of a file."""
        partition = tuple(sorted(file.partition.items()))
        if partition not in writers:
            task = self._task
            spec = FileSpec(task.path, task.schema) if writers is self._rows else feed_files(task.path, task.schema)
            writers[partition] = self._stack.enter_context(FileWriter(spec))
        return writers[partition]

    def _vector(self, file: LiveFile, positions: NDArray[np.int64]) -> dict[str, Any]:
        """Write the deletion vector of a file, unless no row is left."""
        if file.vector is not None:
            positions = np.union1d(file.vector.positions(self._task.path).astype(np.int64), positions)
        rows = file.statistics["numRecords"]
        vectors = write_vectors(self._task.path, [positions]) if len(positions) < rows else []
        return {"file": None, "vector": vectors[0].descriptor() if vectors else None, "rows": rows}


@dataclass(frozen=True)
class _Part:
    """A batch of a data file, and its facts to correct: their places in the batch, and their new columns."""

    batch: pa.RecordBatch
    at: NDArray[np.int64]
    values: Mapping[str, pa.Array] = field(default_factory=dict)

    @property
    def before(self) -> pa.RecordBatch:
        """The facts before the correction."""
        return self.batch.take(pa.array(self.at))

    @property
    def corrected(self) -> pa.RecordBatch:
        """The facts after the correction."""
        before = self.before
        columns = [self.values.get(name, before.column(name)) for name in before.schema.names]
        return pa.RecordBatch.from_arrays(columns, schema=before.schema)

    @property
    def whole(self) -> pa.RecordBatch:
        """All rows of the batch, with the facts corrected."""
        if not len(self.at):
            return self.batch
        source = np.arange(self.batch.num_rows)
        source[self.at] = self.batch.num_rows + np.arange(len(self.at))
        index = pa.array(source)
        columns = [
            pa.concat_arrays([column, self.values[name]]).take(index) if name in self.values else column
            for name, column in zip(self.batch.schema.names, self.batch.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.batch.schema)


def _parts(task: CorrectFacts, file: LiveFile, rows: pa.Table, *, whole: bool = False) -> Iterator[_Part]:
    """Yield the batches of a data file with the facts to correct; only batches that may have some, unless `whole`."""
    wanted = np.asarray(single(rows.column(ROW)))
    kinds = [task.schema.field(name) for name in task.columns]
    old, new = (conform(_renamed(rows, prefix, task.columns), pa.schema(kinds)) for prefix in ("_old_", "_new_"))
    for positions, batch in read_live_file(task.path, file, task.schema, None if whole else wanted):
        if not len(positions):
            continue
        first, last = np.searchsorted(wanted, [positions[0], positions[-1] + 1])
        at = np.searchsorted(positions, wanted[first:last])
        held = batch.select(list(task.columns)).take(pa.array(at))
        if (positions[at] != wanted[first:last]).any() or rows_differ(
            held.columns, old.slice(first, last - first).columns, len(at)
        ).any():
            raise TableMovedError(f"facts of {task.path}/{file.place} are not those that were read")
        values = new.slice(first, last - first)
        yield _Part(batch, at, dict(zip(task.columns, values.columns, strict=True)))


def _renamed(rows: pa.Table, prefix: str, columns: Sequence[str]) -> pa.RecordBatch:
    arrays = [single(rows.column(f"{prefix}{at}")) for at in range(len(columns))]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _by_file(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of each data file, from batches that are ordered by file."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        ids = np.asarray(batch.column(FILE_ID))
        starts = np.flatnonzero(np.diff(ids, prepend=-1)).tolist()
        for first, last in zip(starts, [*starts[1:], len(ids)], strict=True):
            part = batch.slice(first, last - first)
            if held and held[0].column(FILE_ID)[0] != part.column(FILE_ID)[0]:
                yield held[0].column(FILE_ID)[0].as_py(), pa.Table.from_batches(held)
                held = []
            held.append(part)
    if held:
        yield held[0].column(FILE_ID)[0].as_py(), pa.Table.from_batches(held)


def _closed(writers: Mapping[tuple[tuple[str, str | None], ...], FileWriter]) -> list[DataFile]:
    return [
        replace(file, partition=dict(partition)) for partition, writer in writers.items() for file in writer.close()
    ]


def _typed(batch: pa.RecordBatch, kind: str) -> pa.RecordBatch:
    return batch.append_column(CHANGE_TYPE, pa.repeat(pa.scalar(kind), batch.num_rows))
