"""`Table`: a clustered table as its users see it. The work is done by the modules that it calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from headrace.storage.check import CheckReport, check_backend
from headrace.storage.commit.compaction import CompactResult, compact
from headrace.storage.errors import InputError, SchemaError
from headrace.storage.filter.upkeep import DEFAULT_FILTER_BITS, build_filter, check_filter_bits, drop_filter
from headrace.storage.handle import TableHandle
from headrace.storage.load.build import BuildOptions, build_table
from headrace.storage.read.lookup import lookup, scan
from headrace.storage.stats import TableStats, table_stats
from headrace.storage.tree.snapshot import pages_of
from headrace.storage.units import parse_memory

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    import pyarrow as pa

    from headrace.storage.commit.changes import Batch
    from headrace.storage.commit.transaction import CommitResult, Transaction
    from headrace.storage.read.reader import PageReader
    from headrace.storage.sources import Source
    from headrace.storage.tree.snapshot import Snapshot

__all__ = ["Table", "TableStats"]


class Table:
    """A relation on disk, clustered by its key. Open one with `Table.open` or make one with `Table.build`.

    Once it is closed, whatever needs the file raises `ClosedTableError`. Threads that change it at once are writers of
    their own: each waits for the others as long as it says, or is refused.

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

        The file appears whole or not at all: a build that fails or is killed leaves no table, and one that it was to
        overwrite stays as it was.

        Parameters
        ----------
        path
            Of the table.
        source
            Rows in any order: a `pyarrow.Table`, a `RecordBatchReader` or other iterable of record batches, or the
            path of a Parquet or CSV file or of a folder of them, or several such paths.
        key
            Names of the key columns, most significant first; a single name will do.
        unique
            Refuse a key that occurs twice.
        page_size
            Bytes of a page: 4096, 8192, 16384, 32768 or 65536.
        fill
            Share of each page that the load fills; the rest is for later changes.
        memory
            What sorting may take; a source that needs more is sorted on disk.
        temp_directory
            Where to sort what does not fit; by default beside the table.
        app
            Name and version of the application whose state the table holds, see `apply`.
        overwrite
            Replace a table that is there.
        filter_bits
            Bits a key of a negative filter, see `build_filter`; by default there is none.

        Raises
        ------
        TableExistsError
            If the path is taken.
        SchemaError
            If a column cannot be stored, or a key column is missing.
        KeyInputError
            If a key is null.
        UniqueViolationError
            If the table is to be unique and a key occurs twice; the message names it.
        InputError
            If the source cannot be read or is the table's own file, a row does not fit in a page, or an option is
            none that there is.
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
            Of the table.
        mode
            ``"r"``: read, and be the table's one writer while a change is made. ``"w"``: be it until the table is
            closed.
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
            If it is damaged.
        LockedError
            If another handle is the writer and still is after `wait` seconds, with mode ``"w"``.
        InputError
            If the mode is another one.
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
        """Give the file and its locks back; closing twice is allowed."""
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The file."""
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
        """Return the commit that the table stands at. Its pages stay as they are for as long as it is used."""
        return self._handle.snapshot

    def refresh(self) -> Snapshot:
        """Go to the newest commit and return it."""
        return self._handle.refresh()

    def reader(self) -> PageReader:
        """Return what reads the table's pages, by the costs measured for its disk."""
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
        """Change rows in one atomic, durable commit, and go to it.

        Parameters
        ----------
        upserts
            Rows with all columns of the table. They take the place of all rows that have their keys.
        deletes
            Key columns; all rows with these keys go. A key that is upserted too is upserted.
        inserts
            Rows that are added to those with the same key; in a unique table there must be none.
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
            If the table is unique and a key would be there twice; nothing is changed.
        LockedError
            If another handle is the writer and still is after `wait` seconds.
        StorageIOError
            If a write fails. The handle then refuses all further changes with `PoisonedHandleError`; opened again, the
            table stands at its last commit.
        """
        with self._handle.writing(wait) as writer:
            return writer.apply(upserts, deletes, inserts=inserts, app=app)

    @contextlib.contextmanager
    def transaction(self, *, app: tuple[str, int] | None = None, wait: float = 0.0) -> Iterator[Transaction]:
        """Make several changes one commit: it happens when the ``with`` block ends, unless by an exception.

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
        """Restore key order on disk and the fill factor, and give space back, while readers go on.

        Safe at any moment: a crash leaves the table at one of the commits that it is made of. While the table is
        compacted the file holds all rows twice.

        Parameters
        ----------
        wait
            Seconds to wait for another writer.

        Raises
        ------
        LockedError
            If another handle is the writer and still is after `wait` seconds.
        StorageIOError
            If a write fails, for instance because the disk is full; see `apply`.
        """
        with self._handle.writing(wait) as writer:
            return compact(writer, self._handle.adopt)

    def build_filter(self, bits: float = DEFAULT_FILTER_BITS, *, wait: float = 0.0) -> None:
        """Make a negative filter: joins then know of most keys that are not in the table without reading a page.

        It is a file beside the table, ``NAME.filter``, which every later change keeps up to date. It may be removed at
        any time, see `drop_filter`; a table without it gives the same answers.

        Parameters
        ----------
        bits
            For a key, from 4 to 16. With 8, about 3 % of absent keys are not recognised; with 4, about 15 %.
        wait
            Seconds to wait for another writer.

        Raises
        ------
        InputError
            If there cannot be so many bits.
        LockedError
            If another handle is the writer and still is after `wait` seconds.
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
            Has the key columns, by name. Null keys and keys that are not in the table match nothing.

        Returns
        -------
        pyarrow.Table
            All columns, in the order of the given keys; several rows for a key that the table has several times.
        """
        return lookup(self._handle.snapshot, self.reader(), keys)

    def scan(
        self, low: object = None, high: object = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows whose keys lie between two bounds, both included, in key order.

        Parameters
        ----------
        low, high
            A value, or for a key of several columns a tuple with one for each; None for no bound.
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
        """Verify every invariant of the newest commit in the file, and report all that do not hold."""
        return check_backend(self._handle.backend)

    def app_version(self, app_id: str) -> int | None:
        """Return the version that an application's state in this table has reached, or None if it never wrote."""
        return self._handle.snapshot.superblock.apps.get(app_id)

    @property
    def stats(self) -> TableStats:
        """What the table is and how it lies on disk."""
        snapshot = self._handle.snapshot
        return table_stats(snapshot, self._handle.reader(), len(pages_of(snapshot)))


def _names(key: object) -> tuple[str, ...]:
    """Return the names of key columns, of which one alone will do."""
    names = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, Iterable) else ()
    if not all(isinstance(name, str) for name in names) or not isinstance(key, Iterable):
        raise SchemaError(f"a key is the name of a column or a list of such names, not {key!r}")
    return names
