"""The special members of a dimension with history: added to a table that lacks some, since facts refer to them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from headrace.pipelines.delta.commits import Commit, commit_exactly
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.delta.live_files import LiveFiles, read_live_file
from headrace.pipelines.delta.tables import open_table
from headrace.pipelines.errors import DeltaTableError, TableMovedError
from headrace.pipelines.history.layout import delta_schema
from headrace.pipelines.history.tables import special_rows

if TYPE_CHECKING:
    from headrace.etl.history import History

__all__ = ["add_special_versions"]

_LOG = logging.getLogger(__name__)
_ATTEMPTS: Final = 20


def add_special_versions(path: str, history: History) -> list[str]:
    """Add the special members that the Delta table of a dimension lacks.

    Returns
    -------
    list of str
        Descriptions of the changes, for the summary of the run; empty if nothing changed.

    Raises
    ------
    DeltaTableError
        If other writers change the table during every attempt.
    """
    name, surrogate = history.dimension.name, history.dimension.surrogate_key
    for _ in range(_ATTEMPTS):
        table = open_table(path)
        version = table.version()
        declared = special_rows(history)
        missing = declared.filter(
            pc.invert(pc.is_in(declared.column(surrogate), _below_zero(path, surrogate, version)))
        )
        if not missing.num_rows:
            return []
        with FileWriter(FileSpec(path, delta_schema(history))) as writer:
            for batch in missing.to_batches():
                writer.write(batch)
            files = writer.close()
        try:
            commit_exactly(path, table, version, files, Commit("headrace:special", version))
        except TableMovedError:
            continue
        keys = ", ".join(map(str, missing.column(surrogate).to_pylist()))
        notice = f"dimension {name!r}: the special members {keys} were added to {path} after version {version}"
        _LOG.warning("%s", notice)
        return [notice]
    raise DeltaTableError(
        f"dimension {name!r}: other writers won {_ATTEMPTS} attempts to add special members to {path}; run again when "
        "they have ended"
    )


def _below_zero(path: str, surrogate: str, version: int) -> pa.Array:
    """Return the negative keys of a table, from the files whose statistics do not rule them out."""
    schema = pa.schema([(surrogate, pa.int64())])
    found = [pa.array([], pa.int64())]
    for file in LiveFiles(path).at(version):
        least, _ = file.bounds(surrogate)
        if least is None or least < 0:
            for _, batch in read_live_file(path, file, schema):
                keys = batch.column(0)
                found.append(keys.filter(pc.less(keys, 0)))
    return pa.concat_arrays(found)
