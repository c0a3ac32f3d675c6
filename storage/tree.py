"""The inner levels of the B+-tree: written bottom up, read top down into flat arrays. Knows nothing of leaves' rows.

Inner nodes are read as a whole when a table is opened; afterwards the index is `Entries` of the lowest level, one
per leaf, in key order.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage import _encode_kernels, _kernels, _key_kernels
from headrace.storage import _tree_kernels as kernels
from headrace.storage._byte_kernels import SLACK
from headrace.storage.errors import CorruptPageError
from headrace.storage.keys import Keys, Kind
from headrace.storage.layout import HEADER, INNER_PAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.storage.backend import StorageBackend

__all__ = [
    "Entries",
    "InnerLevel",
    "aligned_pages",
    "build_levels",
    "damaged_page",
    "key_limit",
    "read_entries",
    "read_heads",
    "read_pages",
    "read_tree",
    "runs_of",
    "seal_pages",
    "separators_between",
]

_NO_CHECKSUMS = np.zeros(0, dtype=np.uint64)
_BLOCK = 4096
_FEW = 16


@dataclass(frozen=True, slots=True)
class Entries:
    """What inner nodes say of their children, in key order.

    Attributes
    ----------
    pages : int64[n]
        Page numbers.
    checksums : uint64[n]
    rows : int64[n]
        Rows below each child.
    continued : uint8[n]
        1 if the first key of this child may also be the last one of the child before it.
    separators
        No key of a child is below its separator, and no key of the children before is above it. The first is
        minus infinity: 0, or no bytes.
    """

    pages: NDArray[np.int64]
    checksums: NDArray[np.uint64]
    rows: NDArray[np.int64]
    continued: NDArray[np.uint8]
    separators: Keys

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        fixed = self.pages.nbytes + self.checksums.nbytes + self.rows.nbytes + self.continued.nbytes
        return fixed + self.separators.nbytes

    def replaced(self, at: NDArray[np.int64], new: Entries) -> Entries:
        """Return the entries with others at the positions `at`, which have the same separators."""
        pages, checksums, rows = self.pages.copy(), self.checksums.copy(), self.rows
        pages[at], checksums[at] = new.pages, new.checksums
        if not np.array_equal(rows[at], new.rows):
            rows = rows.copy()
            rows[at] = new.rows
        return Entries(pages, checksums, rows, self.continued, self.separators)

    def slice(self, start: int, stop: int) -> Entries:
        """Return the entries from `start` up to `stop`."""
        part = slice(start, stop)
        return Entries(
            self.pages[part],
            self.checksums[part],
            self.rows[part],
            self.continued[part],
            self.separators.slice(start, stop),
        )

    @classmethod
    def empty(cls, kind: Kind) -> Entries:
        """Return the entries of an empty table."""
        none = np.zeros(0, dtype=np.int64)
        return cls(none, _NO_CHECKSUMS, none, np.zeros(0, dtype=np.uint8), Keys.empty(kind))

    @classmethod
    def concat(cls, parts: Sequence[Entries]) -> Entries:
        """Return the entries of all parts, in order. There must be at least one part."""
        return cls(
            np.concatenate([part.pages for part in parts]),
            np.concatenate([part.checksums for part in parts]),
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.continued for part in parts]),
            Keys.concat([part.separators for part in parts]),
        )

    def take(self, index: NDArray[np.int64]) -> Entries:
        """Return the entries at these positions."""
        return Entries(
            self.pages[index],
            self.checksums[index],
            self.rows[index],
            self.continued[index],
            self.separators.take(index),
        )


@dataclass(frozen=True, slots=True)
class InnerLevel:
    """The nodes of one inner level.

    Attributes
    ----------
    nodes
        What is said of them one level up.
    first : int64[m + 1]
        Positions in the level below at which each node's children begin.
    """

    nodes: Entries
    first: NDArray[np.int64]

    @property
    def pages(self) -> NDArray[np.int64]:
        """int64[m], page numbers."""
        return self.nodes.pages

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.nodes.nbytes + self.first.nbytes


def key_limit(page_size: int) -> int:
    """Return how many bytes a byte key may have, so that an inner page always has room for several separators."""
    return page_size // 4


def aligned_pages(count: int, page_size: int) -> NDArray[np.uint8]:
    """Return zeroed room for pages and the kernels' slack behind them, aligned for direct I/O."""
    room = np.zeros(count * page_size + SLACK + _BLOCK, dtype=np.uint8)
    start = -room.__array_interface__["data"][0] % _BLOCK
    return room[start : start + count * page_size + SLACK]


