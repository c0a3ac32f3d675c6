"""Restates facts: gives facts that point to another version since the last changes of a dimension their new keys.

This module handles what surrounds the corrections: Spark, the lease of the pipeline, the order of roles and commits.
`headrace.pipelines.restate` finds and computes them.
"""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from headrace.etl.history import AsOfLookup
from headrace.etl.history.as_of import CURRENT
from headrace.pipelines.batch.error_rows import Origin
from headrace.pipelines.batch.preparation import check_pipeline
from headrace.pipelines.batch.read_step import record_format
from headrace.pipelines.batch.stages import StageRun, Target
from headrace.pipelines.catalog import Catalog
from headrace.pipelines.config.merge import mixed_lookup
from headrace.pipelines.config.model import PipelineConfig, load_pipeline
from headrace.pipelines.delta.commits import Commit
from headrace.pipelines.delta.tables import DeltaHandle, has_table
from headrace.pipelines.errors import PipelineFileError, TableMovedError, UnknownDimensionError
from headrace.pipelines.history.moved import moved_path, settle_moved
from headrace.pipelines.hooks import CHECKED, Step, no_hook
from headrace.pipelines.lease import Leases
from headrace.pipelines.restate.candidates import candidates, moved_facts
from headrace.pipelines.restate.corrections import Batch, batches_of, corrections, differing, merge, of_batch
from headrace.pipelines.restate.progress import Span, finish, span_of
from headrace.pipelines.restate.rewriting import FactFiles
from headrace.pipelines.spark.failures import explained
from headrace.pipelines.spark.frame import STATE, State
from headrace.pipelines.spark.sessions import SparkSettings, session, spark_settings
from headrace.storage.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from headrace.pipelines.batch.stages import Prepared

__all__ = ["MOST_FACTS", "RestatedRole", "restate"]

_LOG = logging.getLogger(__name__)
MOST_FACTS: Final = 5_000_000


@dataclass(frozen=True)
class RestatedRole:
    """Result of a restatement for one role.

    Parameters
    ----------
    role, dimension
        Role, and name of its dimension.
    above, up_to
        Versions of the dimension's Delta table: the changes of commits above the first, up to the second.
    ranges
        Number of moved ranges and retired versions in these commits.
    facts
        Number of facts in the ranges.
    restated
        Number of facts whose key or carried columns were corrected, or would be in a dry run.
    kept
        Number of facts that stay as they are, although the policies of the lookup would reject them now.
    batches
        Number of commits to the fact table, or those that would be made.
    dry_run
        Whether the facts were only counted.
    """

    role: str
    dimension: str
    above: int
    up_to: int
    ranges: int
    facts: int
    restated: int
    kept: int
    batches: int
    dry_run: bool


def restate(
    pipeline: str | Path | PipelineConfig,
    dimension: str | None = None,
    *,
    dry_run: bool = False,
    most_facts: int = MOST_FACTS,
    spark: SparkSettings | None = None,
    hook: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.time,
) -> list[RestatedRole]:
    """Correct the facts that point to another version since the changes that were applied last.

    Parameters
    ----------
    pipeline
        Path of the pipeline file, or its configuration.
    dimension
        Name of a dimension; None for all dimensions with history.
    dry_run
        Whether to count the facts only.
    most_facts
        Most facts in one commit; a day with more facts is one commit.
    spark
        Spark settings. The default is the settings of the pipeline file.
    hook
        Function called with the name of each step. An error that it raises ends the restatement, as a crash would.
    clock
        Function that returns seconds since 1970.

    Returns
    -------
    list of RestatedRole
        One result for each role of the dimensions, in the order of the pipeline file.

    Raises
    ------
    PipelineFileError, DeltaTableError
        If the pipeline, or the dimension, cannot be used. Nothing was written.
    LeaseHeldError
        If a run of the pipeline is active, whose facts could be looked up in an older version.
    BatchError
        If Spark failed, or other writers changed the facts during each attempt. Restate again to continue.
    """
    config = pipeline if isinstance(pipeline, PipelineConfig) else load_pipeline(pipeline)
    names = _dimensions(config, dimension)
    _refuse_mixed(config, names)
    assert config.catalog is not None
    with Catalog(config.catalog, clock) as catalog, ExitStack() as stack:
        started = session(spark or spark_settings(config))
        step = hook or no_hook
        step(Step(CHECKED, "looking for facts in moved ranges"))
        prepared = check_pipeline(config, started.sparkContext.defaultParallelism).prepared
        if not dry_run:
            stack.enter_context(Leases(catalog, [f"pipeline:{config.checkpoint}"], clock=clock))
        if not has_table(config.sink.path):
            return []
        one = _Restatement(prepared, started, dry_run=dry_run, most_facts=most_facts, hook=step)
        return [one.of(role) for role, look in prepared.lookups.items() if look.dimension.name in names]


def _dimensions(config: PipelineConfig, name: str | None) -> set[str]:
    dated = {each for each, declared in config.dimensions.items() if declared.history is not None}
    if name is not None and name not in dated:
        known = ", ".join(sorted(dated)) or "none"
        near = nearest(name, sorted(dated))
        raise UnknownDimensionError(
            f"pipeline {config.name!r} has no dimension {name!r}{near} with history; it has {known}"
        )
    return dated if name is None else {name}


