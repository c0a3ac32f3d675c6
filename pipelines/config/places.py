"""Places of a pipeline file that must be apart: the tables, and the folders of files that are not theirs.

Two tables in one folder mix their rows. `VACUUM` removes what lies in the folder of a table and is not named by its
log, such as another table, a source, or a ledger. Does not look at the file system.
"""

from __future__ import annotations

import itertools
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from headrace.pipelines.config.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.pipelines.config.problems import DocumentPath

__all__ = ["apart"]


def apart(
    tables: Mapping[DocumentPath, str],
    sources: Mapping[DocumentPath, str],
    checkpoint: str | None,
    replicas: str | None,
) -> list[Problem]:
    """Return the problems of tables and folders that meet.

    Dimensions may share a table: a member can be looked up by several natural keys. A table may lie below the folder of
    a source, which ignores subfolders.

    Parameters
    ----------
    tables, sources
        Absolute path of each table and of each source, by its position in the file.
    checkpoint, replicas
        Absolute paths of the folders that the pipeline keeps for itself, if they are known.
    """
    own: dict[DocumentPath, str | None] = {("checkpoint",): checkpoint, ("replicas",): replicas}
    folders = {**sources, **{location: path for location, path in own.items() if path is not None}}
    problems: list[Problem] = []
    for (one, first), (other, second) in itertools.combinations(tables.items(), 2):
        shared = one[0] == other[0] == "dimensions" and first == second
        if not shared:
            problems += _met(other, second, one, first) or _met(one, first, other, second)
    for (folder, path), (table, place) in itertools.product(folders.items(), tables.items()):
        problems += _met(folder, path, table, place)
    return problems


def _met(location: DocumentPath, path: str, table: DocumentPath, place: str) -> list[Problem]:
    """Return the problem if a path is that of a table or below it."""
    if not PurePosixPath(path).is_relative_to(PurePosixPath(place)):
        return []
    name, owner = (".".join(map(str, each)) for each in (location, table))
    text = f"{name}: {path} is the table of {owner}, or lies in its folder; name a folder of its own"
    return [Problem(location, text)]
