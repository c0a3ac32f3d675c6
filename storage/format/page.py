"""Pages of a table file: buffers, and sealing, reading and verification. Knows nothing about the content of pages."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.errors import CorruptPageError
from headrace.storage.format import _page_kernels
from headrace.storage.format.constants import HEADER, SLACK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from headrace.storage.file.backend import StorageBackend

__all__ = ["aligned_pages", "damaged_page", "key_limit", "read_heads", "read_pages", "runs_of", "seal_pages"]

_NO_CHECKSUMS = np.zeros(0, dtype=np.uint64)
_BLOCK = 4096
_FEW = 16


def key_limit(page_size: int) -> int:
    """Return the maximum bytes of a byte key, so that an inner page always has room for several separators."""
    return page_size // 4


def aligned_pages(count: int, page_size: int) -> NDArray[np.uint8]:
    """Return a zeroed buffer for pages and the slack that kernels need after them, aligned for direct I/O."""
    room = np.zeros(count * page_size + SLACK + _BLOCK, dtype=np.uint8)
    start = -room.__array_interface__["data"][0] % _BLOCK
    return room[start : start + count * page_size + SLACK]


def runs_of(numbers: NDArray[np.int64]) -> Iterable[tuple[int, int]]:
    """Return start and end in `numbers` of each run of consecutive pages."""
    if len(numbers) <= _FEW:
        some = numbers.tolist()
        ends = [at for at in range(1, len(some)) if some[at] != some[at - 1] + 1]
    else:
        ends = (np.flatnonzero(np.diff(numbers) != 1) + 1).tolist()
    return itertools.pairwise([0, *ends, len(numbers)] if len(numbers) else [])


def seal_pages(pages: NDArray[np.uint8], page_size: int, numbers: NDArray[np.int64], txid: int) -> NDArray[np.uint64]:
    """Write transaction id and checksum into pages and return the checksums; page `i` becomes page `numbers[i]`."""
    checksums = np.empty(len(numbers), dtype=np.uint64)
    _page_kernels.seal_pages(pages, page_size, np.ascontiguousarray(numbers, dtype=np.int64), txid, checksums)
    return checksums


def read_pages(
    backend: StorageBackend,
    page_size: int,
    numbers: NDArray[np.int64],
    checksums: NDArray[np.uint64] | None,
    room: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Return verified pages of the file side by side, in the buffer `room` if one is given.

    Raises
    ------
    CorruptPageError
        If a page is outside the file, or does not match its checksum or its parent's pointer.
    """
    wanted = numbers.tolist()
    least, most = min(wanted, default=0), max(wanted, default=0)
    if least < 0 or (most + 1) * page_size > backend.size():
        page = least if least < 0 else most
        raise CorruptPageError(f"{backend.path}: page {page} lies outside the file; it has been truncated or damaged")
    frames = aligned_pages(len(numbers), page_size) if room is None else room
    for start, stop in runs_of(numbers):
        backend.pread_into(int(numbers[start]) * page_size, [frames[start * page_size : stop * page_size]])
    expected = _NO_CHECKSUMS if checksums is None else checksums
    bad = _page_kernels.verify_pages(
        frames, page_size, np.arange(len(numbers), dtype=np.int64), np.ascontiguousarray(numbers), expected
    )
    if bad >= 0:
        raise damaged_page(backend, int(numbers[bad]))
    return frames


def damaged_page(backend: StorageBackend, page: int) -> CorruptPageError:
    """Return the error for a page that does not match its checksum or its parent's pointer."""
    return CorruptPageError(
        f"{backend.path}: page {page} is damaged: its checksum is not the one that was written; "
        "restore the file or build it again"
    )


def read_heads(
    frames: NDArray[np.uint8], page_size: int, pages: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint16], NDArray[np.int64]]:
    """Return page type, level and number of entries of each page."""
    heads = frames[: pages * page_size].reshape(-1, page_size)[:, :HEADER]
    levels = np.ascontiguousarray(heads[:, 18:20]).view(np.uint16)[:, 0]
    counts = np.ascontiguousarray(heads[:, 20:24]).view(np.uint32)[:, 0].astype(np.int64)
    return heads[:, 16], levels, counts
