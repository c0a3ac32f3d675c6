"""Creation of a dimension with history as a Delta table: no members yet, only the special members."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.history import special_versions
from headrace.pipelines.delta.commits import Commit, commit_exactly
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.delta.live_files import LiveFiles, read_live_file
from headrace.pipelines.delta.row_changes import create_row_table
from headrace.pipelines.delta.tables import has_table, open_table
from headrace.pipelines.errors import DeltaTableError, TableMovedError
from headrace.pipelines.history.layout import delta_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltalake import DeltaTable

    from headrace.etl.history import History

__all__ = ["DECLARATION", "add_special_members", "check_declaration", "create_history", "special_rows"]

_LOG = logging.getLogger(__name__)
_ADDED: Final = "headrace:special"

DECLARATION: Final = "headrace.history"


def create_history(path: str, history: History) -> None:
    """Create the Delta table of a dimension with history, with its special members.

    The table has deletion vectors, so that changes need not write data files again.

    Raises
    ------
    DeltaTableError
        If the table already exists or cannot be written.
    """
    schema = delta_schema(history)
    if has_table(path):
        raise DeltaTableError(f"there is a Delta table at {path} already; name another folder, or remove the table")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeltaTableError(f"the Delta table at {path} cannot be created: {error}") from error
    with FileWriter(FileSpec(path, schema)) as writer:
        for batch in special_rows(history).to_batches():
            writer.write(batch)
        files = writer.close()
    create_row_table(path, schema, files, {DECLARATION: json.dumps(_stored_form(history))})


def special_rows(history: History) -> pa.Table:
    """Return the special members as rows of the Delta table, which hold no entries."""
    versions, schema = special_versions(history), delta_schema(history)
    hidden = [pa.nulls(versions.num_rows, field.type) for field in list(schema)[versions.num_columns :]]
    return pa.Table.from_arrays([*versions.columns, *hidden], schema=schema)


def add_special_members(path: str, history: History) -> tuple[int, ...]:
    """Add the special members that a table lacks, and return their surrogate keys.

    The commit succeeds only at the version after the one that was searched, so two concurrent runs add a member once.
    """
    surrogate = history.dimension.surrogate_key
    wanted = special_rows(history)
    while True:
        table = open_table(path)
        there = _special_keys(path, table, surrogate)
        missing = wanted.filter(pa.array([key not in there for key in wanted.column(surrogate).to_pylist()]))
        if not missing.num_rows:
            return ()
        with FileWriter(FileSpec(path, wanted.schema)) as writer:
            for batch in missing.combine_chunks().to_batches():
                writer.write(batch)
            files = writer.close()
        added = tuple(missing.column(surrogate).to_pylist())
        commit = Commit(_ADDED, table.version(), {"special": list(added)})
        try:
            commit_exactly(path, table, table.version(), files, commit)
        except TableMovedError:
            continue
        _LOG.warning("the special members %s were added to %s", ", ".join(map(str, added)), path)
        return added


def _special_keys(path: str, table: DeltaTable, surrogate: str) -> set[int]:
    """Return the negative surrogate keys in a table, from the files that may have some."""
    found: set[int] = set()
    schema = pa.schema([(surrogate, pa.int64())])
    for file in LiveFiles(path).at(table.version()):
        least = file.bounds(surrogate)[0]
        if least is None or least < 0:
            for _, batch in read_live_file(path, file, schema):
                found.update(batch.filter(pc.less(batch.column(0), 0)).column(0).to_pylist())
    return found


def check_declaration(properties: Mapping[str, str], history: History, label: str, path: str) -> None:
    """Raise an error unless the versions in a table follow from its changes under this declaration.

    Parameters
    ----------
    properties
        Properties of the table. A table that was made without Headrace has no declaration and is accepted.
    history, label, path
        The declaration, the name of the dimension in messages, and the path of its table.

    Raises
    ------
    DeltaTableError
        If the table was made with another type of an attribute, other rules of the key, or another end of time.
    """
    stored = json.loads(properties.get(DECLARATION, "{}"))
    now = _stored_form(history)
    # An attribute that was added later has no value in stored versions, which is what their changes say. But entries
    # record partial changes of each attribute, and all changes of the other types.
    known, partial = stored.get("types", {}), history.partial is not None
    now["types"] = {name: kind for name, kind in now["types"].items() if name in known or kind != "2" or partial}
    differing = [name for name, value in stored.items() if now.get(name) != value]
    if differing:
        name = differing[0]
        raise DeltaTableError(
            f"{label}: the Delta table {path} was made with {name} {stored[name]}, and the declaration says "
            f"{now.get(name)}; restore the declaration, or make the dimension again from all changes"
        )


def _stored_form(history: History) -> dict[str, Any]:
    """Return what the stored versions depend on; names of columns of changes are not part of it."""
    dimension = history.dimension
    return {
        "natural_key": list(dimension.natural_key),
        "rules": {name: repr(dimension.rule(name)) for name in dimension.natural_key},
        "types": {name: history.type_of(name) for name in dimension.attributes.names},
        "partial": history.partial is not None,
        "instants": str(history.instant_type),
        "sequence": str(history.stored_sequence),
        "end": None if history.end is None else history.end.isoformat(),
    }
