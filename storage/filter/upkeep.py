"""Creation, maintenance and removal of a table's negative filter.

`segments` describes the filter and its file. A failure here never fails a change of the table.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.errors import InputError, StorageIOError
from headrace.storage.file.backend import FileBackend
from headrace.storage.file.temporary_files import claimed, remove_remains
from headrace.storage.filter.segments import FilterFile, FilterShape, filter_path, header_of, leaf_segments
from headrace.storage.format.constants import LEAF_PAGE
from headrace.storage.read.cache import page_buffer

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from headrace.storage.format.layout import LeafLayout
    from headrace.storage.read.reader import PageReader
    from headrace.storage.tree.snapshot import Snapshot

__all__ = ["DEFAULT_FILTER_BITS", "FilterWriter", "build_filter", "check_filter_bits", "cut_filter", "drop_filter"]

DEFAULT_FILTER_BITS = 8.0
_LEAST_BITS, _MOST_BITS = 4, 16
_WINDOW_BYTES = 4 << 20
_LOG = logging.getLogger(__name__)


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
        temporary.unlink(missing_ok=True)


def _created(path: Path, shape: FilterShape) -> Path:
    with path.open("xb") as file:
        file.write(header_of(shape))
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
    try:
        filter_path(table).unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageIOError(f"cannot remove {filter_path(table)}: {error.strerror}") from error
    return True
