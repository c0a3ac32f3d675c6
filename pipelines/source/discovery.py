"""The files of a source folder: which are there now, how large they are and when they were written.

Names are literal. A name that holds ``*``, ``[``, ``%``, a colon or a newline means the file of that name and no other;
only `source.files` is a pattern. What was loaded before is the business of `headrace.pipelines.source.ledger`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import shlex
import stat
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace.pipelines.errors import SourceFileError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = [
    "Found",
    "FoundFile",
    "LeftOut",
    "date_of",
    "discover",
    "examine",
    "fingerprint",
    "name_matcher",
    "printable",
    "skip_command",
]

_HIDDEN = (".", "_")
_LATEST = 2**63 - 1
_BLOCK = 1 << 20


class FoundFile(NamedTuple):
    """One file of a source.

    Parameters
    ----------
    name
        Path relative to the source folder, its parts separated by ``/``.
    size
        Bytes.
    mtime_ns
        Modification time in nanoseconds since 1970; dates after the year 2262 count as that year.
    """

    name: str
    size: int
    mtime_ns: int


class LeftOut(NamedTuple):
    """A file or folder that was not read, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Found:
    """The files of a source folder, in columns, so that a million of them stays small.

    Parameters
    ----------
    names
        Relative paths, in no particular order.
    sizes, mtimes
        Bytes and nanoseconds since 1970 of each file.
    left_out
        What was not read and may surprise: subfolders, dangling links, pipes. Hidden names and names that the pattern
        does not match are left out without mention.
    """

    names: list[str]
    sizes: NDArray[np.int64]
    mtimes: NDArray[np.int64]
    left_out: tuple[LeftOut, ...] = ()

    def file(self, index: int) -> FoundFile:
        """Return one file."""
        return FoundFile(self.names[index], int(self.sizes[index]), int(self.mtimes[index]))


@dataclass
class _Listing:
    """What a walk through the folders has found so far."""

    names: list[str] = field(default_factory=list)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    mtimes: array[int] = field(default_factory=lambda: array("q"))
    left_out: list[LeftOut] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)


def discover(folder: str, pattern: str | None = None, *, recursive: bool = False) -> Found:
    """List the files of a source folder.

    Parameters
    ----------
    folder
        The folder, taken literally.
    pattern
        What the names of files must match, as `name_matcher` has it; None for all. Folders need not match it.
    recursive
        Whether files of subfolders belong to the source.

    Returns
    -------
    Found
        Names that begin with ``.`` or ``_`` are left out, and so is what such folders hold. A link to a file counts
        as a file, a link to a folder is never followed. A file that vanishes during the listing is skipped.

    Raises
    ------
    SourceFileError
        If a folder cannot be listed, or the name of a file or folder is not UTF-8.
    """
    matches = name_matcher(pattern)
    found = _Listing(folders=[""])
    while found.folders:
        _list_folder(folder, found.folders.pop(), found, matches, recursive=recursive)
    return Found(
        found.names,
        np.frombuffer(found.sizes, dtype=np.int64) if found.sizes else np.empty(0, dtype=np.int64),
        np.frombuffer(found.mtimes, dtype=np.int64) if found.mtimes else np.empty(0, dtype=np.int64),
        tuple(sorted(found.left_out)),
    )


def examine(folder: str, name: str) -> FoundFile | None:
    """Return a file of a source as it is now; None if it is gone or is no regular file."""
    try:
        status = os.stat(os.path.join(folder, name))  # noqa: PTH116, PTH118 - `Path` would normalize the name
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SourceFileError(_unreadable(f"the file {name!r} of {folder}", error)) from error
    return FoundFile(name, status.st_size, date_of(status)) if stat.S_ISREG(status.st_mode) else None


def fingerprint(folder: str, file: FoundFile) -> str | None:
    """Return a hash of the whole content of a file.

    Returns
    -------
    str or None
        32 hexadecimal digits of SHA-256; None if the file cannot be read, or is not the given one any more.
    """
    digest = hashlib.sha256()
    try:
        with open(os.path.join(folder, file.name), "rb", buffering=0) as stream:  # noqa: PTH118, PTH123 - as in `examine`
            while block := stream.read(_BLOCK):
                digest.update(block)
            status = os.fstat(stream.fileno())
    except OSError:
        return None
    same = (status.st_size, date_of(status)) == (file.size, file.mtime_ns)
    return digest.hexdigest()[:32] if same else None


def name_matcher(pattern: str | None) -> Callable[[str], object]:
    """Return a function that says whether a file's name matches a pattern.

    Parameters
    ----------
    pattern
        ``*`` any text, ``?`` one character, ``[a-c]`` one of these, ``[!a-c]`` none of these, ``{csv,csv.gz}`` one of
        several; the whole name must match, and case counts. None matches every name.

    Examples
    --------
    >>> matches = name_matcher("*.{csv,csv.gz}")
    >>> [bool(matches(name)) for name in ("a.csv", "a.csv.gz", "a.CSV")]
    [True, True, False]
    """
    if pattern is None:
        return lambda _name: True
    return re.compile("|".join(fnmatch.translate(each) for each in _alternatives(pattern))).match


