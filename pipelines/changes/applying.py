"""Application of files of changes to a dimension with history: which files, in which batches, exactly once.

A source of changes has a ledger of its own, in the checkpoint folder of the pipeline. A file that was applied is not
read again unless that is asked for; then its changes are reported as replayed. A file that changed since is always read
again: changes in it that were applied before add nothing, and what it no longer has stays applied.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headrace.pipelines.catalog import Catalog
from headrace.pipelines.changes.delta_sources import DeltaSource, staged
from headrace.pipelines.changes.engines import LocalEngine, SparkEngine
from headrace.pipelines.changes.parents import parent_tables
from headrace.pipelines.changes.protocol import ApplyProtocol
from headrace.pipelines.changes.snapshots import Snapshot
from headrace.pipelines.changes.sources import change_columns, change_source, file_names, is_table, member_columns
from headrace.pipelines.changes.targets import ChangeTarget, errors_path, prepare_target
from headrace.pipelines.config.history import children_in, history_of, parents_first, references_of
from headrace.pipelines.config.merge import mixed_lookup
from headrace.pipelines.delta.compaction import compact_table
from headrace.pipelines.delta.support import describe, require_row_changes
from headrace.pipelines.delta.tables import has_table, open_table
from headrace.pipelines.errors import PipelineFileError, QualityError
from headrace.pipelines.history.moved import moved_path
from headrace.pipelines.lease import Leases
from headrace.pipelines.source.discovery import Found, FoundFile, LeftOut, discover, examine, fingerprint
from headrace.pipelines.source.intake import Intake
from headrace.pipelines.source.ledger import Ledger
from headrace.pipelines.spark.sessions import session, spark_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from headrace.pipelines.changes.engines import Engine
    from headrace.pipelines.changes.protocol import AppliedBatch
    from headrace.pipelines.config.model import PipelineConfig, SourceConfig
    from headrace.pipelines.delta.compaction import Compacted

__all__ = [
    "ApplyResult",
    "ChangeStreams",
    "SnapshotOptions",
    "apply_files",
    "changing_dimensions",
    "check_change_folders",
    "compact_dimension",
    "leases_of",
    "restate_advice",
    "restates",
    "told_changes",
]

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
    followed
        Number of changes by outcome that followed in each dimension whose members refer to this one.
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
    followed: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def outcomes(self) -> dict[str, int]:
        """Number of changes by outcome."""
        return _outcomes(self.batches)

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
    snapshot: SnapshotOptions | None = None,
    engine: Literal["local", "spark"] = "local",
    hook: Callable[[str], None] = lambda _step: None,
    clock: Callable[[], float] = time.time,
) -> ApplyResult:
    """Apply the changes of files, or of a Delta table, to a dimension with history, exactly once.

    Parameters
    ----------
    config, name
        Configuration of the pipeline, and name of the dimension in it.
    source
        File or folder of changes: CSV, JSON lines, or Parquet. Or a Delta table, whose change feed has the changes.
    again
        Whether to read files that were applied before. Their changes are reported as replayed.
    snapshot
        Options of a snapshot, if the source has all members as of a time instead of changes.
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
    QualityError
        If a snapshot may lack members that would be deleted. Nothing was committed.
    BatchError
        If other writers changed the dimension during every attempt. Run again to continue.
    """
    assert config.catalog is not None
    target = _target(config, name, source, snapshot)
    with (
        Catalog(config.catalog, clock) as catalog,
        Leases(catalog, leases_of(config, name), clock=clock) as leases,
    ):
        created = prepare_target(target)
        runs = SparkEngine(session(spark_settings(config))) if engine == "spark" else LocalEngine(config.replicas)
        protocol = ApplyProtocol(target, runs, holds=leases.check, hook=hook, clock=clock)
        if is_table(source):
            found = _applied_table(target, str(Path(source).absolute()), protocol)
        elif snapshot is not None:
            found = _applied_snapshot(target, Path(source), protocol)
        else:
            found = _applied(target, Path(source), protocol, hook, clock, again=again)
        followed = _followed(protocol, target)
        found = replace(found, created=created, batches=(*found.batches, *followed))
        return replace(found, version=open_table(target.path).version(), followed=_children(target, runs, leases, hook))


def _followed(protocol: ApplyProtocol, target: ChangeTarget) -> Iterator[AppliedBatch]:
    """Let the members of a dimension follow its parents, one after another."""
    for position in range(len(target.parents)):
        record = protocol.follow(position)
        if record is not None:
            yield record


def _children(
    target: ChangeTarget, engine: Engine, leases: Leases, hook: Callable[[str], None]
) -> dict[str, dict[str, int]]:
    """Let the members of other dimensions follow a dimension. Return the number of their changes by outcome."""
    outcomes = {}
    for name in children_in(target.config, target.name):
        if has_table(target.config.dimensions[name].path):
            child = _following(target.config, name)
            prepare_target(child)
            records = _followed(ApplyProtocol(child, engine, holds=leases.check, hook=hook), child)
            outcomes[name] = _outcomes(records)
    return outcomes


def _following(config: PipelineConfig, name: str) -> ChangeTarget:
    """Return a dimension that receives what follows from its parents, and no files."""
    history = history_of(config, name)
    return ChangeTarget(config, name, history, config.source, parents=parent_tables(config, name))


def _outcomes(batches: Iterable[AppliedBatch]) -> dict[str, int]:
    counts = Counter[str]()
    for batch in batches:
        counts.update(batch.outcomes)
    return dict(counts)


@dataclass(frozen=True)
class SnapshotOptions:
    """Options of a snapshot, as texts.

    Parameters
    ----------
    at
        Time of the snapshot.
    sequence
        Sequence of its changes, if the history has a sequence.
    missing
        What happens to members that the snapshot lacks: ``keep`` or ``delete``.
    """

    at: str
    sequence: str | None = None
    missing: Literal["delete", "keep"] = "keep"


class ChangeStreams:
    """The folders of changes that the dimensions of a pipeline declare, which a run applies between its batches.

    Parameters
    ----------
    config
        Configuration of the pipeline.
    engine
        Threads of this process or Spark, which run the tasks.
    holds
        Function called before each commit. It raises an error if this run may no longer write.
    hook
        Function called with the name of each step.
    clock
        Function that returns seconds since 1970.

    Attributes
    ----------
    outcomes
        Number of changes by dimension and outcome so far, also if a later batch failed.
    moved
        Number of moved ranges by dimension so far, for those whose facts `headrace dimension restate` corrects.
    left_out
        Entries that the last listings of the folders skipped, by folder.
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
        self._followers: dict[str, tuple[ChangeTarget, ApplyProtocol]] = {}
        self._names = changing_dimensions(config)
        self.outcomes: dict[str, Counter[str]] = {name: Counter() for name in self._names}
        self.moved: Counter[str] = Counter()
        self.left_out: dict[str, tuple[LeftOut, ...]] = {}

    def apply_waiting(self) -> None:
        """Apply the changes in all files that wait, those of parents first, and what follows from parents."""
        for name in self._names:
            folder = self._config.dimensions[name].changes
            stream = None if folder is None else self._stream(name, folder)
            if folder is not None and stream is None:
                self.left_out[folder] = discover(folder, place=None).left_out
            elif folder is not None and stream is not None:
                target, protocol = stream
                noted = partial(self._note, name)
                found = _applied(target, Path(folder), protocol, self._hook, self._clock, again=False, noted=noted)
                self.left_out[folder] = found.left_out
            follower = self._follower(name)
            if follower is not None:
                for record in _followed(follower[1], follower[0]):
                    self._note(name, record)

    def told(self) -> list[str]:
        """Return what was applied, a text for each dimension with changes; PIPELINE stands for the pipeline file."""
        return told_changes(self.outcomes, self.moved)

    def _note(self, name: str, record: AppliedBatch) -> None:
        self.outcomes[name].update(record.outcomes)
        if record.moved_ranges and restates(self._config, name):
            self.moved[name] += record.moved_ranges

    def _stream(self, name: str, folder: str) -> tuple[ChangeTarget, ApplyProtocol] | None:
        """Return the target and the protocol of a dimension; None while its folder has no file, and so no format."""
        if name not in self._streams and file_names(Path(folder)):
            self._streams[name] = self._prepared(_target(self._config, name, folder))
        return self._streams.get(name)

    def _follower(self, name: str) -> tuple[ChangeTarget, ApplyProtocol] | None:
        """Return the target and the protocol of a dimension that follows its parents; None before it has a table."""
        has_parents = bool(references_of(self._config, name))
        if name not in self._followers and has_parents and has_table(self._config.dimensions[name].path):
            self._followers[name] = self._prepared(_following(self._config, name))
        return self._followers.get(name)

    def _prepared(self, target: ChangeTarget) -> tuple[ChangeTarget, ApplyProtocol]:
        prepare_target(target)
        options: dict[str, Any] = {"holds": self._holds, "hook": self._hook, "clock": self._clock}
        return target, ApplyProtocol(target, self._engine, **options)


