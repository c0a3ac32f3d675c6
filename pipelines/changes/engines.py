"""Where the stages of an apply run: in threads of this process, or in Spark's workers on any number of hosts.

In this process, changes pass from the first stage to the second through files on the local disk, one for each shard, as
Spark passes them through its shuffle. So neither keeps all changes of a batch in memory. If the table is scanned, the
stored rows of the members that the changes name take the same way.
"""

from __future__ import annotations

import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import numpy as np
import pyarrow as pa

from headrace.pipelines.changes.scanning import KeyFilter
from headrace.pipelines.changes.stages import NOTE_SCHEMA
from headrace.pipelines.errors import ReplicaDamagedError
from headrace.pipelines.replica.catch_up import replica_folder
from headrace.pipelines.source.pieces import piece_frame, piece_rows
from headrace.pipelines.spark.columns import spark_schema
from headrace.pipelines.spark.failures import explained
from headrace.pipelines.spark.frame import PIECES, SHARD
from headrace.pipelines.spark.packing import PACKED_SCHEMA, bounded_batches, pack, unpack
from headrace.storage.errors import StorageIOError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from headrace.pipelines.changes.scanning import StoredScan
    from headrace.pipelines.changes.stages import ApplyShard, ReadChanges
    from headrace.pipelines.config.model import SourceConfig
    from headrace.pipelines.source.discovery import FoundFile
    from headrace.pipelines.spark.frame import ShardRule

__all__ = ["Engine", "LocalEngine", "SparkEngine", "local_files"]

_TRIES: Final = 2
_FILTER_SCHEMA: Final = pa.schema([("bits", pa.binary())])


class Engine(Protocol):
    """Runs the stages of an apply."""

    @property
    def cores(self) -> int:
        """Number of tasks that run at the same time."""

    @property
    def tasks_of_a_process(self) -> int:
        """Number of tasks that run at the same time in one process, which share its memory budgets."""

    def run(
        self, source: SourceConfig, files: Sequence[FoundFile], read: ReadChanges, apply: ApplyShard
    ) -> list[dict[str, Any]]:
        """Read files, apply their changes, and return the notes of the tasks."""


