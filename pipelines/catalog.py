"""The run catalog: runs, and their micro-batches with metrics.

It supports any SQLAlchemy database; the default is a SQLite file. `headrace.pipelines.lease` manages the leases, which
are in the same database. The warehouse never depends on the catalog: Delta's transactions decide what is loaded.

A run is in one of these states:

| state     | meaning                                                                                     |
|-----------|---------------------------------------------------------------------------------------------|
| `running` | its process holds its lease                                                                 |
| `done`    | all waiting files are loaded                                                                |
| `stopped` | a signal ended it after a complete batch                                                    |
| `failed`  | an error ended it; `error` gives the reason                                                 |
| `lost`    | its process ended without a report (killed, power cut), or another run took over its lease  |

A run that was marked as lost and resumes, for example after a laptop wakes up, is `running` again.
"""

from __future__ import annotations

import socket
import time
import uuid
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Engine,
    Float,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    create_engine,
    delete,
    func,
    insert,
    inspect,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import IntegrityError, NoSuchModuleError, SQLAlchemyError

from headrace.pipelines.errors import CatalogError
from headrace.pipelines.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from sqlalchemy import Connection, RowMapping

__all__ = ["BatchRecord", "Catalog", "RunRecord"]

_BUSY_SECONDS = 30
_VERSION = 2
_ATTEMPTS = 3  # several processes may create the tables of a new catalog at the same time
METADATA = MetaData()

