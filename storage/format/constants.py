"""Constants of the format, in one place. `FORMAT.md` describes what they mean."""

from __future__ import annotations

import numpy as np

__all__ = [
    "CHILD_BYTES",
    "COPY_BYTES",
    "DIRECTORY_ENTRY",
    "FIRST_PAGE",
    "FORMAT_VERSION",
    "FRAME_OF_REFERENCE",
    "HEADER",
    "INNER_PAGE",
    "LEAF_PAGE",
    "MAGIC",
    "METADATA_PAGE",
    "PAGE_SIZES",
    "RELOCATION_BYTES",
    "SEPARATOR_END",
    "SIGN",
    "SLACK",
    "SLOT_BYTES",
    "TEXT_DICTIONARY",
    "TEXT_PLAIN",
    "WORD",
]

MAGIC = b"HEADRACE"
FORMAT_VERSION = 4
PAGE_SIZES = (4096, 8192, 16384, 32768, 65536)

COPY_BYTES = 2048
"""Bytes of one copy of a superblock."""
SLOT_BYTES = 2 * COPY_BYTES
RELOCATION_BYTES = 24
"""Bytes of one entry of the relocation list."""
FIRST_PAGE = 2
"""First page after the superblocks."""

HEADER = 24
"""Bytes of a page header."""
LEAF_PAGE = 1
INNER_PAGE = 2
METADATA_PAGE = 3

DIRECTORY_ENTRY = 16
"""Bytes of one entry of a leaf's directory."""
FRAME_OF_REFERENCE = 0
TEXT_PLAIN = 1
TEXT_DICTIONARY = 2

CHILD_BYTES = 25
"""Bytes of one child in an inner node, without its separator."""
SEPARATOR_END = 2
"""Bytes of the end offset of a byte separator."""

WORD = 8
"""Bytes of a 64-bit word."""
SIGN = np.uint64(1 << 63)
"""Sign bit of a word."""
SLACK = 8
"""Bytes after the last page or tuple in a buffer: kernels load eight bytes at a time."""
