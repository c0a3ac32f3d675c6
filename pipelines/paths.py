"""Unambiguous paths: builds every URI and URL that Headrace derives from a path, for any characters in the path.

A path in a pipeline file is literal: no character in it is a pattern, an escape or a delimiter. Libraries treat paths
differently: `deltalake` decodes percent signs, and SQLAlchemy ends a database name at a question mark. A path that a
library takes literally is passed unchanged. A path that it needs encoded is encoded. A path that it cannot accept is
refused with the reason, before anything is written.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from headrace.pipelines.errors import DeltaTableError, PipelineFileError

__all__ = [
    "DUPLICATES",
    "ERRORS",
    "MOVED",
    "RESOLUTIONS",
    "anchored",
    "beside",
    "home_expanded",
    "is_link",
    "local_url",
    "same_table",
    "sqlite_file",
    "sqlite_url",
    "table_location",
]

DUPLICATES, ERRORS, MOVED, RESOLUTIONS = "_duplicates", "_errors", "_moved", "_resolutions"
"""Ends of the paths of tables that belong to another table, see `beside`."""

_LINK = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
_FILE_LINK = re.compile(r"^file:/", re.IGNORECASE)
# `deltalake` converts a path to a URL without encoding these characters. It decodes the last one.
_REFUSED_IN_TABLES = re.compile(r"[\x00-\x1f\x7f\[\]^|\\]|%[0-9A-Fa-f]{2}")


def is_link(path: str) -> bool:
    """Return whether a path refers to another file system, such as ``s3a://bucket/facts``."""
    return _LINK.match(path) is not None


def anchored(path: str, folder: Path) -> str:
    """Return the absolute form of a path, without symbolic links; a path in another file system is unchanged.

    Parameters
    ----------
    path
        Path as written: relative to `folder`, absolute, below the home folder (``~/``), or a URI ``file:///...``.
    folder
        Folder of the pipeline file.

    Raises
    ------
    PipelineFileError
        If there is no home folder, or the symbolic links form a loop.
    """
    if _FILE_LINK.match(path):
        path = unquote(urlsplit(path).path)
    elif is_link(path):
        return path
    try:
        return str((folder / home_expanded(path)).resolve())
    except (OSError, RuntimeError, ValueError) as error:
        raise PipelineFileError(f"the path {path!r} leads nowhere: {error}; correct it") from error


def home_expanded(path: str) -> Path:
    """Return a path with a leading ``~`` replaced by the home folder.

    Raises
    ------
    PipelineFileError
        If there is no home folder: HOME is not set, and the system's user database has no entry for the user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise PipelineFileError(
            f"the path {path!r} begins with '~', but there is no home folder; set HOME, or write the path from the root"
        ) from error


def table_location(path: str) -> str:
    """Return the location of a Delta table in the form that `deltalake` needs.

    Raises
    ------
    DeltaTableError
        If `deltalake` would misinterpret characters of the path, and read or write elsewhere.
    """
    refused = None if is_link(path) else _REFUSED_IN_TABLES.search(path)
    if refused is not None:
        raise DeltaTableError(
            f"the path {path!r} holds {refused[0]!r}, which Delta's library does not take literally in a table's path; "
            "rename that folder, or keep the tables in another one (`path` in the pipeline file)"
        )
    return path


def beside(path: str, end: str) -> str:
    """Return the path of a table that belongs to the table at `path`."""
    return f"{path.rstrip('/')}{end}"


def same_table(one: str, other: str) -> bool:
    """Return whether two absolute paths, however they are spelled, are those of one table."""
    return PurePosixPath(one) == PurePosixPath(other)


def sqlite_url(file: Path) -> str:
    """Return the SQLAlchemy URL of a SQLite file."""
    from sqlalchemy.engine import URL  # noqa: PLC0415 - heavy, and not needed to look at paths

    return URL.create("sqlite", database=str(file)).render_as_string(hide_password=False)


def sqlite_file(url: str) -> Path | None:
    """Return the file of a run catalog in SQLite, whose path in the URL is absolute; None for other catalogs."""
    from sqlalchemy.engine import make_url  # noqa: PLC0415 - as above
    from sqlalchemy.exc import ArgumentError  # noqa: PLC0415 - as above

    try:
        parsed = make_url(url)
    except ArgumentError:
        return None  # the catalog raises its own error for it
    name = parsed.database
    return Path(name) if parsed.get_backend_name() == "sqlite" and name and name.startswith("/") else None


def local_url(url: str, folder: Path) -> str:
    """Return the URL of a run catalog; a SQLite path is made absolute.

    Parameters
    ----------
    url
        URL as written in the pipeline file.
    folder
        Folder of the pipeline file, which is the base of relative paths.
    """
    from sqlalchemy.engine import make_url  # noqa: PLC0415 - as above
    from sqlalchemy.exc import ArgumentError  # noqa: PLC0415 - as above

    try:
        parsed = make_url(url)
    except ArgumentError:
        return url  # the catalog raises its own error for it
    name = parsed.database
    if parsed.get_backend_name() != "sqlite" or not name or name == ":memory:" or name.startswith("file:"):
        return url
    return parsed.set(database=anchored(name, folder)).render_as_string(hide_password=False)
