"""The metadata pages of a table: its schema and key columns as an Arrow IPC message. Knows nothing about rows.

The text is cut into pages of type 3 that follow one another: a page header, then as many bytes as fit. The
superblock has its first page, its length and its XXH64.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.storage.errors import CorruptPageError
from headrace.storage.format._byte_kernels import xxh64
from headrace.storage.format.columns import view_of
from headrace.storage.format.constants import HEADER, METADATA_PAGE
from headrace.storage.format.page import aligned_pages, read_pages, seal_pages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.storage.file.backend import StorageBackend

__all__ = ["Metadata", "encode_metadata", "metadata_pages", "read_metadata"]

_KEY = b"headrace.key"
_SEED = np.uint64(0)


@dataclass(frozen=True, slots=True)
class Metadata:
    """Sealed metadata pages, and the fields of the superblock that point to them."""

    pages: NDArray[np.uint8]
    count: int
    length: int
    checksum: int


def metadata_pages(length: int, page_size: int) -> int:
    """Return the number of pages for metadata of `length` bytes."""
    return -(-length // (page_size - HEADER))


def encode_metadata(schema: pa.Schema, key: tuple[str, ...], page_size: int, first_page: int, txid: int) -> Metadata:
    """Return the sealed metadata pages of a table, to be written from `first_page` on."""
    text = view_of(schema.with_metadata({_KEY: json.dumps(list(key))}).serialize(), np.uint8)
    count = metadata_pages(len(text), page_size)
    pages = aligned_pages(count, page_size)
    for number in range(count):
        page = pages[number * page_size : (number + 1) * page_size]
        part = text[number * (page_size - HEADER) : (number + 1) * (page_size - HEADER)]
        page[16] = METADATA_PAGE
        page[20:24] = np.frombuffer(np.uint32(len(part)).tobytes(), dtype=np.uint8)
        page[HEADER : HEADER + len(part)] = part
    seal_pages(pages, page_size, first_page + np.arange(count, dtype=np.int64), txid)
    return Metadata(pages, count, len(text), int(xxh64(text, 0, len(text), _SEED)))


def read_metadata(
    backend: StorageBackend, page_size: int, first_page: int, length: int, checksum: int
) -> tuple[pa.Schema, tuple[str, ...]]:
    """Return the schema and the key columns of a table.

    Raises
    ------
    CorruptPageError
        If the metadata is not what was written.
    """
    numbers = first_page + np.arange(metadata_pages(length, page_size), dtype=np.int64)
    frames = read_pages(backend, page_size, numbers, None)
    body = frames[: len(numbers) * page_size].reshape(-1, page_size)[:, HEADER:]
    text = np.ascontiguousarray(body).reshape(-1)[:length]
    if len(text) < length or int(xxh64(text, 0, length, _SEED)) != checksum:
        raise CorruptPageError(
            f"{backend.path}: page {first_page}, which holds the schema, is not the one that the superblock names; "
            "restore the file or build it again"
        )
    schema = pa.ipc.read_schema(pa.BufferReader(text.tobytes()))
    return schema.remove_metadata(), tuple(json.loads(schema.metadata[_KEY]))
