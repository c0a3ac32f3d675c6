"""`Table`: the public interface of a clustered table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from headrace.storage.check import CheckReport, check_backend
from headrace.storage.commit.compaction import CompactResult, compact
from headrace.storage.errors import InputError, SchemaError
from headrace.storage.filter.segments import (
    DEFAULT_FILTER_BITS,
    FilterFile,
    build_filter,
    check_filter_bits,
    drop_filter,
)
from headrace.storage.handle import TableHandle
from headrace.storage.load.build import BuildOptions, build_table
from headrace.storage.read.lookup import WINDOW_BYTES, lookup, scan
from headrace.storage.read.plan import plan_cost
from headrace.storage.tree.snapshot import pages_of
from headrace.storage.units import parse_memory

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.storage.commit.changes import Batch
    from headrace.storage.commit.writer import CommitResult, Transaction
    from headrace.storage.load.sources import Source
    from headrace.storage.read.reader import PageReader
    from headrace.storage.tree.snapshot import Snapshot

__all__ = ["CheckReport", "Table", "TableStats"]


@dataclass(frozen=True, slots=True)
class TableStats:
    """Size and layout on disk of a table.

    Attributes
    ----------
    rows, leaves, pages
        Rows of the relation, leaf pages that hold them, pages of the file that the newest commit relies on.
    bytes
        Length of the file.
    height
        Levels of the tree, leaves included.
    page_size, fill, unique
        Options with which the table was built.
    txid
        Number of the newest transaction.
    index_bytes
        Bytes of the index in memory while the table is open.
    rows_per_leaf
        Average number of rows in a leaf.
    free_pages
        Pages of the file that the newest commit does not use.
    fragmentation
        Additional cost of reading all rows in key order, as a share of the cost after a load, by the costs of the
        disk: 0 after a load, 0.3 if reading costs 1.3 times as much. `Table.compact` resets it to 0.
    filter_bits, filter_bytes
        Average bits of the filter for each key, and bytes of its file; 0 without a filter.
    """

    rows: int
    leaves: int
    pages: int
    bytes: int
    height: int
    page_size: int
    fill: float
    unique: bool
    txid: int
    index_bytes: int
    rows_per_leaf: float
    free_pages: int
    fragmentation: float
    filter_bits: float = 0.0
    filter_bytes: int = 0


class Table:
    """A relation on disk, clustered by its key. Open one with `Table.open` or create one with `Table.build`.

    After `close`, methods that need the file raise `ClosedTableError`. Threads that change the table at the same time
    take turns like separate writers: each waits for the others for up to `wait` seconds, and is then refused.

    Examples
    --------
    >>> import pyarrow as pa, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> rows = pa.table({"id": [3, 1, 2], "name": ["c", "a", "b"]})
    >>> with Table.build(f"{folder.name}/t.hdr", rows, key=["id"], unique=True) as table:
    ...     found = table.lookup(pa.record_batch({"id": [2, 9]}))
    >>> found.to_pylist()
    [{'id': 2, 'name': 'b'}]
    >>> folder.cleanup()
    """

    def __init__(self, handle: TableHandle) -> None:
        self._handle = handle

    @classmethod
    def build(
        cls,
        path: str | os.PathLike[str],
        source: Source,
        key: str | Sequence[str],
        *,
        unique: bool = False,
        page_size: int = 8192,
        fill: float = 0.8,
        memory: int | str = "1GiB",
        temp_directory: str | os.PathLike[str] | None = None,
        app: tuple[str, int] | None = None,
        overwrite: bool = False,
        filter_bits: float | None = None,
    ) -> Self:
        """Load a table and open it.

        The file appears complete or not at all: a build that fails or is killed leaves no table, and leaves a table
        that it should overwrite unchanged.

        Parameters
        ----------
        path
            Path of the table file.
        source
            Rows in any order: a `pyarrow.Table`, a `RecordBatchReader` or other iterable of record batches, or the
            path of a Parquet or CSV file or of a folder of them, or several such paths.
        key
            Names of the key columns, most significant first, or a single name.
        unique
            Refuse a key that occurs twice.
        page_size
            Page size in bytes: 4096, 8192, 16384, 32768 or 65536.
        fill
            Fill factor: share of each page that the load fills; the rest is for later changes.
        memory
            Memory for sorting; a source that needs more is sorted on disk.
        temp_directory
            Folder for sorting what does not fit in memory; by default that of the table.
        app
            Name and version of the application whose state the table holds, see `apply`.
        overwrite
            Whether to replace an existing table.
        filter_bits
            Bits for each key of a negative filter, see `build_filter`; by default there is no filter.

        Raises
        ------
        TableExistsError
            If the path exists.
        SchemaError
            If a column cannot be stored, or a key column is missing.
        KeyInputError
            If a key is null.
        UniqueViolationError
            If the table is to be unique and a key occurs twice; the message names it.
        InputError
            If the source cannot be read or is the table's own file, a row does not fit in a page, or an option
            is not valid.
        """
        options = BuildOptions(_names(key), unique, page_size, fill, app)
        bits = None if filter_bits is None else check_filter_bits(filter_bits)
        build_table(
            path,
            source,
            options,
            memory=parse_memory(memory),
            temp_directory=temp_directory,
            overwrite=overwrite,
        )
        table = cls.open(path)
        try:
            if bits is not None:
                table.build_filter(bits)
        except BaseException:
            table.close()
            raise
        return table

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, mode: Literal["r", "w"] = "r", wait: float = 0.0, direct: bool = True
    ) -> Self:
        """Open a table at its newest commit.

        Parameters
        ----------
        path
            Path of the table file.
        mode
            ``"r"``: read, and hold the writer's lock only while a change is made. ``"w"``: hold the writer's lock until
            the table is closed.
        wait
            Seconds to wait for another writer, with mode ``"w"``.
        direct
            Whether reads bypass the page cache of the operating system where they can.

        Raises
        ------
        TableNotFoundError
            If there is no such file.
        NotATableError
            If the file is not a table.
        CorruptionError
            If the file is damaged.
        LockedError
            If another handle still holds the writer's lock after `wait` seconds, with mode ``"w"``.
        InputError
            If the mode is neither.
        """
        if mode not in {"r", "w"}:
            raise InputError(f"a table is opened with mode 'r' or 'w', not {mode!r}")
        handle = TableHandle(path, direct=direct)
        if mode == "w":
            try:
                handle.stay_writer(wait)
            except BaseException:
                handle.close()
                raise
        return cls(handle)

    def close(self) -> None:
        """Close the file and release its locks; closing twice is allowed."""
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """Path of the table file."""
        return Path(self._handle.backend.path)

    @property
    def schema(self) -> pa.Schema:
        """Schema of the relation, key columns included."""
        return self._handle.snapshot.schema

    @property
    def key(self) -> tuple[str, ...]:
        """Names of the key columns."""
        return self._handle.snapshot.key

    def snapshot(self) -> Snapshot:
        """Return the current commit of this handle. Its pages stay unchanged as long as it is in use."""
        return self._handle.snapshot

    def refresh(self) -> Snapshot:
        """Move to the newest commit and return it."""
        return self._handle.refresh()

    def reader(self) -> PageReader:
        """Return the page reader of the table, which plans by the costs measured for its disk."""
        return self._handle.reader()

    def apply(
        self,
        upserts: Batch | None = None,
        deletes: Batch | None = None,
        *,
        inserts: Batch | None = None,
        app: tuple[str, int] | None = None,
        wait: float = 0.0,
    ) -> CommitResult:
        """Change rows in one atomic, durable commit, and move to it.

        Parameters
        ----------
        upserts
            Rows with all columns of the table. They replace all rows that have their keys.
        deletes
            Key columns; all rows with these keys are deleted, except those that are also upserted.
        inserts
            Rows to add beside those with the same key; in a unique table no such row may exist.
        app
            Name and version of an application whose state the table holds. If the table has reached that version,
            nothing is done and the result says `skipped`.
        wait
            Seconds to wait for another writer.

        Raises
        ------
        SchemaError
            If a column is missing, unknown or of a type that cannot be stored.
        KeyInputError
            If a key is null.
        UniqueViolationError
            If the table is unique and a key would occur twice; nothing is changed.
        LockedError
            If another handle still holds the writer's lock after `wait` seconds.
        StorageIOError
            If a write fails. The handle then refuses all further changes with `PoisonedHandleError`; when the table
            is opened again, it is at its last commit.
        """
        with self._handle.writing(wait) as writer:
            return writer.apply(upserts, deletes, inserts=inserts, app=app)

    @contextlib.contextmanager
    def transaction(self, *, app: tuple[str, int] | None = None, wait: float = 0.0) -> Iterator[Transaction]:
        """Combine several changes into one commit, made when the ``with`` block ends without an exception.

        Yields
        ------
        Transaction
            Its `apply` takes `upserts`, `deletes` and `inserts`; its `result` is known after the block.

        Examples
        --------
        >>> import pyarrow as pa, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> table = Table.build(f"{folder.name}/t", pa.table({"id": [1, 2]}), key=["id"], unique=True)
        >>> with table.transaction() as change:
        ...     change.apply(inserts=pa.table({"id": [3]}))
        ...     change.apply(deletes=pa.table({"id": [1]}))
        >>> change.result.inserted, change.result.deleted, table.stats.rows
        (1, 1, 2)
        >>> table.close()
        >>> folder.cleanup()
        """
        with self._handle.writing(wait) as writer, writer.transaction(app=app) as change:
            yield change

    def compact(self, *, wait: float = 0.0) -> CompactResult:
        """Restore key order on disk and the fill factor, and release space, while readers continue.

        A crash leaves the table at one of the commits of the compaction. During the compaction the file contains all
        rows twice.

        Parameters
        ----------
        wait
            Seconds to wait for another writer.

        Raises
        ------
        LockedError
            If another handle still holds the writer's lock after `wait` seconds.
        StorageIOError
            If a write fails, for instance because the disk is full; see `apply`.
        """
        with self._handle.writing(wait) as writer:
            return compact(writer, self._handle.adopt)

    def build_filter(self, bits: float = DEFAULT_FILTER_BITS, *, wait: float = 0.0) -> None:
        """Build a negative filter, with which joins recognize most absent keys without reading a page.

        The filter is a file beside the table, ``NAME.filter``, which every later change keeps up to date. It may be
        removed at any time, see `drop_filter`; the answers are the same without it.

        Parameters
        ----------
        bits
            Bits for each key, from 4 to 16. With 8, about 3 % of absent keys are not recognized; with 4, about 15 %.
        wait
            Seconds to wait for another writer.

        Raises
        ------
        InputError
            If the number of bits is not from 4 to 16.
        LockedError
            If another handle still holds the writer's lock after `wait` seconds.
        StorageIOError
            If the file cannot be written.
        """
        with self._handle.writing(wait) as writer:
            build_filter(writer.snapshot, self.reader(), bits)
            writer.open_filter()

    def drop_filter(self) -> bool:
        """Remove the negative filter; return whether there was one."""
        return drop_filter(self._handle.backend.place)

    def lookup(self, keys: pa.RecordBatch | pa.Table) -> pa.Table:
        """Return the rows that have the given keys.

        Parameters
        ----------
        keys
            Batch with the key columns, by name. Null keys and keys that are not in the table match nothing.

        Returns
        -------
        pyarrow.Table
            Matching rows with all columns, in the order of the given keys.
        """
        return lookup(self._handle.snapshot, self.reader(), keys)

    def scan(
        self, low: object = None, high: object = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows whose keys lie between two bounds, both included, in key order.

        Parameters
        ----------
        low, high
            Bounds: a value, or a tuple with one value for each key column; None for no bound.
        columns
            Names of the columns to return; by default all.

        Raises
        ------
        KeyInputError
            If a bound is not a key.
        SchemaError
            If there is no such column.
        """
        return scan(self._handle.snapshot, self.reader(), low, high, columns)

    def check(self) -> CheckReport:
        """Verify every invariant of the newest commit in the file, and report all violations."""
        return check_backend(self._handle.backend)

    def app_version(self, app_id: str) -> int | None:
        """Return the version that an application has reached in this table, or None if it never wrote."""
        return self._handle.snapshot.superblock.apps.get(app_id)

    @property
    def stats(self) -> TableStats:
        """Size and layout on disk of the table."""
        return table_stats(self._handle.snapshot, self._handle.reader())


