"""The file format: what the bytes of a table mean. `FORMAT.md` is its specification.

In: Arrow columns, keys and pages. Out: normalized keys, stored types, sealed and verified pages, superblocks. Contains
all constants of the format, superblock and slots, metadata, page checksums, keys, type conversion and range bounds.
"""

from headrace.storage.format._byte_kernels import I64, compare_bytes, copy_bytes, load_u64, prefetch, store_u64, xxh64
from headrace.storage.format.arrays import Bytes, Flags, Int32s, Int64s, Words
from headrace.storage.format.bounds import extreme, high_bound, low_bound, scale_of
from headrace.storage.format.coercion import Coerced, as_floats, at_scale, coerce, plain
from headrace.storage.format.columns import (
    as_array,
    decoded,
    fixed_type,
    is_bytes,
    null_mask,
    stored_type,
    validity,
    view_of,
)
from headrace.storage.format.constants import (
    DIRECTORY_ENTRY,
    HEADER,
    INNER_PAGE,
    LEAF_PAGE,
    MAGIC,
    METADATA_PAGE,
    PAGE_SIZES,
    SLACK,
)
from headrace.storage.format.copies import concat_arrays, concat_batches, null_array, repeated, take
from headrace.storage.format.keys import KeyCodec, Keys, KeyWords, key_words
from headrace.storage.format.layout import LeafLayout, PhysicalColumn
from headrace.storage.format.page import key_limit
from headrace.storage.format.slots import damaged_copies, read_superblock
from headrace.storage.format.superblock import Superblock, check_page_size

__all__ = [
    "DIRECTORY_ENTRY",
    "HEADER",
    "I64",
    "INNER_PAGE",
    "LEAF_PAGE",
    "MAGIC",
    "METADATA_PAGE",
    "PAGE_SIZES",
    "SLACK",
    "Bytes",
    "Coerced",
    "Flags",
    "Int32s",
    "Int64s",
    "KeyCodec",
    "KeyWords",
    "Keys",
    "LeafLayout",
    "PhysicalColumn",
    "Superblock",
    "Words",
    "as_array",
    "as_floats",
    "at_scale",
    "check_page_size",
    "coerce",
    "compare_bytes",
    "concat_arrays",
    "concat_batches",
    "copy_bytes",
    "damaged_copies",
    "decoded",
    "extreme",
    "fixed_type",
    "high_bound",
    "is_bytes",
    "key_limit",
    "key_words",
    "load_u64",
    "low_bound",
    "null_array",
    "null_mask",
    "plain",
    "prefetch",
    "read_superblock",
    "repeated",
    "scale_of",
    "store_u64",
    "stored_type",
    "take",
    "validity",
    "view_of",
    "xxh64",
]
