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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headrace.pipelines.batch.error_rows import ERROR_SCHEMA
from headrace.pipelines.catalog import Catalog
from headrace.pipelines.changes.engines import LocalEngine, SparkEngine
from headrace.pipelines.changes.protocol import ApplyProtocol, ChangeTarget, errors_path
from headrace.pipelines.config.column_types import type_name
from headrace.pipelines.config.history import history_of
from headrace.pipelines.config.source_format import record_format
from headrace.pipelines.delta.compaction import compact_table
from headrace.pipelines.delta.support import describe, refuse_float_keys, refuse_twins, require_row_changes
from headrace.pipelines.delta.tables import create_table, has_table, open_table
from headrace.pipelines.errors import DeltaTableError, PipelineFileError
from headrace.pipelines.history.layout import delta_schema
from headrace.pipelines.history.moved import ensure_moved_table, moved_path
from headrace.pipelines.history.tables import check_declaration, create_history
from headrace.pipelines.lease import Leases
from headrace.pipelines.source.discovery import Found, FoundFile, LeftOut, discover, examine, fingerprint
from headrace.pipelines.source.intake import Intake
from headrace.pipelines.source.ledger import Ledger
from headrace.pipelines.spark.sessions import session, spark_settings
from headrace.storage.records import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from headrace.etl.history import History
    from headrace.pipelines.changes.protocol import AppliedBatch
    from headrace.pipelines.config.model import PipelineConfig, SourceConfig
    from headrace.pipelines.delta.compaction import Compacted

__all__ = ["ApplyResult", "apply_files", "change_columns", "change_source", "compact_dimension", "prepare_target"]

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
            "seconds": self.total("seconds") if not self.batches else sum(batch.seconds for batch in self.batches),
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
    target = ChangeTarget(
        config, name, history_of(config, name), change_source(config, history_of(config, name), source)
    )
    with (
        Catalog(config.catalog, clock) as catalog,
        Leases(catalog, [f"dimension:{target.path}"], clock=clock) as leases,
    ):
        created = prepare_target(target)
        runs = SparkEngine(session(spark_settings(config))) if engine == "spark" else LocalEngine(config.replicas)
        with Ledger(_checkpoint(target), clock) as ledger:
            protocol = ApplyProtocol(target, runs, holds=leases.check, hook=hook, clock=clock)
            loop = _Loop(target.source, ledger, protocol, Path(source), hook)
            loop.run(config, again=again)
    version = open_table(target.path).version()
    return ApplyResult(
        name,
        target.path,
        version,
        created,
        loop.files,
        loop.left_out,
        tuple(loop.batches),
        errors_path(target.path),
        moved_path(target.path),
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


def change_columns(history: History) -> dict[str, pa.DataType]:
    """Return the columns of changes with their types: key, attributes, and the columns that the history names."""
    import pyarrow as pa  # noqa: PLC0415 - as in the signature

    columns = {history.effective: history.effective_type}
    if history.sequence is not None:
        columns[history.sequence] = history.sequence_type
    if history.operation is not None:
        columns[history.operation] = pa.string()
    dimension = history.dimension
    return {field.name: field.type for field in (*dimension.key_schema, *dimension.attributes)} | columns


def change_source(config: PipelineConfig, history: History, source: str | Path) -> SourceConfig:
    """Return the source configuration for a file or folder of changes.

    The format is that of the file names. Settings of text (delimiter, null spellings, dates, time zone) are those of
    the pipeline's own source.

    Raises
    ------
    PipelineFileError
        If there is no such file or folder, or its names do not say one format.
    """
    place = Path(source).absolute()
    form = _format(place)
    columns = {name: type_name(kind) for name, kind in change_columns(history).items()}
    update: dict[str, Any] = {
        "format": form,
        "path": str(place if place.is_dir() else place.parent),
        "columns": columns,
    }
    update |= {"files": None, "recursive": False, "changed": "reload", "missing_fields": "error"}
    if config.source.format != form:
        update |= {"unknown_fields": None, "nulls": [] if form != "csv" else config.source.nulls}
    changed = config.source.model_copy(update=update)
    record_format(changed)
    return changed


def _format(place: Path) -> str:
    if not place.exists():
        raise PipelineFileError(f"there is no file or folder {place}; correct the path")
    names = (
        [file.name for file in place.iterdir() if not file.name.startswith((".", "_"))]
        if place.is_dir()
        else [place.name]
    )
    found = {kind_of(name) for name in names}
    if len(found) == 1 and (form := found.pop()) is not None:
        return form
    raise PipelineFileError(
        f"{place}: the names of its files do not say one format; name them .csv, .json or .parquet"
        if names
        else f"the folder {place} has no files"
    )


def prepare_target(target: ChangeTarget) -> bool:
    """Check the tables, and create those that are missing. Return whether the dimension was created."""
    label, history = f"dimension {target.name!r}", target.history
    refuse_twins(delta_schema(history).names, label)
    refuse_float_keys(history.dimension.key_schema, label)
    created = not has_table(target.path)
    if created:
        create_history(target.path, history)
    else:
        _check_table(target.path, history, label)
    errors = errors_path(target.path)
    if not has_table(errors):
        create_table(errors, ERROR_SCHEMA)
    ensure_moved_table(target.path, history)
    return created


def _check_table(path: str, history: History, label: str) -> None:
    """Raise an error unless the table has exactly the columns of the declaration, and its rows can be changed."""
    table = describe(open_table(path), path)
    require_row_changes(table, label)
    check_declaration(table.properties, history, label, path)
    wanted = {field.name: field.type for field in delta_schema(history)}
    there = {field.name: field.type for field in table.schema}
    missing = [name for name in wanted if name not in there]
    if missing:
        raise DeltaTableError(
            f"{label}: the Delta table {path} has no column {missing[0]!r}; it has {', '.join(there)}. A dimension "
            "that was made with another declaration of its history has to be made again from all changes"
        )
    more = [name for name in there if name not in wanted]
    if more:
        raise DeltaTableError(
            f"{label}: the Delta table {path} has the column {more[0]!r}, which is not declared, so changed rows would "
            f"lose its values; declare it in dimensions.{history.dimension.name}.columns, or drop it"
        )
    for name, kind in wanted.items():
        if not _same(there[name], kind):
            raise DeltaTableError(
                f"{label}: the Delta table {path} has column {name!r} as {there[name]}, but the declaration says {kind}"
            )


def _same(there: pa.DataType, declared: pa.DataType) -> bool:
    """Return whether types are equal, apart from names of list items and nullability."""
    import pyarrow as pa  # noqa: PLC0415 - as in the signature

    if pa.types.is_list(declared):
        parts = [
            (there.value_type.field(i), declared.value_type.field(i)) for i in range(declared.value_type.num_fields)
        ]
        return there.value_type.num_fields == len(parts) and all(
            one.name == other.name and _same(one.type, other.type) for one, other in parts
        )
    return there == declared


def _checkpoint(target: ChangeTarget) -> str:
    """Return the folder of the ledger for a folder of changes, which does not depend on where the project is.

    A file that is named alone, and its folder, have one ledger.
    """
    place = os.path.relpath(target.source.path, target.path)
    name = hashlib.sha256(place.encode()).hexdigest()[:16]
    return str(Path(str(target.config.checkpoint)) / "dimensions" / target.name / name)
