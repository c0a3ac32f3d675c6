"""Inferred members of a dimension without history, completed by their own records, which arrive later.

A dimension with history is completed by its changes, see `headrace.pipelines.changes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.history.values import rows_differ, single
from headrace.etl.ranking import key_text, rank_rows
from headrace.pipelines.config.column_types import arrow_schema
from headrace.pipelines.config.declared import spellings
from headrace.pipelines.delta.reads import plain_schema
from headrace.pipelines.delta.tables import refuse_far_times
from headrace.pipelines.dimension.columns import checked_keys, merged
from headrace.pipelines.dimension.inferred import FLAG, inferred_members, require_flag
from headrace.pipelines.dimension.tables import (
    declared_dimension,
    members_with,
    opened_dimension,
    refuse_long_members,
)
from headrace.pipelines.errors import DeltaTableError, OtherCommandError
from headrace.storage.format import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltalake import DeltaTable

    from headrace.pipelines.config.model import PipelineConfig

__all__ = ["Completion", "complete_members", "completing_columns"]

_ATTEMPTS: Final = 20
_NAMED: Final = 5


@dataclass(frozen=True)
class Completion:
    """Result of `complete_members`.

    Parameters
    ----------
    dimension, path
        Name and path of the dimension.
    completed
        Number of inferred members that got their record.
    complete_already
        Number of records that members have already.
    inferred
        Number of members that are still inferred.
    """

    dimension: str
    path: str
    completed: int
    complete_already: int
    inferred: int


def completing_columns(config: PipelineConfig, name: str) -> pa.Schema:
    """Return the columns of records of inferred members: natural key and attributes, with their types.

    Raises
    ------
    DeltaTableError
        If the dimension has a history, no table, no flag of inferred members, or lacks a declared column.
    """
    table, path = opened_dimension(config, name)
    declared = config.dimensions[name]
    if declared.history is not None:
        raise OtherCommandError(
            f"dimension {name!r} has a history, so a change completes an inferred member: `headrace dimension apply "
            f"{name} SOURCE`"
        )
    there = plain_schema(pa.schema(table.schema().to_arrow()))
    require_flag(there, name, path)
    apart = {config.surrogate_key(name), FLAG, *spellings(declared).values()}
    wanted = there if declared.columns is None else arrow_schema(declared.columns)
    columns = [field for field in wanted if field.name not in apart]
    missing = [field.name for field in columns if field.name not in there.names]
    if missing:
        raise DeltaTableError(
            f"dimension {name!r}: the Delta table {path} has no column {missing[0]!r}; add it: headrace dimension "
            f"add-column {name} {missing[0]} TYPE"
        )
    return pa.schema([field.remove_metadata() for field in columns])


def complete_members(config: PipelineConfig, name: str, rows: pa.Table) -> Completion:
    """Give inferred members their records, in one commit: their attributes are set, and they are inferred no more.

    A record that its member has already changes nothing, so a call can be repeated.

    Parameters
    ----------
    config, name
        Configuration of the pipeline, and name of the dimension in it.
    rows
        Records of members with the columns of `completing_columns`, in any order.

    Raises
    ------
    DeltaTableError
        If a record has no member, its member has another record already, a key is null or occurs twice, or a value does
        not fit. Nothing was written.
    """
    columns = completing_columns(config, name)
    missing = [each for each in columns.names if each not in rows.column_names]
    if missing:
        raise DeltaTableError(f"the source has no column {missing[0]!r}; it has {', '.join(rows.column_names)}")
    dimension = declared_dimension(config, name)
    keys = checked_keys(dimension, rows)
    refuse_long_members(config, dimension, rows)
    attributes = [each for each in columns.names if each not in dimension.natural_key]
    for _ in range(_ATTEMPTS):
        table, path = opened_dimension(config, name)
        surrogate = config.surrogate_key(name)
        read = [surrogate, FLAG, *dimension.natural_key, *attributes]
        wanted = pa.table(dict(zip(dimension.natural_key, keys, strict=True)))
        members, unknown = members_with(table, dimension, wanted, read)
        _refuse_unknown(name, keys, unknown)
        if members.num_rows != rows.num_rows:
            raise DeltaTableError(
                f"dimension {name!r} has several members with one natural key; see: headrace dimension check {name}"
            )
        place = _places(keys, [single(members.column(each)) for each in dimension.natural_key])
        given = _given(rows.select(attributes).take(pa.array(place)), members.select(attributes).schema)
        inferred = np.asarray(pc.fill_null(single(members.column(FLAG)), fill_value=False))
        differs = rows_differ(
            [single(each) for each in given.columns], [single(members.column(each)) for each in attributes], len(place)
        )
        _refuse_other(name, [key.take(pa.array(place[differs & ~inferred])) for key in keys])
        changes = given.append_column(surrogate, members.column(surrogate)).filter(pa.array(inferred))
        if not changes.num_rows or _merged(table, path, surrogate, attributes, changes):
            done, left = changes.num_rows, inferred_members(config, name, 0).total
            return Completion(name, path, done, rows.num_rows - done, left)
    raise DeltaTableError(
        f"other writers won {_ATTEMPTS} attempts to complete members of dimension {name!r}; run again when they ended"
    )


def _refuse_unknown(name: str, keys: Sequence[pa.Array], unknown: Sequence[int]) -> None:
    if unknown:
        raise DeltaTableError(
            f"dimension {name!r} has no member for {len(unknown)} of the records: "
            f"{_named([key.take(pa.array(unknown[:_NAMED])) for key in keys])}; leave these records out, and add the "
            "members as docs/operations.md, 'Add members to a dimension', says"
        )


def _refuse_other(name: str, keys: Sequence[pa.Array]) -> None:
    if len(keys[0]):
        raise DeltaTableError(
            f"dimension {name!r}: {len(keys[0])} of the records differ from the complete members that they name: "
            f"{_named([key.slice(0, _NAMED) for key in keys])}; leave these records out; only inferred members are "
            "completed"
        )


def _named(keys: Sequence[pa.Array]) -> str:
    return "; ".join(map(str, key_text(list(keys)).to_pylist()))


def _places(keys: Sequence[pa.Array], members: Sequence[pa.Array]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the record of each member; each member has one."""
    both = [pa.concat_arrays([key, other.cast(key.type)]) for key, other in zip(keys, members, strict=True)]
    ranks, distinct = rank_rows(both)
    records = np.empty(distinct, dtype=np.int64)
    records[ranks[: len(keys[0])]] = np.arange(len(keys[0]))
    return records[ranks[len(keys[0]) :]]