def _names(key: object) -> tuple[str, ...]:
    """Return the names of the key columns, which may come as a single name."""
    names = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, Iterable) else ()
    if not all(isinstance(name, str) for name in names) or not isinstance(key, Iterable):
        raise SchemaError(f"a key is the name of a column or a list of such names, not {key!r}")
    return names


def table_stats(snapshot: Snapshot, reader: PageReader) -> TableStats:
    """Return the statistics of a snapshot."""
    rows_per_leaf = snapshot.rows / max(snapshot.leaves, 1)
    filter_bits, filter_bytes = _filter_size(snapshot.path, rows_per_leaf)
    head, leaves, size = snapshot.superblock, snapshot.leaves, reader.backend.size()
    ordered = scan_cost(reader, np.arange(leaves, dtype=np.int64))
    return TableStats(
        rows=head.rows,
        leaves=leaves,
        pages=head.pages,
        bytes=size,
        height=head.height,
        page_size=head.page_size,
        fill=head.fill,
        unique=head.unique,
        txid=head.txid,
        index_bytes=snapshot.index_nbytes,
        rows_per_leaf=rows_per_leaf,
        free_pages=max(size // head.page_size - len(pages_of(snapshot)), 0),
        fragmentation=max(scan_cost(reader, snapshot.leaf_pages) / ordered - 1, 0.0) if leaves else 0.0,
        filter_bits=filter_bits,
        filter_bytes=filter_bytes,
    )


def _filter_size(path: str, rows_per_leaf: float) -> tuple[float, int]:
    made = FilterFile.open(path)
    if made is None:
        return 0.0, 0
    with made:
        return made.shape.bits(rows_per_leaf), made.nbytes


def scan_cost(reader: PageReader, pages: NDArray[np.int64]) -> float:
    """Return the seconds that reading pages in this order takes by the device's costs, window by window as a scan does.

    Parameters
    ----------
    reader
        Plans the reads.
    pages
        Page numbers of the leaves in key order.
    """
    step = max(WINDOW_BYTES // reader.page_size, 1)
    device = reader.device
    plans = (reader.plan(np.sort(pages[at : at + step])) for at in range(0, len(pages), step))
    return sum(plan_cost(plan, device.seek, device.transfer) for plan in plans)
