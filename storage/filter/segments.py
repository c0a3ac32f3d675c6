"""The negative filter of a table: a file beside the table that says which keys are certainly not in a leaf.

The file is derived data. It has a segment, a small blocked Bloom filter, for each leaf page, and a tag that proves that
the segment describes exactly this page. A segment that is torn, lost, stale or from another table does not match its
tag, and is ignored. The file is therefore written without a sync, before or after the commit: it may be incomplete, but
never wrong, and a failure never fails a change of the table. `FORMAT.md` describes its bytes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from headrace.storage.errors import CorruptionError, InputError, StorageIOError, TableNotFoundError
from headrace.storage.file.backend import FileBackend
from headrace.storage.file.temporary_files import claimed, remove_remains, removed
from headrace.storage.filter import _filter_kernels as kernels
from headrace.storage.format.constants import LEAF_PAGE, SLACK
from headrace.storage.format.page import runs_of
from headrace.storage.format.superblock import hash_bytes
from headrace.storage.leaf.decode import gather_keys, rows_of_pages
from headrace.storage.read.cache import page_buffer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.storage.file.backend import StorageBackend
    from headrace.storage.format.keys import Keys
    from headrace.storage.format.layout import LeafLayout
    from headrace.storage.read.reader import PageReader
    from headrace.storage.tree.snapshot import Snapshot

__all__ = [
    "BLOCK_NBYTES",
    "DEFAULT_FILTER_BITS",
    "FilterFile",
    "FilterShape",
    "FilterWriter",
    "build_filter",
    "check_filter_bits",
    "cut_filter",
    "drop_filter",
    "filter_path",
    "hash_keys",
    "leaf_segments",
]

_FOUR_PROBES, _FIVE_PROBES = 10, 14  # bits a key from which on a fourth and a fifth bit pay
BLOCK_NBYTES = 8 * kernels.BLOCK_WORDS
DEFAULT_FILTER_BITS = 8.0
_LEAST_BITS, _MOST_BITS = 4, 16
_BLOCK_BITS = 8 * BLOCK_NBYTES
_TAG_NBYTES = 8
_SUFFIX = ".filter"
_MAGIC = b"HEADFLTR"
_VERSION = 1
_HEADER = struct.Struct("<8sIII4xQ")
_CHECKED = _HEADER.size - 8
_MOST_BLOCKS = 1 << 16
_MOST_PROBES = 7
_WINDOW_BYTES = 4 << 20
_GAP = 16  # slots that are read along rather than with another call
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FilterShape:
    """Shape of all segments of a filter.

    Attributes
    ----------
    blocks
        Blocks of 256 bits in a segment on disk.
    probes
        Bits that a key sets, all in one block.
    kept
        Blocks of a segment in memory; those on disk are folded to them.
    """

    blocks: int
    probes: int
    kept: int

    @classmethod
    def chosen(cls, bits: float, rows_per_leaf: float) -> FilterShape:
        """Return the shape for so many bits a key."""
        blocks = min(max(1, round(bits * rows_per_leaf / _BLOCK_BITS)), _MOST_BLOCKS)
        return cls(blocks, 3 + (bits >= _FOUR_PROBES) + (bits >= _FIVE_PROBES), blocks)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a segment with its tag on disk."""
        return self.blocks * BLOCK_NBYTES + _TAG_NBYTES

    @property
    def words(self) -> int:
        """Words of 64 bits in a segment in memory."""
        return self.kept * kernels.BLOCK_WORDS

    @property
    def narrow(self) -> int:
        """The share of the blocks that are left in memory, times 2**32."""
        return (self.kept << 32) // self.blocks

    def folded(self, kept: int) -> FilterShape:
        """Return the shape with fewer blocks in memory."""
        return replace(self, kept=min(kept, self.blocks))

    def bits(self, rows_per_leaf: float) -> float:
        """Return how many bits a key has in memory on average."""
        return self.kept * _BLOCK_BITS / rows_per_leaf if rows_per_leaf else 0.0


def filter_path(table: str | os.PathLike[str]) -> Path:
    """Return the path of a table's filter file."""
    return Path(f"{os.fspath(table)}{_SUFFIX}")


def hash_keys(keys: Keys) -> NDArray[np.uint64]:
    """Return the hashes of keys."""
    out = np.empty(len(keys), dtype=np.uint64)
    if keys.offsets is None or keys.data is None:
        kernels.hash_words(keys.prefix, out)
    else:
        kernels.hash_bytes(keys.offsets, keys.data, out)
    return out


def leaf_segments(
    layout: LeafLayout, frames: NDArray[np.uint8], frame: NDArray[np.int32], shape: FilterShape
) -> NDArray[np.uint64]:
    """Return uint64[n, words]: the segments of leaf pages, made from their keys."""
    places, rows, owner = rows_of_pages(layout, frames, frame)
    segments = np.zeros((len(frame), shape.words), dtype=np.uint64)
    hashes = hash_keys(gather_keys(layout, frames, places, rows))
    kernels.fill_segments(hashes, owner, shape.blocks, shape.narrow, shape.probes, segments)
    return segments


