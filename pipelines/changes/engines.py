"""Where the stages of an apply run: in threads of this process, or in Spark's workers on any number of hosts.

In this process, changes pass from the first stage to the second through files on the local disk, one for each shard, as
Spark passes them through its shuffle. So neither keeps all changes of a batch in memory.
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

from headrace.pipelines.changes.stages import NOTE_SCHEMA
from headrace.pipelines.errors import ReplicaDamagedError
from headrace.pipelines.replica.catch_up import replica_folder
from headrace.pipelines.source.pieces import piece_frame, piece_rows
from headrace.pipelines.spark.columns import spark_schema
from headrace.pipelines.spark.failures import explained
from headrace.pipelines.spark.frame import PIECES, SHARD
from headrace.storage.errors import StorageIOError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pyspark.sql import SparkSession

    from headrace.pipelines.changes.stages import ApplyShard, ReadChanges
    from headrace.pipelines.config.model import SourceConfig
    from headrace.pipelines.source.discovery import FoundFile

__all__ = ["Engine", "LocalEngine", "SparkEngine", "local_files"]

_TRIES: Final = 2


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
            with _Exchange(Path(folder)) as exchange:
                list(pool.map(lambda row: exchange.take(read(_pieces(row))), rows))
            shards = range(apply.shards) if apply.needs_every_shard else exchange.shards
            return list(pool.map(lambda shard: _applied(apply, exchange, shard), shards))


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
        with explained("the application of changes"):
            # `mapInArrow` does not take columns whose names have dots or backticks, so columns have numbers between.
            names = read.schema.names
            numbered = [name if name == SHARD else f"_{number}" for number, name in enumerate(names)]
            between = pa.schema(field.with_name(name) for field, name in zip(read.schema, numbered, strict=True))
            pieces = piece_frame(self._spark, source, files, skippable=False)
            frame = pieces.mapInArrow(_Renaming(read, None, tuple(numbered)), spark_schema(between))
            frame = frame.repartitionById(apply.shards, SHARD)
            notes = frame.mapInArrow(_Renaming(apply, tuple(names), None), spark_schema(NOTE_SCHEMA)).collect()
        return [json.loads(row[0]) for row in notes]


@dataclass(frozen=True)
class _Renaming:
    """A stage with other column names in its input, or in its output. Picklable."""

    stage: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
    given: tuple[str, ...] | None
    returned: tuple[str, ...] | None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _renamed(self.stage(_renamed(batches, self.given)), self.returned)


def _renamed(batches: Iterable[pa.RecordBatch], names: tuple[str, ...] | None) -> Iterator[pa.RecordBatch]:
    return iter(batches) if names is None else (batch.rename_columns(list(names)) for batch in batches)


def _pieces(row: dict[str, Any]) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pylist([row], PIECES)]


def _applied(apply: ApplyShard, exchange: _Exchange, shard: int) -> dict[str, Any]:
    """Apply the changes of a shard; once more if its replica was found to be damaged, as Spark retries a task."""
    for _ in range(_TRIES - 1):
        try:
            return apply.run(shard, exchange.of(shard))
        except ReplicaDamagedError:
            continue
    return apply.run(shard, exchange.of(shard))


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
    """Changes between the stages, in one file per shard.

    Parameters
    ----------
    folder
        Empty folder for the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
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
        """Shards that have changes."""
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
        """Return the changes of a shard."""
        if shard not in self._writers:
            return []
        with local_files(self._folder), pa.ipc.open_stream(self._folder / f"{shard}.arrow") as reader:
            return list(reader)

    def _writer(self, shard: int, schema: pa.Schema) -> tuple[pa.ipc.RecordBatchStreamWriter, Lock]:
        with self._lock, local_files(self._folder):
            if shard not in self._writers:
                options = pa.ipc.IpcWriteOptions(compression="lz4")
                file = self._stack.enter_context(_created(self._folder / f"{shard}.arrow"))
                writer = self._stack.enter_context(pa.ipc.new_stream(file, schema, options=options))
                self._writers[shard] = writer, Lock()
            return self._writers[shard]
