"""Replicas: clustered tables on this host's disk that follow a Delta table, one per shard.

The only operation is the catch-up: bring a shard to version V. It covers the first build, new members, a crash, a new
host, a lost or damaged file, a changed number of shards, and a recreated table. The replica's superblock holds the
Delta version that the replica has reached, so data and version change in one commit.

| the replica is                               | what happens                                                     |
|----------------------------------------------|------------------------------------------------------------------|
| at V                                         | nothing                                                          |
| behind V, and the feed covers the gap        | the changes are applied in one commit                            |
| behind V, and feed files were removed        | it is rebuilt from the Delta table at V                          |
| ahead of V only by members above the base    | it is joined as is, and the base hides the later members         |
| limited to pages too small for a new row     | it is rebuilt from the Delta table at V, with larger pages       |
| ahead of V otherwise, missing or damaged     | it is rebuilt from the Delta table at V                          |

A lock file admits one process of the host at a time. The lock is released when its holder ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from headrace.pipelines.delta.tables import open_table, read_changes, read_rows
from headrace.pipelines.errors import DeltaTableError
from headrace.pipelines.paths import home_expanded
from headrace.pipelines.replica.row_sizes import DEFAULT_PAGE_SIZE, LONGEST_ROW, RowSizes, long_row
from headrace.pipelines.replica.rows import of_shard
from headrace.pipelines.spark.jars import cache_folder
from headrace.storage.errors import (
    CorruptionError,
    InputError,
    StorageIOError,
    TableNotFoundError,
    UniqueViolationError,
)
from headrace.storage.format import PAGE_SIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from headrace.pipelines.replica.rows import Changes, ReplicaRows
    from headrace.storage import Table

__all__ = ["Reached", "ReplicaSpec", "catch_up", "discard", "replica_file", "replica_folder"]

_LOG = logging.getLogger(__name__)
_APPLICATION = "delta"
_TABLE = "table.headrace"
_LOCK = "lock"
_UNUSED_SECONDS = 14 * 24 * 3600
_FORMAT = 1
_TWICE = "a natural key was inserted again"
_T = TypeVar("_T")


@dataclass(frozen=True)
class ReplicaSpec:
    """Description of the replicas that a join needs.

    Parameters
    ----------
    rows
        Rows that the replicas hold.
    path, table_id
        Path of the Delta table that the replicas follow, and its identity.
    shards
        Number of shards.
    folder
        Replica folder on the host; None for the default, see `replica_folder`.
    memory
        Memory in bytes for sorting while a replica is built.
    """

    rows: ReplicaRows
    path: str
    table_id: str
    shards: int
    folder: str | None
    memory: int

    def place(self, shard: int) -> Path:
        """Return the folder of a shard's replica. Any change to what determines its content yields a new folder."""
        shape = f"{_FORMAT}|{self.path}|{self.table_id}|{self.rows.schema}|{self.rows.key}|{self.rows!r}"
        name = f"{self.rows.label}-{hashlib.sha256(shape.encode()).hexdigest()[:16]}"
        return replica_folder(self.folder) / name / f"{shard}-of-{self.shards}"

    def rows_of(self, shard: int, table: pa.Table, version: int) -> pa.Table:
        """Return the rows of a shard's replica that rows of the Delta table at a version make."""
        rows = self.rows.rows(table, version).cast(self.rows.schema)
        return of_shard(rows, self.rows.shard_key, self.shards, shard)


@dataclass(frozen=True)
class Reached:
    """A replica that serves version V.

    Parameters
    ----------
    file
        The clustered table.
    exact
        Whether the replica is exactly at V. If not, members above the base must be hidden.
    action
        Action of the catch-up: `kept`, `advanced`, or `built` with the reason; `followed` if the file stayed as it was,
        and new members are in memory (`headrace.pipelines.replica.recent`).
    rows
        Number of rows that the catch-up changed or built.
    seconds
        Duration of the catch-up in seconds, including the wait for the lock.
    """

    file: Path
    exact: bool
    action: str
    rows: int
    seconds: float


