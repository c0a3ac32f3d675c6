"""From the block `history` of a dimension in a pipeline file to its declaration, `headrace.etl.history.History`."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.etl import Dimension
from headrace.etl.errors import DeclarationError
from headrace.etl.history import AsOfLookup, History, Reference
from headrace.pipelines.config.column_types import arrow_schema, arrow_type
from headrace.pipelines.config.declared import key_rules, special_members
from headrace.pipelines.errors import PipelineFileError, UnknownDimensionError
from headrace.storage.errors import nearest

if TYPE_CHECKING:
    from headrace.pipelines.config.model import DimensionConfig, HistoryConfig, LookupConfig, PipelineConfig

__all__ = ["as_of_lookup", "children_in", "declared_history", "history_of", "parents_first", "references_of"]

_LISTS = ("upserts", "deletes", "type_0", "type_1", "type_1_current", "type_2", "audit")
_PLAIN = (
    "effective", "by_day", "sequence", "operation", "valid_from", "valid_to", "is_current", "version", "is_deleted",
    "end", "partial",
)  # fmt: skip


def history_of(config: PipelineConfig, name: str) -> History:
    """Return the declaration of a dimension with history.

    Parameters
    ----------
    config, name
        Configuration of the pipeline, and name of the dimension in it.

    Raises
    ------
    PipelineFileError
        If the dimension is not declared, has no history, or no columns.
    DeclarationError
        If an attribute has no type or two, or a column is unsuitable.
    """
    declared = config.dimensions.get(name)
    if declared is None:
        known = ", ".join(config.dimensions) or "none"
        near = nearest(name, list(config.dimensions))
        raise UnknownDimensionError(
            f"pipeline {config.name!r} has no dimension {name!r}{near}; its dimensions are {known}"
        )
    if declared.history is None:
        raise PipelineFileError(
            f"dimension {name!r} is declared without history: it has one row for each member, and changes cannot be "
            f"applied to it; declare dimensions.{name}.history"
        )
    return declared_history(name, declared, config.surrogate_key(name))


def declared_history(name: str, declared: DimensionConfig, surrogate_key: str) -> History:
    """Return the declaration of a dimension that has the block `history`.

    Raises
    ------
    PipelineFileError
        If the dimension has no columns.
    DeclarationError
        If an attribute has no type or two, or a column is unsuitable.
    """
    assert declared.history is not None
    if declared.columns is None:
        raise PipelineFileError(
            f"dimension {name!r} has a history, so it needs dimensions.{name}.columns, the types of its key and "
            "attributes"
        )
    columns = arrow_schema(declared.columns)
    special = special_members(declared, name, columns)
    dimension = Dimension(
        name, tuple(declared.natural_key), surrogate_key, columns, key_rules(declared), special=special
    )
    return History(dimension, **_options(declared.history), special=special)


def references_of(config: PipelineConfig, name: str) -> tuple[Reference, ...]:
    """Return the references of a dimension with history to its parents.

    Raises
    ------
    PipelineFileError
        If a parent is not declared, or has no history.
    DeclarationError
        If the declarations of both do not fit together.
    """
    declared = config.dimensions[name].history
    if declared is None or not declared.parents:
        return ()
    child = history_of(config, name)
    if child.sequence_type in {pa.int8(), pa.int16()}:
        raise DeclarationError(
            f"history of dimension {name!r}: changes that follow from parents are numbered by the versions of the "
            "table, so `sequence_type` needs at least four bytes; declare it as bigint"
        )
    return tuple(
        Reference(child, history_of(config, each.dimension), dict(each.on), dict(each.carry), dict(each.audit))
        for each in declared.parents
    )


def children_in(config: PipelineConfig, name: str) -> list[str]:
    """Return the dimensions whose members refer to members of a dimension, directly or through others, in order."""
    found = [name]
    for each in parents_first(config):
        if each not in found and set(found) & set(_parents(config, each)):
            found.append(each)
    return found[1:]


def parents_first(config: PipelineConfig) -> list[str]:
    """Return the names of all dimensions, each after its parents.

    Raises
    ------
    PipelineFileError
        If a dimension is its own parent, directly or through others.
    """
    sorter = TopologicalSorter({name: _parents(config, name) for name in config.dimensions})
    try:
        return [name for name in sorter.static_order() if name in config.dimensions]
    except CycleError as error:
        names = " -> ".join(reversed(error.args[1]))
        raise PipelineFileError(f"dimensions are parents of each other: {names}; leave one reference out") from error


def _parents(config: PipelineConfig, name: str) -> list[str]:
    declared = config.dimensions[name].history
    return [] if declared is None else [each.dimension for each in declared.parents]


def as_of_lookup(history: History, declared: LookupConfig) -> AsOfLookup:
    """Return the declaration of a lookup into a dimension with history.

    Raises
    ------
    DeclarationError
        If the lookup names a column or a special member that the dimension does not have.
    """
    return AsOfLookup(
        history,
        declared.role,
        dict(declared.on),
        declared.event_time,
        declared.policy,
        tuple(declared.carry),
        before_first=declared.before_first,
        null_time=declared.null_time,
        null_key=declared.null_key,
        unfit_key=declared.unfit_key,
    )


def _options(given: HistoryConfig) -> dict[str, Any]:
    """Return the options of `History` that the block gives."""
    options: dict[str, Any] = {field: getattr(given, field) for field in _PLAIN}
    options |= {field: tuple(names) for field in _LISTS if (names := getattr(given, field)) is not None}
    options["effective_type"] = arrow_type(given.effective_type)
    options["sequence_type"] = arrow_type(given.sequence_type)
    return options
