"""The dimension that receives changes, and its tables: checked before anything is written, created if missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.pipelines.batch.error_rows import ERROR_SCHEMA
from headrace.pipelines.config.history import history_of
from headrace.pipelines.delta.support import describe, refuse_float_keys, refuse_twins, require_row_changes
from headrace.pipelines.delta.tables import create_table, has_table, open_table
from headrace.pipelines.dimension.carried_numbers import refuse_numbering_again
from headrace.pipelines.errors import DeltaTableError
from headrace.pipelines.history.layout import delta_schema
from headrace.pipelines.history.moved import ensure_moved_table
from headrace.pipelines.history.tables import add_special_members, check_declaration, create_history
from headrace.pipelines.paths import ERRORS, beside
from headrace.pipelines.rejects.rows import OPEN, count_rejects

if TYPE_CHECKING:
    from headrace.etl.history import History
    from headrace.pipelines.changes.parents import ParentTable
    from headrace.pipelines.changes.snapshots import Snapshot
    from headrace.pipelines.config.model import PipelineConfig, SourceConfig

__all__ = ["ChangeTarget", "changes_not_applied", "changes_of", "check_table", "errors_path", "prepare_target"]


@dataclass(frozen=True)
class ChangeTarget:
    """A dimension with history that receives changes.

    Parameters
    ----------
    config
        Configuration of the pipeline that declares the dimension.
    name
        Name of the dimension.
    history
        Its declaration.
    source
        Source configuration of the files.
    snapshot
        Snapshot that the files are; None for files of changes.
    parents
        Tables of the dimensions that its members refer to.
    """

    config: PipelineConfig
    name: str
    history: History
    source: SourceConfig
    snapshot: Snapshot | None = None
    parents: tuple[ParentTable, ...] = ()

    @property
    def path(self) -> str:
        """Path of the dimension's Delta table."""
        return self.config.dimensions[self.name].path


def errors_path(dimension_path: str) -> str:
    """Return the path of the table of changes that were not applied."""
    return beside(dimension_path, ERRORS)


def changes_of(config: PipelineConfig, name: str) -> PipelineConfig:
    """Return the pipeline with the changes of a dimension that were not applied in place of its rejected rows.

    Functions of `headrace.pipelines.rejects` list, show and dismiss them by it.

    Raises
    ------
    UnknownDimensionError, PipelineFileError
        If the dimension is not declared, or has no history.
    """
    history_of(config, name)
    sink = config.sink.model_copy(update={"errors": errors_path(config.dimensions[name].path)})
    return config.model_copy(update={"sink": sink})


def changes_not_applied(config: PipelineConfig) -> dict[str, int]:
    """Return the number of open changes that were not applied, by dimension with history that has any."""
    dated = [name for name, declared in config.dimensions.items() if declared.history is not None]
    counts = {name: count_rejects(changes_of(config, name), [OPEN]) for name in dated}
    return {name: count for name, count in counts.items() if count}


def prepare_target(target: ChangeTarget) -> bool:
    """Check the tables, and create those that are missing. Return whether the dimension was created."""
    label, history = f"dimension {target.name!r}", target.history
    refuse_twins(delta_schema(history).names, label)
    refuse_float_keys(history.dimension.key_schema, label)
    created = not has_table(target.path)
    if created:
        refuse_numbering_again(target.config, target.name)
        create_history(target.path, history)
    else:
        check_table(target.path, history, label)
        add_special_members(target.path, history)
    errors = errors_path(target.path)
    if not has_table(errors):
        create_table(errors, ERROR_SCHEMA)
    ensure_moved_table(target.path, history)
    return created


def check_table(path: str, history: History, label: str) -> None:
    """Raise an error unless the table has exactly the columns of the declaration, and its rows can be changed."""
    table = describe(open_table(path), path)
    require_row_changes(table, label)
    check_declaration(table.properties, history, label, path)
    wanted = {field.name: field.type for field in delta_schema(history)}
    there = {field.name: field.type for field in table.schema}
    missing = [name for name in wanted if name not in there]
    if missing:
        raise DeltaTableError(
            f"{label}: the Delta table {path} has no column {missing[0]!r}; it has {', '.join(there)}. A dimension "
            "that was made with another declaration of its history has to be made again from all changes"
        )
    more = [name for name in there if name not in wanted]
    if more:
        raise DeltaTableError(
            f"{label}: the Delta table {path} has the column {more[0]!r}, which is not declared, so changed rows would "
            f"lose its values; declare it in dimensions.{history.dimension.name}.columns, or drop it"
        )
    for name, kind in wanted.items():
        if not _same(there[name], kind):
            raise DeltaTableError(
                f"{label}: the Delta table {path} has column {name!r} as {there[name]}, but the declaration says {kind}"
            )


def _same(there: pa.DataType, declared: pa.DataType) -> bool:
    """Return whether types are equal, apart from names of list items and nullability."""
    if pa.types.is_list(declared):
        if not pa.types.is_list(there) or there.value_type.num_fields != declared.value_type.num_fields:
            return False
        parts = [
            (there.value_type.field(i), declared.value_type.field(i)) for i in range(declared.value_type.num_fields)
        ]
        return there.value_type.num_fields == len(parts) and all(
            one.name == other.name and _same(one.type, other.type) for one, other in parts
        )
    return there == declared
