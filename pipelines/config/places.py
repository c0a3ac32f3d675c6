"""Places of a pipeline file that must be apart: the tables, and the folders of files that are not theirs.

Two tables in one folder mix their rows. `VACUUM` removes what lies in the folder of a table and is not named by its
log, such as another table, a source, or a ledger. Does not look at the file system.
"""

from __future__ import annotations

import itertools
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from headrace.pipelines.config.problems import Problem
from headrace.pipelines.paths import ERRORS, MOVED, RESOLUTIONS, beside, same_table, sqlite_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headrace.pipelines.config.model import DimensionConfig, LookupConfig
    from headrace.pipelines.config.problems import DocumentPath

__all__ = ["apart", "other_files", "shared_problems", "tables_of_dimensions"]


def apart(
    tables: Mapping[DocumentPath, str],
    sources: Mapping[DocumentPath, str],
    checkpoint: str | None,
    replicas: str | None,
) -> list[Problem]:
    """Return the problems of tables and folders that meet.

    Dimensions may share a table, see `shared_problems`. A table may lie below the folder of a source, which ignores
    subfolders.

    Parameters
    ----------
    tables, sources
        Absolute path of each table, and of each source and other files, by its position in the file. A table that
        belongs to another has its position, followed by the end of its name, such as ``_errors``.
    checkpoint, replicas
        Absolute paths of the folders that the pipeline keeps for itself, if they are known.
    """
    own: dict[DocumentPath, str | None] = {("checkpoint",): checkpoint, ("replicas",): replicas}
    folders = {**sources, **{location: path for location, path in own.items() if path is not None}}
    problems: list[Problem] = []
    for (one, first), (other, second) in itertools.combinations(tables.items(), 2):
        shared = one[0] == other[0] == "dimensions" and same_table(first, second)
        if not shared:
            problems += _met(other, second, one, first) or _met(one, first, other, second)
    for (folder, path), (table, place) in itertools.product(folders.items(), tables.items()):
        problems += _met(folder, path, table, place)
    return problems


def _met(location: DocumentPath, path: str, table: DocumentPath, place: str) -> list[Problem]:
    """Return the problem if a path is that of a table or below it."""
    if not PurePosixPath(path).is_relative_to(PurePosixPath(place)):
        return []
    text = (
        f"{_named(location)}: {path} is the table of {_named(table)}, or lies in its folder; name a folder of its own"
    )
    return [Problem(location, text)]


def _named(location: DocumentPath) -> str:
    """Return the name of a position in the file; of a table that belongs to another, with the end of its name."""
    last = str(location[-1])
    names, end = (location[:-1], f" (<path>{last})") if last.startswith("_") else (location, "")
    return f"{'.'.join(map(str, names))}{end}"


def tables_of_dimensions(dimensions: Mapping[str, DimensionConfig]) -> dict[DocumentPath, str]:
    """Return the path of each table of the dimensions: a history has tables of rejected changes and moved ranges."""
    tables: dict[DocumentPath, str] = {}
    for name, dimension in dimensions.items():
        place: DocumentPath = ("dimensions", name, "path")
        tables[place] = dimension.path
        if dimension.history is not None:
            ends = (ERRORS, f"{ERRORS}{RESOLUTIONS}", MOVED)
            tables |= {(*place, end): beside(dimension.path, end) for end in ends}
    return tables


def other_files(dimensions: Mapping[str, DimensionConfig], catalog: str | None) -> dict[DocumentPath, str]:
    """Return the folders of changes, and the run catalog if it is a file."""
    files: dict[DocumentPath, str] = {
        ("dimensions", name, "changes"): dimension.changes
        for name, dimension in dimensions.items()
        if dimension.changes is not None
    }
    file = None if catalog is None else sqlite_file(catalog)
    return files if file is None else files | {("catalog",): str(file)}


def shared_problems(dimensions: Mapping[str, DimensionConfig], lookups: Iterable[LookupConfig]) -> list[Problem]:
    """Return the problems of dimensions that share a table.

    That lets facts find one member by several natural keys. It suits tables whose members all come from elsewhere: an
    inferred member would have one natural key and lack the others, and a history is stored by its natural key.
    """
    inferring = {lookup.dimension for lookup in lookups if lookup.policy == "infer"}
    problems = []
    for (one, first), (other, second) in itertools.combinations(dimensions.items(), 2):
        if not same_table(first.path, second.path):
            continue
        if set(first.natural_key) == set(second.natural_key):
            reason = "and the same natural key; declare one dimension, and give each of its lookups a `role`"
        elif first.history is not None or second.history is not None:
            reason = "and a history, which has a table of its own; name another path"
        elif inferring & {one, other}:
            reason = (
                "and members that facts infer, which would lack the other natural key; give these lookups the `policy` "
                "unknown or reject, or name another path"
            )
        else:
            continue
        text = f"the dimensions {one!r} and {other!r} have the same table, {first.path}, {reason}"
        problems.append(Problem(("dimensions", other, "path"), text))
    return problems
