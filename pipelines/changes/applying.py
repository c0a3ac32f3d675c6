"""Application of files of changes to a dimension with history: which files, in which batches, exactly once.

A source of changes has a ledger of its own, in the checkpoint folder of the pipeline. A file that was applied is not
read again unless that is asked for; then its changes are reported as replayed. Files that changed since are read again,
because changes that were applied before add nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headrace.pipelines.catalog import Catalog
from headrace.pipelines.changes.engines import LocalEngine, SparkEngine
from headrace.pipelines.changes.protocol import ApplyProtocol
from headrace.pipelines.changes.sources import change_source, file_names
from headrace.pipelines.changes.targets import ChangeTarget, errors_path, prepare_target
from headrace.pipelines.config.history import history_of
from headrace.pipelines.delta.compaction import compact_table
from headrace.pipelines.delta.support import describe, require_row_changes
from headrace.pipelines.delta.tables import open_table
from headrace.pipelines.errors import PipelineFileError
from headrace.pipelines.history.moved import moved_path
from headrace.pipelines.lease import Leases
from headrace.pipelines.source.discovery import Found, FoundFile, LeftOut, discover, examine, fingerprint
from headrace.pipelines.source.intake import Intake
from headrace.pipelines.source.ledger import Ledger
from headrace.pipelines.spark.sessions import session, spark_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.pipelines.changes.engines import Engine
    from headrace.pipelines.changes.protocol import AppliedBatch
    from headrace.pipelines.config.model import PipelineConfig, SourceConfig
    from headrace.pipelines.delta.compaction import Compacted

__all__ = ["ApplyResult", "ChangeStreams", "apply_files", "check_change_folders", "compact_dimension", "lease_of"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ApplyResult:
    """Result of applying files of changes to a dimension.

    Parameters
    ----------
    dimension, path
        Name of the dimension, and path of its Delta table.
    version
        Version of the dimension afterward.
    created
        Whether the dimension was created.
    files
        Number of files that were applied.
    left_out
        Files and folders that were not applied, with reasons.
    batches
        Results of the batches.
    errors, moved
        Paths of the tables of changes that were not applied, and of moved facts.
    """

    dimension: str
    path: str
    version: int
    created: bool
    files: int
    left_out: tuple[LeftOut, ...]
    batches: tuple[AppliedBatch, ...]
    errors: str
    moved: str

    @property
    def outcomes(self) -> dict[str, int]:
        """Number of changes by outcome."""
        counts = Counter[str]()
        for batch in self.batches:
            counts.update(batch.outcomes)
        return dict(counts)

    def total(self, name: str) -> int:
        """Return the sum of a count over all batches, such as `rows`, `inserted` or `moved_ranges`."""
        return int(sum(getattr(batch, name) for batch in self.batches))

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values for JSON, with totals."""
        names = ("rows", "inserted", "updated", "retired", "moved_ranges", "late")
        return {
            **{name: value for name, value in asdict(self).items() if name not in {"batches", "left_out"}},
            **{name: self.total(name) for name in names},
            "seconds": sum(batch.seconds for batch in self.batches),
            "outcomes": self.outcomes,
            "left_out": [item._asdict() for item in self.left_out],
            "batches": [asdict(batch) for batch in self.batches],
        }


def apply_files(
    config: PipelineConfig,
    name: str,
    source: str | Path,
    *,
    again: bool = False,
    engine: Literal["local", "spark"] = "local",
    hook: Callable[[str], None] = lambda _step: None,
    clock: Callable[[], float] = time.time,
) -> ApplyResult:
    """Apply the changes of files to a dimension with history, exactly once.

    Parameters
    ----------
    config, name
        Configuration of the pipeline, and name of the dimension in it.
    source
        File or folder of changes: CSV, JSON lines, or Parquet.
    again
        Whether to read files that were applied before. Their changes are reported as replayed.
    engine
        Where the changes are applied: in threads of this process, or in Spark's workers on any number of hosts.
    hook
        Function called with the name of each step. An error that it raises ends the run, as a crash would.
    clock
        Function that returns seconds since 1970.

    Raises
    ------
    PipelineFileError, DeclarationError, DeltaTableError
        If the dimension has no history, or its tables or the files cannot be used. Nothing was written.
    SourceFileError
        If a file cannot be read, or changes while it is read.
    LeaseHeldError
        If another run applies changes to the dimension.
    BatchError
        If other writers changed the dimension during every attempt. Run again to continue.
    """
    assert config.catalog is not None
    target = _target(config, name, source)
    with (
        Catalog(config.catalog, clock) as catalog,
        Leases(catalog, [lease_of(config, name)], clock=clock) as leases,
    ):
        created = prepare_target(target)
        runs = SparkEngine(session(spark_settings(config))) if engine == "spark" else LocalEngine(config.replicas)
        protocol = ApplyProtocol(target, runs, holds=leases.check, hook=hook, clock=clock)
        return replace(_applied(target, Path(source), protocol, hook, clock, again=again), created=created)


