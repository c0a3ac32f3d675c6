"""Command-line operations on the files of a source: list them by state, skip some, adopt all."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.pipelines.catalog import Catalog
from headrace.pipelines.delta.tables import DeltaHandle, has_table, stream_registry
from headrace.pipelines.errors import LedgerError, SourceFileError
from headrace.pipelines.lease import Leases
from headrace.pipelines.source.discovery import FoundFile, LeftOut, discover, examine, fingerprint
from headrace.pipelines.source.ledger import LOADED, PLANNED, Ledger
from headrace.pipelines.source.pieces import check_source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.pipelines.config.model import PipelineConfig, SourceConfig

__all__ = ["Adopted", "SourceFile", "SourceListing", "adopt_files", "list_files", "skip_files"]

CHANGED: Final = "changed"
EMPTY: Final = "empty"
GONE: Final = "gone"
NEW: Final = "new"


@dataclass(frozen=True)
class SourceFile:
    """A file of a source.

    Parameters
    ----------
    name
        Path of the file, relative to the source folder.
    state
        State of the file: ``loaded``, ``skipped``, ``planned`` (for a batch that is not loaded yet), ``new``, ``empty``
        (loaded once it has content), ``changed`` (after it was loaded) or ``gone`` (planned, but removed).
    batch
        Number of the batch that loaded the file or is planned to load it, or None.
    size, modified
        Size in bytes, and modification time in seconds since 1970; the last known values for a removed file.
    """

    name: str
    state: str
    batch: int | None
    size: int
    modified: float


@dataclass(frozen=True)
class SourceListing:
    """The files of a source by state, most recently modified first, and the skipped entries of the listing."""

    files: tuple[SourceFile, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Number of files by state, for states that at least one file has."""
        return dict(sorted(Counter(file.state for file in self.files).items()))


@dataclass(frozen=True)
class Adopted:
    """Result of an adoption: the new stream, the replaced stream, the number of files, and the files never loaded."""

    stream: str
    replaces: str | None
    files: int
    never_loaded: tuple[str, ...]


def list_files(config: PipelineConfig) -> SourceListing:
    """Return the files of a source by state; files removed after they were loaded are not included.

    Raises
    ------
    PipelineFileError, SourceFileError
        If the source cannot be listed.
    LedgerError
        If the ledger cannot be read.
    """
    check_source(config.source)
    source = config.source
    found = discover(source.path, source.files, recursive=source.recursive, place=source.place)
    states: dict[str, tuple[str, int | None]] = {
        name: (EMPTY if size == 0 else NEW, None) for name, size in zip(found.names, found.sizes, strict=True)
    }
    gone: list[SourceFile] = []
    if Ledger.exists(str(config.checkpoint)):
        with Ledger(str(config.checkpoint)) as ledger:
            gone = _add_states(ledger, config, states)
            compared = ledger.compare(found, lambda file: fingerprint(source.path, file))
        states |= {change.file.name: (CHANGED, change.loaded.batch) for change in compared.changed}
        for index in compared.new:
            name = found.names[index]
            states[name] = states[name] if states[name][0] == PLANNED else (NEW, None)
    files = [
        SourceFile(file.name, *states[file.name], file.size, file.mtime_ns / 1e9)
        for file in map(found.file, range(len(found.names)))
    ]
    ordered = sorted([*files, *gone], key=lambda file: (-file.modified, file.name))
    return SourceListing(tuple(ordered), found.left_out)


def _add_states(ledger: Ledger, config: PipelineConfig, states: dict[str, tuple[str, int | None]]) -> list[SourceFile]:
    """Set the states that the ledger holds, and return the planned files that were removed."""
    for known in ledger.files():
        if known.name in states:
            states[known.name] = (known.state, known.batch)
    plan = ledger.pending()
    if plan is None:
        return []
    planned = [file for file in plan.files if file.name not in plan.skipped]
    states |= {file.name: (PLANNED, plan.number) for file in planned}
    return [
        SourceFile(file.name, GONE, plan.number, file.size, file.mtime_ns / 1e9)
        for file in planned
        if examine(config.source.path, file.name) is None
    ]


