"""Leaves: rows encoded into pages, and found and decoded in them.

In: sorted rows as keys and Arrow arrays, or encoded pages. Out: encoded pages, or rows. Does no I/O.
"""

from headrace.storage.leaf._search_kernels import mask_of
from headrace.storage.leaf.decode import (
    FixedRows,
    StagedRows,
    copy_pages,
    gather,
    gather_keys,
    gather_runs,
    search,
    search_nearest,
    search_range,
    verify,
)
from headrace.storage.leaf.encode import LeafEncoder

__all__ = [
    "FixedRows",
    "LeafEncoder",
    "StagedRows",
    "copy_pages",
    "gather",
    "gather_keys",
    "gather_runs",
    "mask_of",
    "search",
    "search_nearest",
    "search_range",
    "verify",
]