def told_changes(outcomes: Mapping[str, Mapping[str, int]], moved: Mapping[str, int]) -> list[str]:
    """Return a text for each dimension with changes; PIPELINE stands for the pipeline file.

    Parameters
    ----------
    outcomes, moved
        As the attributes of `ChangeStreams`.

    Examples
    --------
    >>> told_changes({"item": {"rejected": 1, "added": 2}, "shop": {}}, {})
    ['changes of dimension item: 2 added, 1 rejected']
    """
    texts = []
    for name, counts in outcomes.items():
        ranges = moved.get(name, 0)
        remedy = f"; {restate_advice(name, ranges)}" if ranges else ""
        if any(counts.values()):
            read = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(counts.items()))
            texts.append(f"changes of dimension {name}: {read}{remedy}")
    return texts


def restates(config: PipelineConfig, name: str) -> bool:
    """Return whether a pipeline has facts of a dimension that a restatement corrects."""
    lookups = [each for each in config.lookups if each.dimension == name]
    restatable = config.source.is_folder and bool(lookups) and not any(mixed_lookup(config, each) for each in lookups)
    return restatable and has_table(config.sink.path)


def restate_advice(name: str, ranges: int) -> str:
    """Return the advice to restate the facts in moved ranges; PIPELINE stands for the pipeline file."""
    which = "1 moved range" if ranges == 1 else f"{ranges:,} moved ranges"
    return f"`headrace dimension restate {name} --pipeline PIPELINE` corrects the facts in {which}"


