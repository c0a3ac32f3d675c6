"""Runs a correlation: a pipeline that joins the rows of several sources with each other.

This module prepares what surrounds the batches, as `headrace.pipelines.runner` does for pipelines with one source.
`headrace.pipelines.correlate` loads a batch.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from headrace.pipelines.batch.preparation import check_pipeline
from headrace.pipelines.batch.protocol import BatchProtocol
from headrace.pipelines.catalog import Catalog
from headrace.pipelines.changes.applying import ChangeStreams, changing_dimensions, check_change_folders, leases_of
from headrace.pipelines.changes.engines import SparkEngine as ChangesEngine
from headrace.pipelines.correlate.delivery import steps_problem
from headrace.pipelines.correlate.engines import SparkEngine
from headrace.pipelines.correlate.kernels import compiling
from headrace.pipelines.correlate.ledgers import SourceLedgers
from headrace.pipelines.correlate.manifests import ManifestRef
from headrace.pipelines.correlate.protocol import CorrelationProtocol, state_folder
from headrace.pipelines.correlate.sinks import check_sinks, create_sinks
from headrace.pipelines.delta.tables import DeltaHandle, has_table
from headrace.pipelines.errors import PipelineFileError, StateDamagedError, telling
from headrace.pipelines.hooks import CHECKED, Step, no_hook
from headrace.pipelines.lease import Leases
from headrace.pipelines.loop import BatchLoop
from headrace.pipelines.rejects.retries import RetrySource
from headrace.pipelines.rejects.rows import check_left_over
from headrace.pipelines.replica.kernels import finish_compiling
from headrace.pipelines.runner import OpenRun, RunResult
from headrace.pipelines.source.identity import application, check_identity
from headrace.pipelines.source.ledger import Ledger
from headrace.pipelines.source.pieces import check_source
from headrace.pipelines.spark.sessions import SparkSettings, session, spark_settings
from headrace.storage.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace.pipelines.batch.resolutions import RetryOf
    from headrace.pipelines.catalog import BatchRecord
    from headrace.pipelines.config.correlation import CorrelationConfig
    from headrace.pipelines.config.join_plan import JoinPlan
    from headrace.pipelines.config.model import PipelineConfig
    from headrace.pipelines.correlate.engines import Engine
    from headrace.pipelines.source.ledger import RejectedRow

__all__ = ["opened_correlation", "opened_with", "run_with"]


@contextmanager
def opened_correlation(
    config: CorrelationConfig,
    mode: str,
    *,
    spark: SparkSettings | None = None,
    on_batch: Callable[[BatchRecord], None] | None = None,
    hook: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.time,
) -> Iterator[OpenRun]:
    """Check and prepare a correlation, and yield its run; parameters and errors are those of `runner.opened`.

    Raises
    ------
    StateDamagedError
        If a file of the state is damaged or missing.
    """
    assert config.catalog is not None
    for source in config.sources.values():
        check_source(source)
    check_change_folders(config.steps())
    with Catalog(config.catalog, clock) as catalog:
        kernels = compiling(with_steps=config.has_steps)  # while Spark starts
        engine = SparkEngine(session(spark or spark_settings(config)))
        step = hook or no_hook
        finish_compiling(kernels, step)
        step(Step(CHECKED, "checking the tables"))
        with opened_with(engine, catalog, config, mode, on_batch=on_batch, hook=step, clock=clock) as run:
            yield run


def run_with(
    engine: Engine,
    catalog: Catalog,
    config: CorrelationConfig,
    *,
    hook: Callable[[str], None] = no_hook,
    clock: Callable[[], float] = time.time,
) -> RunResult:
    """Run a correlation once with a given engine and an open catalog."""
    with opened_with(engine, catalog, config, "once", hook=hook, clock=clock) as run:
        return run.load(follow=False)


@contextmanager
def opened_with(
    engine: Engine,
    catalog: Catalog,
    config: CorrelationConfig,
    mode: str,
    *,
    on_batch: Callable[[BatchRecord], None] | None = None,
    hook: Callable[[str], None] = no_hook,
    clock: Callable[[], float] = time.time,
) -> Iterator[OpenRun]:
    """Prepare a correlation with a given engine and an open catalog; otherwise as `opened_correlation`."""
    plan, after = config.plan(), config.steps()
    with _with_earlier_batches(config, plan):
        check_sinks(config, plan)
        steps = check_pipeline(after, engine.cores) if config.has_steps else None
    with (
        Leases(catalog, _leases(config, after), clock=clock) as leases,
        SourceLedgers(config, clock) as ledgers,
        ExitStack() as done,
    ):
        facts = DeltaHandle(config.sink.path) if has_table(config.sink.path) else None
        check_identity(after, ledgers.ledger, facts, ran_before=catalog.has_batches(config.name))
        check_left_over(after, ledgers.ledger)
        stream = ledgers.ledger.stream
        state = state_folder(config, stream)
        state.require_own()
        create_sinks(config, plan)
        guards: Any = {"holds": leases.check, "hook": hook, "clock": clock}
        prepared = None if steps is None else steps.create()
        changes = ChangeStreams(after, ChangesEngine(_spark()), **guards) if config.has_steps else None
        notices = () if prepared is None else prepared.notices
        done.enter_context(telling(lambda: [*notices, *(() if changes is None else changes.told())]))
        state.claim()
        number = catalog.start_run(config.name, mode, leases.token)
        follows = None if prepared is None else BatchProtocol(prepared, catalog, number, **guards)
        protocol = CorrelationProtocol(
            engine, config, plan, catalog, number, stream, ledgers=ledgers, steps=follows, **guards
        )

        def before() -> None:
            protocol.clean()
            if changes is not None:
                changes.apply_waiting()

        loop = BatchLoop(
            ledgers,
            protocol,
            lambda files: files,
            retry_of=lambda rows: _retried(after, rows),
            on_batch=on_batch,
            before=before,
            hook=hook,
            holds=leases.check,
        )
        yield OpenRun(after, catalog, number, loop, ledgers, changes, notices, tuple(config.sources))


@contextmanager
def _with_earlier_batches(config: CorrelationConfig, plan: JoinPlan) -> Iterator[None]:
    """Explain a refusal in the block by what earlier batches need, if no change of a table would help.

    The steps may not come or go while a batch is not complete, and the sources and conditions are those of the state.
    """
    try:
        yield
    except HeadraceError as error:
        problem = ""
        with suppress(HeadraceError):
            problem = _problem_of_unfinished(config)
        if problem:
            raise PipelineFileError(problem) from error
        with suppress(StateDamagedError):  # the run that changes it meanwhile, or the next one, reports it
            _require_state(config, plan)
        raise


def _require_state(config: CorrelationConfig, plan: JoinPlan) -> None:
    """Refuse a file with other sources or conditions than the state has."""
    checkpoint = str(config.checkpoint)
    if not Ledger.exists(checkpoint):
        return
    with Ledger(checkpoint) as ledger:
        number, stream = ledger.last_loaded(), ledger.stream
        attempt = None if number is None else ledger.attempt_of(number)
    if number is not None and attempt is not None:
        state_folder(config, stream).read(ManifestRef(number, attempt), plan.definition())


def _problem_of_unfinished(config: CorrelationConfig) -> str:
    """Return why the file cannot complete the pending batch; an empty text if it can, or there is none."""
    checkpoint = str(config.checkpoint)
    if not (Ledger.exists(checkpoint) and has_table(config.sink.path)):
        return ""
    with Ledger(checkpoint) as ledger:
        plan, name = ledger.pending(), application(ledger.stream, "facts")
    notes = [] if plan is None else DeltaHandle(config.sink.path).commit_notes(name, plan.number)
    return steps_problem(plan.number, notes[-1], has_steps=config.has_steps) if plan is not None and notes else ""


def _leases(config: CorrelationConfig, after: PipelineConfig) -> list[str]:
    """Return the names of the leases of a run: those of the pipeline and its sources, and of dimensions that change."""
    checkpoints = [config.checkpoint, *(config.of_source(name).checkpoint for name in config.sources)]
    return [*(f"pipeline:{each}" for each in checkpoints), *leases_of(after, *changing_dimensions(after))]


def _spark() -> Any:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - pyspark is heavy

    return SparkSession.active()


def _retried(after: PipelineConfig, rows: Sequence[RejectedRow]) -> tuple[Any, RetryOf]:
    return RetrySource(_spark(), after)(rows)
