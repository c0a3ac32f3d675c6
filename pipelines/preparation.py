"""A pipeline made ready to run: its dimensions, lookups and duplicates checked against the Delta tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.etl import Dimension, Duplicates, KeyRule, Lookup
from headrace.pipelines.column_types import arrow_schema, arrow_type
from headrace.pipelines.delta_tables import DeltaHandle, create_dimension, has_table
from headrace.pipelines.errors import DeltaTableError, PipelineFileError
from headrace.pipelines.stages import DUPLICATES_ROLE, Prepared

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.pipelines.config import DimensionConfig, PipelineConfig

__all__ = ["prepare"]

_INFERRED_FLAG = "is_inferred"


def prepare(config: PipelineConfig, parallelism: int) -> Prepared:
    """Check a pipeline against its Delta tables, and create dimensions whose columns it gives.

    Parameters
    ----------
    config
        The pipeline file.
    parallelism
        The number of shards where the file names none.

    Raises
    ------
    DeltaTableError
        If a dimension is missing or lacks a column.
    DeclarationError, KeyInputError, PipelineFileError
        If a lookup or the duplicates cannot work on these columns.
    """
    stream = arrow_schema(config.source.columns)
    dimensions = {name: _dimension(config, name) for name in config.dimensions}
    lookups = {
        item.role: Lookup(dimensions[item.dimension], item.role, dict(item.on), item.policy, tuple(item.carry))
        for item in config.lookups
    }
    for lookup in lookups.values():
        lookup.check(stream)
    duplicates = _duplicates(config, stream)
    shards = {
        item.role: config.dimensions[item.dimension].shards or parallelism
        for item in config.lookups
        if item.policy == "infer"
    }
    if config.duplicates is not None:
        shards[DUPLICATES_ROLE] = config.duplicates.shards or parallelism
    prepared = Prepared(config, stream, lookups, duplicates, shards)
    _check_names(prepared)
    return prepared


def _dimension(config: PipelineConfig, name: str) -> Dimension:
    """Return a dimension as its Delta table has it."""
    declared = config.dimensions[name]
    surrogate = config.surrogate_key(name)
    rules = {column: KeyRule(tuple(steps)) for column, steps in declared.rules.items()}
    if not has_table(declared.path):
        _create(declared, name, surrogate, rules)
    schema = DeltaHandle(declared.path).schema()
    for column in (*declared.natural_key, surrogate):
        if column not in schema.names:
            raise DeltaTableError(
                f"dimension {name!r}: the Delta table {declared.path} has no column {column!r}; "
                f"it has {', '.join(schema.names)}"
            )
    if schema.field(surrogate).type != pa.int64():
        raise DeltaTableError(
            f"dimension {name!r}: the surrogate key {surrogate!r} is {schema.field(surrogate).type}; it must be bigint"
        )
    flag = _INFERRED_FLAG if _INFERRED_FLAG in schema.names else None
    columns = pa.schema([field for field in schema if field.name not in {surrogate, flag}])
    return Dimension(name, tuple(declared.natural_key), surrogate, columns, rules, inferred_flag=flag)


def _create(declared: DimensionConfig, name: str, surrogate: str, rules: Mapping[str, KeyRule]) -> None:
    if declared.columns is None:
        raise DeltaTableError(
            f"dimension {name!r}: there is no Delta table at {declared.path}; create it with `headrace dimension "
            f"create`, or give dimensions.{name}.columns to begin with an empty one"
        )
    columns = pa.schema([pa.field(column, arrow_type(kind)) for column, kind in declared.columns.items()])
    create_dimension(declared.path, Dimension(name, tuple(declared.natural_key), surrogate, columns, rules))


def _duplicates(config: PipelineConfig, stream: pa.Schema) -> Duplicates | None:
    declared = config.duplicates
    if declared is None:
        return None
    key = pa.schema([stream.field(name) for name in declared.key])
    duplicates = Duplicates(key, declared.action, tuple(declared.order_by))
    duplicates.check(stream)
    return duplicates


def _check_names(prepared: Prepared) -> None:
    """Refuse two columns of one name in the facts, and partition columns that facts do not have."""
    names: list[Any] = prepared.fact_schema.names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise PipelineFileError(f"the facts would have two columns {repeated[0]!r}; give the lookup another role")
    for name in prepared.config.sink.partition_by:
        if name not in names:
            raise PipelineFileError(
                f"sink.partition_by names {name!r}, which the facts do not have; they have {', '.join(names)}"
            )
