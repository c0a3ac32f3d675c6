"""The folder of an extraction: files that appear complete, and the position up to which they hold the rows.

A whole extraction appears at once. Its files are written to a hidden folder beside the destination, which takes the
destination's name when all of them are on disk.

A growing folder gets files over many runs, in the order of a column. Its file `_extract.json`, which readers skip,
holds the position: the greatest value in the committed files, and how many these are. To commit file N,

1. the hidden file `.part-N.partial` is written and synced,
2. `_extract.json` is replaced by one that says N and the new position. This commits the file,
3. the hidden file gets its visible name.

If the process is killed before step 2, the hidden file has a number that is not committed, and the next run removes it.
If it is killed after step 2, the hidden file has the committed number, and the next run gives it its name. The position
does not depend on the visible files, so they may be moved or removed after they are loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import uuid
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol, Self

from headrace.pipelines.durable import sync_file, sync_folder, write_new
from headrace.pipelines.errors import ExtractionError
from headrace.storage.file import claimed, remove_remains

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["STATE", "Destination", "GrowingFolder", "Subject", "new_folder", "writing"]

STATE = "_extract.json"
_VERSION = 1
_REMAINS = re.compile(r"\.part-[0-9]{6,}\.partial|\.extract-[0-9a-f]{32}\.tmp")


@dataclass(frozen=True)
class Subject:
    """What the files of a growing folder hold, which never changes.

    Parameters
    ----------
    source, schema, table
        Database, as messages show it, schema or None, and table.
    new_by
        Column that orders the rows.
    columns
        Arrow type of each column by its name, in order.
    """

    source: str
    schema: str | None
    table: str
    new_by: str
    columns: Mapping[str, str]


class Destination(Protocol):
    """Folder to which files are written one after the other.

    Attributes
    ----------
    folder
        Folder, for messages.
    position
        Greatest value of the ordering column in committed files, as text; None before the first row, or without order.
    files
        Number of files that were ever committed.
    """

    folder: Path
    position: str | None
    files: int

    def begin(self) -> Path:
        """Return the path to write the next file to."""

    def commit(self, position: str | None) -> str:
        """Commit the file that was begun, which is closed, and return its name.

        Parameters
        ----------
        position
            Greatest value of the ordering column so far; None if there is none.
        """


class _WholeFolder:
    position: str | None = None

    def __init__(self, folder: Path, hidden: Path) -> None:
        self.folder = folder
        self.files = 0
        self._hidden = hidden

    def begin(self) -> Path:
        return self._hidden / _name(self.files + 1)

    def commit(self, position: str | None) -> str:
        assert position is None
        path = self.begin()
        sync_file(path)
        self.files += 1
        return path.name


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Destination]:
    """Return the destination of a whole extraction, which appears at the end of the context, or never.

    Parameters
    ----------
    folder
        Folder that does not exist or is empty.

    Raises
    ------
    ExtractionError
        If there is something in the folder, or it cannot be written.
    """
    folder = folder.resolve()
    _check_new(folder)
    with writing(folder):
        remove_remains(folder.parent, re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{32}}\.partial"))
    with contextlib.ExitStack() as stack:
        with writing(folder):
            hidden = stack.enter_context(claimed(lambda: _hidden_folder(folder)))
        stack.callback(shutil.rmtree, hidden, ignore_errors=True)
        yield _WholeFolder(folder, hidden)
        with writing(folder):
            if folder.exists():
                hidden.chmod(folder.stat().st_mode)
            sync_folder(hidden)
            hidden.rename(folder)
            sync_folder(folder.parent)


class GrowingFolder:
    """Destination of an extraction that continues after the rows that were extracted before.

    Parameters
    ----------
    folder
        Folder that does not exist, is empty, or was written by such an extraction of the same subject.
    subject
        What is extracted.

    Attributes
    ----------
    position
        Greatest value of the ordering column in committed files, as text; None before the first row.
    files
        Number of files that were ever committed.

    Raises
    ------
    ExtractionError
        On entry, if the folder holds something else, another process writes to it, or it cannot be written.
    """

    def __init__(self, folder: Path, subject: Subject) -> None:
        self.folder = folder
        self.position: str | None = None
        self.files = 0
        self._subject = subject
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            _check_folder(self.folder)
            with writing(self.folder):
                self.folder.mkdir(exist_ok=True)
                sync_folder(self.folder.absolute().parent)  # else a power failure may take the position with the folder
                stack.enter_context(_locked(self.folder))
                self._load()
                self._recover()
            self._lock = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock, contextlib.suppress(OSError, ExtractionError):  # the next run removes what is left
            self._load()  # `commit` may have been interrupted, after `_extract.json` committed another file
            self._remove_remains()

    def begin(self) -> Path:
        """Return the path to write the next file to."""
        path = self._visible(self.files + 1)
        if path.exists():
            raise ExtractionError(f"{path} exists, but no extraction wrote it; move it out of {self.folder}")
        return self._partial(self.files + 1)

    def commit(self, position: str | None) -> str:
        """Commit the file that was begun, which is closed, and return its name."""
        sync_file(self._partial(self.files + 1))
        sync_folder(self.folder)
        self._save(self.files + 1, position)
        self.files, self.position = self.files + 1, position
        self._publish()
        return _name(self.files)

    def _publish(self) -> None:
        """Give the last committed file its name, if it does not have it yet."""
        partial = self._partial(self.files)
        if partial.exists():
            partial.rename(self._visible(self.files))
            sync_folder(self.folder)

    def _recover(self) -> None:
        self._publish()
        self._remove_remains()

    def _remove_remains(self) -> None:
        kept = self._partial(self.files).name  # committed, if it is there
        for path in self.folder.iterdir():
            if _REMAINS.fullmatch(path.name) and path.name != kept:
                path.unlink()

    def _load(self) -> None:
        state = self.folder / STATE
        try:
            text = state.read_bytes()
        except FileNotFoundError:
            others = [path.name for path in self.folder.iterdir() if not _REMAINS.fullmatch(path.name)]
            if others:
                raise _in_use(self.folder, others) from None
            return
        try:
            document = json.loads(text)
            version, self.files, self.position = document["version"], int(document["files"]), document["position"]
            found = Subject(**document["subject"])
        except (ValueError, KeyError, TypeError) as error:
            raise ExtractionError(f"{state} is damaged; name a new folder, or restore the file") from error
        if version != _VERSION:
            raise ExtractionError(f"{state} has version {version}, this release knows {_VERSION}; upgrade headrace")
        _check_same(found, self._subject, self.folder)

    def _save(self, files: int, position: str | None) -> None:
        document = {
            "version": _VERSION,
            "subject": asdict(self._subject),
            "files": files,
            "position": position,
        }
        written = self.folder / f".extract-{uuid.uuid4().hex}.tmp"
        write_new(written, json.dumps(document, indent=1, ensure_ascii=False).encode())
        written.replace(self.folder / STATE)
        sync_folder(self.folder)

    def _partial(self, number: int) -> Path:
        return self.folder / f".part-{number:06}.partial"

    def _visible(self, number: int) -> Path:
        return self.folder / _name(number)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Name the folder and a remedy if the operating system refuses to write there."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ExtractionError(f"cannot write {folder}: {reason}; free space, or name another folder") from error


def _name(number: int) -> str:
    return f"part-{number:06}.parquet"


def _hidden_folder(folder: Path) -> Path:
    hidden = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
    hidden.mkdir()
    return hidden


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder; the lock disappears with the process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExtractionError(f"another command writes to {folder}; wait for it, or name another folder") from None
        yield
    finally:
        os.close(descriptor)


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ExtractionError(f"{folder} is no folder; name a new folder")
    if not folder.exists() and not folder.parent.is_dir():
        raise ExtractionError(f"there is no folder {folder.parent} to make {folder.name} in; make it first")


def _check_new(folder: Path) -> None:
    _check_folder(folder)
    if folder.is_dir():
        with writing(folder):
            others = [path.name for path in folder.iterdir()]
        if others:
            raise _in_use(folder, others)
        if os.path.ismount(folder):
            raise ExtractionError(f"{folder} is the root of a file system; name a new folder in it")
        if folder.samefile("."):  # the shell would go on to see the folder that is replaced, which is empty
            raise ExtractionError(f"{folder} is the current folder, which cannot be replaced; name a new folder in it")


def _in_use(folder: Path, names: list[str]) -> ExtractionError:
    if STATE in names:
        return ExtractionError(
            f"{folder} holds the files of an extraction with --new-by; name a new or empty folder, or continue it"
        )
    return ExtractionError(f"{folder} holds {min(names)} already; name a new or empty folder")


def _check_same(found: Subject, wanted: Subject, folder: Path) -> None:
    for what, before, now in (
        ("from the database", found.source, wanted.source),
        ("from the schema", found.schema, wanted.schema),
        ("from the table", found.table, wanted.table),
        ("by the column", found.new_by, wanted.new_by),
    ):
        if before != now:
            raise ExtractionError(f"{folder} was extracted {what} {before!r}, not {now!r}; name another folder")
    if list(found.columns.items()) != list(wanted.columns.items()):
        before = ", ".join(f"{name} {dtype}" for name, dtype in found.columns.items())
        now = ", ".join(f"{name} {dtype}" for name, dtype in wanted.columns.items())
        raise ExtractionError(
            f"the files of {folder} have the columns {before}, and the table now gives {now}; select the same columns "
            "in the same order by --columns, or name another folder"
        )
