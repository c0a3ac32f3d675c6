"""The table's filter file: which keys are certainly not in a leaf.

In: leaves that were written. Out: for each leaf and key, whether a lookup can be skipped. The file is derived data: a
missing, torn or stale part only costs speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.storage._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.storage.filter.segments import (
        BLOCK_NBYTES,
        FilterFile,
        FilterShape,
        filter_path,
        hash_keys,
        leaf_segments,
    )
    from headrace.storage.filter.upkeep import FilterWriter, build_filter, drop_filter

__all__ = [
    "BLOCK_NBYTES",
    "FilterFile",
    "FilterShape",
    "FilterWriter",
    "build_filter",
    "drop_filter",
    "filter_path",
    "hash_keys",
    "leaf_segments",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "segments": ("BLOCK_NBYTES", "FilterFile", "FilterShape", "filter_path", "hash_keys", "leaf_segments"),
        "upkeep": ("FilterWriter", "build_filter", "drop_filter"),
    },
)
