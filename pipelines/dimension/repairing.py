"""Repair of a dimension without history: what needs no decision is fixed, and the rest is listed.

`Audit.divided` says what needs no decision. Each fix is a commit of its own, at exactly the version that was checked.
If another writer commits first, the dimension is checked again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from headrace.pipelines.config.declared import special_members
from headrace.pipelines.delta.commits import Commit, commit_exactly
from headrace.pipelines.delta.support import describe, takes_files
from headrace.pipelines.delta.tables import GREATEST_KEY, open_table
from headrace.pipelines.dimension.check import Repaired
from headrace.pipelines.dimension.special_members import add_special_members
from headrace.pipelines.dimension.tables import audited, declared_dimension
from headrace.pipelines.errors import DeltaTableError, TableMovedError
from headrace.pipelines.replica.checking import rebuild

if TYPE_CHECKING:
    from headrace.etl import Dimension
    from headrace.pipelines.config.model import PipelineConfig
    from headrace.pipelines.delta.support import Described
    from headrace.pipelines.dimension.check import Audit, Repair

__all__ = ["repair_dimension"]

_ATTEMPTS: Final = 10


def repair_dimension(config: PipelineConfig, name: str, *, dry_run: bool = False) -> Repaired:
    """Fix what `check_dimension` finds and no decision is needed for, and return the rest.

    Parameters
    ----------
    config, name
        Configuration of the pipeline, and name of the dimension in it.
    dry_run
        Whether nothing is changed.

    Raises
    ------
    DeltaTableError
        If the pipeline declares no such dimension, its table cannot be read or written, or other writers committed
        first on every attempt.
    """
    fixed: dict[str, Repair] = {}
    for _ in range(_ATTEMPTS):
        with audited(config, name) as audit:
            found = audit.divided()
            fixed = {**{each.rule: each for each in found.fixed}, **fixed}
            if dry_run or not found.fixed:
                return Repaired(tuple(fixed.values()), found.left)
            _fix(config, name, audit)
    raise DeltaTableError(
        f"dimension {name!r}: other writers changed {config.dimensions[name].path} during each of {_ATTEMPTS} attempts "
        "to repair it; run again when they have ended"
    )


def _fix(config: PipelineConfig, name: str, audit: Audit) -> None:
    """Make one commit if the table must change, and build replicas again otherwise."""
    path = config.dimensions[name].path
    table = open_table(path)
    plain = takes_files(table)
    if plain and (audit.missing_members or audit.wrong_members):
        described = describe(table, path)
        add_special_members(_as_stored(config, name, described), described)
    elif plain and audit.property_behind:
        commit = Commit("", 0, properties={GREATEST_KEY: str(audit.greatest)})
        try:
            commit_exactly(path, table, audit.version, (), commit)
        except TableMovedError:
            return
    else:
        for difference in audit.differing_replicas():
            rebuild(difference, audit.version, audit.greatest)


def _as_stored(config: PipelineConfig, name: str, described: Described) -> Dimension:
    """Return the dimension with the columns of its table."""
    dimension = declared_dimension(config, name)
    flag = dimension.inferred_flag if dimension.inferred_flag in described.schema.names else None
    apart = {dimension.surrogate_key, flag}
    schema = pa.schema([field for field in described.schema if field.name not in apart])
    special = special_members(config.dimensions[name], name, schema)
    return replace(dimension, schema=schema, inferred_flag=flag, special=special, spellings={})
