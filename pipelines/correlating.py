"""Runs a correlation: a pipeline that joins the rows of several sources with each other.

This module handles everything around the batches, and the loop over them, as `headrace.pipelines.runner` and
`headrace.pipelines.loop` do for pipelines with one source. `headrace.pipelines.correlate` loads a batch.
"""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING

from headrace.pipelines.catalog import Catalog
from headrace.pipelines.config.column_types import arrow_schema
from headrace.pipelines.config.join_plan import join_plan
from headrace.pipelines.correlate.engines import SparkEngine
from headrace.pipelines.correlate.kernels import compiling
from headrace.pipelines.correlate.ledgers import SourceLedgers
from headrace.pipelines.correlate.protocol import CorrelationProtocol, sources_text, state_folder
from headrace.pipelines.correlate.sinks import check_sinks, create_sinks
from headrace.pipelines.delta.tables import DeltaHandle, has_table, stream_registry
from headrace.pipelines.errors import LedgerError, SourceFileError
from headrace.pipelines.lease import Leases
from headrace.pipelines.loop import StopRequest, fingerprints
from headrace.pipelines.runner import RunResult
from headrace.pipelines.source.discovery import examine, skip_command
from headrace.pipelines.source.identity import application, restored_before
from headrace.pipelines.source.pieces import check_source
from headrace.pipelines.spark.failures import explained
from headrace.pipelines.spark.sessions import SparkSettings, session, spark_settings
from headrace.storage.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.pipelines.catalog import BatchRecord
    from headrace.pipelines.config.correlation import CorrelationConfig
    from headrace.pipelines.config.join_plan import JoinPlan
    from headrace.pipelines.correlate.engines import Engine
    from headrace.pipelines.source.discovery import FoundFile
    from headrace.pipelines.source.ledger import Ledger

__all__ = ["plan_of", "run_correlation", "run_with"]

_LOG = logging.getLogger(__name__)
_NAMED = 5


def _no_hook(_step: str) -> None:
    """Do nothing."""


def plan_of(config: CorrelationConfig) -> JoinPlan:
    """Return the plan of a pipeline's joins."""
    return join_plan({name: arrow_schema(each.columns) for name, each in config.sources.items()}, config.conditions)


def run_correlation(
    config: CorrelationConfig,
    *,
    follow: bool = False,
    spark: SparkSettings | None = None,
    on_batch: Callable[[BatchRecord], None] | None = None,
    hook: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.time,
) -> RunResult:
    """Run a correlation; parameters, result and errors are those of `headrace.pipelines.runner.run`.

    Raises
    ------
    StateDamagedError
        If a file of the state is damaged or missing.
    """
    assert config.catalog is not None
    _check_sources(config)
    with Catalog(config.catalog, clock) as catalog:
        kernels = compiling()  # while Spark starts
        started = session(spark or spark_settings(config))
        kernels.join()
        return run_with(
            SparkEngine(started), catalog, config, follow=follow, on_batch=on_batch, hook=hook or _no_hook, clock=clock
        )


def run_with(
    engine: Engine,
    catalog: Catalog,
    config: CorrelationConfig,
    *,
    follow: bool = False,
    on_batch: Callable[[BatchRecord], None] | None = None,
    hook: Callable[[str], None] = _no_hook,
    clock: Callable[[], float] = time.time,
) -> RunResult:
    """Run a correlation with a given engine and an open catalog; otherwise as `run_correlation`."""
    plan = plan_of(config)
    check_sinks(config, plan)
    checkpoints = [config.checkpoint, *(config.of_source(name).checkpoint for name in config.sources)]
    leases = Leases(catalog, [f"pipeline:{checkpoint}" for checkpoint in checkpoints], clock=clock)
    with leases, SourceLedgers(config, clock) as ledgers:
        _check_identity(config, ledgers)
        state = state_folder(config, ledgers.stream.stream)
        state.require_own()
        create_sinks(config, plan)
        state.claim()
        number = catalog.start_run(config.name, "follow" if follow else "once", leases.token)
        protocol = CorrelationProtocol(
            engine, config, plan, catalog, number, ledgers.stream.stream, holds=leases.check, hook=hook, clock=clock
        )
        loop = _Loop(ledgers, protocol, on_batch, hook)
        began = time.monotonic()
        try:
            with loop.stop.on_signals(), explained("a batch"):
                loop.run(parse_duration(config.trigger.interval) if follow else None)
        except BaseException as error:
            catalog.finish_run(number, "failed", str(error) or type(error).__name__)
            raise
        ended = "done" if loop.stop.signal is None else "stopped"
        catalog.finish_run(number, ended)
        seconds, tables = time.monotonic() - began, (config.sink.path, config.errors_path, "")
        records, left_out = tuple(loop.records), ledgers.left_out
        signal, sources = loop.stop.signal, tuple(config.sources)
        return RunResult(number, config.name, ended, signal, seconds, records, *tables, left_out, sources=sources)


