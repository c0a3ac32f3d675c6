"""Rejected rows: what the error table holds of them, whether they are resolved, and batches that retry them.

In: the error table and its resolutions. Out: summaries, records, and the frames of retries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.pipelines._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.pipelines.rejects.dismissal import dismiss_rows
    from headrace.pipelines.rejects.rows import (
        RejectedRecord,
        RejectGroup,
        RowId,
        Selection,
        list_rejects,
        show_rejects,
    )

__all__ = [
    "RejectGroup",
    "RejectedRecord",
    "RowId",
    "Selection",
    "dismiss_rows",
    "list_rejects",
    "show_rejects",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "dismissal": ("dismiss_rows",),
        "rows": ("RejectGroup", "RejectedRecord", "RowId", "Selection", "list_rejects", "show_rejects"),
    },
)
