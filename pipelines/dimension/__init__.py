"""Operations on whole dimension tables: creation, description, checks against facts, columns, special members."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.pipelines._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.pipelines.dimension.check import Finding, Repair, Repaired
    from headrace.pipelines.dimension.columns import ColumnChange, add_column, drop_column, source_types, widen_column
    from headrace.pipelines.dimension.completing import Completion, complete_members, completing_columns
    from headrace.pipelines.dimension.inferred import inferred_members
    from headrace.pipelines.dimension.repairing import repair_dimension
    from headrace.pipelines.dimension.tables import (
        DimensionSummary,
        check_dimension,
        create_dimension,
        describe_dimension,
        find_members,
        member_columns,
        plan_repair,
        refuse_creation,
    )

__all__ = [
    "ColumnChange",
    "Completion",
    "DimensionSummary",
    "Finding",
    "Repair",
    "Repaired",
    "add_column",
    "check_dimension",
    "complete_members",
    "completing_columns",
    "create_dimension",
    "describe_dimension",
    "drop_column",
    "find_members",
    "inferred_members",
    "member_columns",
    "plan_repair",
    "refuse_creation",
    "repair_dimension",
    "source_types",
    "widen_column",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "check": ("Finding", "Repair", "Repaired"),
        "columns": ("ColumnChange", "add_column", "drop_column", "source_types", "widen_column"),
        "completing": ("Completion", "complete_members", "completing_columns"),
        "inferred": ("inferred_members",),
        "repairing": ("repair_dimension",),
        "tables": (
            "DimensionSummary",
            "check_dimension",
            "create_dimension",
            "describe_dimension",
            "find_members",
            "member_columns",
            "plan_repair",
            "refuse_creation",
        ),
    },
)
