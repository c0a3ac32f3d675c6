"""Discovery of the files in a source folder, with their sizes and modification times.

File names are literal. A name with ``*``, ``[``, ``%``, a colon or a newline refers to exactly that file; only
`source.files` is a pattern. `headrace.pipelines.source.ledger` records the files that were loaded before.
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
    "leave_out_advice",
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
        Path relative to the source folder, with ``/`` as the separator.
    size
        Size in bytes.
    mtime_ns
        Modification time in nanoseconds since 1970. Dates after the year 2262 are stored as that year.
    """

    name: str
    size: int
    mtime_ns: int


class LeftOut(NamedTuple):
    """A file or folder that was not read, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Found:
    """The files of a source folder, stored as columns so that a million files need little memory.

    Parameters
    ----------
    names
        Relative paths, in no particular order.
    sizes, mtimes
        Size in bytes, and modification time in nanoseconds since 1970, of each file.
    left_out
        Skipped entries that the user may not expect: subfolders, dangling links, pipes. Hidden names, and names that
        the pattern does not match, are skipped without a report.
    """

    names: list[str]
    sizes: NDArray[np.int64]
    mtimes: NDArray[np.int64]
    left_out: tuple[LeftOut, ...] = ()

    def file(self, index: int) -> FoundFile:
        """Return the file at an index."""
        return FoundFile(self.names[index], int(self.sizes[index]), int(self.mtimes[index]))


@dataclass
class _Listing:
    """Results of a folder traversal so far."""

    place: str | None
    names: list[str] = field(default_factory=list)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    mtimes: array[int] = field(default_factory=lambda: array("q"))
    left_out: list[LeftOut] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)


def discover(
    folder: str, pattern: str | None = None, *, recursive: bool = False, place: str | None = "source"
) -> Found:
    """List the files of a source folder.

    Parameters
    ----------
    folder
        Path of the folder, taken literally.
    pattern
        Pattern for file names, see `name_matcher`; None for all files. Folder names need not match it.
    recursive
        Whether the source includes the files of subfolders.
    place
        Field of the source in the pipeline file, for messages; None for a folder that is no source of it.

    Returns
    -------
    Found
        Files of the folder. Names that begin with ``.`` or ``_`` are skipped, including the contents of such folders. A
        link to a file counts as a file; a link to a folder is never followed. A file that vanishes during the listing
        is skipped.

    Raises
    ------
    SourceFileError
        If a folder cannot be listed, or a file or folder name is not UTF-8.
    """
    matches = name_matcher(pattern)
    found = _Listing(place, folders=[""])
    while found.folders:
        _list_folder(folder, found.folders.pop(), found, matches, recursive=recursive)
    return Found(
        found.names,
        np.frombuffer(found.sizes, dtype=np.int64) if found.sizes else np.empty(0, dtype=np.int64),
        np.frombuffer(found.mtimes, dtype=np.int64) if found.mtimes else np.empty(0, dtype=np.int64),
        tuple(sorted(found.left_out)),
    )


def examine(folder: str, name: str) -> FoundFile | None:
    """Return a source file in its current state; None if it does not exist or is not a regular file."""
    try:
        status = os.stat(os.path.join(folder, name))  # noqa: PTH116, PTH118 - `Path` would normalize the name
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SourceFileError(_unreadable(f"the file {name!r} of {folder}", error)) from error
    return FoundFile(name, status.st_size, date_of(status)) if stat.S_ISREG(status.st_mode) else None


def fingerprint(folder: str, file: FoundFile) -> str | None:
    """Return a hash of the entire content of a file.

    Returns
    -------
    str or None
        32 hexadecimal digits of SHA-256; None if the file cannot be read, or differs from the given file.
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
    """Return a function that tests whether a file name matches a pattern.

    Parameters
    ----------
    pattern
        Pattern with ``*`` for any text, ``?`` for one character, ``[a-c]`` for one of these, ``[!a-c]`` for none of
        these, and ``{csv,csv.gz}`` for one of several. The whole name must match, case-sensitively. None matches every
        name.

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
    r"""Return a name with its control characters escaped, so that it fits on one line.

    Examples
    --------
    >>> printable("a\nb"), printable("ünï")
    ('a\\nb', 'ünï')
    """
    return name if name.isprintable() else "".join(map(_printable, name))


def leave_out_advice(name: str, *, skippable: bool, source: str | None = None) -> str:
    """Return how to continue without a file of a source: by a command, or by moving it, if no command knows the source.

    Examples
    --------
    >>> print(leave_out_advice("a.csv", skippable=True))
    leave it out with: headrace source skip PIPELINE a.csv
    >>> print(leave_out_advice("a.csv", skippable=False))
    leave it out: move it to another folder, and run again
    """
    if skippable:
        return f"leave it out with: {skip_command(name, source)}"
    return "leave it out: move it to another folder, and run again"


def skip_command(name: str, source: str | None = None) -> str:
    r"""Return the command that skips a file of a source, on one line and quoted for the shell.

    Examples
    --------
    >>> print(skip_command("a b.csv"))
    headrace source skip PIPELINE 'a b.csv'
    >>> print(skip_command("-a.csv"))
    headrace source skip PIPELINE ./-a.csv
    >>> print(skip_command("a\nb.csv"))
    headrace source skip PIPELINE $'a\U0000000ab.csv'
    >>> print(skip_command("a.csv", "payments"))
    headrace source skip PIPELINE a.csv --source payments
    """
    path = f"./{name}" if name.startswith("-") else name
    named = "" if source is None else f" --source {shlex.quote(source)}"
    return f"headrace source skip PIPELINE {shlex.quote(path) if path.isprintable() else _ansi_quoted(path)}{named}"


def _ansi_quoted(text: str) -> str:
    """Return text in the ``$'...'`` quotes of bash, ksh and zsh, which support escapes for control characters."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in escaped) + "'"


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _alternatives(pattern: str) -> list[str]:
    """Return the patterns without braces that a pattern with ``{a,b}`` expands to."""
    match = re.search(r"\{([^{}]*,[^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [each for part in match[1].split(",") for each in _alternatives(f"{before}{part}{after}")]


def _list_folder(
    source: str, below: str, found: _Listing, matches: Callable[[str], object], *, recursive: bool
) -> None:
    """Add the contents of one folder, and append the subfolders to read to the list of folders."""
    try:
        with os.scandir(os.path.join(source, below)) as entries:  # noqa: PTH118 - as in `examine`
            for entry in entries:
                if not entry.name.startswith(_HIDDEN):
                    _add_entry(entry, below + entry.name, found, matches, recursive=recursive)
    except FileNotFoundError as error:
        if not below:
            remedy = "create it" if found.place is None else f"create it, or correct {found.place}.path"
            raise SourceFileError(f"there is no folder {source}; {remedy}") from error
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
            remedy = "apply it by itself" if found.place is None else f"{found.place}.recursive: true reads its files"
            found.left_out.append(LeftOut(name, f"a folder; {remedy}"))
    elif matches(entry.name):
        _require_text(entry)
        _add_file(entry, name, found)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links, which `_add_file` reports
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
    """Raise an error if a name is not UTF-8: the ledger and the tables could not store it as text."""
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
    """Return a modification time in nanoseconds since 1970, limited to the 64-bit range.

    One process compares the dates that another process recorded, so every process must get dates from this function.
    """
    return min(status.st_mtime_ns, _LATEST)


def _unreadable(what: str, error: OSError) -> str:
    return f"{what} cannot be read: {error.strerror or error}; check its permissions and the disk, then run again"
