"""The ledger of a pipeline: the source files that were loaded, the batch that loaded each, and the stream's identity.

The ledger is a SQLite file in the pipeline's checkpoint folder. Paths are relative to the source folder, so a moved
project continues to work. A batch is planned here before anything is written, and marked as loaded after its facts are
committed. Only the facts decide whether a planned batch was loaded (`headrace.pipelines.batch.protocol`).

Only one process writes: the run that holds the pipeline's lease. Every change is one transaction, on disk on return.
"""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    Float,
    Integer,
    MetaData,
    NullPool,
    Table,
    Text,
    create_engine,
    delete,
    event,
    func,
    select,
    update,
)
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import SQLAlchemyError

from headrace.pipelines.durable import sync_folder
from headrace.pipelines.errors import LedgerError
from headrace.pipelines.source.discovery import Found, FoundFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from numpy.typing import NDArray
    from sqlalchemy import Connection, Engine

__all__ = ["Change", "Comparison", "Ledger", "LedgerFile", "Plan", "RejectedRow"]

FILE_NAME: Final = "ledger.db"
LOADED: Final = "loaded"
SKIPPED: Final = "skipped"
PLANNED: Final = "planned"

_VERSION: Final = 1
_BUSY_SECONDS: Final = 30
_ROWS: Final = 50_000
_NAMES_IN_A_QUERY: Final = 500

# These two statements run once per file, for up to a million files; SQLAlchemy's expressions would cost more than
# SQLite.
_READ_INDEX: Final = "SELECT name, size, mtime_ns FROM files"
_RECORD_FILE: Final = (
    "INSERT OR REPLACE INTO files (name, size, mtime_ns, fingerprint, state, batch, recorded) "
    "VALUES (?, ?, ?, ?, ?, ?, ?)"
)