class ChangeStreams:
    """The folders of changes that the dimensions of a pipeline declare, which a run applies between its batches.

    Parameters
    ----------
    config
        Configuration of the pipeline.
    engine
        Where the changes are applied.
    holds
        Function called before each commit. It raises an error if this run may no longer write.
    hook
        Function called with the name of each step.
    clock
        Function that returns seconds since 1970.

    Attributes
    ----------
    outcomes
        Number of changes by dimension and outcome so far.
    """

    def __init__(
        self,
        config: PipelineConfig,
        engine: Engine,
        *,
        holds: Callable[[], None],
        hook: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._engine = engine
        self._holds = holds
        self._hook = hook
        self._clock = clock
        self._streams: dict[str, tuple[ChangeTarget, ApplyProtocol]] = {}
        self._folders = {name: each.changes for name, each in config.dimensions.items() if each.changes is not None}
        self.outcomes: dict[str, Counter[str]] = {name: Counter() for name in self._folders}

    def apply_waiting(self) -> None:
        """Apply the changes in all files that wait."""
        for name, folder in self._folders.items():
            stream = self._stream(name, folder)
            if stream is not None:
                target, protocol = stream
                found = _applied(target, Path(folder), protocol, self._hook, self._clock, again=False)
                self.outcomes[name].update(found.outcomes)

    def _stream(self, name: str, folder: str) -> tuple[ChangeTarget, ApplyProtocol] | None:
        """Return the target and the protocol of a dimension; None while its folder has no file, and so no format."""
        if name not in self._streams and file_names(Path(folder)):
            target = _target(self._config, name, folder)
            prepare_target(target)
            protocol = ApplyProtocol(target, self._engine, holds=self._holds, hook=self._hook, clock=self._clock)
            self._streams[name] = target, protocol
        return self._streams.get(name)


def check_change_folders(config: PipelineConfig) -> None:
    """Raise `PipelineFileError` if a dimension declares a folder of changes that does not exist."""
    for name, declared in config.dimensions.items():
        if declared.changes is not None and not Path(declared.changes).is_dir():
            raise PipelineFileError(
                f"dimensions.{name}.changes: there is no folder {declared.changes}; create it, or correct the path"
            )


def lease_of(config: PipelineConfig, name: str) -> str:
    """Return the name of the lease that admits one run at a time to apply changes to a dimension."""
    return f"dimension:{config.dimensions[name].path}"


def _target(config: PipelineConfig, name: str, source: str | Path) -> ChangeTarget:
    history = history_of(config, name)
    return ChangeTarget(config, name, history, change_source(config, history, source))


def _applied(
    target: ChangeTarget,
    given: Path,
    protocol: ApplyProtocol,
    hook: Callable[[str], None],
    clock: Callable[[], float],
    *,
    again: bool,
) -> ApplyResult:
    """Apply the files that wait."""
    with Ledger(_checkpoint(target), clock) as ledger:
        loop = _Loop(target.source, ledger, protocol, given, hook)
        loop.run(target.config, again=again)
    return ApplyResult(
        dimension=target.name,
        path=target.path,
        version=open_table(target.path).version(),
        created=False,
        files=loop.files,
        left_out=loop.left_out,
        batches=tuple(loop.batches),
        errors=errors_path(target.path),
        moved=moved_path(target.path),
    )


def compact_dimension(config: PipelineConfig, name: str) -> Compacted:
    """Compact the Delta table of a dimension with history, see `headrace.pipelines.delta.compaction`.

    Raises
    ------
    PipelineFileError, DeltaTableError
        If the dimension has no history or no table, or its table cannot be used.
    TableMovedError
        If other writers changed the table during every attempt. Nothing was committed.
    """
    history_of(config, name)
    path = config.dimensions[name].path
    require_row_changes(describe(open_table(path), path), f"dimension {name!r}")
    return compact_table(path)


class _Loop:
    """Applies the files that wait, batch by batch."""

    def __init__(
        self,
        source: SourceConfig,
        ledger: Ledger,
        protocol: ApplyProtocol,
        given: Path,
        hook: Callable[[str], None],
    ) -> None:
        self._source = source
        self._ledger = ledger
        self._protocol = protocol
        self._hook = hook
        self._only = None if given.is_dir() else given.name
        self.batches: list[AppliedBatch] = []
        self.files = 0
        self.left_out: tuple[LeftOut, ...] = ()

    def run(self, config: PipelineConfig, *, again: bool) -> None:
        """Complete the batch of an earlier run, and apply the files that wait."""
        self._resume()
        intake = Intake(self._source, config.trigger, self._ledger, listing=self._listing, again=again)
        while files := intake.take():
            self._batch(files)
        self.left_out = intake.left_out

    def _listing(self) -> Found:
        """Return the files of the source: one file, or those of a folder."""
        source = self._source
        if self._only is None:
            return discover(source.path, source.files, recursive=source.recursive)
        file = examine(source.path, self._only)
        files = [] if file is None else [file]
        sizes, mtimes = (np.array([getattr(each, key) for each in files], np.int64) for key in ("size", "mtime_ns"))
        return Found([each.name for each in files], sizes, mtimes)

    def _resume(self) -> None:
        """Complete a planned batch if the dimension holds it; otherwise plan again from the files that are there."""
        plan = self._ledger.pending()
        if plan is None:
            return
        record = self._protocol.finish(plan.number, self._ledger.stream)
        if record is None:
            self._ledger.forget(plan.number)
            return
        _LOG.info("batch %d of changes was committed by a run that ended before it could note that", plan.number)
        self._mark(record, list(plan.files))

    def _batch(self, files: list[FoundFile]) -> None:
        number = self._ledger.next_number()
        self._ledger.plan(number, str(uuid.uuid4()), files)
        self._hook("after plan")
        self._mark(self._protocol.run_batch(files, number, self._ledger.stream), files)

    def _mark(self, record: AppliedBatch, files: list[FoundFile]) -> None:
        self._ledger.done(record.batch, {file.name: fingerprint(self._source.path, file) for file in files})
        self._hook("after done")
        self.batches.append(record)
        self.files += len(files)


def _checkpoint(target: ChangeTarget) -> str:
    """Return the folder of the ledger for a folder of changes, which does not depend on where the project is.

    A file that is named alone, and its folder, have one ledger.
    """
    place = os.path.relpath(target.source.path, target.path)
    name = hashlib.sha256(place.encode()).hexdigest()[:16]
    return str(Path(str(target.config.checkpoint)) / "dimensions" / target.name / name)