def runs_of(numbers: NDArray[np.int64]) -> Iterable[tuple[int, int]]:
    """Return where runs of pages that follow one another begin and end in `numbers`."""
    if len(numbers) <= _FEW:
        some = numbers.tolist()
        ends = [at for at in range(1, len(some)) if some[at] != some[at - 1] + 1]
    else:
        ends = (np.flatnonzero(np.diff(numbers) != 1) + 1).tolist()
    return itertools.pairwise([0, *ends, len(numbers)] if len(numbers) else [])


def seal_pages(pages: NDArray[np.uint8], page_size: int, numbers: NDArray[np.int64], txid: int) -> NDArray[np.uint64]:
    """Write transaction id and checksum into pages and return the checksums; page `i` becomes page `numbers[i]`."""
    checksums = np.empty(len(numbers), dtype=np.uint64)
    _encode_kernels.seal_pages(pages, page_size, np.ascontiguousarray(numbers, dtype=np.int64), txid, checksums)
    return checksums


def separators_between(last: Keys, first: Keys) -> tuple[Keys, NDArray[np.uint8]]:
    """Return separators for neighbouring leaves, and whether a key spans both.

    Parameters
    ----------
    last, first
        For each boundary the last key on its left and the first key on its right.
    """
    both = Keys.concat([last, first])
    count = len(first)
    left = np.arange(count, dtype=np.int64)
    right = left + count
    pairs = both.take(np.ravel(np.column_stack([left, right])))
    continued = pairs.same_as_next()[::2].astype(np.uint8) if count else np.zeros(0, dtype=np.uint8)
    if both.offsets is None or both.data is None:
        return first, continued
    lengths = _key_kernels.shortest_separators(both.offsets, both.data, left, right)
    starts = both.offsets[count:-1]
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    data = _key_kernels.read_bytes(both.data, starts.copy(), offsets, False)  # noqa: FBT003 - a kernel
    return Keys.from_bytes(offsets, data), continued


def build_levels(
    entries: Entries, page_size: int, limit: int, first_page: int, txid: int
) -> Iterator[tuple[NDArray[np.uint8], Entries]]:
    """Yield the sealed pages of each inner level, from the lowest to the root, and the entries that point to them.

    Parameters
    ----------
    entries
        Of the leaves. With fewer than two there are no inner levels.
    limit
        Bytes of a page to fill.
    first_page
        Where the first inner page goes; all follow one another.
    """
    level = 1
    while len(entries) > 1:
        pages, entries = _build_level(entries, page_size, limit, first_page, txid, level)
        yield pages, entries
        first_page += len(entries)
        level += 1