def skip_files(
    config: PipelineConfig, names: Sequence[str], clock: Callable[[], float] = time.time
) -> list[SourceFile]:
    """Record that files are not to be loaded in their current state.

    Parameters
    ----------
    config
        Configuration of the pipeline.
    names
        Paths of the files, relative to the source folder or absolute.
    clock
        Function that returns seconds since 1970.

    Returns
    -------
    list of SourceFile
        Files with their new states.

    Raises
    ------
    SourceFileError
        If a file does not exist and was not planned, or was already loaded in its current state. Nothing is recorded
        then.
    LeaseHeldError
        If a run of the pipeline is active.
    """
    check_source(config.source)
    folder = config.source.path
    relative = [_relative(name, folder) for name in names]
    with (
        Catalog(str(config.catalog), clock) as catalog,
        Leases(catalog, [f"pipeline:{config.checkpoint}"], clock=clock),
        Ledger(str(config.checkpoint), clock) as ledger,
    ):
        files = [_to_skip(name, ledger, config.source) for name in relative]
        for file in files:
            ledger.skip(file, fingerprint(folder, file))
        states = [ledger.file(file.name) for file in files]
    return [
        SourceFile(file.name, file.state, file.batch, file.size, file.mtime_ns / 1e9)
        for file in states
        if file is not None
    ]


def _relative(name: str, folder: str) -> str:
    """Return the path of a file relative to the source folder.

    Raises
    ------
    SourceFileError
        If the path is outside the source folder.
    """
    path = os.path.relpath(name, folder) if os.path.isabs(name) else os.path.normpath(name)  # noqa: PTH117 - literal
    if path.partition("/")[0] == "..":
        raise SourceFileError(f"{name!r} is not in the source folder {folder}; name a file relative to that folder")
    return path


def _to_skip(name: str, ledger: Ledger, source: SourceConfig) -> FoundFile:
    """Return the current state of a file, or its planned state if it was removed."""
    folder = source.path
    plan = ledger.pending()
    now = examine(folder, name)
    if now is None:
        planned = next((file for file in (plan.files if plan is not None else ()) if file.name == name), None)
        if planned is None:
            raise SourceFileError(
                f"there is no file {name!r} in {folder}, and none is planned; name it relative to that folder, as "
                f"`headrace source list{'' if source.label is None else f' --source {source.label}'}` does"
            )
        return planned
    known = ledger.file(name)
    if known is not None and known.state == LOADED and (known.size, known.mtime_ns) == (now.size, now.mtime_ns):
        raise SourceFileError(f"{name!r} was loaded and has not changed since; there is nothing to skip")
    return now


def adopt_files(config: PipelineConfig, clock: Callable[[], float] = time.time) -> Adopted:
    """Mark every existing file as loaded, and start a new stream.

    Raises
    ------
    LeaseHeldError
        If a run of the pipeline is active.
    PipelineFileError, SourceFileError
        If the source cannot be listed.
    LedgerError
        If the ledger cannot be written.
    """
    check_source(config.source)
    source = config.source
    with (
        Catalog(str(config.catalog), clock) as catalog,
        Leases(catalog, [f"pipeline:{config.checkpoint}"], clock=clock),
    ):
        found = discover(source.path, source.files, recursive=source.recursive, place=source.place)
        registry = stream_registry(DeltaHandle(config.sink.path)) if has_table(config.sink.path) else {}
        replaces = registry[config.name]["stream"] if config.name in registry else None
        never_loaded = _never_loaded(config)
        with Ledger.adopt(str(config.checkpoint), found, replaces, clock) as ledger:
            files = int(np.count_nonzero(found.sizes > 0))
            return Adopted(ledger.stream, ledger.replaces, files, never_loaded)


def _never_loaded(config: PipelineConfig) -> tuple[str, ...]:
    """Return the planned files of the replaced ledger, whose batch was not recorded as loaded."""
    try:
        if not Ledger.exists(str(config.checkpoint)):
            return ()
        with Ledger(str(config.checkpoint)) as ledger:
            plan = ledger.pending()
    except LedgerError:  # the ledger is damaged, which is why it is replaced
        return ()
    return () if plan is None else tuple(file.name for file in plan.files if file.name not in plan.skipped)
