"""Runs a pipeline: once over what is there, or following what arrives, until it is told to stop.

Holds what surrounds the batches: Spark, leases, tables that must be there, signals, the run's record. What a batch does
is in `headrace.pipelines.batch`.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.etl import DuplicateAction
from headrace.pipelines.batch import BatchProtocol
from headrace.pipelines.batch_tables import ERROR_SCHEMA
from headrace.pipelines.catalog import Catalog
from headrace.pipelines.config import PipelineConfig, load_pipeline
from headrace.pipelines.delta_tables import DeltaHandle, create_table, has_table
from headrace.pipelines.errors import BatchError, DeltaTableError, PipelineFileError
from headrace.pipelines.failures import cause_of
from headrace.pipelines.kernels import compiling
from headrace.pipelines.lease import Leases
from headrace.pipelines.preparation import prepare
from headrace.pipelines.source import check_source, open_stream, option_text
from headrace.pipelines.spark import SparkSettings, session
from headrace.storage.errors import HeadraceError
from headrace.storage.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from headrace.pipelines.catalog import BatchRecord
    from headrace.pipelines.stages import Prepared

__all__ = ["RunResult", "run"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
_START_SECONDS = 120


@dataclass(frozen=True)
class RunResult:
    """What a run did.

    Parameters
    ----------
    run
        Its id in the run catalog.
    pipeline
        The pipeline's name.
    state
        `done`, or `stopped` when it was told to stop.
    signal
        The signal that stopped it, or None.
    seconds
        From the first batch's start to the end, without the start of Spark.
    batches
        The records of its batches.
    facts, errors, duplicates
        Where facts, rejected rows and routed duplicates lie.
    """

    run: str
    pipeline: str
    state: str
    signal: int | None
    seconds: float
    batches: tuple[BatchRecord, ...]
    facts: str
    errors: str
    duplicates: str

    def total(self, name: str) -> int:
        """Return the sum of a count over all batches, such as `rows_in`, `loaded`, `rejected` or `new_members`."""
        return int(sum(getattr(batch, name) for batch in self.batches))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON, with totals and outcomes."""
        counts = ("rows_in", "loaded", "dropped", "routed", "rejected", "new_members", "deadline_misses")
        outcomes: dict[str, int] = {}
        for batch in self.batches:
            for name, count in batch.detail.get("outcomes", {}).get("rows", {}).items():
                outcomes[name] = outcomes.get(name, 0) + count
        return {
            **{name: value for name, value in asdict(self).items() if name != "batches"},
            **{name: self.total(name) for name in counts},
            "outcomes": outcomes,
            "batches": [asdict(batch) for batch in self.batches],
        }


def run(
    pipeline: str | Path | PipelineConfig,
    *,
    follow: bool = False,
    spark: SparkSettings | None = None,
    on_batch: Callable[[BatchRecord], None] | None = None,
    hook: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.time,
) -> RunResult:
    """Run a pipeline.

    Parameters
    ----------
    pipeline
        The pipeline file, or what `load_pipeline` made of it.
    follow
        Go on with what arrives until a signal comes, instead of ending when all that is there is loaded.
    spark
        How to start Spark; by default as the pipeline file says.
    on_batch
        Called with the record of each batch, in another thread.
    hook
        Called with the name of each step of a batch; an error that it raises ends the run, as a crash there would.
    clock
        Seconds since 1970.

    Returns
    -------
    RunResult
        What was done. SIGINT and SIGTERM end the run after the batch that is being done.

    Raises
    ------
    PipelineFileError, DeltaTableError
        If the pipeline cannot work as it stands. Nothing has been written.
    LeaseHeldError
        If another run is at it.
    SparkStartError
        If Spark does not start.
    BatchError
        If a batch failed. Run again to go on.
    QualityError
        If the data broke a promise.
    """
    config = pipeline if isinstance(pipeline, PipelineConfig) else load_pipeline(pipeline)
    assert config.catalog is not None
    check_source(config.source)
    with Catalog(config.catalog, clock) as catalog:
        kernels = compiling()  # while Spark starts
        started = session(spark or _spark_settings(config))
        kernels.join()
        prepared = prepare(config, started.sparkContext.defaultParallelism)
        with Leases(catalog, _leases(prepared), clock=clock) as leases:
            _ensure_tables(prepared)
            _check_checkpoint(prepared, catalog)
            number = catalog.start_run(config.name, "follow" if follow else "once", leases.token)
            options = {"hook": hook} if hook is not None else {}
            protocol = BatchProtocol(prepared, catalog, number, holds=leases.check, clock=clock, **options)
            sink = _Sink(protocol, config.name, on_batch)
            return _Run(started, prepared, catalog, number, sink).to_the_end(follow=follow)


class _Sink:
    """What Spark calls for each batch. One batch at a time; none begins once the run is to stop."""

    def __init__(self, protocol: BatchProtocol, name: str, on_batch: Callable[[BatchRecord], None] | None) -> None:
        self._protocol = protocol
        self._name = name
        self._on_batch = on_batch
        self.query_id: Future[str] = Future()
        self.records: list[BatchRecord] = []
        self.failure: BaseException | None = None
        self.busy = threading.Lock()

    def __call__(self, frame: DataFrame, number: int) -> None:
        """Do a batch."""
        with self.busy:
            try:
                stream = f"{self._name}-{self.query_id.result(_START_SECONDS)}"
                record = self._protocol.run_batch(frame, number, stream)
            except BaseException as error:
                self.failure = error
                raise
            self.records.append(record)
        _LOG.info(
            "batch %d: %d rows in, %d loaded, %d dropped, %d routed, %d rejected, %d new members, %.2f s",
            *(number, record.rows_in, record.loaded, record.dropped, record.routed, record.rejected),
            *(record.new_members, record.seconds),
        )
        if self._on_batch is not None:
            self._on_batch(record)


