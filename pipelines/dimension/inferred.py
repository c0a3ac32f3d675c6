"""The inferred members of a dimension: facts introduced them, and their own records have not arrived yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from headrace.pipelines.delta.reads import plain_schema, scan_table
from headrace.pipelines.dimension.tables import opened_dimension
from headrace.pipelines.errors import DeltaTableError

if TYPE_CHECKING:
    from headrace.pipelines.config.model import PipelineConfig

__all__ = ["FLAG", "InferredMembers", "inferred_members", "require_flag"]

FLAG = "is_inferred"


class InferredMembers(NamedTuple):
    """Inferred members of a dimension.

    Attributes
    ----------
    version
        Version of the Delta table.
    total
        Number of inferred members.
    members
        The first of them in the order of their surrogate keys: surrogate key, natural key, and first spellings.
    """

    version: int
    total: int
    members: pa.Table


def inferred_members(config: PipelineConfig, name: str, limit: int | None = None) -> InferredMembers:
    """Return the inferred members of a dimension.

    Parameters
    ----------
    config, name
        Configuration of the pipeline, and name of the dimension in it.
    limit
        Number of members to return; None for all.

    Raises
    ------
    DeltaTableError
        If the table does not exist, or has no flag of inferred members.
    """
    table, path = opened_dimension(config, name)
    schema = plain_schema(pa.schema(table.schema().to_arrow()))
    require_flag(schema, name, path)
    declared, key = config.dimensions[name], config.surrogate_key(name)
    spelled = [each for each in (f"{column}_spelled" for column in declared.natural_key) if each in schema.names]
    wanted = list(dict.fromkeys([key, *declared.natural_key, *spelled]))
    kept = pa.schema([schema.field(each) for each in wanted]).empty_table()
    total = 0
    for batch in scan_table(table, [*wanted, FLAG]):
        rows = pa.Table.from_batches([batch.filter(pc.fill_null(batch.column(FLAG), fill_value=False))]).select(wanted)
        total += rows.num_rows
        kept = pa.concat_tables([kept.cast(rows.schema), rows]).sort_by(key)
        kept = kept if limit is None else kept.slice(0, limit)
    return InferredMembers(table.version(), total, kept)


def require_flag(schema: pa.Schema, name: str, path: str) -> None:
    """Raise `DeltaTableError` if the table of a dimension does not mark inferred members."""
    if FLAG not in schema.names or schema.field(FLAG).type != pa.bool_():
        raise DeltaTableError(
            f"dimension {name!r}: the Delta table {path} has no boolean column {FLAG!r}, so inferred members are not "
            f"marked; it has {', '.join(schema.names)}; add it: headrace dimension add-column {name} {FLAG} boolean"
        )
