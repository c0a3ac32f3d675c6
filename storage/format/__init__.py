"""The file format: what the bytes of a table mean. `FORMAT.md` is its specification.

In: Arrow columns, keys and pages. Out: normalized keys, stored types, sealed and verified pages, superblocks. Contains
all constants of the format, superblock and slots, metadata, page checksums, keys, type conversion and range bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.storage._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.storage.format._byte_kernels import load_u64, prefetch, store_u64, xxh64
    from headrace.storage.format.bounds import extreme, high_bound, low_bound, scale_of
    from headrace.storage.format.coercion import Coerced, coerce
    from headrace.storage.format.columns import as_array, fixed_type, is_bytes, stored_schema, stored_type
    from headrace.storage.format.constants import (
        DIRECTORY_ENTRY,
        FORMAT_VERSION,
        HEADER,
        INNER_PAGE,
        LEAF_PAGE,
        MAGIC,
        METADATA_PAGE,
        PAGE_SIZES,
        SLACK,
    )
    from headrace.storage.format.keys import KeyCodec, Keys
    from headrace.storage.format.layout import LeafLayout, PhysicalColumn
    from headrace.storage.format.metadata import read_metadata
    from headrace.storage.format.page import aligned_pages, key_limit, read_pages, seal_pages
    from headrace.storage.format.slots import damaged_copies, read_superblock
    from headrace.storage.format.superblock import Superblock, check_page_size
    from headrace.storage.format.word_keys import KeyWords, key_words

__all__ = [
    "DIRECTORY_ENTRY",
    "FORMAT_VERSION",
    "HEADER",
    "INNER_PAGE",
    "LEAF_PAGE",
    "MAGIC",
    "METADATA_PAGE",
    "PAGE_SIZES",
    "SLACK",
    "Coerced",
    "KeyCodec",
    "KeyWords",
    "Keys",
    "LeafLayout",
    "PhysicalColumn",
    "Superblock",
    "aligned_pages",
    "as_array",
    "check_page_size",
    "coerce",
    "damaged_copies",
    "extreme",
    "fixed_type",
    "high_bound",
    "is_bytes",
    "key_limit",
    "key_words",
    "load_u64",
    "low_bound",
    "prefetch",
    "read_metadata",
    "read_pages",
    "read_superblock",
    "scale_of",
    "seal_pages",
    "store_u64",
    "stored_schema",
    "stored_type",
    "xxh64",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "constants": (
            "DIRECTORY_ENTRY",
            "FORMAT_VERSION",
            "HEADER",
            "INNER_PAGE",
            "LEAF_PAGE",
            "MAGIC",
            "METADATA_PAGE",
            "PAGE_SIZES",
            "SLACK",
        ),
        "page": ("aligned_pages", "key_limit", "read_pages", "seal_pages"),
        "superblock": ("Superblock", "check_page_size"),
        "slots": ("damaged_copies", "read_superblock"),
        "metadata": ("read_metadata",),
        "layout": ("LeafLayout", "PhysicalColumn"),
        "columns": ("as_array", "fixed_type", "is_bytes", "stored_schema", "stored_type"),
        "coercion": ("Coerced", "coerce"),
        "keys": ("KeyCodec", "Keys"),
        "word_keys": ("KeyWords", "key_words"),
        "bounds": ("extreme", "high_bound", "low_bound", "scale_of"),
        "_byte_kernels": ("load_u64", "prefetch", "store_u64", "xxh64"),
    },
)
