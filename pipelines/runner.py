"""Runs a pipeline: once over the waiting files, or continuously, until a stop is requested.

This module handles everything around the batches: Spark, leases, required tables, signals, the record of the run.
`headrace.pipelines.loop` selects the files of a batch, and `headrace.pipelines.batch.protocol` loads it.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.pipelines.batch.preparation import check_pipeline
from headrace.pipelines.batch.protocol import BatchProtocol
from headrace.pipelines.catalog import Catalog
from headrace.pipelines.changes.applying import (
    ChangeStreams,
    changing_dimensions,
    check_change_folders,
    leases_of,
)
from headrace.pipelines.changes.engines import SparkEngine
from headrace.pipelines.config.correlation import load_any
from headrace.pipelines.config.model import PipelineConfig
from headrace.pipelines.delta.tables import DeltaHandle, has_table
from headrace.pipelines.errors import DeltaTableError, telling
from headrace.pipelines.hooks import CHECKED, Step, no_hook
from headrace.pipelines.lease import Leases
from headrace.pipelines.loop import BatchLoop, StopRequest
from headrace.pipelines.rejects.retries import RetrySource
from headrace.pipelines.rejects.rows import check_left_over
from headrace.pipelines.replica.kernels import compiling, finish_compiling
from headrace.pipelines.source.feed import SourceFeed
from headrace.pipelines.source.identity import check_identity, replaced_stream
from headrace.pipelines.source.ledger import Ledger
from headrace.pipelines.source.pieces import check_source, piece_frame
from headrace.pipelines.spark.failures import explained
from headrace.pipelines.spark.sessions import SparkSettings, session, spark_settings
from headrace.storage.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from headrace.pipelines.catalog import BatchRecord
    from headrace.pipelines.config.correlation import CorrelationConfig
    from headrace.pipelines.source.discovery import LeftOut
    from headrace.pipelines.source.feed import Feed

__all__ = ["OpenRun", "RunResult", "opened", "run"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Parameters
    ----------
    run
        Id of the run in the run catalog.
    pipeline
        Name of the pipeline.
    state
        State of the run: `done`, or `stopped` if a stop was requested.
    signal
        Signal that stopped the run, or None.
    seconds
        Elapsed seconds from the start of the first batch to the end of the run. Starting Spark is not included.
    batches
        Records of the run's batches.
    facts, errors, duplicates
        Paths of the tables of facts, rejected rows and routed duplicates.
    left_out
        Files and folders of the source that were not loaded, with reasons: subfolders that `source.recursive` excludes,
        empty files, changes that `source.changed` ignores. Those of a folder of changes have its path in front.
    notices
        Changes to tables that prepared the pipeline, such as an added unknown member.
    changes
        For each dimension that declares a folder of changes, the number of changes by outcome.
    moved_ranges
        For each dimension whose changes moved ranges of facts that a restatement corrects, the number of ranges.
    sources
        Names of the sources of a pipeline with several; empty for a pipeline with one.
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
    left_out: tuple[LeftOut, ...] = ()
    notices: tuple[str, ...] = ()
    changes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    moved_ranges: Mapping[str, int] = field(default_factory=dict)
    sources: tuple[str, ...] = ()

    def total(self, name: str) -> int:
        """Return the sum of a count over all batches, such as `rows_in`, `loaded`, `rejected` or `new_members`."""
        return int(sum(getattr(batch, name) for batch in self.batches))

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values for JSON, with totals and outcomes."""
        counts = ("rows_in", "loaded", "dropped", "routed", "rejected", "new_members", "deadline_misses")
        outcomes = _summed(batch.detail.get("outcomes", {}).get("rows", {}) for batch in self.batches)
        merged = _summed(batch.detail.get("merged", {}) for batch in self.batches)
        return {
            **{name: value for name, value in asdict(self).items() if name not in {"batches", "left_out", "sources"}},
            **({"sources": list(self.sources)} if self.sources else {}),
            **{name: self.total(name) for name in counts},
            "filtered": outcomes.get("filtered", 0),
            "outcomes": outcomes,
            **({"merged": merged} if merged else {}),
            "batches": [asdict(batch) for batch in self.batches],
            "left_out": [item._asdict() for item in self.left_out],
        }


