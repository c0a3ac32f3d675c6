"""The table's filter file: which keys are certainly not in a leaf.

In: leaves that were written. Out: for each leaf and key, whether a lookup can be skipped. The file is derived data: a
missing, torn or stale part only costs speed.
"""

from headrace.storage.filter.segments import (
    BLOCK_NBYTES,
    FilterFile,
    FilterShape,
    filter_path,
    hash_keys,
    leaf_segments,
)

__all__ = ["BLOCK_NBYTES", "FilterFile", "FilterShape", "filter_path", "hash_keys", "leaf_segments"]