def printable(name: str) -> str:
    r"""Return a name with its control characters escaped, so that it takes one line.

    Examples
    --------
    >>> printable("a\nb"), printable("ünï")
    ('a\\nb', 'ünï')
    """
    return name if name.isprintable() else "".join(map(_printable, name))


def skip_command(name: str) -> str:
    r"""Return the command that skips a file, on one line and quoted for a shell.

    Examples
    --------
    >>> print(skip_command("a b.csv"))
    headrace source skip PIPELINE 'a b.csv'
    >>> print(skip_command("-a.csv"))
    headrace source skip PIPELINE ./-a.csv
    >>> print(skip_command("a\nb.csv"))
    headrace source skip PIPELINE $'a\nb.csv'
    """
    path = f"./{name}" if name.startswith("-") else name
    return f"headrace source skip PIPELINE {shlex.quote(path) if path.isprintable() else _ansi_quoted(path)}"


def _ansi_quoted(text: str) -> str:
    """Return text in the ``$'...'`` quotes of bash, ksh and zsh, which have escapes for control characters."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in escaped) + "'"


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _alternatives(pattern: str) -> list[str]:
    """Return the patterns without braces that one with ``{a,b}`` stands for."""
    match = re.search(r"\{([^{}]*,[^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [each for part in match[1].split(",") for each in _alternatives(f"{before}{part}{after}")]


def _list_folder(
    source: str, below: str, found: _Listing, matches: Callable[[str], object], *, recursive: bool
) -> None:
    """Add what one folder holds; subfolders that are to be read are put on the list of folders."""
    try:
        with os.scandir(os.path.join(source, below)) as entries:  # noqa: PTH118 - as in `examine`
            for entry in entries:
                if not entry.name.startswith(_HIDDEN):
                    _add_entry(entry, below + entry.name, found, matches, recursive=recursive)
    except FileNotFoundError as error:
        if not below:
            raise SourceFileError(f"there is no folder {source}; create it, or correct source.path") from error
    except OSError as error:
        raise SourceFileError(_unreadable(f"the folder {source}/{below}".rstrip("/"), error)) from error


def _add_entry(
    entry: os.DirEntry[str], name: str, found: _Listing, matches: Callable[[str], object], *, recursive: bool
) -> None:
    if _is_folder(entry):
        _require_text(entry)
        if entry.is_symlink():
            found.left_out.append(LeftOut(name, "a link to a folder, which is never followed"))
        elif recursive:
            found.folders.append(f"{name}/")
        else:
            found.left_out.append(LeftOut(name, "a folder; source.recursive: true reads its files"))
    elif matches(entry.name):
        _require_text(entry)
        _add_file(entry, name, found)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links; `_add_file` names it
        return False


def _add_file(entry: os.DirEntry[str], name: str, found: _Listing) -> None:
    try:
        status = entry.stat()
    except OSError as error:
        if entry.is_symlink():
            found.left_out.append(LeftOut(name, f"a link that cannot be followed ({error.strerror})"))
        elif not isinstance(error, FileNotFoundError):
            found.left_out.append(LeftOut(name, f"cannot be examined ({error.strerror})"))
        return
    if not stat.S_ISREG(status.st_mode):
        found.left_out.append(LeftOut(name, "neither a file nor a folder"))
        return
    found.names.append(name)
    found.sizes.append(status.st_size)
    found.mtimes.append(date_of(status))


def _require_text(entry: os.DirEntry[str]) -> None:
    """Raise if a name is not UTF-8: it could not be kept as text in the ledger and in the tables."""
    if entry.name.isascii():
        return
    try:
        entry.name.encode()
    except UnicodeEncodeError as error:
        folder = os.path.dirname(entry.path)  # noqa: PTH120 - a `Path` of these bytes prints no better
        raise SourceFileError(
            f"the name of {os.fsencode(entry.name)!r} in {folder.encode(errors='backslashreplace').decode()} is not "
            "UTF-8; rename it, or move it out of the source folder"
        ) from error


def date_of(status: os.stat_result) -> int:
    """Return a modification time in nanoseconds since 1970, of dates that 64 bits cannot hold the latest that they can.

    A file planned by one process is compared with what another one sees, so all of them take dates from here.
    """
    return min(status.st_mtime_ns, _LATEST)


def _unreadable(what: str, error: OSError) -> str:
    return f"{what} cannot be read: {error.strerror or error}; check its permissions and the disk, then run again"