def _plain(changes: ChangeStreams) -> dict[str, dict[str, int]]:
    return {name: dict(counts) for name, counts in changes.outcomes.items()}


def _with_folders(changes: ChangeStreams) -> Iterator[LeftOut]:
    """Yield what the folders of changes left out, with the path of the folder in front."""
    for folder, entries in changes.left_out.items():
        yield from (each._replace(name=f"{folder}/{each.name}") for each in entries)


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of counts by name."""
    total: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    return total


def run(
    pipeline: str | Path | PipelineConfig | CorrelationConfig,
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
        Path of the pipeline file, or the configuration that `load_any` returned.
    follow
        Whether to continue with new files until a signal arrives, instead of ending when all waiting files are loaded.
    spark
        Spark settings. The default is the settings of the pipeline file.
    on_batch
        Function called with the record of each batch after the batch is loaded.
    hook
        Function called with the name of each step of a batch. An error that it raises ends the run, as a crash would.
    clock
        Function that returns seconds since 1970.

    Returns
    -------
    RunResult
        Result of the run. SIGINT and SIGTERM end the run after the current batch.

    Raises
    ------
    PipelineFileError, DeltaTableError
        If the pipeline cannot run in its present form. Nothing was written.
    LedgerError
        If the ledger of loaded files cannot be used, or does not belong to the fact table.
    SourceFileError
        If a file changed after it was loaded, or a file of an unfinished batch was removed.
    LeaseHeldError
        If another run of the pipeline is active.
    SparkStartError
        If Spark does not start.
    BatchError
        If a batch failed. Run the pipeline again to continue.
    QualityError
        If the data violated a guarantee.

    Notes
    -----
    The notes of an error (`__notes__`) say what the run did before: the totals of the batches that it loaded, columns
    and special members that it added to dimensions, and changes that were applied. These are committed, and the next
    run does not repeat them.
    """
    mode = "follow" if follow else "once"
    with opened(pipeline, mode, spark=spark, on_batch=on_batch, hook=hook, clock=clock) as run:
        return run.load(follow=follow)


@contextmanager
def opened(
    pipeline: str | Path | PipelineConfig | CorrelationConfig,
    mode: str,
    *,
    spark: SparkSettings | None = None,
    on_batch: Callable[[BatchRecord], None] | None = None,
    hook: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.time,
) -> Iterator[OpenRun]:
    """Check and prepare a pipeline, and yield its run, which holds the leases until the block ends.

    Parameters
    ----------
    pipeline, spark, on_batch, hook, clock
        As in `run`.
    mode
        Mode of the run in the run catalog.

    Raises
    ------
    HeadraceError
        As in `run`, except for errors of batches.
    """
    config = load_any(pipeline) if isinstance(pipeline, str | Path) else pipeline
    if not isinstance(config, PipelineConfig):
        from headrace.pipelines.correlating import opened_correlation  # noqa: PLC0415 - it imports this module

        with opened_correlation(config, mode, spark=spark, on_batch=on_batch, hook=hook, clock=clock) as run:
            yield run
        return
    assert config.catalog is not None
    check_source(config.source)
    check_change_folders(config)
    with Catalog(config.catalog, clock) as catalog:
        step = hook or no_hook
        kernels = compiling()  # while Spark starts
        started = session(spark or spark_settings(config))
        finish_compiling(kernels, step)
        step(Step(CHECKED, "checking the tables"))
        checked = check_pipeline(config, started.sparkContext.defaultParallelism)
        with (
            Leases(catalog, _leases(config), clock=clock) as leases,
            Ledger(str(config.checkpoint), clock) as ledger,
            ExitStack() as done,
        ):
            facts = DeltaHandle(config.sink.path) if has_table(config.sink.path) else None
            check_identity(config, ledger, facts, ran_before=catalog.has_batches(config.name))
            check_left_over(config, ledger)
            prepared = checked.create()
            changes = ChangeStreams(config, SparkEngine(started), holds=leases.check, hook=step, clock=clock)
            done.enter_context(telling(lambda: [*prepared.notices, *changes.told()]))
            number = catalog.start_run(config.name, mode, leases.token)
            protocol = BatchProtocol(prepared, catalog, number, holds=leases.check, hook=step, clock=clock)
            _finish_replaced(protocol, replaced_stream(config, ledger, facts))
            feed = SourceFeed(config.source, config.trigger, ledger)
            loop = BatchLoop(
                feed,
                protocol,
                partial(piece_frame, started, config.source),
                retry_of=RetrySource(started, config),
                on_batch=on_batch,
                before=changes.apply_waiting,
                hook=step,
                holds=leases.check,
            )
            yield OpenRun(config, catalog, number, loop, feed, changes, prepared.notices)


