"""Creation of a dimension with history as a Delta table: no members yet, only the special members."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from headrace.etl.history import special_versions
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.delta.row_changes import create_row_table
from headrace.pipelines.delta.tables import has_table
from headrace.pipelines.errors import DeltaTableError
from headrace.pipelines.history.layout import delta_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.etl.history import History

__all__ = ["DECLARATION", "check_declaration", "create_history", "special_rows"]

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
        "instants": str(history.instant_type),
        "sequence": str(history.stored_sequence),
        "end": None if history.end is None else history.end.isoformat(),
    }