def _given(rows: pa.Table, there: pa.Schema) -> pa.Table:
    """Return attributes in the types of the table."""
    columns = []
    for field in there:
        try:
            columns.append(plain(rows.column(field.name), field.type))
        except pa.ArrowException as error:
            raise DeltaTableError(
                f"the source's column {field.name!r} does not fit {field.type}: {str(error).splitlines()[0]}"
            ) from error
    given = pa.table(columns, schema=pa.schema([field.remove_metadata() for field in there]))
    refuse_far_times(given, "the source")
    return given


def _merged(table: DeltaTable, path: str, key: str, attributes: Sequence[str], changes: pa.Table) -> bool:
    """Set attributes and flag of members; return False if another writer committed first."""
    pairs = ", ".join([*(f"`{each}` = record.`{each}`" for each in attributes), f"`{FLAG}` = false"])
    by_hand = (
        f"complete the members there: MERGE INTO delta.`{path}` AS m USING your_source AS record ON ... WHEN MATCHED "
        f"AND m.`{FLAG}` THEN UPDATE SET {pairs}"
    )
    names = {each: f"value {position}" for position, each in enumerate(attributes)}
    updates = {f'"{each}"': f'source."{given}"' for each, given in names.items()} | {f'"{FLAG}"': "false"}
    return merged(table, path, key, updates, changes.rename_columns([*names.values(), "number"]), by_hand)