def replica_folder(chosen: str | None = None) -> Path:
    """Return the replica folder on this host: the given folder, else HEADRACE_REPLICAS, else the user's cache."""
    named = chosen or os.environ.get("HEADRACE_REPLICAS")
    return home_expanded(named) if named else cache_folder() / "replicas"


def replica_file(place: Path) -> Path:
    """Return the clustered table in a folder that `ReplicaSpec.place` returned."""
    return place / _TABLE


def catch_up(spec: ReplicaSpec, shard: int, version: int, base: int, use: Callable[[Reached], _T]) -> _T:
    """Bring a shard's replica to a version of its Delta table, and open it before another process can advance it.

    Parameters
    ----------
    spec
        Description of the replica.
    shard
        Number of the shard.
    version
        The Delta version V.
    base
        Highest surrogate key at V.
    use
        Function that is called with the result while the replica is locked, to take a snapshot of it.

    Returns
    -------
    object
        Return value of `use`.

    Raises
    ------
    DeltaTableError
        If the Delta table cannot be read at V, or contains a natural key twice.
    """
    began = time.monotonic()
    place = spec.place(shard)
    with _locked(place):
        exact, action, rows = _CatchUp(spec, shard, version, base, file := replica_file(place)).run()
        os.utime(place)
        return use(Reached(file, exact, action, rows, time.monotonic() - began))