class _Run:
    """A run under its leases."""

    def __init__(self, spark: SparkSession, prepared: Prepared, catalog: Catalog, number: str, sink: _Sink) -> None:
        self._spark = spark
        self._prepared = prepared
        self._config = prepared.config
        self._catalog = catalog
        self._number = number
        self._sink = sink
        self._signal: int | None = None

    def to_the_end(self, *, follow: bool) -> RunResult:
        """Run until there is nothing left or a signal comes; record how it ended."""
        began = time.monotonic()
        try:
            with self._signals(), self._quiet_py4j():
                self._stream(follow=follow)
        except BaseException as error:
            self._catalog.finish_run(self._number, "failed", str(error) or type(error).__name__)
            raise
        state = "done" if self._signal is None else "stopped"
        self._catalog.finish_run(self._number, state)
        return RunResult(
            run=self._number,
            pipeline=self._config.name,
            state=state,
            signal=self._signal,
            seconds=time.monotonic() - began,
            batches=tuple(self._sink.records),
            facts=self._config.sink.path,
            errors=self._config.errors_path,
            duplicates=self._config.duplicates_path,
        )

    def _stream(self, *, follow: bool) -> None:
        query = self._start(follow=follow)
        self._sink.query_id.set_result(str(query.id))
        try:
            while not query.awaitTermination(_POLL_SECONDS):
                if self._signal is not None:
                    self._stop(query)
                    break
        except Exception as error:
            raise self._failure(error) from error
        finally:
            if query.isActive:
                query.stop()
        if self._sink.failure is not None:
            raise self._failure(self._sink.failure)

    def _start(self, *, follow: bool) -> StreamingQuery:
        config = self._config
        writer = open_stream(self._spark, config.source, config.trigger).writeStream.foreachBatch(self._sink)
        writer = writer.option("checkpointLocation", config.checkpoint).queryName(f"{config.name}-{self._number}")
        if follow:
            milliseconds = int(parse_duration(config.trigger.interval) * 1000)
            return writer.trigger(processingTime=f"{milliseconds} milliseconds").start()
        return writer.trigger(availableNow=True).start()

    def _stop(self, query: StreamingQuery) -> None:
        """End the stream between two batches."""
        _LOG.info("stopping after the batch that is being done")
        with self._sink.busy:
            query.stop()

    def _failure(self, error: BaseException) -> BaseException:
        """Return the error that ended the stream: the batch's own where there is one."""
        cause = self._sink.failure
        if isinstance(cause, HeadraceError):
            return cause
        if cause is not None:
            return BatchError(f"a batch failed: {cause_of(cause)}; nothing is lost, the next run does this batch again")
        return BatchError(f"the stream failed: {cause_of(error)}; correct the cause and run again")

    @contextmanager
    def _quiet_py4j(self) -> Iterator[None]:
        """Keep py4j from logging the errors of a batch with their stack: they are raised to the caller."""
        logger = logging.getLogger("py4j.clientserver")
        before = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(before)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM stop the run; a second one does what it did before."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def note(number: int, _frame: Any) -> None:
            self._signal = number
            signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _spark_settings(config: PipelineConfig) -> SparkSettings:
    conf = {name: option_text(value) for name, value in config.spark.conf.items()}
    return SparkSettings(master=config.spark.master, app_name=f"headrace {config.name}", conf=conf)


def _leases(prepared: Prepared) -> list[str]:
    """Return what this run must be alone at: its pipeline, and the facts whose keys it compares.

    Dimensions are not among it: members are committed only at the version that their numbers were planned at.
    """
    config = prepared.config
    names = [f"pipeline:{config.checkpoint}"]
    if prepared.duplicates is not None:
        names.append(f"facts:{config.sink.path}")
    return names


def _ensure_tables(prepared: Prepared) -> None:
    """Create the tables that receive rows where there are none, and compare the others with what they will receive."""
    config = prepared.config
    _ensure_table(config.sink.path, prepared.fact_schema, tuple(config.sink.partition_by))
    _ensure_table(config.errors_path, ERROR_SCHEMA)
    if prepared.duplicates is not None and prepared.duplicates.action is DuplicateAction.ROUTE:
        _ensure_table(config.duplicates_path, prepared.duplicate_schema)


def _ensure_table(path: str, schema: pa.Schema, partition_by: tuple[str, ...] = ()) -> None:
    if not has_table(path):
        create_table(path, schema, partition_by)
        return
    there = DeltaHandle(path).schema()
    for field in schema:
        if field.name not in there.names:
            raise DeltaTableError(
                f"the Delta table {path} has no column {field.name!r}; it has {', '.join(there.names)}; name another "
                "table or add the column"
            )
        found = there.field(field.name).type
        if not pa.types.is_nested(field.type) and found != field.type:
            raise DeltaTableError(
                f"the Delta table {path} has column {field.name!r} as {found}, but the pipeline writes {field.type}; "
                "name another table or change the source's schema"
            )


def _check_checkpoint(prepared: Prepared, catalog: Catalog) -> None:
    """Refuse to load every file again because the checkpoint has gone while the facts have not."""
    config = prepared.config
    checkpoint = str(config.checkpoint)
    if "://" in checkpoint or (Path(checkpoint) / "metadata").exists() or prepared.duplicates is not None:
        return
    if DeltaHandle(config.sink.path).latest().version > 0 and catalog.has_batches(config.name):
        raise PipelineFileError(
            f"the checkpoint {checkpoint} is gone, but {config.sink.path} holds facts of this pipeline: a run would "
            "load every file again; restore the checkpoint, or remove the fact table too, or declare `duplicates`"
        )