def _refuse_mixed(config: PipelineConfig, names: set[str]) -> None:
    """Raise an error if merged facts do not say what was looked up."""
    for at, lookup in enumerate(config.lookups):
        mixed = mixed_lookup(config, lookup) if lookup.dimension in names else None
        if mixed is not None:
            raise PipelineFileError(
                f"lookups.{at}: {mixed} (sink.keep or sink.update), so a restatement of {lookup.role!r} cannot know "
                "what was looked up; keep or update all columns of the lookup alike, or name the other dimensions to "
                "restate"
            )


class _Restatement:
    """The facts of a pipeline, and the options of a restatement."""

    def __init__(
        self,
        prepared: Prepared,
        spark: SparkSession,
        *,
        dry_run: bool,
        most_facts: int,
        hook: Callable[[str], None],
    ) -> None:
        self._prepared = prepared
        self._spark = spark
        self._dry_run = dry_run
        self._most_facts = most_facts
        self._hook = hook
        self._facts = DeltaHandle(prepared.config.sink.path)
        self._run = str(uuid.uuid4())

    def of(self, role: str) -> RestatedRole:
        """Restate the facts of a role."""
        lookup, path = self._prepared.lookups[role], self._prepared.path(role)
        assert isinstance(lookup, AsOfLookup)
        dimension = DeltaHandle(path)
        span = span_of(role, dimension, self._facts)
        settle_moved(path)
        ranges, facts, restated, kept, batches = 0, 0, 0, 0, 0
        if span.above < span.up_to and has_table(moved_path(path)):
            with explained(f"restating the facts of {role!r}", "restate again"):
                moved = moved_facts(self._spark, path, span).persist()
                try:
                    ranges = moved.count()
                    if ranges:
                        files = FactFiles(self._facts, lookup)
                        parts = [self._corrected(lookup, dimension, span, moved, files)]
                        if lookup.event_time is not None and lookup.null_time == CURRENT:
                            # Facts without event time have the current version, as in a lookup without `event_time`.
                            current = replace(lookup, event_time=None)
                            parts.append(self._corrected(current, dimension, span, moved, files, lookup.event_time))
                        facts, restated, kept, batches = map(sum, zip(*parts, strict=True))
                finally:
                    moved.unpersist()
        if ranges and not self._dry_run:
            finish(self._spark, self._facts, span, restated)
        dry = self._dry_run
        return RestatedRole(
            role, lookup.dimension.name, span.above, span.up_to, ranges, facts, restated, kept, batches, dry
        )

    def _corrected(
        self,
        lookup: AsOfLookup,
        dimension: DeltaHandle,
        span: Span,
        moved: DataFrame,
        files: FactFiles,
        undated: str | None = None,
    ) -> tuple[int, int, int, int]:
        """Correct the facts of moved ranges; return the numbers of facts, corrections, kept facts, and batches."""
        shards = self._prepared.shards.get(lookup.role, 1)
        base = dimension.greatest_key(lookup.dimension.surrogate_key)
        target = Target(span.up_to, base, shards, span.table_id)
        rows = files.find(self._spark, lookup, moved)
        if rows is None:
            facts = files.read(self._spark, span.facts)
            rows = candidates(lookup, facts, moved, undated, placed=files.usable)
        found = corrections(rows, self._prepared, lookup.role, target, self._stage_run()).persist()
        try:
            counts = {row[STATE]: row["count"] for row in found.groupBy(STATE).count().collect()}
            changed = differing(found, lookup)
            batches = batches_of(changed, self._most_facts)
            for number, batch in enumerate(batches if not self._dry_run else ()):
                self._hook(Step(f"before batch {number}", f"correcting facts, commit {number + 1} of {len(batches)}"))
                self._write(lookup, span, changed, batch, files, undated)
                self._hook(f"after batch {number}")
        finally:
            found.unpersist()
        facts, kept = (counts.get(int(state), 0) for state in (State.OPEN, State.REJECTED))
        return facts + kept, sum(batch.facts for batch in batches), kept, len(batches)

    def _write(
        self, lookup: AsOfLookup, span: Span, changed: DataFrame, batch: Batch, files: FactFiles, undated: str | None
    ) -> None:
        """Commit the corrections of a batch: by files while no other writer changes those files, else by `MERGE`."""
        note = {"restate": lookup.role, "dimension_version": span.up_to, "facts": batch.facts}
        if files.usable:
            try:
                files.correct(
                    of_batch(changed, batch), lookup, batch.facts, Commit(f"{span.application}:facts", 0, note)
                )
            except TableMovedError as moved:
                _LOG.info("the other facts of %r are restated by MERGE: %s", lookup.role, moved)
            else:
                return
        merge(self._spark, self._facts.path, lookup, changed, batch, note, undated)

    def _stage_run(self) -> StageRun:
        config = self._prepared.config
        began = datetime.fromtimestamp(0, UTC)  # the stage settles no rows, so no row names it
        origin = Origin(config.name, "", 0, began, config.source.path, record_format(config.source))
        return StageRun(self._run, self._prepared.shards, {}, origin)