def check_change_folders(config: PipelineConfig) -> None:
    """Raise `PipelineFileError` if a dimension declares a folder of changes that does not exist."""
    for name, declared in config.dimensions.items():
        if declared.changes is not None and not Path(declared.changes).is_dir():
            raise PipelineFileError(
                f"dimensions.{name}.changes: there is no folder {declared.changes}; create it, or correct the path"
            )


def leases_of(config: PipelineConfig, *names: str) -> list[str]:
    """Return the leases that admit one run at a time to apply changes to dimensions, and to those that follow them."""
    wanted = {each for name in names for each in (name, *children_in(config, name))}
    return sorted(f"dimension:{config.dimensions[name].path}" for name in wanted)


def changing_dimensions(config: PipelineConfig) -> list[str]:
    """Return the dimensions that a run applies changes to, each after its parents: from files, or from parents."""
    declared = config.dimensions
    return [name for name in parents_first(config) if declared[name].changes is not None or references_of(config, name)]


def _target(
    config: PipelineConfig, name: str, source: str | Path, options: SnapshotOptions | None = None
) -> ChangeTarget:
    history = history_of(config, name)
    snapshot = None if options is None else Snapshot.of(history, options.at, options.sequence, options.missing)
    parents = parent_tables(config, name)
    repeated = frozenset(attribute for each in parents for attribute in each.reference.carry)
    columns_of = change_columns if snapshot is None else member_columns
    declared = change_source(config, columns_of(history, repeated=repeated), source)
    return ChangeTarget(config, name, history, declared, snapshot, parents)


def _applied(
    target: ChangeTarget,
    given: Path,
    protocol: ApplyProtocol,
    hook: Callable[[str], None],
    clock: Callable[[], float],
    *,
    again: bool,
    noted: Callable[[AppliedBatch], None] = lambda _record: None,
) -> ApplyResult:
    """Apply the files that wait; call `noted` with each batch as soon as it is committed."""
    with Ledger(_checkpoint(target), clock) as ledger:
        loop = _Loop(target.source, ledger, protocol, given, hook, noted)
        loop.run(target.config, again=again)
    return _result(target, loop.batches, loop.files, loop.left_out)


