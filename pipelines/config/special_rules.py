"""Rules of a pipeline file for the special members of a dimension, their values, and the spellings of its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.pipelines.config.column_types import canonical
from headrace.pipelines.config.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.pipelines.config.model import DimensionConfig, PipelineConfig

__all__ = ["special_problems"]

_SPELLED = "_spelled"
_REJECT = "reject"


def special_problems(config: PipelineConfig, name: str) -> Iterator[Problem]:
    """Yield what is wrong with a dimension's special members and spellings, and with lookups that name them."""
    dimension = config.dimensions[name]
    declared = {member for member, values in dimension.special.model_dump().items() if values is not None}
    for place, lookup in enumerate(config.lookups):
        for field in ("null_key", "unfit_key"):
            target = getattr(lookup, field)
            if lookup.dimension == name and target not in {None, _REJECT, *declared}:
                yield Problem(
                    ("lookups", place, field),
                    f"lookup {lookup.role!r} sends facts to the member {target!r}, which dimension {name!r} does not "
                    f"declare; add `special: {{{target}: {{}}}}` to the dimension, with the values of its attributes",
                )
    if dimension.columns is not None:
        yield from _value_problems(config, name, dimension, dimension.columns)


def _value_problems(
    config: PipelineConfig, name: str, dimension: DimensionConfig, columns: dict[str, str]
) -> Iterator[Problem]:
    apart = {*dimension.natural_key, config.surrogate_key(name), "is_inferred"}
    attributes = [column for column in columns if column not in apart]
    for member, values in dimension.special.model_dump().items():
        for column, value in (values or {}).items():
            if canonical(columns.get(column, "string")) == "string" and not isinstance(value, str | None):
                yield Problem(
                    ("dimensions", name, "special", member, column),
                    f"dimension {name!r}: {column!r} of its member {member!r} is text, and YAML reads the value as "
                    f"{type(value).__name__}; write it in quotes",
                )
            if column not in attributes:
                yield Problem(
                    ("dimensions", name, "special", member, column),
                    f"dimension {name!r} has no attribute {column!r} for its member {member!r}; it has "
                    f"{', '.join(attributes) or 'none'}",
                )
    for column in dimension.natural_key:
        kind = columns.get(f"{column}{_SPELLED}")
        if kind is not None and canonical(kind) != "string":
            yield Problem(
                ("dimensions", name, "columns", f"{column}{_SPELLED}"),
                f"dimension {name!r}: {column + _SPELLED!r} keeps the first spelling of {column!r}, so it is a string, "
                f"not {canonical(kind)}",
            )