class OpenRun:
    """A run under its leases.

    Attributes
    ----------
    config
        Configuration of the pipeline.
    loop
        Loop that loads batches.
    stop
        Request that ends the run after the current batch.
    """

    def __init__(
        self,
        config: PipelineConfig,
        catalog: Catalog,
        number: str,
        loop: BatchLoop,
        feed: Feed,
        changes: ChangeStreams | None,
        notices: tuple[str, ...] = (),
        sources: tuple[str, ...] = (),
    ) -> None:
        self._changes = changes
        self.config = config
        self._notices = notices
        self._sources = sources
        self._catalog = catalog
        self._number = number
        self.loop = loop
        self._feed = feed
        self.stop = StopRequest()

    def load(self, *, follow: bool) -> RunResult:
        """Load the files that wait; to follow, go on with new ones until `stop` is requested."""
        interval = parse_duration(self.config.trigger.interval) if follow else None
        return self.to_the_end(lambda: self.loop.run(self.stop, interval))

    def to_the_end(self, work: Callable[[], None]) -> RunResult:
        """Do the work of the run, which ends early if `stop` is requested, as signals do; record the final state."""
        began = time.monotonic()
        try:
            with self.stop.on_signals(), telling(self._loaded), explained("a batch"):
                work()
        except BaseException as error:
            self._catalog.finish_run(self._number, "failed", str(error) or type(error).__name__)
            raise
        state = "done" if self.stop.signal is None else "stopped"
        self._catalog.finish_run(self._number, state)
        return RunResult(
            run=self._number,
            pipeline=self.config.name,
            state=state,
            signal=self.stop.signal,
            seconds=time.monotonic() - began,
            batches=tuple(self.loop.records),
            facts=self.config.sink.path,
            errors=self.config.errors_path,
            duplicates=self.config.duplicates_path,
            left_out=(*self._feed.left_out, *(() if self._changes is None else _with_folders(self._changes))),
            notices=self._notices,
            changes={} if self._changes is None else _plain(self._changes),
            moved_ranges={} if self._changes is None else dict(self._changes.moved),
            sources=self._sources,
        )

    def _loaded(self) -> list[str]:
        """Return what the batches so far loaded, as one line; no line without batches."""
        records = self.loop.records
        if not records:
            return []
        counts = {
            "rows in": "rows_in",
            "loaded": "loaded",
            "duplicates dropped": "dropped",
            "duplicates routed": "routed",
            "rejected": "rejected",
            "new members": "new_members",
        }
        told = [f"{sum(getattr(record, name) for record in records):,} {what}" for what, name in counts.items()]
        return [f"{len(records):,} batch{'es' if len(records) > 1 else ''}: {', '.join(told)}"]


def _leases(config: PipelineConfig) -> list[str]:
    """Return the names of the leases of a run: its pipeline, and the dimensions whose changes it applies."""
    return [f"pipeline:{config.checkpoint}", *leases_of(config, *changing_dimensions(config))]


def _finish_replaced(protocol: BatchProtocol, stream: str | None) -> None:
    """Complete the last batch of the stream that this run's stream replaces, whose ledger no longer exists."""
    if stream is None:
        return
    last = protocol.loaded(stream)
    if last is None:
        return
    try:
        protocol.finish(last, stream)
    except DeltaTableError as error:
        _LOG.warning("the stream %s is replaced although its last batch cannot be completed: %s", stream, error)
