"""Sources of changes: the columns of a change, and how its files are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.pipelines.config.column_types import type_name
from headrace.pipelines.config.source_format import for_other_files, record_format
from headrace.pipelines.delta.tables import has_table
from headrace.pipelines.errors import PipelineFileError
from headrace.storage.records import kind_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from headrace.etl.history import History
    from headrace.pipelines.config.model import PipelineConfig, SourceConfig
    from headrace.storage.records import Kind

__all__ = ["change_columns", "change_source", "file_names", "is_table", "member_columns"]


def change_columns(history: History, *, repeated: Collection[str] = ()) -> dict[str, pa.DataType]:
    """Return the columns of changes with their types: key, attributes, and the columns that the history names.

    Parameters
    ----------
    history
        The declaration.
    repeated
        Attributes that follow from parents, so that changes do not have them.
    """
    columns = {history.effective: history.effective_type}
    if history.sequence is not None:
        columns[history.sequence] = history.sequence_type
    if history.operation is not None:
        columns[history.operation] = pa.string()
    if history.partial is not None:
        columns[history.partial] = pa.string()  # a list as text, which all formats have
    return member_columns(history, repeated=repeated) | columns


def member_columns(history: History, *, repeated: Collection[str] = ()) -> dict[str, pa.DataType]:
    """Return the columns of a snapshot with their types: key and attributes, without those that follow from parents."""
    dimension = history.dimension
    fields = (*dimension.key_schema, *dimension.attributes)
    return {field.name: field.type for field in fields if field.name not in repeated}


def change_source(config: PipelineConfig, columns: Mapping[str, pa.DataType], source: str | Path) -> SourceConfig:
    """Return the source configuration for a file or folder of changes.

    The format is that of the file names. Settings of text (delimiter, null spellings, dates, time zone) are those of
    the pipeline's own source.

    Raises
    ------
    PipelineFileError
        If there is no such file or folder, or its names do not say one format.
    """
    place = Path(source).absolute()
    form = _format(place)
    kinds = {name: type_name(kind) for name, kind in columns.items()}
    update: dict[str, Any] = {
        "path": str(place if place.is_dir() else place.parent),
        "columns": kinds,
    }
    update |= {"files": None, "recursive": False, "changed": "reload"}
    changed = for_other_files(config.source, form).model_copy(update=update)
    record_format(changed)
    return changed


def is_table(source: str | Path) -> bool:
    """Return whether a source is a Delta table."""
    return Path(source).is_dir() and has_table(str(Path(source).absolute()))


def file_names(place: Path) -> list[str]:
    """Return the names of the files of a source: a file, or the files of a folder that are not hidden."""
    files = (each for each in place.iterdir() if not each.is_dir()) if place.is_dir() else [place]
    return [file.name for file in files if file == place or not file.name.startswith((".", "_"))]


def _format(place: Path) -> Kind:
    if is_table(place):
        return "parquet"
    if not place.exists():
        raise PipelineFileError(f"there is no file or folder {place}; correct the path")
    names = file_names(place)
    found = {kind_of(name) for name in names}
    if len(found) == 1 and (form := found.pop()) is not None:
        return form
    raise PipelineFileError(
        f"{place}: the names of its files do not say one format; name them .csv, .json or .parquet"
        if names
        else f"the folder {place} has no files"
    )
