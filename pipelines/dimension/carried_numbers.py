"""The surrogate keys that facts carry, as far as they forbid to number the members of a dimension from 1 again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.compute as pc

from headrace.pipelines.delta.reads import scan_table
from headrace.pipelines.delta.tables import has_table, open_table
from headrace.pipelines.errors import DeltaTableError

if TYPE_CHECKING:
    from headrace.pipelines.config.model import PipelineConfig

__all__ = ["refuse_numbering_again"]


def refuse_numbering_again(config: PipelineConfig, name: str) -> None:
    """Refuse to create the table of a dimension while the facts carry surrogate keys of its members.

    New members would be numbered from 1 and share the numbers of the members that the lost table held.

    Parameters
    ----------
    config, name
        Configuration of the pipeline, and name of a dimension whose table does not exist.

    Raises
    ------
    DeltaTableError
        If a fact has the key of a member. The keys of special members, which are below 0, are the same in each table.
    """
    if not has_table(config.sink.path):
        return
    facts = open_table(config.sink.path)
    there = {field.name for field in facts.schema().fields}
    for column in (f"{item.role}_key" for item in config.lookups if item.dimension == name):
        if column in there and any(pc.any(pc.greater(batch[0], 0)).as_py() for batch in scan_table(facts, [column])):
            raise DeltaTableError(
                f"dimension {name!r}: there is no Delta table at {config.dimensions[name].path}, but the facts of "
                f"{config.sink.path} carry the numbers of its members in {column!r}, which a new table would give to "
                f"other members. Put the table back, or correct dimensions.{name}.path; or, to begin again, remove the "
                f"fact table and the checkpoint {config.checkpoint} too, so that the next run loads all files again"
            )
