"""Leaves: rows encoded into pages, and found and decoded in them.

In: sorted rows as keys and Arrow arrays, or encoded pages. Out: encoded pages, or rows. Does no I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.storage._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.storage.leaf.decode import (
        copy_pages,
        decode_pages,
        expand_matches,
        gather,
        gather_keys,
        search,
        search_nearest,
        search_range,
        verify,
    )
    from headrace.storage.leaf.encode import LeafEncoder
    from headrace.storage.leaf.staging import StagedRows

__all__ = [
    "LeafEncoder",
    "StagedRows",
    "copy_pages",
    "decode_pages",
    "expand_matches",
    "gather",
    "gather_keys",
    "search",
    "search_nearest",
    "search_range",
    "verify",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "encode": ("LeafEncoder",),
        "decode": (
            "copy_pages",
            "decode_pages",
            "expand_matches",
            "gather",
            "gather_keys",
            "search",
            "search_nearest",
            "search_range",
            "verify",
        ),
        "staging": ("StagedRows",),
    },
)