class FilterFile:
    """An existing filter file with a sound header.

    Parameters
    ----------
    backend
        Storage backend of the filter file.
    shape
        Shape of its segments.
    """

    def __init__(self, backend: StorageBackend, shape: FilterShape) -> None:
        self._backend = backend
        self.shape = shape

    @classmethod
    def open(cls, table: str | os.PathLike[str], *, writing: bool = False) -> Self | None:
        """Return the filter of a table, or None if it has no usable one."""
        path = f"{os.fspath(table)}{_SUFFIX}"
        if not os.path.isfile(path):  # noqa: PTH113 - asked at every commit
            return None
        try:
            backend = FileBackend(path, "w" if writing else "r", direct=False)
        except TableNotFoundError:  # was removed meanwhile
            return None
        except StorageIOError as error:
            _LOG.warning("the filter of %s is not used: %s", os.fspath(table), error)
            return None
        shape = _read_shape(backend)
        if shape is None:
            _LOG.warning("%s is damaged and not used; build it again: headrace table filter", path)
            backend.close()
            return None
        return cls(backend, shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._backend.close()

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return self._backend.size()

    def load(
        self,
        pages: NDArray[np.int64],
        checksums: NDArray[np.uint64],
        shape: FilterShape,
        segments: NDArray[np.uint64],
        place: NDArray[np.int32],
        known: NDArray[np.bool_],
    ) -> None:
        """Read the segments of pages.

        Parameters
        ----------
        pages : int64[n]
            Page numbers, in any order.
        checksums : uint64[n]
            Checksums from the parents' pointers.
        shape
            Shape of the filter, perhaps folded for the available memory.
        segments : uint64[m, words]
            Receives the segments.
        place : int32[n]
            Row of `segments` for each page.
        known : bool[m]
            Filled with whether each segment is proven.
        """
        size = self.shape.slot_nbytes
        order = np.argsort(pages)
        inside = max(self._backend.size() // size, 0)
        known[place] = False
        order = order[pages[order] < inside]
        wanted = pages[order]
        for start, stop in _windows(wanted, max(1, _WINDOW_BYTES // size)):
            first, last = int(wanted[start]), int(wanted[stop - 1])
            slots = np.empty((last - first + 1) * size + SLACK, dtype=np.uint8)
            try:
                self._backend.pread_into(first * size, [slots[:-SLACK]])
            except (StorageIOError, CorruptionError) as error:
                _LOG.warning("a part of a filter is not used: %s", error)
                continue
            part = order[start:stop]
            kernels.take_proven(
                slots, (wanted[start:stop] - first) * size, pages[part], checksums[part], size - _TAG_NBYTES,
                shape.narrow, segments, place[part], known,
            )  # fmt: skip

    def store(self, segments: NDArray[np.uint64], pages: NDArray[np.int64], checksums: NDArray[np.uint64]) -> None:
        """Write the segments of pages with their tags, consecutive ones with one call."""
        size = self.shape.slot_nbytes
        slots = np.empty(len(pages) * size + SLACK, dtype=np.uint8)
        kernels.seal_segments(segments, pages, checksums, slots)
        for start, stop in runs_of(pages):
            self._backend.pwrite(int(pages[start]) * size, slots[start * size : stop * size])

    def cut(self, pages: int) -> None:
        """Cut off the slots after `pages` pages."""
        self._backend.truncate(min(self._backend.size(), pages * self.shape.slot_nbytes))


def _windows(wanted: NDArray[np.int64], most: int) -> list[tuple[int, int]]:
    """Cut ascending slots into reads: at wide gaps, and where a read would get too long."""
    if not len(wanted):
        return []
    gaps = np.flatnonzero(np.diff(wanted) > _GAP) + 1
    windows = []
    for start, stop in zip([0, *gaps.tolist()], [*gaps.tolist(), len(wanted)], strict=True):
        at = start
        while at < stop:
            end = at + int(np.searchsorted(wanted[at:stop], wanted[at] + most))
            windows.append((at, end))
            at = end
    return windows


def _read_shape(backend: StorageBackend) -> FilterShape | None:
    """Return the shape in the header, or None if the header is not sound."""
    header = np.zeros(_HEADER.size, dtype=np.uint8)
    try:
        backend.pread_into(0, [header])
    except (StorageIOError, CorruptionError):
        return None
    magic, version, blocks, probes, checksum = _HEADER.unpack(header.tobytes())
    sound = magic == _MAGIC and version == _VERSION and checksum == hash_bytes(header[:_CHECKED].tobytes())
    if not sound or not 0 < blocks <= _MOST_BLOCKS or not 0 < probes <= _MOST_PROBES:
        return None
    return FilterShape(blocks, probes, blocks)


def _header_of(shape: FilterShape) -> bytes:
    """Return the bytes with which the file of a filter begins."""
    fields = (_MAGIC, _VERSION, shape.blocks, shape.probes)
    return _HEADER.pack(*fields, hash_bytes(_HEADER.pack(*fields, 0)[:_CHECKED]))


def check_filter_bits(bits: float) -> float:
    """Return the bits for each key, or raise.

    Raises
    ------
    InputError
        If they are not from 4 to 16.
    """
    is_number = isinstance(bits, int | float | np.integer) and not isinstance(bits, bool)
    if not is_number or not _LEAST_BITS <= bits <= _MOST_BITS:
        raise InputError(f"a filter has from {_LEAST_BITS} to {_MOST_BITS} bits a key, not {bits!r}")
    return float(bits)


class FilterWriter:
    """Keeps a filter up to date with the pages that a writer writes, if the table has a filter when the writer starts.

    If the filter cannot be written, a warning is logged; its segments of other pages are still proven.

    Parameters
    ----------
    table
        Path of the table.
    layout
        Layout of its leaves.
    """

    def __init__(self, table: str, layout: LeafLayout) -> None:
        self._table = table
        self._layout = layout
        self._file = FilterFile.open(table, writing=True)

    def put(self, pages: NDArray[np.uint8], numbers: NDArray[np.int64]) -> None:
        """Write the segments of the leaves among these sealed pages."""
        if self._file is None:
            return
        size = self._layout.page_size
        heads = pages[: len(numbers) * size].reshape(-1, size)
        leaves = np.flatnonzero(heads[:, 16] == LEAF_PAGE)
        if not len(leaves):
            return
        checksums = np.ascontiguousarray(heads[leaves, :8]).view(np.uint64)[:, 0]
        try:
            segments = leaf_segments(self._layout, pages, leaves.astype(np.int32), self._file.shape)
            self._file.store(segments, np.ascontiguousarray(numbers[leaves], dtype=np.int64), checksums)
        except StorageIOError as error:
            _LOG.warning("the filter of %s misses what this transaction writes: %s", self._table, error)
            self.close()

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        if self._file is not None:
            self._file.close()
            self._file = None


def build_filter(snapshot: Snapshot, reader: PageReader, bits: float = DEFAULT_FILTER_BITS) -> None:
    """Build the filter of a table's newest commit and replace an existing one; the caller holds the writer's lock.

    Raises
    ------
    InputError
        If the bits a key are not from 4 to 16.
    CorruptionError
        If a page is damaged.
    StorageIOError
        If the file cannot be written.
    """
    leaves = max(len(snapshot.leaf_pages), 1)
    shape = FilterShape.chosen(check_filter_bits(bits), max(snapshot.rows / leaves, 1.0))
    target = filter_path(snapshot.path)
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}-{threading.get_ident()}")
    try:
        remove_remains(target.parent, re.compile(re.escape(target.name) + r"\.tmp-\d+-\d+"))
        with claimed(lambda: _created(temporary, shape)):
            with FilterFile(FileBackend(temporary, "w", direct=False), shape) as made:
                _fill(made, snapshot, reader)
            temporary.replace(target)
    except OSError as error:
        raise StorageIOError(f"cannot build {target}: {error.strerror}; the table is as it was") from error
    finally:
        removed(temporary)


def _created(path: Path, shape: FilterShape) -> Path:
    with path.open("xb") as file:
        file.write(_header_of(shape))
    return path


def _fill(made: FilterFile, snapshot: Snapshot, reader: PageReader) -> None:
    """Write the segments of all leaves, in the order of the disk."""
    order = np.argsort(snapshot.leaf_pages)
    step = max(1, _WINDOW_BYTES // snapshot.page_size)
    frames = page_buffer(step, snapshot.page_size)
    for start in range(0, len(order), step):
        part = order[start : start + step]
        pages, checksums = snapshot.leaf_pages[part], snapshot.leaf_checksums[part]
        frame = np.arange(len(part), dtype=np.int32)
        reader.read(pages, frames, frame, checksums)
        made.store(leaf_segments(snapshot.layout, frames, frame, made.shape), pages, checksums)


def cut_filter(table: str, pages: int) -> None:
    """Cut off the slots of a filter after `pages` pages, if the table has a filter."""
    made = FilterFile.open(table, writing=True)
    if made is not None:
        with made, contextlib.suppress(StorageIOError):  # the file then stays longer than necessary
            made.cut(pages)


def drop_filter(table: str | os.PathLike[str]) -> bool:
    """Remove the filter of a table; return whether it had one.

    Raises
    ------
    StorageIOError
        If the operating system refuses.
    """
    path = filter_path(table)
    if not path.exists():  # a read-only file system refuses to remove even what is not there
        return False
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageIOError(f"cannot remove {path}: {error.strerror}; check the permissions of its folder") from error
    return True
