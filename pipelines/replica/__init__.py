"""Replicas: clustered tables on the local disk that follow the Delta tables of dimensions and loaded keys.

In: a Delta version and a shard. Out: join operators over a clustered table with exactly the rows of that version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.pipelines._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.pipelines.replica.catch_up import ReplicaSpec
    from headrace.pipelines.replica.kernels import compiling
    from headrace.pipelines.replica.operators import Joiner, Serving, close, serve
    from headrace.pipelines.replica.row_sizes import LONGEST_KEY, LONGEST_ROW, RowSizes, long_row
    from headrace.pipelines.replica.rows import LoadedKeyRows, MemberRows, ReplicaRows

__all__ = [
    "LONGEST_KEY",
    "LONGEST_ROW",
    "Joiner",
    "LoadedKeyRows",
    "MemberRows",
    "ReplicaRows",
    "ReplicaSpec",
    "RowSizes",
    "Serving",
    "close",
    "compiling",
    "long_row",
    "serve",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "catch_up": ("ReplicaSpec",),
        "kernels": ("compiling",),
        "operators": ("Joiner", "Serving", "close", "serve"),
        "row_sizes": ("LONGEST_KEY", "LONGEST_ROW", "RowSizes", "long_row"),
        "rows": ("LoadedKeyRows", "MemberRows", "ReplicaRows"),
    },
)