def discard(spec: ReplicaSpec, shard: int, inode: int) -> None:
    """Remove a damaged replica, unless another process has already replaced it."""
    place = spec.place(shard)
    with _locked(place):
        file = replica_file(place)
        if file.exists() and file.stat().st_ino == inode:
            _LOG.warning("the replica %s is damaged; it has been removed and will be built again from Delta", file)
            file.unlink()


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (place / _LOCK).open("w")
    except OSError as error:
        raise StorageIOError(
            f"the folder {place} for replicas cannot be written: {error}; name another one as `replicas` in the "
            "pipeline file or in HEADRACE_REPLICAS"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _UnusableError(Exception):
    """An intact replica cannot reach V through the change feed; the message says why."""


class _CatchUp:
    """One catch-up, under the lock."""

    def __init__(self, spec: ReplicaSpec, shard: int, version: int, base: int, file: Path) -> None:
        self._spec = spec
        self._shard = shard
        self._version = version
        self._base = base
        self._file = file
        self._longest = 0

    def run(self) -> tuple[bool, str, int]:
        """Return whether the replica is exactly at V, the action taken, and the number of rows changed."""
        from headrace.storage import Table  # noqa: PLC0415 - numba comes in only when a replica is needed

        try:
            with Table.open(self._file, mode="w") as table:
                return self._advance(table)
        except TableNotFoundError:
            why = "missing"
        except _UnusableError as error:
            why = str(error)
        except (CorruptionError, StorageIOError) as error:
            _LOG.warning("the replica %s cannot be used and will be built again: %s", self._file, error)
            why = "damaged"
        return True, f"built: {why}", self._build()

    def _advance(self, table: Table) -> tuple[bool, str, int]:
        reached = table.app_version(_APPLICATION)
        if reached == self._version:
            return True, "kept", 0
        if reached is None:
            raise _UnusableError("unknown version")
        if reached > self._version:
            self._require_hidden(reached)
            return False, "kept", 0
        feed = read_changes(self._spec.path, reached + 1, self._version, self._spec.rows.columns, self._of_feed)
        if feed is None:
            raise _UnusableError("change feed gone")
        changes = self._spec.rows.changes(feed)
        if changes is None:
            raise _UnusableError("rows were removed")
        return True, "advanced", self._apply(table, changes)

    def _apply(self, table: Table, changes: Changes) -> int:
        key = self._spec.rows.shard_key
        inserts, upserts, deletes, absent = (
            of_shard(rows, key, self._spec.shards, self._shard)
            for rows in (changes.inserts, changes.upserts, changes.deletes, changes.absent)
        )
        if absent.num_rows and table.lookup(absent).num_rows:
            raise _UnusableError(_TWICE)
        self._require_room(table, pa.concat_tables([inserts, upserts]))
        try:
            table.apply(upserts=upserts, deletes=deletes, inserts=inserts, app=(_APPLICATION, self._version))
        except UniqueViolationError as error:
            raise _UnusableError(_TWICE) from error
        return int(inserts.num_rows + upserts.num_rows + deletes.num_rows)

    def _of_feed(self, rows: pa.Table) -> pa.Table:
        """Return the rows of the feed that may belong to the shard."""
        key = self._spec.rows.feed_key
        return rows if key is None else of_shard(rows, key, self._spec.shards, self._shard)

    def _require_hidden(self, reached: int) -> None:
        """Refuse to serve an older version, unless all later changes are members above the base.

        That is the case when a batch runs again after its members were added.
        """
        if reached <= open_table(self._spec.path).version():
            feed = read_changes(self._spec.path, self._version + 1, reached, self._spec.rows.columns)
            if feed is not None and self._spec.rows.hides_later(feed, self._base):
                return
        raise _UnusableError("ahead")

    def _require_room(self, table: Table, upserts: pa.Table) -> None:
        """Raise an error unless the longest new row fits in the replica's pages."""
        sizes = RowSizes(self._spec.rows.schema, self._spec.rows.key)
        if sizes.needs(upserts, DEFAULT_PAGE_SIZE) > max(table.stats.page_size, DEFAULT_PAGE_SIZE):
            raise _UnusableError("longer rows")

    def _build(self) -> int:
        """Build the replica with pages that hold its longest row; start over if the default page size is too small."""
        self._clear()
        self._longest = 0
        page_size = DEFAULT_PAGE_SIZE
        while True:
            try:
                return self._built_with(page_size)
            except DeltaTableError:
                raise
            except InputError:
                if self._longest <= page_size:
                    raise
                page_size = next(size for size in PAGE_SIZES if size >= self._longest)

    def _built_with(self, page_size: int) -> int:
        from headrace.storage import Table  # noqa: PLC0415 - numba comes in only when a replica is needed

        spec = self._spec
        try:
            with Table.build(
                self._file,
                pa.RecordBatchReader.from_batches(spec.rows.schema, self._shard_rows()),
                key=spec.rows.key.names,
                unique=spec.rows.unique,
                page_size=page_size,
                memory=spec.memory,
                app=(_APPLICATION, self._version),
                overwrite=True,
                filter_bits=spec.rows.filter_bits,
            ) as table:
                return int(table.stats.rows)
        except UniqueViolationError as error:
            raise DeltaTableError(f"dimension {spec.rows.label!r} has a natural key more than once: {error}") from error

    def _shard_rows(self) -> Iterator[pa.RecordBatch]:
        """Yield the shard's rows, and record the longest one; raise an error for a row that fits in no page."""
        reader = read_rows(self._spec.path, self._version, self._spec.rows.columns)
        sizes = RowSizes(self._spec.rows.schema, self._spec.rows.key)
        for piece in reader:
            rows = self._spec.rows_of(self._shard, pa.Table.from_batches([piece]), self._version)
            self._longest = max(self._longest, sizes.needs(rows, max(self._longest, DEFAULT_PAGE_SIZE)))
            if self._longest > LONGEST_ROW:
                raise self._too_long(rows, sizes)
            yield from rows.to_batches()

    def _too_long(self, rows: pa.Table, sizes: RowSizes) -> DeltaTableError:
        needs = sizes.of_each(rows)
        longest = rows.slice(int(needs.argmax()), 1)
        return long_row(self._spec.rows.label, self._spec.path, longest, self._spec.rows.key.names, int(needs.max()))

    def _clear(self) -> None:
        """Remove the leftovers of a killed build, and sibling replicas that were not used for a long time."""
        for item in self._file.parent.iterdir():
            if item.name not in {_TABLE, _LOCK}:
                shutil.rmtree(item) if item.is_dir() else item.unlink(missing_ok=True)
        limit = time.time() - _UNUSED_SECONDS
        for other in self._file.parent.parent.iterdir():
            if other != self._file.parent and other.stat().st_mtime < limit:
                shutil.rmtree(other, ignore_errors=True)
