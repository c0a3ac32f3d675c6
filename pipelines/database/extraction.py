"""Extraction of a table: what is selected, and the way of its rows into files."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from sqlalchemy import column as sql_column
from sqlalchemy import inspect, quoted_name, select, text
from sqlalchemy import table as sql_table
from sqlalchemy.dialects.postgresql.base import PGInspector
from sqlalchemy.exc import NoSuchTableError, SAWarning

from headrace.pipelines.database.columns import Column, clause_of, column_of, unsupported_reason
from headrace.pipelines.database.folder import GrowingFolder, Subject, new_folder, writing
from headrace.pipelines.database.source import SQLITE, Source, parse_source, reading
from headrace.pipelines.errors import ExtractionError
from headrace.storage.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from sqlalchemy import ColumnClause, Connection, Inspector
    from sqlalchemy.engine.interfaces import ReflectedColumn

    from headrace.pipelines.database.folder import Destination

__all__ = ["ROWS_PER_FILE", "ExtractResult", "extract"]

ROWS_PER_FILE = 1_000_000
_PARTITION_ROWS = 1_000  # rows that are in memory as Python objects
_GROUP_BYTES = 16 << 20
_SHOWN = 60
_COPY: Final = "extract a table to which they are copied as another type"
_VIEW: Final = "extract a view that casts them"


@dataclass(frozen=True)
class ExtractResult:
    """Result of an extraction.

    Parameters
    ----------
    rows
        Number of rows that were written.
    files
        Names of the files that were written.
    position
        Greatest value of the ordering column so far, as text; None without one, and before the first row.
    """

    rows: int
    files: tuple[str, ...]
    position: str | None


@dataclass(frozen=True)
class _Relation:
    """A table or view, and the columns of it that are extracted."""

    name: str
    schema: str | None
    columns: list[Column]
    key: list[str]  # columns of the primary key
    nullable: frozenset[str]  # columns that are not declared NOT NULL
    recast: str  # remedy for values whose type does not fit

    @property
    def arrow_schema(self) -> pa.Schema:
        return pa.schema([(column.name, column.dtype) for column in self.columns])

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)


def extract(
    url: str,
    table: str,
    folder: str | Path,
    *,
    columns: Sequence[str] | None = None,
    new_by: str | None = None,
    rows_per_file: int = ROWS_PER_FILE,
    schema: str | None = None,
    on_rows: Callable[[int], None] = lambda _rows: None,
) -> ExtractResult:
    """Read a table or view of a database into Parquet files.

    Parameters
    ----------
    url
        SQLAlchemy URL of a SQLite or PostgreSQL database. ``${NAME}`` in it is an environment variable. A password must
        be one.
    table
        Name of the table or view, as the database has it.
    folder
        Folder for the files, new or empty; with `new_by`, also one that an extraction of the same table wrote.
    columns
        Columns to extract, in this order; all by default.
    new_by
        Extract only the rows whose value in this column is greater than all that `folder` got before.
    rows_per_file
        Number of rows of a file.
    schema
        Schema of the table; by default that of the connection.
    on_rows
        Called with the number of rows of each batch that was read.

    Raises
    ------
    ExtractionError
        If the table cannot be read, a type or value has no exact counterpart, or the files cannot be written. Without
        `new_by`, nothing is left then; with it, complete files, after which the next extraction continues.
    """
    if rows_per_file < 1:
        raise ExtractionError(f"a file cannot have {rows_per_file} rows; give a number from 1")
    source = parse_source(url)
    with reading(source) as connection:
        # Views of SQLite have no types but those of the columns of tables, and no view can be extracted by `new_by`.
        recast = _COPY if source.backend == SQLITE or new_by is not None else _VIEW
        relation = _relation(connection, source, table, schema, columns, recast)
        if new_by is not None:
            _require_order(connection, relation, new_by)
        with (
            _destination(Path(folder), source, relation, new_by) as destination,
            _Files(destination, relation, new_by, rows_per_file) as files,
        ):
            for rows in _batches(connection, relation, new_by, destination):
                files.write(rows)
                on_rows(rows.num_rows)
            return files.finish()


def _destination(
    folder: Path, source: Source, relation: _Relation, new_by: str | None
) -> AbstractContextManager[Destination]:
    if new_by is None:
        return new_folder(folder)
    types = {column.name: str(column.dtype) for column in relation.columns}
    return GrowingFolder(folder, Subject(source.shown, relation.schema, relation.name, new_by, types))


def _relation(
    connection: Connection, source: Source, table: str, schema: str | None, names: Sequence[str] | None, recast: str
) -> _Relation:
    inspector = inspect(connection)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SAWarning)  # of types that SQLAlchemy does not know, which are refused
        try:
            found = inspector.get_columns(table, schema=schema)  # of SQLite, also for a name in another case
            key = inspector.get_pk_constraint(table, schema=schema)["constrained_columns"]
        except NoSuchTableError:
            raise _no_table(inspector, source, table, schema) from None
    clauses = [clause_of(each) for each in _chosen(found, table, names)]
    sql_table(_quoted(table), *clauses, schema=None if schema is None else _quoted(schema))  # they are its columns now
    columns = [column_of(each, source.backend) for each in clauses]
    _refuse_unsupported(clauses, columns, table, recast)
    nullable = frozenset(each["name"] for each in found if each["nullable"])
    return _Relation(table, schema, [column for column in columns if column is not None], key, nullable, recast)


def _quoted(name: str) -> quoted_name:
    return quoted_name(name, quote=True)


def _no_table(inspector: Inspector, source: Source, table: str, schema: str | None) -> ExtractionError:
    names = [*inspector.get_table_names(schema=schema), *inspector.get_view_names(schema=schema)]
    place = source.shown if schema is None else f"schema {schema!r} of {source.shown}"
    return ExtractionError(
        f"{place} has no table or view {table!r}{nearest(table, names)}; correct the name, or name its schema"
    )


def _chosen(found: list[ReflectedColumn], table: str, names: Sequence[str] | None) -> list[ReflectedColumn]:
    if not found:
        raise ExtractionError(f"table {table!r} has no columns; name another one")
    if names is None:
        return found
    if not names or len(set(names)) != len(names):
        raise ExtractionError(f"the columns {list(names)} are not different names; name each one once")
    there = {column["name"]: column for column in found}
    for name in names:
        if name not in there:
            raise ExtractionError(
                f"table {table!r} has no column {name!r}{nearest(name, list(there))}; its columns are "
                + ", ".join(there)
            )
    return [there[name] for name in names]


def _refuse_unsupported(
    clauses: list[ColumnClause[Any]], columns: list[Column | None], table: str, recast: str
) -> None:
    refused = [unsupported_reason(each) for each, column in zip(clauses, columns, strict=True) if column is None]
    if refused:
        kept = ",".join(_as_option(column.name) for column in columns if column is not None)
        remedy = f"leave them out with: --columns {shlex.quote(kept)}, or " if kept else ""
        raise ExtractionError(
            f"columns of table {table!r} have types that Headrace does not extract exactly: {', '.join(refused)}; "
            f"{remedy}{recast}"
        )


def _as_option(name: str) -> str:
    """Return a name as the option `--columns` takes it, quoted as in CSV where necessary."""
    plain = name == name.strip() and not set(name) & {",", '"'}
    return name if plain else '"' + name.replace('"', '""') + '"'


def _require_order(connection: Connection, relation: _Relation, new_by: str) -> None:
    """Raise an error if a column does not order all rows, each at a place of its own."""
    names = [column.name for column in relation.columns]
    if new_by not in names:
        raise ExtractionError(
            f"the column {new_by!r} of --new-by is not extracted{nearest(new_by, names)}; the columns are "
            + ", ".join(names)
        )
    column, place = relation.column(new_by), f"column {new_by!r} of table {relation.name!r}"
    advice = "name a unique column whose values grow, such as an identity column, or extract without --new-by"
    if _is_view(connection, relation):
        raise ExtractionError(
            f"{relation.name!r} is a view, which declares no column as unique and never null, so --new-by is not "
            "possible; extract the table that it reads, or extract it without --new-by"
        )
    if not column.ordered:
        raise ExtractionError(f"{place} has the type {column.declared}, which is not compared exactly; {advice}")
    if [new_by] not in _unique_columns(connection, relation):
        raise ExtractionError(
            f"{place} is not declared unique, so later rows with the greatest extracted value would be lost; {advice}"
        )
    if _is_inherited(connection, relation):
        raise ExtractionError(
            f"{place} is not unique together with the rows of the tables that inherit from it, so later rows with the "
            "greatest extracted value would be lost; extract without --new-by"
        )
    is_key = relation.key == [new_by]  # a key of SQLite may hold null
    if new_by in relation.nullable and not (is_key and not _has_null(connection, column)):
        raise ExtractionError(f"{place} may be null, so it does not order all rows; declare it NOT NULL, or {advice}")


def _is_view(connection: Connection, relation: _Relation) -> bool:
    inspector = inspect(connection)
    names = inspector.get_view_names(schema=relation.schema)
    if isinstance(inspector, PGInspector):
        names = [*names, *inspector.get_materialized_view_names(schema=relation.schema)]
    return relation.name in names


def _unique_columns(connection: Connection, relation: _Relation) -> list[Sequence[str | None]]:
    """Return the lists of columns whose values are different in all rows."""
    if connection.dialect.name == SQLITE:
        return [relation.key, *_unique_in_sqlite(connection, relation)]
    inspector = inspect(connection)
    constraints = inspector.get_unique_constraints(relation.name, schema=relation.schema)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SAWarning)  # of indexes by expressions
        indexes = inspector.get_indexes(relation.name, schema=relation.schema)
    unique = [each for each in indexes if each["unique"] and not _is_partial(each)]
    invalid = _invalid_indexes(connection, relation) if unique else set()
    return [
        relation.key,
        *(each["column_names"] for each in constraints),
        *(each["column_names"] for each in unique if each["name"] not in invalid),
    ]


def _unique_in_sqlite(connection: Connection, relation: _Relation) -> Iterator[Sequence[str | None]]:
    """Yield the columns of each unique index.

    SQLite's own list is read: SQLAlchemy parses the text of statements, and misses the condition in ``ON t(a)WHERE b``.
    """
    place = relation.schema or "main"
    listed = text('SELECT name FROM pragma_index_list(:name, :place) WHERE "unique" AND NOT partial')
    parts = text("SELECT name FROM pragma_index_info(:name, :place)")
    for (index,) in connection.execute(listed, {"name": relation.name, "place": place}).all():
        found = connection.execute(parts, {"name": index, "place": place})
        yield [name for (name,) in found]  # None is an expression


def _invalid_indexes(connection: Connection, relation: _Relation) -> set[str | None]:
    """Return the indexes of a table of PostgreSQL whose concurrent creation failed: they do not cover all rows."""
    inspector = inspect(connection)
    assert isinstance(inspector, PGInspector)
    indexes = sql_table("pg_index", *map(sql_column, ("indexrelid", "indrelid", "indisvalid")), schema="pg_catalog")
    names = sql_table("pg_class", sql_column("oid"), sql_column("relname"), schema="pg_catalog")
    found = (
        select(names.c.relname)
        .join(indexes, indexes.c.indexrelid == names.c.oid)
        .where(indexes.c.indrelid == inspector.get_table_oid(relation.name, schema=relation.schema))
        .where(indexes.c.indisvalid.is_(False))
    )
    return set(connection.execute(found).scalars())


def _is_inherited(connection: Connection, relation: _Relation) -> bool:
    """Whether the rows of a table are also those of others, which its constraints do not cover: only in PostgreSQL."""
    inspector = inspect(connection)
    if not isinstance(inspector, PGInspector):
        return False
    heirs = sql_table("pg_inherits", sql_column("inhparent"), schema="pg_catalog")
    parents = sql_table("pg_class", sql_column("oid"), sql_column("relkind"), schema="pg_catalog")
    found = (
        select(heirs.c.inhparent)
        .join(parents, parents.c.oid == heirs.c.inhparent)
        .where(heirs.c.inhparent == inspector.get_table_oid(relation.name, schema=relation.schema))
        .where(parents.c.relkind != "p")  # constraints of partitioned tables cover all partitions
    )
    return connection.execute(found.limit(1)).first() is not None


def _is_partial(index: Any) -> bool:
    return any(name.endswith("_where") for name in index.get("dialect_options", {}))


def _has_null(connection: Connection, column: Column) -> bool:
    found = connection.execute(select(column.clause).where(column.clause.is_(None)).limit(1))
    return found.first() is not None


def _batches(
    connection: Connection, relation: _Relation, new_by: str | None, destination: Destination
) -> Iterator[pa.Table]:
    """Yield the rows; those after the position of the destination in the order of a column, if it is given."""
    after = destination.position
    wanted = select(*(column.expression.label(f"c{at}") for at, column in enumerate(relation.columns)))
    if new_by is not None:
        column = relation.column(new_by)
        wanted = wanted.order_by(column.clause)
        if after is not None:
            wanted = wanted.where(column.clause > _value(after, column.dtype))
    first = 1
    with connection.execute(wanted, execution_options={"yield_per": _PARTITION_ROWS}) as result:  # a server's cursor
        for rows in result.partitions():
            yield _converted(relation, rows, first, destination)
            first += len(rows)


def _converted(relation: _Relation, rows: Sequence[Any], first: int, destination: Destination) -> pa.Table:
    arrays = []
    for at, column in enumerate(relation.columns):
        values = []
        for number, row in enumerate(rows):
            try:
                values.append(None if row[at] is None else column.convert(row[at]))
            except ValueError as error:
                reason = f"{_short(row[at])} {error}"
                raise _bad_value(relation, column, row, first + number, reason, destination) from None
        try:
            arrays.append(pa.array(values, column.dtype))
        except (pa.ArrowException, OverflowError) as error:
            raise ExtractionError(
                f"table {relation.name!r}, column {column.name!r}, rows {first} to {first + len(rows) - 1}: a value is "
                f"no {column.dtype}: {error}; was the table changed meanwhile? Run the extraction again"
            ) from error
    return pa.Table.from_arrays(arrays, schema=relation.arrow_schema)


def _bad_value(
    relation: _Relation, column: Column, row: Any, number: int, reason: str, destination: Destination
) -> ExtractionError:
    names = [each.name for each in relation.columns]
    key = [f"{name} = {_short(row[names.index(name)])}" for name in relation.key if name in names]
    shown = f" ({', '.join(key)})" if key else ""
    return ExtractionError(
        f"table {relation.name!r}, column {column.name!r}, row {number}{shown}: {reason}; the column is "
        f"{column.declared}: {_advice(relation, destination)}"
    )


def _advice(relation: _Relation, destination: Destination) -> str:
    """Return what to do about values that do not fit: a folder with files takes neither other columns nor tables."""
    if isinstance(destination, GrowingFolder) and destination.files:
        return (
            f"correct such values, or name another folder than {destination.folder}, whose files have this column, and "
            f"leave the column out with --columns there, or {relation.recast}"
        )
    return f"correct such values, leave the column out with --columns, or {relation.recast}"


def _short(value: Any) -> str:
    shown = repr(value[:_SHOWN] if isinstance(value, str | bytes) else value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


class _Files:
    """Writes rows to the files of a destination, one file after the other.

    Parameters
    ----------
    destination
        Folder of the files.
    relation
        Table or view.
    new_by
        Column in whose order the rows come, or None.
    rows_per_file
        Number of rows of a file; the last one may have fewer.
    """

    def __init__(self, destination: Destination, relation: _Relation, new_by: str | None, rows_per_file: int) -> None:
        self._destination = destination
        self._schema = relation.arrow_schema
        self._new_by = new_by
        self._rows_per_file = rows_per_file
        self._writer: pq.ParquetWriter | None = None
        self._in_file = self._total = self._pending_bytes = 0
        self._pending: list[pa.Table] = []
        self._last: pa.Scalar | None = None
        self._names: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):  # the first error is the one to report
                self._writer.close()

    def write(self, rows: pa.Table) -> None:
        """Write rows, which come after all others in the order of the column."""
        if self._new_by is not None:
            self._require_growth(rows.column(self._new_by))
        while rows.num_rows:
            part = rows.slice(0, self._rows_per_file - self._in_file)
            self._append(part)
            rows = rows.slice(part.num_rows)

    def finish(self) -> ExtractResult:
        """Commit the last file, and return the result. The first file of a folder is written even without rows."""
        if self._writer is None and self._destination.files == 0:
            self._begin()
        if self._writer is not None:
            self._commit()
        return ExtractResult(self._total, tuple(self._names), self._destination.position)

    def _append(self, part: pa.Table) -> None:
        if self._writer is None:
            self._begin()
        self._pending.append(part)
        self._in_file += part.num_rows
        self._total += part.num_rows
        self._pending_bytes += part.nbytes
        if self._pending_bytes >= _GROUP_BYTES:
            self._flush()
        if self._new_by is not None:
            self._last = part.column(self._new_by)[-1]
        if self._in_file == self._rows_per_file:
            self._commit()

    def _begin(self) -> None:
        texts = [field.name for field in self._schema if pa.types.is_string(field.type)]
        with writing(self._destination.folder):
            path = self._destination.begin()
            self._writer = pq.ParquetWriter(path, self._schema, compression="zstd", use_dictionary=texts)

    def _flush(self) -> None:
        assert self._writer is not None
        if self._pending:
            with writing(self._destination.folder):
                self._writer.write_table(pa.concat_tables(self._pending))
        self._pending, self._pending_bytes = [], 0

    def _commit(self) -> None:
        self._flush()
        assert self._writer is not None
        writer, self._writer, self._in_file = self._writer, None, 0
        position = self._destination.position if self._last is None else _position(self._last)
        with writing(self._destination.folder):
            writer.close()
            self._names.append(self._destination.commit(position))

    def _require_growth(self, values: pa.ChunkedArray) -> None:
        """Raise an error unless each value is greater than the one before it."""
        column = (
            values.combine_chunks()
            if self._last is None
            else pa.concat_arrays([pa.array([self._last.as_py()], values.type), *values.chunks])
        )
        if column.null_count or not pc.all(pc.less(column[:-1], column[1:]), min_count=0).as_py():
            raise ExtractionError(
                f"column {self._new_by!r} has equal values or null in several rows, although it is declared unique; "
                "extract without --new-by"
            )


def _position(value: pa.Scalar) -> str:
    found = value.as_py()
    return found.isoformat() if isinstance(found, dt.date) else str(found)


def _value(position: str, dtype: pa.DataType) -> Any:
    """Return the value of a position."""
    if pa.types.is_integer(dtype):
        return int(position)
    if pa.types.is_decimal(dtype):
        return decimal.Decimal(position)
    return (dt.date if pa.types.is_date(dtype) else dt.datetime).fromisoformat(position)
