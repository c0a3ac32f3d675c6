"""Spill files: immutable blocks of bytes in a temporary folder, with checksums, gone when their owner is.

In: the bytes of blocks, and a folder to put them in. Out: the same bytes, or an error that names the damaged block.
Knows nothing about tuples or joins.
"""

from headrace.storage.spill.files import (
    SPILL_PAGE,
    BlockRef,
    SpillFile,
    SpillFolder,
    SpillStats,
    block_buffer,
    block_nbytes,
    content_nbytes,
)

__all__ = [
    "SPILL_PAGE",
    "BlockRef",
    "SpillFile",
    "SpillFolder",
    "SpillStats",
    "block_buffer",
    "block_nbytes",
    "content_nbytes",
]