METADATA = MetaData()
_IDENTITY = Table(
    "identity",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("stream", Text, nullable=False),
    Column("replaces", Text),
    Column("adopted", Integer, nullable=False),
)
_FILES = Table(
    "files",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("mtime_ns", BigInteger, nullable=False),
    Column("fingerprint", Text),
    Column("state", Text, nullable=False),
    Column("batch", BigInteger),
    Column("recorded", Float, nullable=False),
    sqlite_with_rowid=False,
)
_BATCHES = Table(
    "batches",
    METADATA,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("attempt", Text, nullable=False),
    Column("state", Text, nullable=False),
)
_PLANNED = Table(
    "planned",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("batch", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("mtime_ns", BigInteger, nullable=False),
    Column("skipped", Integer, nullable=False, server_default="0"),
    sqlite_with_rowid=False,
)
_RETRIED = Table(
    "retried",
    METADATA,
    Column("number", Integer, primary_key=True),
    Column("batch", BigInteger, nullable=False),
    Column("stream", Text, nullable=False),
    Column("rejected_in", BigInteger, nullable=False),
    Column("file", Text, nullable=False),
    Column("record", BigInteger, nullable=False),
)


class RejectedRow(NamedTuple):
    """Identity of a rejected row: the stream and the batch that rejected it, its file, and its record number there."""

    stream: str
    batch: int
    file: str
    record: int


@dataclass(frozen=True)
class Plan:
    """A planned batch that is not known to be loaded.

    Parameters
    ----------
    number
        Number of the batch in the stream.
    attempt
        Identity of this plan, which the facts' commit also carries.
    files
        Files of the batch as they were when it was planned.
    skipped
        Names of the files that were skipped after the batch was planned.
    retried
        Rejected rows that the batch retries. Such a batch has no files.
    """

    number: int
    attempt: str
    files: tuple[FoundFile, ...]
    skipped: frozenset[str] = frozenset()
    retried: tuple[RejectedRow, ...] = ()


@dataclass(frozen=True)
class LedgerFile:
    """Ledger entry of a file: recorded size and date, state, batch, and time of the record."""

    name: str
    size: int
    mtime_ns: int
    fingerprint: str | None
    state: str
    batch: int | None
    recorded: float


@dataclass(frozen=True)
class Change:
    """A loaded file whose content has changed."""

    file: FoundFile
    loaded: LedgerFile


@dataclass(frozen=True)
class Comparison:
    """A listing compared with the ledger.

    Parameters
    ----------
    found
        Listing of the source folder.
    new
        Positions in the listing of files to load, oldest first; files with the same date are sorted by name.
    empty
        Names of empty files that would otherwise be new.
    changed
        Files that changed after they were loaded.
    """

    found: Found
    new: NDArray[np.int64]
    empty: tuple[str, ...]
    changed: tuple[Change, ...]


class Ledger:
    """The ledger of one pipeline, as a context manager that closes it.

    Parameters
    ----------
    checkpoint
        Checkpoint folder of the pipeline. The folder and the ledger are created if they do not exist.
    clock
        Function that returns seconds since 1970.

    Attributes
    ----------
    stream
        Identity of the stream, created once with the ledger. Delta's transactions carry it.
    replaces
        Stream in the fact table that this stream replaced when it was adopted, or None.
    adopted
        Whether `adopt` created the ledger.

    Raises
    ------
    LedgerError
        If the folder holds a Spark checkpoint, or the ledger cannot be read or written.
    """

    def __init__(self, checkpoint: str | Path, clock: Callable[[], float] = time.time) -> None:
        folder = _local(checkpoint)
        self.path = folder / FILE_NAME
        self._clock = clock
        _refuse_spark_checkpoint(folder, self.path)
        _make_file(self.path)
        self._engine = _engine(self.path)
        with self._transaction() as connection:
            METADATA.create_all(connection)
            first = {"id": 1, "version": _VERSION, "stream": str(uuid.uuid4()), "adopted": 0}
            connection.execute(insert(_IDENTITY).values(**first).on_conflict_do_nothing())
            identity = connection.execute(select(_IDENTITY)).mappings().one()
            self._check_version(identity["version"])
            index = _read_index(connection)
        self.stream = str(identity["stream"])
        self.replaces: str | None = identity["replaces"]
        self.adopted = bool(identity["adopted"])
        self._index = index

    @classmethod
    def exists(cls, checkpoint: str | Path) -> bool:
        """Return whether a checkpoint folder holds a ledger."""
        return (_local(checkpoint) / FILE_NAME).exists()

    @classmethod
    def adopt(
        cls,
        checkpoint: str | Path,
        found: Found,
        replaces: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """Start a new stream in which every existing file counts as loaded.

        The new ledger replaces an existing one, even an unreadable one. Empty files are not recorded, because they are
        loaded once they have content. Fingerprints are not computed, because that would read every file.

        Parameters
        ----------
        checkpoint
            Checkpoint folder of the pipeline.
        found
            Files that exist now.
        replaces
            Stream of this pipeline in the fact table; None if there is none.
        clock
            Function that returns seconds since 1970.
        """
        folder = _local(checkpoint)
        draft = folder / f"{FILE_NAME}.{uuid.uuid4()}"
        _make_file(draft)
        try:
            _fill_adopted(draft, found, replaces, clock())
            (folder / f"{FILE_NAME}-journal").unlink(missing_ok=True)  # SQLite would roll it back into the new ledger
            draft.replace(folder / FILE_NAME)
            sync_folder(folder)
        except OSError as error:
            raise LedgerError(_explained(folder / FILE_NAME, error)) from error
        finally:
            draft.unlink(missing_ok=True)
        return cls(checkpoint, clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._engine.dispose()

    @property
    def is_new(self) -> bool:
        """Whether no batch was ever planned here, and no file was skipped or adopted."""
        with self._transaction() as connection:
            batches = connection.execute(select(func.count()).select_from(_BATCHES)).scalar_one()
        return not self.adopted and not batches and not len(self._index)

    # Batches

    def pending(self) -> Plan | None:
        """Return the planned batch that is not known to be loaded, or None."""
        with self._transaction() as connection:
            wanted = select(_BATCHES.c.number, _BATCHES.c.attempt).where(_BATCHES.c.state == PLANNED)
            row = connection.execute(wanted).one_or_none()
            if row is None:
                return None
            planned = connection.execute(select(_PLANNED).order_by(_PLANNED.c.name)).all()
            retried = connection.execute(select(_RETRIED).order_by(_RETRIED.c.number)).all()
        return Plan(
            row.number,
            row.attempt,
            tuple(FoundFile(each.name, each.size, each.mtime_ns) for each in planned),
            frozenset(each.name for each in planned if each.skipped),
            tuple(RejectedRow(each.stream, each.rejected_in, each.file, each.record) for each in retried),
        )

    def last_loaded(self) -> int | None:
        """Return the number of the last batch marked as loaded, or None."""
        with self._transaction() as connection:
            wanted = select(func.max(_BATCHES.c.number)).where(_BATCHES.c.state == LOADED)
            number: int | None = connection.execute(wanted).scalar_one()
            return number

    def attempt_of(self, number: int) -> str | None:
        """Return the identity of the plan of a batch, or None if the ledger does not have the batch."""
        with self._transaction() as connection:
            wanted = select(_BATCHES.c.attempt).where(_BATCHES.c.number == number)
            attempt: str | None = connection.execute(wanted).scalar_one_or_none()
            return attempt

    def next_number(self) -> int:
        """Return the number of the batch after the last loaded one."""
        last = self.last_loaded()
        return 0 if last is None else last + 1

    def plan(self, number: int, attempt: str, files: Sequence[FoundFile], retried: Sequence[RejectedRow] = ()) -> None:
        """Record a batch before any part of it is written.

        Parameters
        ----------
        number, attempt
            Number of the batch, and identity of the plan.
        files
            Files of the batch; none for a batch that retries rejected rows.
        retried
            Rejected rows that the batch retries.

        Raises
        ------
        LedgerError
            If another batch is pending, or a loaded batch has used the number.
        """
        rows = [{"name": file.name, "batch": number, "size": file.size, "mtime_ns": file.mtime_ns} for file in files]
        with self._transaction() as connection:
            taken = connection.execute(
                select(_BATCHES.c.number).where((_BATCHES.c.state == PLANNED) | (_BATCHES.c.number >= number)).limit(1)
            ).scalar_one_or_none()
            if taken is not None:
                raise LedgerError(f"batch {number} cannot be planned: the ledger {self.path} has batch {taken} already")
            connection.execute(insert(_BATCHES).values(number=number, attempt=attempt, state=PLANNED))
            if rows:
                connection.execute(insert(_PLANNED), rows)
            if retried:
                connection.execute(insert(_RETRIED), [_retried_values(number, row) for row in retried])

    def done(self, number: int, fingerprints: Mapping[str, str | None] | None = None) -> None:
        """Mark the pending batch as loaded.

        Parameters
        ----------
        number
            Number of the batch.
        fingerprints
            Content hash of each file that has one.
        """
        known = fingerprints or {}
        with self._transaction() as connection:
            planned = select(_PLANNED).where(_PLANNED.c.batch == number)
            files = [FoundFile(row.name, row.size, row.mtime_ns) for row in connection.execute(planned)]
            self._record(connection, files, LOADED, number, known)
            connection.execute(delete(_PLANNED).where(_PLANNED.c.batch == number))
            connection.execute(delete(_RETRIED).where(_RETRIED.c.batch == number))
            connection.execute(update(_BATCHES).where(_BATCHES.c.number == number).values(state=LOADED))
        self._index.put(files)

    def forget(self, number: int) -> None:
        """Delete the plan of a batch that the facts do not hold. Its files return to their previous state."""
        with self._transaction() as connection:
            connection.execute(delete(_PLANNED).where(_PLANNED.c.batch == number))
            connection.execute(delete(_RETRIED).where(_RETRIED.c.batch == number))
            connection.execute(delete(_BATCHES).where(_BATCHES.c.number == number, _BATCHES.c.state == PLANNED))

    # Files

    def file(self, name: str) -> LedgerFile | None:
        """Return the ledger entry of a file, or None."""
        with self._transaction() as connection:
            return next(iter(_read_files(connection, [name])), None)

    def files(self) -> Iterator[LedgerFile]:
        """Yield all loaded and skipped files, the most recently recorded first."""
        with self._transaction() as connection:
            wanted = select(_FILES).order_by(_FILES.c.recorded.desc(), _FILES.c.name)
            for row in connection.execute(wanted).yield_per(_ROWS):
                yield LedgerFile(*row)

    def skip(self, file: FoundFile, fingerprint: str | None = None) -> None:
        """Record that a file is not to be loaded in its current state. A loaded file stays loaded, with new content."""
        with self._transaction() as connection:
            known = next(iter(_read_files(connection, [file.name])), None)
            state, batch = (SKIPPED, None) if known is None else (known.state, known.batch)
            self._record(connection, [file], state, batch, {file.name: fingerprint})
            connection.execute(update(_PLANNED).where(_PLANNED.c.name == file.name).values(skipped=1))
        self._index.put([file])

    def compare(self, found: Found, hash_of: Callable[[FoundFile], str | None]) -> Comparison:
        """Compare a listing with the loaded files.

        A file is unchanged if its size and date are. If only the date differs, the content decides: if it is the same,
        the new date is recorded.

        Parameters
        ----------
        found
            Listing of the source folder.
        hash_of
            Function that returns the fingerprint of a file.
        """
        at = self._index.positions(found.names)
        known = at >= 0
        same = known & (self._index.sizes[at] == found.sizes) & (self._index.mtimes[at] == found.mtimes)
        changed = self._changed(found, np.flatnonzero(known & ~same), hash_of)
        wanted = ~known
        wanted[[index for index, file in changed if file.state == SKIPPED]] = True
        filled = found.sizes > 0
        return Comparison(
            found,
            _by_date(found, np.flatnonzero(wanted & filled)),
            tuple(sorted(found.names[index] for index in np.flatnonzero(wanted & ~filled))),
            tuple(Change(found.file(index), file) for index, file in changed if file.state == LOADED),
        )

    def _changed(
        self, found: Found, differing: NDArray[np.int64], hash_of: Callable[[FoundFile], str | None]
    ) -> list[tuple[int, LedgerFile]]:
        """Return files whose size or date differs and whose content changed; record the new date of the others."""
        changed: list[tuple[int, LedgerFile]] = []
        for first in range(0, len(differing), _ROWS):
            part = differing[first : first + _ROWS].tolist()
            touched: list[FoundFile] = []
            with self._transaction() as connection:
                recorded = {file.name: file for file in _read_files(connection, [found.names[at] for at in part])}
            for index in part:
                now, before = found.file(index), recorded[found.names[index]]
                if now.size == before.size and before.fingerprint is not None and hash_of(now) == before.fingerprint:
                    touched.append(now)
                else:
                    changed.append((index, before))
            self._touch(touched)
        return changed

    def _touch(self, touched: Sequence[FoundFile]) -> None:
        """Record the new dates of files whose content did not change."""
        if not touched:
            return
        with self._transaction() as connection:
            for now in touched:
                connection.execute(update(_FILES).where(_FILES.c.name == now.name).values(mtime_ns=now.mtime_ns))
        self._index.put(touched)

    def _record(
        self,
        connection: Connection,
        files: Sequence[FoundFile],
        state: str,
        batch: int | None,
        fingerprints: Mapping[str, str | None],
    ) -> None:
        _upsert(connection, files, state, batch, fingerprints, self._clock())

    # File

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except (SQLAlchemyError, sqlite3.Error) as error:
            raise LedgerError(_explained(self.path, error)) from error

    def _check_version(self, version: int) -> None:
        if version > _VERSION:
            raise LedgerError(
                f"the ledger {self.path} was made by a newer release (its version is {version}, this release knows "
                f"{_VERSION}); upgrade headrace"
            )


class _Index:
    """Names, sizes and dates of all files in the ledger, stored as columns: about 100 bytes per file.

    Recent records are kept in a small dict until there are enough of them to add to the columns.
    """

    def __init__(self, names: pa.Array, sizes: NDArray[np.int64], mtimes: NDArray[np.int64]) -> None:
        self._names = names
        self._sizes = sizes
        self._mtimes = mtimes
        self._recent: dict[str, FoundFile] = {}

    def __len__(self) -> int:
        self._settle()
        return len(self._names)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Size by position, with an extra element for position -1."""
        return np.append(self._sizes, -1)

    @property
    def mtimes(self) -> NDArray[np.int64]:
        """Date by position, with an extra element for position -1."""
        return np.append(self._mtimes, -1)

    def put(self, files: Iterable[FoundFile]) -> None:
        """Add files in their recorded state."""
        self._recent.update((file.name, file) for file in files)
        if len(self._recent) >= _ROWS:
            self._settle()

    def positions(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Return the position of each name, or -1 if it is not in the index."""
        self._settle()
        return self._positions(names)

    def _positions(self, names: Sequence[str]) -> NDArray[np.int64]:
        found = pc.index_in(pa.array(names, pa.large_string()), value_set=self._names)
        return np.asarray(found.fill_null(-1), dtype=np.int64)

    def _settle(self) -> None:
        """Add the recent records to the columns."""
        if not self._recent:
            return
        names = list(self._recent)
        sizes = np.array([file.size for file in self._recent.values()], dtype=np.int64)
        mtimes = np.array([file.mtime_ns for file in self._recent.values()], dtype=np.int64)
        at = self._positions(names)
        there, absent = at >= 0, np.flatnonzero(at < 0)
        self._sizes[at[there]] = sizes[there]
        self._mtimes[at[there]] = mtimes[there]
        added = pa.array([names[index] for index in absent], pa.large_string())
        self._names = pa.concat_arrays([self._names, added])
        self._sizes = np.concatenate([self._sizes, sizes[absent]])
        self._mtimes = np.concatenate([self._mtimes, mtimes[absent]])
        self._recent.clear()


def _read_index(connection: Connection) -> _Index:
    names, sizes, mtimes = [pa.array([], pa.large_string())], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    rows = connection.exec_driver_sql(_READ_INDEX)
    for part in rows.yield_per(_ROWS).partitions():
        columns = list(zip(*part, strict=True))
        names.append(pa.array(columns[0], pa.large_string()))
        sizes.append(np.array(columns[1], dtype=np.int64))
        mtimes.append(np.array(columns[2], dtype=np.int64))
    return _Index(pa.concat_arrays(names), np.concatenate(sizes), np.concatenate(mtimes))


def _read_files(connection: Connection, names: Sequence[str]) -> Iterator[LedgerFile]:
    for first in range(0, len(names), _NAMES_IN_A_QUERY):
        part = names[first : first + _NAMES_IN_A_QUERY]
        yield from (LedgerFile(*row) for row in connection.execute(select(_FILES).where(_FILES.c.name.in_(part))))


def _retried_values(number: int, row: RejectedRow) -> dict[str, Any]:
    return {"batch": number, "stream": row.stream, "rejected_in": row.batch, "file": row.file, "record": row.record}


def _upsert(
    connection: Connection,
    files: Sequence[FoundFile],
    state: str,
    batch: int | None,
    fingerprints: Mapping[str, str | None],
    now: float,
) -> None:
    """Record files, and replace their existing entries."""
    if not files:
        return
    rows = [(*file, fingerprints.get(file.name), state, batch, now) for file in files]
    connection.exec_driver_sql(_RECORD_FILE, rows)


def _by_date(found: Found, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return positions by date, then by name."""
    names = pa.array([found.names[index] for index in wanted], pa.large_string())
    table = pa.table({"date": found.mtimes[wanted], "name": names})
    order = pc.sort_indices(table, sort_keys=[("date", "ascending"), ("name", "ascending")])
    return wanted[np.asarray(order)]


def _fill_adopted(path: Path, found: Found, replaces: str | None, now: float) -> None:
    engine = _engine(path)
    filled = np.flatnonzero(found.sizes > 0).tolist()
    try:
        with engine.begin() as connection:
            METADATA.create_all(connection)
            identity = {"id": 1, "version": _VERSION, "stream": str(uuid.uuid4()), "replaces": replaces, "adopted": 1}
            connection.execute(insert(_IDENTITY).values(**identity))
            for first in range(0, len(filled), _ROWS):
                files = [found.file(index) for index in filled[first : first + _ROWS]]
                _upsert(connection, files, LOADED, None, {}, now)
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise LedgerError(_explained(path, error)) from error
    finally:
        engine.dispose()


def _engine(path: Path) -> Engine:
    """Return an engine whose transactions, including the folder's entry, are on disk when they end."""
    url = URL.create("sqlite", database=str(path))
    engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": _BUSY_SECONDS})

    @event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: Any) -> None:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA synchronous = EXTRA")

    return engine


def _local(checkpoint: str | Path) -> Path:
    if "://" in str(checkpoint):
        raise LedgerError(f"checkpoint: {checkpoint} is no local folder; name one, since the ledger is a SQLite file")
    return Path(checkpoint)


def _refuse_spark_checkpoint(folder: Path, ledger: Path) -> None:
    if (folder / "offsets").is_dir() and not ledger.exists():
        raise LedgerError(
            f"the checkpoint {folder} was made by an earlier release, with Spark Structured Streaming, and cannot be "
            "continued; if all files that are in the source now were loaded, run `headrace source adopt PIPELINE`; to "
            "load all of them again, remove this folder, the fact table and the tables of rejected rows"
        )


def _make_file(path: Path) -> None:
    """Create the folder and an empty file with access for the owner only, regardless of the umask."""
    try:
        missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            folder.chmod(folder.stat().st_mode & 0o7777 | 0o700)
        if not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666))
            path.chmod(path.stat().st_mode & 0o7777 | 0o600)
            sync_folder(path.parent)
    except OSError as error:
        raise LedgerError(_explained(path, error)) from error


_REMEDIES: Final = (
    (("readonly", "read-only", "permission denied", "unable to open"), "let this user read and write its folder"),
    (("full", "no space", "quota"), "free some space, then run again"),
    (("locked", "busy"), "another process is using it; wait for it or stop it"),
    (
        ("not a database", "malformed", "corrupt", "no such table", "no such column"),
        "it is damaged: restore the checkpoint folder; or, for one source, run `headrace source adopt PIPELINE`",
    ),
)


def _explained(path: Path, error: BaseException) -> str:
    """Return a one-line description of a ledger file failure, with its remedy."""
    cause = str(getattr(error, "orig", None) or getattr(error, "strerror", None) or error).splitlines()[0]
    lower = cause.lower()
    remedy = next((text for marks, text in _REMEDIES if any(mark in lower for mark in marks)), "check the disk")
    return f"the ledger {path} cannot be used: {cause}; {remedy}"
