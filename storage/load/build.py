"""Bulk load: rows in key order become a table file, bottom up, in one pass and bounded memory.

`TableWriter` takes sorted batches; `build_table` brings any source into order first (`sources`) and makes the
file appear whole or not at all. Updates of existing tables are elsewhere.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

import numpy as np
import pyarrow as pa

from headrace.storage.errors import (
    InputError,
    KeyInputError,
    SchemaError,
    StorageIOError,
    TableExistsError,
    UniqueViolationError,
)
from headrace.storage.file.backend import FileBackend, StorageBackend, path_text, sync_folder
from headrace.storage.file.temporary_files import claimed, remove_remains, removed
from headrace.storage.filter.segments import drop_filter
from headrace.storage.format.constants import FIRST_PAGE
from headrace.storage.format.keys import Keys
from headrace.storage.format.layout import LeafLayout
from headrace.storage.format.metadata import encode_metadata
from headrace.storage.format.page import seal_pages
from headrace.storage.format.slots import write_first_superblocks
from headrace.storage.format.superblock import Superblock, check_app, check_page_size
from headrace.storage.leaf.encode import LeafEncoder, WordRoom
from headrace.storage.load.sources import NotInOrderError, SortedRows, Source, sorted_rows
from headrace.storage.tree.nodes import Entries, separators_between
from headrace.storage.tree.rewrite import NewTree, Placed, rewrite_inner

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_P = ParamSpec("_P")

__all__ = ["BuildOptions", "TableWriter", "build_table"]

_REMAINS = r"(\.filter|\.device\.json)?\.tmp-\d+-\d+"
_FIRST_TXID = 1
_CHUNK_ROWS = 1 << 17
_CHUNK_BYTES = 8 << 20
_SYNC_BYTES = 8 << 20
_WRITES = 3
_THREADS = 3  # one of them syncs at times


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How a table is laid out. See `Table.build`."""

    key: tuple[str, ...]
    unique: bool = False
    page_size: int = 8192
    fill: float = 0.8
    app: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        check_page_size(self.page_size)
        check_app(self.app)
        if not isinstance(self.fill, int | float) or not 0 < self.fill <= 1:
            raise InputError(f"the fill factor is a share of a page above 0 and at most 1, not {self.fill!r}")


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows in key order."""

    keys: Keys
    payload: list[pa.Array]

    def __len__(self) -> int:
        return len(self.keys)

    def slice(self, start: int, stop: int) -> _Rows:
        return _Rows(self.keys.slice(start, stop), [array.slice(start, stop - start) for array in self.payload])

    @classmethod
    def concat(cls, first: _Rows, second: _Rows) -> _Rows:
        payload = [pa.concat_arrays(pair) for pair in zip(first.payload, second.payload, strict=True)]
        return cls(Keys.concat([first.keys, second.keys]), payload)


class TableWriter:
    """Writes one table from batches in key order.

    Parameters
    ----------
    backend
        Storage backend of an empty file.
    schema
        Schema of the batches, in stored types.
    options
        Layout of the table.

    Attributes
    ----------
    page_size, txid
        Page size in bytes, and the transaction id of all pages.
    """

    txid = _FIRST_TXID

    def __init__(self, backend: StorageBackend, schema: pa.Schema, options: BuildOptions) -> None:
        self._backend = backend
        self._options = options
        self.page_size = options.page_size
        self._layout = LeafLayout(schema, options.key, options.page_size)
        self._limit = int(options.page_size * options.fill)
        self._metadata = encode_metadata(schema, self._layout.key, options.page_size, FIRST_PAGE, _FIRST_TXID)
        self._next_page = FIRST_PAGE + self._metadata.count
        self._rows = 0
        self._parts: list[Entries] = []
        self._last: Keys | None = None
        self._open: _Rows | None = None
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="headrace-write")
        self._writing: deque[Future[None]] = deque()
        self._syncing: Future[None] | None = None
        self._unsynced = 0
        self._rooms = itertools.cycle([WordRoom() for _ in range(_WRITES + 1)])
        self._room = next(self._rooms)

    def write(self, batch: pa.RecordBatch, keys: Keys | None = None) -> None:
        """Add rows; their keys continue the order of what came before.

        Raises
        ------
        UniqueViolationError
            If the table is unique and a key occurs twice.
        SchemaError
            If a column that the schema declares not null holds a null.
        InputError
            If one fits in no page.
        NotInOrderError
            If the rows are not in key order.
        """
        self._refuse_nulls(batch)
        rows = _Rows(
            self._layout.codec.encode(batch) if keys is None else keys,
            [batch.column(name) for name in self._layout.payload.names],
        )
        step = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES * len(rows) // max(batch.nbytes, 1)))
        at, size = 0, step
        while at < len(rows):
            part = rows.slice(at, min(at + size, len(rows)))
            joined = part if self._open is None else _Rows.concat(self._open, part)
            held = len(joined) - len(part)
            done = self._encode(joined, keep_open=True)
            if done > held:
                self._open = None
                at, size = at + done - held, step
            elif at + size < len(rows) and not done:
                size += size  # the chunk did not fill a page
            else:
                self._open = joined.slice(done, len(joined))
                at += len(part)

    def _refuse_nulls(self, batch: pa.RecordBatch) -> None:
        for field in self._layout.payload:
            if not field.nullable and batch.column(field.name).null_count:
                raise SchemaError(f"column {field.name!r} holds nulls, but its schema says it never does; correct one")

    def finish(self) -> Superblock:
        """Write what is left, the inner levels and both superblocks, and make all durable."""
        if self._open is not None:
            self._encode(self._open, keep_open=False)
        self._wait()
        entries = Entries.concat(self._parts) if self._parts else Entries.empty(self._layout.codec.kind)
        tree = rewrite_inner(Placed(entries, np.zeros(0, dtype=np.int64)), [], self._options.fill, self)
        self._put_at(FIRST_PAGE, self._metadata.pages, self._metadata.count)
        self._wait()
        self._settle()
        superblock = self._superblock(tree, len(entries))
        self._backend.sync()
        write_first_superblocks(self._backend, superblock)
        self._backend.sync()
        return superblock

    def close(self) -> None:
        """Stop writing."""
        self._pool.shutdown()

    def _encode(self, rows: _Rows, *, keep_open: bool) -> int:
        """Write the pages that rows fill and return how many rows that are."""
        self._check_order(rows.keys)
        encoder = LeafEncoder(self._layout, rows.keys, rows.payload, room=self._room)
        ends = encoder.plan(self._limit)
        if keep_open:
            ends = ends[:-1]
        if not len(ends):
            return 0
        self._add(encoder, ends, rows.keys)
        self._rows += int(ends[-1])
        return int(ends[-1])

    def _check_order(self, keys: Keys) -> None:
        row = keys.first_descent(strictly=self._options.unique)
        if row < 0:
            return
        key = self._layout.codec.describe(keys, row)
        if keys.comparable(row) == keys.comparable(row - 1):
            raise UniqueViolationError(f"key {key} occurs more than once, but the table is to be unique")
        raise NotInOrderError(f"row {self._rows + row} (key {key}) is out of key order")

    def _add(self, encoder: LeafEncoder, ends: NDArray[np.int64], keys: Keys) -> None:
        """Start to write the pages that end at these rows; their checksums are known when that is done."""
        first = np.concatenate([np.zeros(1, dtype=np.int64), ends])
        numbers = self.place(ends)
        checksums = np.zeros(len(ends), dtype=np.uint64)
        separators, continued = self._separators(keys.take(first[:-1]), keys.take(ends - 1))
        self._parts.append(Entries(numbers, checksums, np.diff(first), continued, separators))
        self._start(len(ends), self._write_leaves, encoder, ends, numbers, checksums)
        self._room = next(self._rooms)

    def _write_leaves(
        self, encoder: LeafEncoder, ends: NDArray[np.int64], numbers: NDArray[np.int64], checksums: NDArray[np.uint64]
    ) -> None:
        pages = encoder.write(ends).pages
        checksums[:] = seal_pages(pages, self._options.page_size, numbers, _FIRST_TXID)
        self._backend.pwrite(int(numbers[0]) * self._options.page_size, pages[: len(ends) * self._options.page_size])

    def _separators(self, heads: Keys, tails: Keys) -> tuple[Keys, NDArray[np.uint8]]:
        if self._last is None:
            separators, continued = separators_between(tails.slice(0, len(tails) - 1), heads.slice(1, len(heads)))
            separators = Keys.concat([Keys.lowest(heads.kind), separators])
            continued = np.concatenate([np.zeros(1, dtype=np.uint8), continued])
        else:
            before = Keys.concat([self._last, tails.slice(0, len(tails) - 1)])
            separators, continued = separators_between(before, heads)
        self._last = tails.take(np.array([len(tails) - 1]))
        return separators, continued

    def place(self, hints: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the page numbers after the last one, as many as there are hints."""
        numbers = self._next_page + np.arange(len(hints), dtype=np.int64)
        self._next_page += len(hints)
        return numbers

    def put(self, pages: NDArray[np.uint8], numbers: NDArray[np.int64], checksums: NDArray[np.uint64]) -> None:
        """Start to write sealed pages, which follow one another; their checksums are in the pages."""
        del checksums
        self._put_at(int(numbers[0]), pages, len(numbers))

    def _put_at(self, page: int, pages: NDArray[np.uint8], count: int) -> None:
        size = self._options.page_size
        self._start(count, self._backend.pwrite, page * size, pages[: count * size])

    def _start(self, count: int, write: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Write pages in a thread."""
        self._wait(_WRITES - 1)
        self._writing.append(self._pool.submit(write, *args, **kwargs))
        self._unsynced += count * self._options.page_size
        if self._unsynced >= _SYNC_BYTES and (self._syncing is None or self._syncing.done()):
            self._settle()
            self._syncing, self._unsynced = self._pool.submit(self._backend.sync), 0

    def _wait(self, left: int = 0) -> None:
        """Wait until at most `left` writes are running."""
        while len(self._writing) > left:
            self._writing.popleft().result()

    def _settle(self) -> None:
        """Wait for the running sync; the disk reports a failed write only once."""
        if self._syncing is not None:
            self._syncing.result()
            self._syncing = None

    def _superblock(self, tree: NewTree, leaves: int) -> Superblock:
        page, checksum = tree.root_pointer
        return Superblock(
            page_size=self._options.page_size,
            txid=_FIRST_TXID + 1,
            root_page=page,
            root_checksum=checksum,
            height=tree.height,
            rows=self._rows,
            leaves=leaves,
            pages=self._next_page,
            metadata_page=FIRST_PAGE,
            metadata_bytes=self._metadata.length,
            metadata_checksum=self._metadata.checksum,
            fill=self._options.fill,
            unique=self._options.unique,
            apps=dict([self._options.app]) if self._options.app else {},
        )


def build_table(
    path: str | os.PathLike[str],
    source: Source,
    options: BuildOptions,
    *,
    memory: int,
    temp_directory: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Superblock:
    """Write a table file from any source. A build that fails removes its files. See `Table.build`."""
    target, spill = _places(path, temp_directory, overwrite=overwrite)
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}-{threading.get_ident()}")
    try:
        remove_remains(target.parent, re.compile(re.escape(target.name) + _REMAINS))
        with claimed(lambda: _created(temporary)):
            try:
                with sorted_rows(source, options.key, memory, spill, target, assume_sorted=True) as rows:
                    superblock = _write_file(temporary, rows, options)
            except NotInOrderError:
                with sorted_rows(source, options.key, memory, spill, target) as rows:
                    superblock = _write_file(temporary, rows, options)
            with contextlib.suppress(StorageIOError):  # a filter of the old table proves nothing about this one
                drop_filter(target)
            temporary.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        left = "nothing was left behind" if removed(temporary) else f"{temporary} is left, which the next build removes"
        raise StorageIOError(f"cannot build {target}: {error.strerror or error}; {left}") from error
    finally:
        removed(temporary)
    return superblock


def _places(
    path: str | os.PathLike[str], temp_directory: str | os.PathLike[str] | None, *, overwrite: bool
) -> tuple[Path, Path]:
    """Return where the table goes, and where to sort."""
    target = Path(path_text(path))
    spill = target.parent if temp_directory is None else Path(path_text(temp_directory))
    if not target.name:
        raise InputError(f"{target} names a folder, not a table in it; name a file")
    try:
        if not target.parent.is_dir():
            raise InputError(f"cannot build {target}: the folder {target.parent} does not exist; create it")
        if target.exists() and not overwrite:
            raise TableExistsError(f"{target} exists already; name another file, or replace it with `overwrite=True`")
        if target.exists() and not target.is_file():
            raise InputError(f"{target} is not a regular file; name another file")
        if not spill.is_dir():
            raise InputError(f"there is no folder {spill} to sort in; create it or name another one")
    except OSError as error:
        raise StorageIOError(f"cannot build {target}: {error.strerror}; nothing was changed") from error
    return target, spill


def _created(path: Path) -> Path:
    path.touch(0o644, exist_ok=False)
    return path


def _write_file(path: Path, rows: SortedRows, options: BuildOptions) -> Superblock:
    with (
        contextlib.closing(FileBackend(path, "w", direct=False)) as backend,
        contextlib.closing(TableWriter(backend, rows.schema, options)) as writer,
    ):
        backend.truncate(0)
        for batch, keys in rows.batches:
            _write_batch(writer, batch, keys, assume_sorted=not rows.checked)
        return writer.finish()


def _write_batch(writer: TableWriter, batch: pa.RecordBatch, keys: Keys | None, *, assume_sorted: bool) -> None:
    try:
        writer.write(batch, keys)
    except KeyInputError as error:
        if assume_sorted:
            raise NotInOrderError from error  # reported with the row's number when the source is read again
        raise