class _Loop:
    """Loads the new files of the sources batch by batch."""

    def __init__(
        self,
        ledgers: SourceLedgers,
        protocol: CorrelationProtocol,
        on_batch: Callable[[BatchRecord], None] | None,
        hook: Callable[[str], None],
    ) -> None:
        self._ledgers = ledgers
        self._protocol = protocol
        self._on_batch = on_batch
        self._hook = hook
        self.stop = StopRequest()
        self.records: list[BatchRecord] = []

    def run(self, interval: float | None) -> None:
        """Complete or drop the pending batch, then load the waiting files; with an interval, go on with new ones."""
        self._resume()
        while not self.stop.asked:
            began = time.monotonic()
            files = self._ledgers.take()
            self._hook("after listing")
            if files:
                self._load(files)
            elif interval is None:
                return
            if interval is not None:
                rest = began + interval - time.monotonic()
                self.stop.wait(max(rest, 0.0 if files else self._ledgers.listing_seconds))
        _LOG.info("stopped between two batches, as asked")

    def _load(self, files: dict[str, list[FoundFile]]) -> None:
        number, attempt = self._ledgers.stream.next_number(), str(uuid.uuid4())
        self._ledgers.plan(number, attempt, files)
        self._hook("after plan")
        with ExitStack() as stack:
            folders = self._ledgers.folders
            prints = {name: stack.enter_context(fingerprints(folders[name], each)) for name, each in files.items()}
            record = self._protocol.run_batch(files, number, attempt)
            self._mark(record, {name: taken() for name, taken in prints.items()})

    def _mark(self, record: BatchRecord, prints: dict[str, dict[str, str | None]] | None = None) -> None:
        self._ledgers.done(record.batch, prints)
        self._hook("after done")
        self._protocol.settled()
        self.records.append(record)
        _LOG.info(
            "batch %d: %d rows in, %d results, %d rejected, %.2f s",
            *(record.batch, record.rows_in, record.loaded, record.rejected, record.seconds),
        )
        if self._on_batch is not None:
            self._on_batch(record)

    def _resume(self) -> None:
        """Complete the pending batch if the results hold it; otherwise delete its plan. Then open the state."""
        stream = self._ledgers.stream
        plan = stream.pending()
        if plan is not None:
            record = self._protocol.finish(plan.number, plan.attempt)
            self._hook("after finish")
            if record is not None:
                _LOG.info("batch %d was loaded by a run that ended before it could note that", plan.number)
                self._mark(record)
                return
            self._require_files(plan.number)
            self._ledgers.forget(plan.number)
            self._hook("after forget")
        last = stream.last_loaded()
        self._protocol.open(last, None if last is None else stream.attempt_of(last))

    def _require_files(self, number: int) -> None:
        """Raise an error if a planned file was removed."""
        gone = [
            (name, file.name)
            for name, (folder, files, skipped) in self._ledgers.planned().items()
            for file in files
            if file.name not in skipped and examine(folder, file.name) is None
        ]
        if gone:
            named = ", ".join(f"{source}/{file}" for source, file in gone[:_NAMED])
            more = f" and {len(gone) - _NAMED} more" if len(gone) > _NAMED else ""
            raise SourceFileError(
                f"batch {number} has not been loaded, and some of its files are missing: "
                f"{named}{more}; put them back, or continue without them: "
                f"`{skip_command(gone[0][1], gone[0][0])}`"
            )


def _check_sources(config: CorrelationConfig) -> None:
    for source in config.sources.values():
        check_source(source)


def _check_identity(config: CorrelationConfig, ledgers: SourceLedgers) -> None:
    """Refuse ledgers that do not belong to the table of results.

    Raises
    ------
    LedgerError
        If a run would load rows twice, or omit some.
    """
    stream, path = ledgers.stream, config.sink.path
    facts = DeltaHandle(path) if has_table(path) else None
    pending, last = stream.pending(), stream.last_loaded()
    newest = last if pending is None else pending.number
    loaded = None if facts is None else facts.transaction(application(stream.stream, "facts"))
    again = f"remove {path}, {config.errors_path} and {config.checkpoint} to load every file again"
    if facts is not None:
        _refuse_renamed(config, stream, facts)
        entry = stream_registry(facts).get(config.name)
        if entry is not None and entry["stream"] != stream.stream:
            raise LedgerError(
                f"{path} holds results that pipeline {config.name} loaded as stream {entry['stream']}, but the "
                f"checkpoint {config.checkpoint} is that of stream {stream.stream}; restore the checkpoint of that "
                f"stream, name another table, or {again}"
            )
    if last is not None and (loaded is None or loaded < last):
        raise LedgerError(
            f"the checkpoint {config.checkpoint} says that batch {last} was loaded, but {path} has "
            f"{'no batch' if loaded is None else f'only batch {loaded}'} of this stream: the table was replaced, or is "
            f"an older copy; restore it, or {again}"
        )
    if loaded is not None and (newest is None or loaded > newest):
        raise LedgerError(
            f"{path} has batch {loaded} of this stream, which the checkpoint {config.checkpoint} does not know: it "
            f"is an older copy, or a copy of it was used elsewhere; restore the newest checkpoint, or {again}"
        )
    version = None if facts is None or loaded is None else restored_before(stream.stream, facts)
    if version is not None:
        raise LedgerError(
            f"{path} was restored to a version before its last batch; restore it to its version {version}, or {again}"
        )


def _refuse_renamed(config: CorrelationConfig, stream: Ledger, facts: DeltaHandle) -> None:
    """Refuse a new ledger if a pipeline of another name loaded sources of the same names into the table.

    Raises
    ------
    LedgerError
        If there is such a pipeline.
    """
    registry, sources = stream_registry(facts), sources_text(config)
    other = next((name for name, entry in registry.items() if entry["source"] == sources), None)
    if other is not None and config.name not in registry and stream.is_new:
        raise LedgerError(
            f"{config.sink.path} holds results that pipeline {other} loaded from sources of the same names, "
            f"{', '.join(config.sources)}; if {config.name} is its new name, a run would load every file again. Give "
            "the pipeline its old name, or name another table; if its files are others, give its sources other names"
        )
