"""Operations on whole dimension tables: creation, description, checks against facts, and the unknown member."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.pipelines._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.pipelines.dimension.check import Finding, Repair
    from headrace.pipelines.dimension.tables import (
        DimensionSummary,
        check_dimension,
        create_dimension,
        describe_dimension,
        find_members,
        plan_repair,
    )

__all__ = [
    "DimensionSummary",
    "Finding",
    "Repair",
    "check_dimension",
    "create_dimension",
    "describe_dimension",
    "find_members",
    "plan_repair",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "check": ("Finding", "Repair"),
        "tables": (
            "DimensionSummary",
            "check_dimension",
            "create_dimension",
            "describe_dimension",
            "find_members",
            "plan_repair",
        ),
    },
)
