"""Changes of members: from files of changes to committed versions of a dimension with history.

In: files of changes. Out: versions in the dimension's Delta table, rejected changes in its error table, and the ranges
of facts that now belong to another version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.pipelines._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.pipelines.changes.applying import (
        ApplyResult,
        SnapshotOptions,
        apply_files,
        compact_dimension,
        restate_advice,
        restates,
        told_changes,
    )
    from headrace.pipelines.changes.checking import check_history, repair_history
    from headrace.pipelines.changes.reading import open_versions
    from headrace.pipelines.changes.targets import changes_not_applied, changes_of

__all__ = [
    "ApplyResult",
    "SnapshotOptions",
    "apply_files",
    "changes_not_applied",
    "changes_of",
    "check_history",
    "compact_dimension",
    "open_versions",
    "repair_history",
    "restate_advice",
    "restates",
    "told_changes",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "applying": (
            "ApplyResult",
            "SnapshotOptions",
            "apply_files",
            "compact_dimension",
            "restate_advice",
            "restates",
            "told_changes",
        ),
        "checking": ("check_history", "repair_history"),
        "reading": ("open_versions",),
        "targets": ("changes_not_applied", "changes_of"),
    },
)
