"""What a pipeline file declares of a dimension, as `headrace.etl` takes it: key rules, spellings, special members."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.etl import KeyRule
from headrace.etl.errors import DeclarationError
from headrace.etl.special import SpecialMembers, exact_scalar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.pipelines.config.model import DimensionConfig

__all__ = ["CONVERT", "SPELLED", "key_rules", "special_members", "spellings"]

CONVERT = "convert"
SPELLED = "_spelled"


def key_rules(declared: DimensionConfig) -> dict[str, KeyRule]:
    """Return the normalization rule of each natural key column that has one."""
    return {
        column: KeyRule(tuple(step for step in steps if step != CONVERT), convert=CONVERT in steps)
        for column, steps in declared.rules.items()
    }


def spellings(declared: DimensionConfig) -> dict[str, str]:
    """Return the column that keeps the first spelling of a natural key column, for each that is declared."""
    columns = declared.columns or {}
    return {name: f"{name}{SPELLED}" for name in declared.natural_key if f"{name}{SPELLED}" in columns}


def special_members(declared: DimensionConfig, name: str, columns: pa.Schema) -> SpecialMembers:
    """Return the special members of a dimension, with values of the columns' types.

    Parameters
    ----------
    declared, name
        Declaration and name of the dimension.
    columns
        Columns of the dimension, with their types.

    Raises
    ------
    DeclarationError
        If a value does not fit its column.
    """
    given: dict[str, Any] = {}
    for member, values in declared.special.model_dump().items():
        given[member] = None if values is None else _typed(values, member, name, columns)
    return SpecialMembers(**given)


def _typed(values: Mapping[str, Any], member: str, name: str, columns: pa.Schema) -> dict[str, Any]:
    typed: dict[str, Any] = {}
    for column, value in values.items():
        if column not in columns.names or value is None:
            typed[column] = value
            continue
        kind = columns.field(column).type
        try:
            typed[column] = _scalar(value, kind).as_py()
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise DeclarationError(
                f"dimensions.{name}.special.{member}.{column}: {value!r} is no value of type {kind} "
                f"({str(error).splitlines()[0]}); write one that the column can hold"
            ) from error
    return typed


def _scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    """Return a value of YAML as a value of a column; text and numbers are converted, but not rounded."""
    text = isinstance(value, str) or (isinstance(value, float) and pa.types.is_decimal(kind))
    if text and pa.types.is_floating(kind):
        value = float(value)
    elif text and not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
        return pa.scalar(str(value), pa.string()).cast(kind)
    if pa.types.is_string(kind) and not isinstance(value, str):
        raise TypeError(f"YAML reads it as {type(value).__name__}; write the text in quotes")
    if isinstance(value, bool) != pa.types.is_boolean(kind):
        raise TypeError("one is true or false, the other is not")
    if isinstance(value, dt.datetime) and pa.types.is_timestamp(kind) and value.tzinfo is None:
        return pa.scalar(value, pa.timestamp("us")).cast(kind)
    return exact_scalar(value, kind)