_META = Table("headrace_meta", METADATA, Column("version", Integer, primary_key=True))
_RUNS = Table(
    "headrace_runs",
    METADATA,
    Column("id", String(36), primary_key=True),
    Column("pipeline", String(64), nullable=False, index=True),
    Column("mode", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("started", Float, nullable=False),
    Column("ended", Float),
    Column("host", String(255), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("error", Text),
    Column("machine", String(255)),
    Column("process", String(64)),
    Column("lease", String(36)),
    Column("alive", Float),
)
_BATCHES = Table(
    "headrace_batches",
    METADATA,
    Column("run", String(36), nullable=False, index=True),
    Column("stream", String(128), nullable=False),
    Column("batch", BigInteger, nullable=False),
    Column("started", Float, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("rows_in", BigInteger, nullable=False),
    Column("loaded", BigInteger, nullable=False),
    Column("dropped", BigInteger, nullable=False),
    Column("routed", BigInteger, nullable=False),
    Column("rejected", BigInteger, nullable=False),
    Column("new_members", BigInteger, nullable=False),
    Column("hit_ratio", Float, nullable=False),
    Column("pages_wanted", BigInteger, nullable=False),
    Column("pages_read", BigInteger, nullable=False),
    Column("seeks", BigInteger, nullable=False),
    Column("deadline_misses", BigInteger, nullable=False),
    Column("detail", JSON, nullable=False),
    PrimaryKeyConstraint("stream", "batch"),
)

LEASES = Table(
    "headrace_leases",
    METADATA,
    Column("name", String(255), primary_key=True),
    Column("token", String(36), nullable=False),
    Column("machine", String(255), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("process", String(64), nullable=False),
    Column("expires", Float, nullable=False),
)


@dataclass(frozen=True)
class RunRecord:
    """One run of a pipeline.

    Parameters
    ----------
    id, pipeline, mode
        Id of the run, name of its pipeline, and `once` or `follow`.
    state
        State of the run: `running`, `done`, `stopped`, `failed` or `lost`; see the module.
    started, ended
        Start and end times in seconds since 1970. `ended` is None for an active run, and the last heartbeat of a lost
        run.
    host, pid
        Host and process id of the driver.
    error
        Reason for the failure, or what is known about a lost run.
    alive
        Last heartbeat of the run, in seconds since 1970.
    batches, rows_in, loaded, dropped, routed, rejected, new_members
        Sums over the batches of the run.
    """

    id: str
    pipeline: str
    mode: str
    state: str
    started: float
    ended: float | None
    host: str
    pid: int
    error: str | None
    alive: float | None = None
    batches: int = 0
    rows_in: int = 0
    loaded: int = 0
    dropped: int = 0
    routed: int = 0
    rejected: int = 0
    new_members: int = 0


@dataclass(frozen=True)
class BatchRecord:
    """One micro-batch of a run, with its counts; `detail` holds outcomes, phases, replicas and joins."""

    run: str
    stream: str
    batch: int
    started: float
    seconds: float
    rows_in: int
    loaded: int
    dropped: int
    routed: int
    rejected: int
    new_members: int
    hit_ratio: float
    pages_wanted: int
    pages_read: int
    seeks: int
    deadline_misses: int
    detail: Mapping[str, Any]


_RUN_FIELDS = ("id", "pipeline", "mode", "state", "started", "ended", "host", "pid", "error", "alive")
_SUMS = ("rows_in", "loaded", "dropped", "routed", "rejected", "new_members")


class Catalog:
    """The run catalog in a database.

    Parameters
    ----------
    url
        SQLAlchemy URL of the database. Missing tables are created.
    clock
        Function that returns seconds since 1970.

    Raises
    ------
    CatalogError
        If the database cannot be used.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._shown = url
        try:
            parsed = make_url(url)
            self._shown = parsed.render_as_string(hide_password=True)
            self.engine: Engine = create_engine(parsed, **_options(parsed.get_backend_name(), parsed.database))
        except ImportError as error:
            raise CatalogError(f"the run catalog {self._shown} needs a driver: {_remedy(parsed, error)}") from error
        except NoSuchModuleError as error:
            raise CatalogError(
                f"the run catalog {self._shown}: SQLAlchemy knows no database {parsed.drivername!r}; write "
                "sqlite:///FILE or postgresql+psycopg://USER@HOST/DATABASE, or install the package of its dialect"
            ) from error
        except (SQLAlchemyError, OSError) as error:
            raise CatalogError(
                f"the run catalog {self._shown} cannot be opened: {error}; write it as sqlite:///FILE or "
                "postgresql+psycopg://USER@HOST/DATABASE"
            ) from error
        for attempt in range(_ATTEMPTS):
            try:
                self._ensure_tables()
            except CatalogError as error:
                cause = error.__cause__
                made_by_another = isinstance(cause, IntegrityError) or "already exists" in str(cause)
                if attempt == _ATTEMPTS - 1 or not made_by_another:
                    raise
            else:
                break

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Return a connection within one transaction; database errors become `CatalogError`."""
        try:
            with self.engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            cause = str(getattr(error, "orig", None) or error).splitlines()[0]
            raise CatalogError(
                f"the run catalog {self._shown} failed: {cause}; check that it can be reached and written"
            ) from error

    def start_run(self, pipeline: str, mode: str, lease: str | None = None) -> str:
        """Record the start of a run, and return its id.

        Parameters
        ----------
        pipeline, mode
            Name of the pipeline, and `once` or `follow`.
        lease
            Token of the leases that the run holds. Once they are released or expire, the run counts as lost.
        """
        run, now, own = str(uuid.uuid4()), self._clock(), ProcessIdentity.own()
        values = {"host": socket.gethostname(), "started": now, "alive": now, "state": "running", "lease": lease}
        with self.transaction() as connection:
            self._note_lost(connection)
            connection.execute(insert(_RUNS).values(id=run, pipeline=pipeline, mode=mode, **values, **asdict(own)))
        return run

    def finish_run(self, run: str, state: str, error: str | None = None) -> None:
        """Record the final state of a run: `done`, `stopped` or `failed`."""
        with self.transaction() as connection:
            now = self._clock()
            change = update(_RUNS).where(_RUNS.c.id == run)
            connection.execute(change.values(state=state, ended=now, alive=now, error=error))

    def note_alive(self, connection: Connection, lease: str) -> None:
        """Record a heartbeat of the run with a lease; a run that was marked as lost becomes `running` again."""
        mine = _RUNS.c.lease == lease
        connection.execute(update(_RUNS).where(mine, _RUNS.c.state == "running").values(alive=self._clock()))
        back = {"state": "running", "alive": self._clock(), "ended": None, "error": None}
        connection.execute(update(_RUNS).where(mine, _RUNS.c.state == "lost").values(**back))

    def record_batch(self, record: BatchRecord) -> None:
        """Store the counts of a batch; a repeated batch replaces its record."""
        values = {name: getattr(record, name) for name in record.__dataclass_fields__}
        with self.transaction() as connection:
            same = (_BATCHES.c.stream == record.stream, _BATCHES.c.batch == record.batch)
            connection.execute(delete(_BATCHES).where(*same))
            connection.execute(insert(_BATCHES).values(**values))
            connection.execute(update(_RUNS).where(_RUNS.c.id == record.run).values(alive=self._clock()))

    def runs(self, pipeline: str | None = None, limit: int = 20) -> list[RunRecord]:
        """Return the latest runs, newest first, after marking the runs whose process has ended as lost."""
        wanted = select(*(_RUNS.c[name] for name in _RUN_FIELDS)).order_by(_RUNS.c.started.desc()).limit(limit)
        if pipeline is not None:
            wanted = wanted.where(_RUNS.c.pipeline == pipeline)
        with self.transaction() as connection:
            self._note_lost(connection)
            rows = connection.execute(wanted).mappings().all()
            return [RunRecord(**row, **_sums(connection, row["id"])) for row in rows]

    def batches(self, run: str) -> list[BatchRecord]:
        """Return the batches of a run in order."""
        wanted = select(_BATCHES).where(_BATCHES.c.run == run).order_by(_BATCHES.c.stream, _BATCHES.c.batch)
        with self.transaction() as connection:
            return [BatchRecord(**row) for row in connection.execute(wanted).mappings().all()]

    def has_batches(self, pipeline: str) -> bool:
        """Return whether any run of a pipeline has recorded a batch."""
        wanted = select(_BATCHES.c.batch).join(_RUNS, _RUNS.c.id == _BATCHES.c.run)
        with self.transaction() as connection:
            found = connection.execute(wanted.where(_RUNS.c.pipeline == pipeline).limit(1)).first()
        return found is not None

    def _note_lost(self, connection: Connection) -> None:
        """Mark as lost the runs whose process has ended or whose lease another run has taken over."""
        running = connection.execute(select(_RUNS).where(_RUNS.c.state == "running")).mappings().all()
        tokens = [run["lease"] for run in running if run["lease"] is not None]
        held = connection.execute(select(LEASES).where(LEASES.c.token.in_(tokens))).mappings().all() if tokens else []
        for run in running:
            if _is_lost(run, [lease for lease in held if lease["token"] == run["lease"]], self._clock()):
                alive = run["alive"] or run["started"]
                known = (_RUNS.c.id == run["id"], _RUNS.c.state == "running")
                change = update(_RUNS).where(*known, or_(_RUNS.c.alive.is_(None), _RUNS.c.alive <= alive))
                connection.execute(change.values(state="lost", ended=alive, alive=alive, error=_epitaph(run, alive)))

    def _ensure_tables(self) -> None:
        """Create the missing tables, and upgrade those of an older release."""
        with self.transaction() as connection:
            METADATA.create_all(connection)
            found = connection.execute(select(_META.c.version)).scalars().all()
            if not found:
                connection.execute(insert(_META).values(version=_VERSION))
            elif max(found) > _VERSION:
                raise CatalogError(
                    f"the run catalog {self._shown} was made by a newer release (its version is {max(found)}, this "
                    f"release knows {_VERSION}); upgrade headrace or name another catalog"
                )
            elif max(found) < _VERSION:
                _add_columns(connection, _RUNS)
                connection.execute(update(_META).values(version=_VERSION))


def _sums(connection: Connection, run: str) -> dict[str, Any]:
    """Return the number of batches of a run, and the sums of their counts."""
    sums = [func.coalesce(func.sum(_BATCHES.c[name]), 0).label(name) for name in _SUMS]
    found = connection.execute(select(func.count().label("batches"), *sums).where(_BATCHES.c.run == run))
    return {name: int(value) for name, value in found.mappings().one().items()}


def holder(lease: RowMapping) -> ProcessIdentity:
    """Return the process that holds a lease."""
    return ProcessIdentity(lease["machine"], lease["pid"], lease["process"])


def lease_is_live(lease: RowMapping, now: float) -> bool:
    """Return whether the holder of a lease may still write under it."""
    return bool(lease["expires"] > now and not holder(lease).has_ended())


def _is_lost(run: RowMapping, leases: Sequence[RowMapping], now: float) -> bool:
    """Return whether a run that is recorded as running has ended."""
    if run["lease"] is not None:
        return not leases or not all(lease_is_live(lease, now) for lease in leases)
    if run["machine"] is not None:
        return ProcessIdentity(run["machine"], run["pid"], run["process"] or "").has_ended()
    return bool(run["host"] == socket.gethostname() and not Path(f"/proc/{run['pid']}").exists())


def _epitaph(run: RowMapping, alive: float) -> str:
    moment = datetime.fromtimestamp(alive, UTC).isoformat(sep=" ", timespec="seconds")
    return (
        f"process {run['pid']} on {run['host']} ended without finishing the run, or lost its lease to another one; it "
        f"was last alive at {moment}; nothing is lost, the next run goes on"
    )


def _add_columns(connection: Connection, table: Table) -> None:
    """Add the columns that are missing from a table of an older release."""
    there = {column["name"] for column in inspect(connection).get_columns(table.name)}
    quote = connection.dialect.identifier_preparer.quote
    for column in table.columns:
        if column.name not in there:
            kind = column.type.compile(connection.dialect)
            connection.execute(text(f"ALTER TABLE {quote(table.name)} ADD COLUMN {quote(column.name)} {kind}"))


def _remedy(url: URL, error: ImportError) -> str:
    """Return the remedy for a driver that is not installed."""
    missing = f"there is no module {error.name!r}"
    if url.get_backend_name() == "postgresql":
        here = "" if url.get_driver_name() == "psycopg" else " and write the URL as postgresql+psycopg://..."
        return f"{missing}; run `pip install 'headrace[postgresql]'`{here}"
    return f"{missing}; install the package that holds it into the environment of headrace (`pip install {error.name}`)"


def _options(backend: str, database: str | None) -> dict[str, Any]:
    """Return the connection options; create the folder of a SQLite file."""
    if backend != "sqlite":
        return {"pool_pre_ping": True}
    if database and database != ":memory:":
        Path(database).parent.mkdir(parents=True, exist_ok=True)
    return {"connect_args": {"timeout": _BUSY_SECONDS}}