def _applied_snapshot(target: ChangeTarget, given: Path, protocol: ApplyProtocol) -> ApplyResult:
    """Apply all files of a snapshot in one batch. What it contains identifies it, so it is applied once."""
    found = listed(target.source, given)
    files = sorted(map(found.file, range(len(found.names))))
    if target.snapshot is not None and target.snapshot.missing == "delete":
        _require_whole(files, found.left_out)
    prints = [f"{file.name}:{fingerprint(target.source.path, file)}" for file in files]
    stream = _digest("snapshot", os.path.relpath(target.source.path, target.path), repr(target.snapshot), *prints)
    record = protocol.finish(0, stream) or protocol.run_batch(files, 0, stream)
    return _result(target, [record], len(files), found.left_out)


def _require_whole(files: Sequence[FoundFile], left_out: Sequence[LeftOut]) -> None:
    """Raise an error if a snapshot may lack members, because they would be deleted as missing."""
    gaps = [f"{file.name!r} is empty" for file in files if file.size == 0]
    gaps += [f"{item.name!r} is not read: {item.reason}" for item in left_out]
    if gaps:
        raise QualityError(
            f"the snapshot may not be whole: {gaps[0]}, and members that it lacks would be deleted; nothing was "
            "committed. Deliver it again, or leave missing members with `--missing keep`. A snapshot without members "
            "has a heading, or is a Parquet file without rows"
        )


def _applied_table(target: ChangeTarget, path: str, protocol: ApplyProtocol) -> ApplyResult:
    """Apply what changed in a Delta table since the version that was applied last, or all of its rows as a snapshot."""
    source = DeltaSource(path)
    columns = list(target.source.columns)
    if target.snapshot is not None:
        number, batches = 0, source.rows(columns)
        stream = _digest("snapshot", source.table_id, str(source.version), repr(target.snapshot))
    else:
        number, stream = source.version, source.table_id
        applied = protocol.last_batch(stream)
        if applied is not None and applied >= number:
            protocol.finish(applied, stream)
            return _result(target, [], 0, ())
        if applied is not None:
            protocol.finish(applied, stream)
        batches = source.changes(target.history, columns, 0 if applied is None else applied + 1)
    record = protocol.finish(number, stream)
    if record is None:
        name = f"{Path(path).name}-{source.version}"
        with staged(target.path, name, source.schema(columns), batches) as file:
            own = target.source.model_copy(update={"path": str(file.parent)})
            staged_file = examine(str(file.parent), file.name)
            assert staged_file is not None
            record = protocol.run_batch([staged_file], number, stream, own, marked=True)
    return _result(target, [record], 1, ())


def _result(
    target: ChangeTarget, batches: Sequence[AppliedBatch], files: int, left_out: tuple[LeftOut, ...]
) -> ApplyResult:
    return ApplyResult(
        dimension=target.name,
        path=target.path,
        version=open_table(target.path).version(),
        created=False,
        files=files,
        left_out=left_out,
        batches=tuple(batches),
        errors=errors_path(target.path),
        moved=moved_path(target.path),
    )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def listed(source: SourceConfig, given: Path) -> Found:
    """Return the files of a source: one file, or those of a folder."""
    if given.is_dir():
        return discover(source.path, source.files, recursive=source.recursive, place=None)
    file = examine(source.path, given.name)
    files = [] if file is None else [file]
    sizes, mtimes = (np.array([getattr(each, key) for each in files], np.int64) for key in ("size", "mtime_ns"))
    return Found([each.name for each in files], sizes, mtimes)


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
        noted: Callable[[AppliedBatch], None],
    ) -> None:
        self._noted = noted
        self._source = source
        self._ledger = ledger
        self._protocol = protocol
        self._hook = hook
        self._given = given
        self.batches: list[AppliedBatch] = []
        self.files = 0
        self.left_out: tuple[LeftOut, ...] = ()

    def run(self, config: PipelineConfig, *, again: bool) -> None:
        """Complete the batch of an earlier run, and apply the files that wait."""
        self._resume()
        listing = partial(listed, self._source, self._given)
        intake = Intake(self._source, config.trigger, self._ledger, listing=listing, again=again)
        while files := intake.take():
            self._batch(files)
        self.left_out = intake.left_out

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
        self._noted(record)
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
