"""The steps of `transform` in a pipeline file: their model, without Spark.

`headrace.pipelines.batch.transform` checks the expressions and applies the steps.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["STEP_KINDS", "TransformStep"]

STEP_KINDS = ("derive", "where", "rename", "select", "python")
_FUNCTION = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"

Expression = str | bool | int | float


class TransformStep(BaseModel):
    """One step between the source and the lookups: exactly one of its fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    derive: Annotated[dict[str, Expression], Field(min_length=1)] | None = Field(
        default=None, description="Spark SQL expression for each column to add or replace"
    )
    where: Expression | None = Field(
        default=None, description="Spark SQL condition; records for which it is false or null are filtered out"
    )
    rename: Annotated[dict[str, str], Field(min_length=1)] | None = Field(
        default=None, description="New name for each column to rename"
    )
    select: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None, description="Columns to keep, in order"
    )
    python: Annotated[str, Field(pattern=_FUNCTION)] | None = Field(
        default=None, description="module:function that takes a Spark DataFrame and returns one; runs your code"
    )

    @model_validator(mode="after")
    def _one_kind(self) -> TransformStep:
        given = [kind for kind in STEP_KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = f"this one has {' and '.join(given)}" if given else "this one has none"
            raise ValueError(f"a step is exactly one of {', '.join(STEP_KINDS)}; {found}")
        return self

    @property
    def kind(self) -> str:
        """The field that is given."""
        return next(kind for kind in STEP_KINDS if getattr(self, kind) is not None)