class LocalEngine:
    """Runs the stages in threads of this process.

    Parameters
    ----------
    folder
        Folder for changes between the stages; None for the replica folder of this host.
    cores
        Number of threads; None for one per core.
    """

    def __init__(self, folder: str | None = None, cores: int | None = None) -> None:
        self._folder = replica_folder(folder)
        self._cores = cores or os.cpu_count() or 1

    @property
    def cores(self) -> int:  # noqa: D102 - as in the protocol
        return self._cores

    @property
    def tasks_of_a_process(self) -> int:  # noqa: D102 - as in the protocol
        return self._cores

    def run(  # noqa: D102 - as in the protocol
        self, source: SourceConfig, files: Sequence[FoundFile], read: ReadChanges, apply: ApplyShard
    ) -> list[dict[str, Any]]:
        with local_files(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            place = tempfile.TemporaryDirectory(prefix="changes-", dir=self._folder)
        rows = piece_rows(source, files, self._cores, skippable=False)
        with (
            place as folder,
            ThreadPoolExecutor(self._cores, "headrace-apply") as pool,
        ):
            named = None if apply.scan is None else _Named(apply.scan, read.rule)
            with _Exchange(Path(folder)) as changes:
                list(pool.map(lambda row: changes.take(_noted(read(_pieces(row)), named)), rows))
            with _Exchange(Path(folder), "stored-") as stored:
                if named is not None:
                    list(pool.map(lambda file: stored.take(named.scan.rows(file, named.keys)), named.scan.files()))
            shards = range(apply.shards) if apply.needs_every_shard else changes.shards
            return list(pool.map(lambda shard: _applied(apply, changes, stored, shard), shards))


class _Named:
    """The members that changes name, as they are read by several threads.

    Parameters
    ----------
    scan, rule
        Scan of the table for the members, and the rule that assigns changes to shards.
    """

    def __init__(self, scan: StoredScan, rule: ShardRule) -> None:
        self.scan = scan
        self.keys = scan.no_members()
        self._rule = rule
        self._lock = Lock()

    def add(self, changes: pa.RecordBatch) -> None:
        """Add the members of changes."""
        with self._lock:
            self.scan.note(self.keys, changes, self._rule)


def _noted(changes: Iterator[pa.RecordBatch], named: _Named | None) -> Iterator[pa.RecordBatch]:
    """Yield changes, after their members were noted if they are wanted."""
    for batch in changes:
        if named is not None:
            named.add(batch)
        yield batch


class SparkEngine:
    """Runs the stages in Spark's workers.

    Parameters
    ----------
    spark
        Spark session.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    @property
    def cores(self) -> int:  # noqa: D102 - as in the protocol
        return int(self._spark.sparkContext.defaultParallelism)

    @property
    def tasks_of_a_process(self) -> int:  # noqa: D102 - as in the protocol
        return 1

    def run(  # noqa: D102 - as in the protocol
        self, source: SourceConfig, files: Sequence[FoundFile], read: ReadChanges, apply: ApplyShard
    ) -> list[dict[str, Any]]:
        with explained("the application of changes", "apply them again"), bounded_batches(self._spark):
            pieces = piece_frame(self._spark, source, files, skippable=False)
            frame = pieces.mapInArrow(_Packed(read), spark_schema(PACKED_SCHEMA))
            frame = frame if apply.scan is None else frame.unionAll(self._stored(frame, apply.scan, read.rule))
            frame = frame.repartitionById(apply.shards, SHARD)
            notes = frame.mapInArrow(apply, spark_schema(NOTE_SCHEMA)).collect()
        return [json.loads(row[0]) for row in notes]

    def _stored(self, changes: DataFrame, scan: StoredScan, rule: ShardRule) -> DataFrame:
        """Return the stored rows of the members that changes name, packed."""
        noted = changes.mapInArrow(_Noting(scan, rule), spark_schema(_FILTER_SCHEMA)).collect()
        named = KeyFilter.united([row[0] for row in noted]) if noted else scan.no_members()
        numbers = self._spark.range(0, len(scan.files()), 1, self.cores)
        return numbers.mapInArrow(_Scanning(scan, named), spark_schema(PACKED_SCHEMA))


@dataclass(frozen=True)
class _Packed:
    """Reads changes, and packs them for the shuffle. Picklable."""

    read: ReadChanges

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return map(pack, self.read(batches))


@dataclass(frozen=True)
class _Noting:
    """Returns a filter of the members that packed changes name. Picklable."""

    scan: StoredScan
    rule: ShardRule

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        named = self.scan.no_members()
        for batch in batches:
            for changes in unpack(batch):
                self.scan.note(named, changes, self.rule)
        yield pa.RecordBatch.from_arrays([pa.array([named.bits.tobytes()], pa.binary())], schema=_FILTER_SCHEMA)


@dataclass(frozen=True)
class _Scanning:
    """Reads data files, given by their numbers, and packs the rows whose members a filter may have. Picklable."""

    scan: StoredScan
    named: KeyFilter

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        files = self.scan.files()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from map(pack, self.scan.rows(files[number], self.named))


def _pieces(row: dict[str, Any]) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pylist([row], PIECES)]


def _applied(apply: ApplyShard, changes: _Exchange, stored: _Exchange, shard: int) -> dict[str, Any]:
    """Apply the changes of a shard; once more if its replica was found to be damaged, as Spark retries a task."""
    for _ in range(_TRIES - 1):
        try:
            return apply.run(shard, changes.of(shard), stored.of(shard))
        except ReplicaDamagedError:
            continue
    return apply.run(shard, changes.of(shard), stored.of(shard))


def _created(path: Path) -> pa.NativeFile:
    return pa.OSFile(str(path), "wb")


@contextmanager
def local_files(folder: Path, held: str = "the changes of a batch while they are applied") -> Iterator[None]:
    """Raise an error that names the folder and the remedy if a file in it cannot be written or read.

    Parameters
    ----------
    folder, held
        The folder, and what it holds.

    Raises
    ------
    StorageIOError
        If the disk is full or fails.
    """
    try:
        yield
    except OSError as error:
        raise StorageIOError(
            f"the folder {folder}, which holds {held}, cannot be used: {error}; nothing was committed. Free "
            "some space there, or name another folder as `replicas` in the pipeline file or in HEADRACE_REPLICAS, and "
            "run again"
        ) from error


class _Exchange:
    """Changes or stored rows between the stages, in one file per shard.

    Parameters
    ----------
    folder, prefix
        Folder for the files, and the beginning of their names.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self._folder = folder
        self._prefix = prefix
        self._lock = Lock()
        self._writers: dict[int, tuple[pa.ipc.RecordBatchStreamWriter, Lock]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:  # a file that could not be written cannot be completed either
            with suppress(OSError):
                self._stack.close()
            return
        with local_files(self._folder):
            self._stack.close()

    @property
    def shards(self) -> list[int]:
        """Shards that have rows."""
        return sorted(self._writers)

    def take(self, batches: Iterator[pa.RecordBatch]) -> None:
        """Write batches to the files of their shards."""
        for batch in batches:
            shard = np.asarray(batch.column(SHARD))
            order = np.argsort(shard, kind="stable")
            ordered = batch.take(pa.array(order))
            shards, starts = np.unique(shard[order], return_index=True)
            for each, start, end in zip(shards, starts, [*starts[1:], len(order)], strict=True):
                writer, lock = self._writer(int(each), batch.schema)
                with lock, local_files(self._folder):
                    writer.write_batch(ordered.slice(start, end - start))

    def of(self, shard: int) -> list[pa.RecordBatch]:
        """Return the rows of a shard."""
        if shard not in self._writers:
            return []
        with local_files(self._folder), pa.ipc.open_stream(self._file(shard)) as reader:
            return list(reader)

    def _file(self, shard: int) -> Path:
        return self._folder / f"{self._prefix}{shard}.arrow"

    def _writer(self, shard: int, schema: pa.Schema) -> tuple[pa.ipc.RecordBatchStreamWriter, Lock]:
        with self._lock, local_files(self._folder):
            if shard not in self._writers:
                options = pa.ipc.IpcWriteOptions(compression="lz4")
                file = self._stack.enter_context(_created(self._file(shard)))
                writer = self._stack.enter_context(pa.ipc.new_stream(file, schema, options=options))
                self._writers[shard] = writer, Lock()
            return self._writers[shard]