def _build_level(
    entries: Entries, page_size: int, limit: int, first_page: int, txid: int, level: int
) -> tuple[NDArray[np.uint8], Entries]:
    keys = entries.separators
    prefix, offsets, data = keys.parts
    ends = kernels.plan_inner(offsets, keys.wide, len(entries), limit)
    pages = aligned_pages(len(ends), page_size)
    kernels.write_inner(
        prefix, offsets, data, keys.wide, entries.pages, entries.checksums, entries.rows, entries.continued,
        ends, page_size, level, pages,
    )  # fmt: skip
    numbers = first_page + np.arange(len(ends), dtype=np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    return pages, Entries(
        numbers,
        seal_pages(pages, page_size, numbers, txid),
        np.add.reduceat(entries.rows, starts),
        entries.continued[starts],
        keys.take(starts),
    )


def read_pages(
    backend: StorageBackend,
    page_size: int,
    numbers: NDArray[np.int64],
    checksums: NDArray[np.uint64] | None,
    room: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Return pages of the file side by side, in this room if one is given, each one verified.

    Raises
    ------
    CorruptPageError
        If a page lies outside the file, or its content is not what its checksum or its parent says.
    """
    beyond = (numbers < 0) | ((numbers + 1) * page_size > backend.size())
    if beyond.any():
        page = int(numbers[int(np.argmax(beyond))])
        raise CorruptPageError(f"{backend.path}: page {page} lies outside the file; it has been truncated or damaged")
    frames = aligned_pages(len(numbers), page_size) if room is None else room
    for start, stop in runs_of(numbers):
        backend.pread_into(int(numbers[start]) * page_size, [frames[start * page_size : stop * page_size]])
    expected = _NO_CHECKSUMS if checksums is None else checksums
    bad = _kernels.verify_pages(
        frames, page_size, np.arange(len(numbers), dtype=np.int64), np.ascontiguousarray(numbers), expected
    )
    if bad >= 0:
        raise damaged_page(backend, int(numbers[bad]))
    return frames


def damaged_page(backend: StorageBackend, page: int) -> CorruptPageError:
    """Return the error of a page whose content is not what its checksum or its parent says."""
    return CorruptPageError(
        f"{backend.path}: page {page} is damaged: its checksum is not the one that was written; "
        "restore the file or build it again"
    )


def read_tree(
    backend: StorageBackend, page_size: int, kind: Kind, root: Entries, height: int
) -> tuple[Entries, list[InnerLevel]]:
    """Read all inner levels.

    Parameters
    ----------
    root
        One entry, for the root; none for an empty table.
    height
        Levels of the tree, leaves included.

    Returns
    -------
    entries
        Of the leaves.
    levels
        Inner levels, root first.
    """
    entries, levels = root, []
    for level in range(height - 1, 0, -1):
        frames = read_pages(backend, page_size, entries.pages, entries.checksums)
        counts = _inner_counts(backend, frames, page_size, entries.pages, level)
        below = read_entries(frames, page_size, kind, counts)
        if isinstance(below, int):
            raise CorruptPageError(f"{backend.path}: the entries of inner page {int(entries.pages[below])} overrun it")
        levels.append(InnerLevel(entries, _starts(counts)))
        entries = below
    return entries, levels


def read_heads(
    frames: NDArray[np.uint8], page_size: int, pages: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint16], NDArray[np.int64]]:
    """Return page type, level and number of entries of each page."""
    heads = frames[: pages * page_size].reshape(-1, page_size)[:, :HEADER]
    levels = np.ascontiguousarray(heads[:, 18:20]).view(np.uint16)[:, 0]
    counts = np.ascontiguousarray(heads[:, 20:24]).view(np.uint32)[:, 0].astype(np.int64)
    return heads[:, 16], levels, counts


def read_entries(frames: NDArray[np.uint8], page_size: int, kind: Kind, counts: NDArray[np.int64]) -> Entries | int:
    """Return the entries of inner pages, one page after the other, or the first page whose entries overrun it."""
    first = _starts(counts)
    count = int(first[-1])
    pages, checksums = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.uint64)
    rows, flags = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.uint8)
    prefix, offsets = np.zeros(count, dtype=np.uint64), np.zeros(count + 1, dtype=np.int64)
    wide = kind == "bytes"
    bad = kernels.read_inner(frames, page_size, wide, first, pages, checksums, rows, flags, prefix, offsets)
    if bad >= 0:
        return int(bad)
    if wide:
        separators = Keys.from_bytes(offsets, kernels.read_separators(frames, page_size, first, offsets))
    else:
        separators = Keys("u64", prefix)
    return Entries(pages, checksums, rows, flags, separators)


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])


def _inner_counts(
    backend: StorageBackend, frames: NDArray[np.uint8], page_size: int, numbers: NDArray[np.int64], level: int
) -> NDArray[np.int64]:
    kinds, levels, counts = read_heads(frames, page_size, len(numbers))
    wrong = (kinds != INNER_PAGE) | (levels != level) | (counts < 1) | (counts > page_size)
    if wrong.any():
        page = int(numbers[int(np.argmax(wrong))])
        raise CorruptPageError(f"{backend.path}: page {page} should be an inner node of level {level}, but is not")
    return counts
