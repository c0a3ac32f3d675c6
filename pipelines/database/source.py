"""The URL of a source database, and one consistent reading of it.

Secrets come from the environment only, so no message can show one: a URL that spells a password out is refused without
being repeated, and messages show a URL without its user.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import create_engine
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from headrace.pipelines.errors import ExtractionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Engine

__all__ = ["SQLITE", "Source", "parse_source", "reading", "require_no_secrets"]

SQLITE = "sqlite"
_DRIVERS = {SQLITE: "pysqlite", "postgresql": "psycopg"}
_FORMS = "sqlite:///FILE or postgresql+psycopg://USER:${PASSWORD}@HOST/DATABASE"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_PLACES = ("host", "hostaddr", "port", "dbname", "service")
_SETTINGS = ("TIME ZONE 'UTC'", "DateStyle TO ISO", "IntervalStyle TO postgres", "extra_float_digits TO 3")


@dataclass(frozen=True)
class Source:
    """A source database.

    Parameters
    ----------
    url
        SQLAlchemy URL with secrets.
    backend
        `sqlite` or `postgresql`.
    shown
        URL without user, password and options, which identifies the database.
    """

    url: URL
    backend: str
    shown: str


def parse_source(text: str) -> Source:
    """Return the source database of a URL.

    Parameters
    ----------
    text
        SQLAlchemy URL. ``${NAME}`` stands for an environment variable: as the whole URL, or as user, password, host,
        database or the value of an option, where it is taken literally.

    Raises
    ------
    ExtractionError
        If the URL is malformed, holds a password, uses a variable that is not set, or is of another kind of database.
    """
    require_no_secrets(text)
    url = _parsed(_resolved(text)) if _VARIABLE.fullmatch(text) else _with_variables(_parsed(text))
    backend, _, driver = url.drivername.partition("+")
    if backend not in _DRIVERS:
        raise ExtractionError(
            f"tables are extracted from SQLite and PostgreSQL, not from {backend!r}; write {_FORMS}, or export the "
            "table with the tools of its database to CSV, JSON lines or Parquet"
        )
    if driver not in ("", _DRIVERS[backend]):
        raise ExtractionError(f"the driver {driver!r} is not supported; write {backend}+{_DRIVERS[backend]}://...")
    url = url.set(drivername=f"{backend}+{_DRIVERS[backend]}")
    if backend == SQLITE:
        url = url.set(database=str(_sqlite_file(url)))
    return Source(url, backend, _shown(url, backend))


def require_no_secrets(text: str) -> None:
    """Raise an error if a URL holds a password, or may hold one because it cannot be parsed.

    Raises
    ------
    ExtractionError
        With a message that does not repeat the URL.
    """
    if _VARIABLE.fullmatch(text):
        return
    url = _parsed(text)
    if any(_VARIABLE.fullmatch(secret) is None for secret in _secrets(url)):
        raise ExtractionError(
            "the URL of the database holds a password; write '${VARIABLE}' in single quotes in its place, and set "
            "that variable in the environment"
        )


@contextmanager
def reading(source: Source) -> Iterator[Connection]:
    """Return a connection within one read-only transaction, which sees one state of the database.

    Raises
    ------
    ExtractionError
        If the driver is missing, or the database cannot be reached or read.
    """
    engine = _engine(source)
    try:
        with engine.connect() as connection:
            _begin(connection, source.backend)
            yield connection
    except SQLAlchemyError as error:
        # Without the chain: a driver's own error may hold the URL.
        raise ExtractionError(
            f"{source.shown} failed: {_cause(error, source.url)}; check that it can be reached and read"
        ) from None
    finally:
        engine.dispose()


def _engine(source: Source) -> Engine:
    try:
        return create_engine(source.url, poolclass=NullPool)
    except ImportError as error:
        raise ExtractionError(
            f"{source.shown} needs a driver: there is no module {error.name or 'psycopg'!r}; run "
            "`pip install 'headrace[postgresql]'`"
        ) from error
    except (SQLAlchemyError, ValueError) as error:
        raise ExtractionError(f"{source.shown} cannot be opened: {_cause(error, source.url)}; write {_FORMS}") from None


def _begin(connection: Connection, backend: str) -> None:
    if backend == SQLITE:
        driver = connection.connection.dbapi_connection
        assert driver is not None
        driver.text_factory = _text_or_bytes
        connection.exec_driver_sql("BEGIN")
        return
    connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    for setting in _SETTINGS:
        connection.exec_driver_sql(f"SET LOCAL {setting}")


class _NotText(bytes):
    """A text of SQLite that is not UTF-8; a value of this class fits no column."""


def _text_or_bytes(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _NotText(data)


def _parsed(text: str) -> URL:
    try:
        return make_url(text)
    except (SQLAlchemyError, ValueError):  # their message would repeat the URL, and with it the password
        raise ExtractionError(f"the URL of the database is malformed; write {_FORMS}") from None


def _secrets(url: URL) -> list[str]:
    """Return the password of a URL, and the values of options that are passwords."""
    options = [value for name, value in url.query.items() if "pass" in name.lower()]
    listed = [value for option in options for value in ([option] if isinstance(option, str) else option)]
    return listed if url.password is None else [str(url.password), *listed]


def _with_variables(url: URL) -> URL:
    query = {
        name: _resolved(value) if isinstance(value, str) else tuple(map(_resolved, value))
        for name, value in url.query.items()
    }
    parts = {
        name: _resolved(value)
        for name, value in (("username", url.username), ("host", url.host), ("database", url.database))
        if value is not None
    }
    password = None if url.password is None else _resolved(str(url.password))
    url = url.set(**parts, query=query)  # type: ignore[arg-type] # a mapping of several parameters' types
    return url if password is None else url.set(password=password)


def _resolved(text: str) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ExtractionError(
                f"the URL of the database uses ${{{match[1]}}}, but the environment has no variable {match[1]}; set it"
            )
        return os.environ[match[1]]

    return _VARIABLE.sub(value, text)


def _sqlite_file(url: URL) -> Path:
    """Return the path of a SQLite file, which exists: SQLite would create a missing one."""
    name = url.database or ":memory:"
    if name == ":memory:" or name.startswith("file:"):
        raise ExtractionError(f"{name!r} is no path of a SQLite file; write sqlite:///FILE")
    path = Path(name).resolve()
    if not path.is_file():
        raise ExtractionError(f"there is no SQLite file {path}; correct the URL")
    return path


def _shown(url: URL, backend: str) -> str:
    places = {name: value for name, value in url.query.items() if name in _PLACES}
    return URL.create(backend, host=url.host, port=url.port, database=url.database, query=places).render_as_string(
        hide_password=True
    )


def _cause(error: Exception, url: URL) -> str:
    text = " ".join(str(getattr(error, "orig", None) or error).split())
    for secret in _secrets(url):
        text = text.replace(secret, "***") if secret else text
    return text
