"""`SpillFolder` and `SpillFile`: blocks of bytes that do not fit in memory, on the storage backend.

A block is written once, never changed, and read as a whole::

    header (block number, bytes of content, tag) | content | digest of each page of these | digest of the digests

A block begins and ends on a page, with padding, so that reads can bypass the page cache. Digests depend on the block's
number, so a block that is read in place of another is found too. Blocks are not synced, since a crash makes them
worthless.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from headrace.storage.errors import ClosedTableError, CorruptPageError, StorageIOError
from headrace.storage.file import FileBackend, claimed, remove_remains
from headrace.storage.file.backend import path_text
from headrace.storage.format.constants import SLACK, WORD
from headrace.storage.format.page import aligned_pages
from headrace.storage.spill import _spill_kernels as kernels

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.storage.file import StorageBackend

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

SPILL_PAGE = 4096
"""Bytes of a page: the unit of checksums, and of reads that bypass the page cache."""

_PREFIX = ".headrace-spill-"
_HEADER = 3 * WORD


def _digest_count(nbytes: int) -> int:
    return -(-(_HEADER + nbytes) // SPILL_PAGE)


def _pages(nbytes: int) -> int:
    return -(-(_padded(nbytes) + WORD * (_digest_count(nbytes) + 1)) // SPILL_PAGE)


def _padded(nbytes: int) -> int:
    """Return where the digests begin: behind the content, at a whole word."""
    return -(-(_HEADER + nbytes) // WORD) * WORD


def block_nbytes(nbytes: int) -> int:
    """Return the bytes that a block with `nbytes` bytes of content takes, on disk and as a buffer in memory.

    Examples
    --------
    >>> block_nbytes(10_000) - 8
    12288
    """
    return _pages(nbytes) * SPILL_PAGE + SLACK


def content_nbytes(pages: int) -> int:
    """Return the most bytes of content of a block of so many pages, in whole words.

    Examples
    --------
    >>> block_nbytes(content_nbytes(3)) - 8 == 3 * SPILL_PAGE
    True
    """
    return pages * SPILL_PAGE - _HEADER - WORD * (pages + 1)


def block_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Return a buffer of `block_nbytes` to write or read blocks with at most `nbytes` bytes of content."""
    return aligned_pages(_pages(nbytes), SPILL_PAGE)


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Where a block is.

    Attributes
    ----------
    number
        Number in its file, from 0 on.
    page
        First page in the file.
    nbytes
        Bytes of content.
    tag
        A number that its writer gave it.
    """

    number: int
    page: int
    nbytes: int
    tag: int = 0

    @property
    def end(self) -> int:
        """Page behind the block."""
        return self.page + _pages(self.nbytes)


@dataclass(slots=True)
class SpillStats:
    """Running counts of a file or a folder.

    Attributes
    ----------
    blocks_written, blocks_read
        Number of blocks.
    bytes_written, bytes_read
        Bytes with headers and padding.
    """

    blocks_written: int = 0
    blocks_read: int = 0
    bytes_written: int = 0
    bytes_read: int = 0

    def add(self, other: SpillStats) -> None:
        """Add the counts of another file."""
        self.blocks_written += other.blocks_written
        self.blocks_read += other.blocks_read
        self.bytes_written += other.bytes_written
        self.bytes_read += other.bytes_read


class SpillFile:
    """Blocks in one file, appended and read in any order.

    Parameters
    ----------
    backend
        Storage backend of the file, which is empty.

    Attributes
    ----------
    stats
        Counts of what was written and read.
    content_nbytes, largest
        Bytes of content of all blocks, and most of a block.

    Examples
    --------
    >>> with tempfile.TemporaryDirectory() as parent, SpillFolder(parent) as folder:
    ...     file = folder.file("left")
    ...     ref = file.append([np.arange(5, dtype=np.uint8)])
    ...     file.read(ref).tolist()
    [0, 1, 2, 3, 4]
    """

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend
        self._blocks = self._end = 0
        self.content_nbytes = self.largest = 0
        self.stats = SpillStats()

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self._blocks

    @property
    def name(self) -> str:
        """Path of the file, for messages."""
        return str(self._backend.path)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._end * SPILL_PAGE

    def append(self, parts: Sequence[NDArray[np.uint8]], tag: int = 0) -> BlockRef:
        """Write a block whose content is these parts in order.

        Allocates one buffer of `block_nbytes`, which the caller counts.

        Raises
        ------
        StorageIOError
            If the operating system refuses, for instance because the disk is full. The file keeps its earlier blocks.
        """
        ref = BlockRef(self._blocks, self._end, sum(len(part) for part in parts), tag)
        self.write(ref, parts)
        self._take(ref)
        return ref

    def reserve(self, nbytes: int, tag: int = 0) -> BlockRef:
        """Return the place of the next block, of so many bytes, which is to be passed to `write`."""
        ref = BlockRef(self._blocks, self._end, nbytes, tag)
        self._take(ref)
        return ref

    def write(self, ref: BlockRef, parts: Sequence[NDArray[np.uint8]], buffer: NDArray[np.uint8] | None = None) -> None:
        """Write a block whose place was reserved. One thread may do so while another reserves.

        Parameters
        ----------
        ref
            Place of the block.
        parts
            Its content.
        buffer
            A `block_buffer` that is large enough; by default a new one, which the caller counts.

        Raises
        ------
        StorageIOError
            If the operating system refuses, for instance because the disk is full.
        """
        block = self._buffer(ref, buffer)
        block[:_HEADER].view(np.int64)[:] = ref.number, ref.nbytes, ref.tag
        at = _HEADER
        for part in parts:
            block[at : at + len(part)] = part
            at += len(part)
        block[at : _padded(ref.nbytes)] = 0
        digests, digest = self._digests(block, ref)
        self._table(block, ref)[:] = np.append(digests, digest)
        self._backend.pwrite(ref.page * SPILL_PAGE, block[:-SLACK])
        self.stats.blocks_written += 1
        self.stats.bytes_written += len(block) - SLACK

    def read(self, ref: BlockRef, buffer: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Return the content of a block.

        Parameters
        ----------
        ref
            Place of the block.
        buffer
            A `block_buffer` that is large enough, of which the content is a view; by default a new one of
            `block_nbytes`, which the caller counts.

        Raises
        ------
        CorruptPageError
            If the block is not what was written; the message names file and page.
        StorageIOError
            If the operating system refuses.
        """
        block = self._buffer(ref, buffer)
        self._backend.pread_into(ref.page * SPILL_PAGE, [block[:-SLACK]])
        self.stats.blocks_read += 1
        self.stats.bytes_read += len(block) - SLACK
        digests, digest = self._digests(block, ref)
        table = self._table(block, ref)
        bad = np.flatnonzero(digests != table[:-1])
        if len(bad) or digest != table[-1] or block[:_HEADER].view(np.int64).tolist()[:2] != [ref.number, ref.nbytes]:
            raise self._damaged(ref.number, ref.page + (int(bad[0]) if len(bad) else 0))
        return block[_HEADER : _HEADER + ref.nbytes]

    def scan(self, number: int = 0, page: int = 0) -> Iterator[BlockRef]:
        """Yield the blocks from one on, found by their headers, so that no list of them is needed.

        Parameters
        ----------
        number, page
            Number and first page of the first block.

        Raises
        ------
        CorruptPageError
            If a header cannot be that of the block. `read` checks the rest.
        StorageIOError
            If the operating system refuses.
        """
        head = aligned_pages(1, SPILL_PAGE)
        while number < self._blocks:
            self._backend.pread_into(page * SPILL_PAGE, [head[:SPILL_PAGE]])
            found, nbytes, tag = head[:_HEADER].view(np.int64).tolist()
            if found != number or not 0 <= nbytes <= self.nbytes or page + _pages(nbytes) > self._end:
                raise self._damaged(number, page)
            ref = BlockRef(number, page, nbytes, tag)
            yield ref
            number, page = number + 1, ref.end

    def _damaged(self, number: int, page: int) -> CorruptPageError:
        return CorruptPageError(
            f"{self._backend.path}: block {number}, page {page} is damaged: its checksum is not the one that was "
            "written; the join cannot be completed, so check the disk and start over"
        )

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._backend.close()

    def _take(self, ref: BlockRef) -> None:
        """Go on behind a block."""
        self._blocks, self._end = self._blocks + 1, ref.end
        self.content_nbytes += ref.nbytes
        self.largest = max(self.largest, ref.nbytes)

    @staticmethod
    def _buffer(ref: BlockRef, buffer: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
        nbytes = block_nbytes(ref.nbytes)
        block = block_buffer(ref.nbytes) if buffer is None else buffer[:nbytes]
        assert len(block) == nbytes, (len(block), nbytes)
        return block

    @staticmethod
    def _digests(block: NDArray[np.uint8], ref: BlockRef) -> tuple[NDArray[np.uint64], np.uint64]:
        """Return the digest of each page of header and content, and the digest of these digests."""
        digests = np.empty(_digest_count(ref.nbytes), dtype=np.uint64)
        seed = ref.number << 24
        kernels.digest_pages(block, _HEADER + ref.nbytes, SPILL_PAGE, seed, digests)
        digest = np.empty(1, dtype=np.uint64)
        kernels.digest_pages(digests.view(np.uint8), digests.nbytes, digests.nbytes, seed, digest)
        return digests, digest[0]

    @staticmethod
    def _table(block: NDArray[np.uint8], ref: BlockRef) -> NDArray[np.uint64]:
        start = _padded(ref.nbytes)
        return block[start : start + WORD * (_digest_count(ref.nbytes) + 1)].view(np.uint64)


def _buffered(path: Path) -> StorageBackend:
    """Return a file that is read through the page cache, where most of it may still be since it was written."""
    return FileBackend(path, "x", direct=False)


class SpillFolder:
    """Temporary folder of one operator. It is removed at `close`, or by a later one if the process is killed.

    Parameters
    ----------
    parent
        Existing folder in which the temporary folder is created.
    backend
        Creates the storage backend of a new file; by default a file on disk.

    Raises
    ------
    StorageIOError
        If the folder cannot be created.
    """

    def __init__(self, parent: str | os.PathLike[str], backend: Callable[[Path], StorageBackend] | None = None) -> None:
        self._backend = backend or _buffered
        self._files: list[SpillFile] = []
        self._created = 0
        self._stack = contextlib.ExitStack()
        self._removed = SpillStats()
        self._path: Path | None = self._claim(Path(path_text(parent)))

    def _claim(self, parent: Path) -> Path:
        try:
            remove_remains(parent, re.compile(re.escape(_PREFIX) + ".*"))
            return self._stack.enter_context(claimed(lambda: Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))))
        except OSError as error:
            raise StorageIOError(
                f"cannot create a temporary folder in {parent}: {error.strerror}; name an existing folder that this "
                "user may write to"
            ) from error

    @property
    def path(self) -> Path:
        """Path of the temporary folder.

        Raises
        ------
        ClosedTableError
            After `close`.
        """
        if self._path is None:
            raise ClosedTableError("the spill folder was closed; make a new operator")
        return self._path

    @property
    def stats(self) -> SpillStats:
        """Counts of all files."""
        total = SpillStats()
        for counts in (self._removed, *(file.stats for file in self._files)):
            total.add(counts)
        return total

    def file(self, name: str) -> SpillFile:
        """Create a file. `name` is any text; it appears in messages."""
        safe = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:40]
        file = SpillFile(self._backend(self.path / f"{self._created}-{safe}"))
        self._created += 1
        self._files.append(file)
        return file

    def remove(self, file: SpillFile) -> None:
        """Close a file of the folder and free its space on disk."""
        self._files.remove(file)
        self._removed.add(file.stats)
        file.close()
        (self.path / Path(file.name).name).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files and remove the folder. May be called twice."""
        if self._path is None:
            return
        path, self._path = self._path, None
        try:
            for file in self._files:
                file.close()
        finally:
            shutil.rmtree(path, ignore_errors=True)
            self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
