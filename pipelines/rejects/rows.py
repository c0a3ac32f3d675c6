"""The rejected rows of a pipeline with their status, read without Spark.

A row is open until a retry loads it or it is dismissed. If a retry rejects it again, it stays open with the new cause.
"""

from __future__ import annotations

import re
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.pipelines.batch.error_rows import ERROR_SCHEMA
from headrace.pipelines.batch.resolutions import RESOLUTION_SCHEMA, Action
from headrace.pipelines.delta.reads import scan_table
from headrace.pipelines.delta.scratch import load_rows, scratch_database
from headrace.pipelines.delta.tables import has_table, open_table
from headrace.pipelines.errors import DeltaTableError, LedgerError, RejectedRowsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import duckdb
    import pyarrow as pa

    from headrace.pipelines.config.model import PipelineConfig
    from headrace.pipelines.source.ledger import Ledger

__all__ = [
    "OPEN",
    "RejectGroup",
    "RejectedRecord",
    "RowId",
    "Selection",
    "check_left_over",
    "count_rejects",
    "list_rejects",
    "rejects",
    "show_rejects",
]

OPEN: Final = "open"
STATUSES: Final = (OPEN, str(Action.RETRIED), str(Action.DISMISSED))
_ID: Final = re.compile(r"(\d+)/(.+):(\d+)", re.DOTALL)
_RECORDS: Final = ("record", "heading", "record_bytes")


class RowId(NamedTuple):
    """Name of a rejected row on the command line, ``BATCH/FILE:RECORD``: batch, file, and record number in the file."""

    batch: int
    file: str
    record: int

    def __str__(self) -> str:
        return f"{self.batch}/{self.file}:{self.record}"

    @classmethod
    def parse(cls, text: str) -> RowId:
        """Return the row that a text names.

        Raises
        ------
        RejectedRowsError
            If the text does not have the form ``BATCH/FILE:RECORD``.

        Examples
        --------
        >>> RowId.parse("3/2024/orders.csv:17")
        RowId(batch=3, file='2024/orders.csv', record=17)
        """
        match = _ID.fullmatch(text)
        if match is None:
            raise RejectedRowsError(
                f"{text!r} names no rejected row; write BATCH/FILE:RECORD, as `headrace errors show` does"
            )
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Selection:
    """A choice of rejected rows. A row must meet every criterion that is given; without any, all rows are selected.

    Parameters
    ----------
    ids
        Rows by name.
    rules
        Texts, one of which must occur in a cause of the row, regardless of case: a role, a column, or words of the
        reason.
    batches, files
        Batches that rejected the row, and files that it came from.
    streams
        Streams of these batches, as the beginnings of their identities.
    """

    ids: tuple[RowId, ...] = ()
    rules: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether no criterion is given."""
        return not (self.ids or self.rules or self.batches or self.files or self.streams)


@dataclass(frozen=True)
class RejectGroup:
    """Rejected rows with the same status, rule, stream, batch and file.

    Parameters
    ----------
    status
        ``open``, ``retried`` or ``dismissed``.
    rule
        Causes without the values: role or column, and reason.
    stream, batch, file
        Stream and batch that rejected the rows, and their file.
    rows
        Number of rows.
    """

    status: str
    rule: str
    stream: str
    batch: int
    file: str
    rows: int


@dataclass(frozen=True)
class RejectedRecord:
    """A rejected row.

    Parameters
    ----------
    id
        Name of the row, see `RowId`.
    stream, batch, file, record_number
        Identity of the row.
    status
        ``open``, ``retried`` or ``dismissed``.
    reason
        Reason for the last rejection.
    note
        Batch that retried the row, batches that rejected it again, or the reason for its dismissal; None if there was
        no action.
    record
        Original record as text.
    causes
        Causes of the last rejection.
    """

    id: str
    stream: str
    batch: int
    file: str
    record_number: int
    status: str
    reason: str
    note: str | None
    record: str | None
    causes: tuple[dict[str, Any], ...] = field(default_factory=tuple)


def list_rejects(
    config: PipelineConfig, selection: Selection | None = None, statuses: Sequence[str] = STATUSES
) -> list[RejectGroup]:
    """Return the rejected rows of a pipeline by status, rule, stream, batch and file, the newest batch first.

    Raises
    ------
    DeltaTableError
        If the error table cannot be read.
    """
    with rejects(config, selection or Selection(), statuses, records=False) as found:
        rows = found.execute(
            "SELECT status, rule, stream, batch, _file, count(*) FROM found GROUP BY ALL "
            "ORDER BY stream, batch DESC, _file, count(*) DESC, status, rule"
        ).fetchall()
    return [RejectGroup(*row) for row in rows]


def count_rejects(config: PipelineConfig, statuses: Sequence[str] = STATUSES) -> int:
    """Return the number of rejected rows of a pipeline.

    Raises
    ------
    DeltaTableError
        If the error table cannot be read.
    """
    if not has_table(config.errors_path):
        return 0
    with rejects(config, Selection(), statuses, records=False) as found:
        return int(found.execute("SELECT count(*) FROM found").fetchall()[0][0])


def check_left_over(config: PipelineConfig, ledger: Ledger) -> None:
    """Refuse to begin a stream while rows that an earlier stream of the pipeline rejected are open.

    Call it after `headrace.pipelines.source.identity.check_identity`, so that the facts of the earlier stream are gone.

    Raises
    ------
    LedgerError
        If a run would reject these rows again, and a retry would then load them twice. The message gives the remedies.
    DeltaTableError
        If the error table cannot be read.
    """
    rows = count_rejects(config, (OPEN,)) if ledger.is_new else 0
    if rows:
        tables = " and ".join(filter(has_table, (config.errors_path, config.resolutions_path)))
        raise LedgerError(
            f"{config.errors_path} holds {rows:,} open rows that pipeline {config.name} rejected, but its checkpoint "
            f"{config.checkpoint} is new and its facts are gone; a run would reject these rows again, and a retry load "
            f"them twice. To begin again, remove {tables} too; or mark the rows: run `headrace errors dismiss "
            "--pipeline PIPELINE --all --reason TEXT`"
        )


def show_rejects(
    config: PipelineConfig,
    selection: Selection | None = None,
    statuses: Sequence[str] = STATUSES,
    limit: int | None = None,
) -> tuple[list[RejectedRecord], int]:
    """Return rejected rows of a pipeline in the order of batch, file and record, and how many there are in all.

    Raises
    ------
    DeltaTableError
        If the error table cannot be read.
    """
    with rejects(config, selection or Selection(), statuses) as found:
        total = found.execute("SELECT count(*) FROM found").fetchall()[0][0]
        rows = found.sql(
            "SELECT batch || '/' || _file || ':' || _record_number AS id, stream, batch, _file AS file, "
            "_record_number AS record_number, status, reason, note, record, causes FROM found "
            "ORDER BY stream, batch, _file, _record_number LIMIT ?",
            params=[limit if limit is not None else total],
        ).to_arrow_table()
    records = [RejectedRecord(**{**row, "causes": tuple(row["causes"] or ())}) for row in rows.to_pylist()]
    return records, int(total)


@contextmanager
def rejects(
    config: PipelineConfig, selection: Selection, statuses: Sequence[str], *, records: bool = True
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a connection whose table `found` holds the selected rows: the error table's columns, status, rule, note.

    `reason` and `causes` are those of the last rejection. Without `records`, the original records are null.

    Raises
    ------
    DeltaTableError
        If the error table cannot be read.
    RejectedRowsError
        If an id names no row, or rows of several streams.
    """
    with (
        tempfile.TemporaryDirectory(prefix="headrace-rejects-") as folder,
        scratch_database(Path(folder) / "rejects.duckdb") as connection,
    ):
        _load(connection, "errors", config.errors_path, ERROR_SCHEMA, config.name, () if records else _RECORDS)
        _load(connection, "resolutions", config.resolutions_path, RESOLUTION_SCHEMA, config.name)
        connection.execute(_STATUS)
        where, values = _criteria(selection, statuses)
        connection.execute(f"CREATE TABLE found AS SELECT * FROM judged WHERE {where}", values)  # noqa: S608 - parameters
        _require_ids(connection, selection)
        yield connection


_STATUS: Final = """
    CREATE VIEW attempts AS
    SELECT stream, batch, _file, _record_number, by_stream, by_batch, bool_or(action = 'retried') AS taken,
        bool_or(action = 'rejected') AS refused, bool_or(action = 'dismissed') AS dismissed, max("at") AS moment,
        any_value(reason) AS reason, any_value(causes) FILTER (action = 'rejected') AS causes
    FROM resolutions GROUP BY stream, batch, _file, _record_number, by_stream, by_batch;
    CREATE VIEW outcomes AS
    SELECT stream, batch, _file, _record_number, bool_or(taken AND NOT refused) AS loaded,
        bool_or(dismissed) AS dismissed,
        arg_max(by_batch, moment) FILTER (taken AND NOT refused) AS loaded_by,
        arg_max(reason, moment) FILTER (refused) AS new_reason, arg_max(causes, moment) FILTER (refused) AS new_causes,
        string_agg(by_batch, ', ' ORDER BY moment) FILTER (refused) AS refused_by,
        arg_max(reason, moment) FILTER (dismissed) AS why
    FROM attempts GROUP BY stream, batch, _file, _record_number;
    CREATE VIEW judged AS
    SELECT e.* EXCLUDE (reason, causes), coalesce(new_reason, e.reason) AS reason,
        coalesce(new_causes, e.causes) AS causes,
        CASE WHEN loaded THEN 'retried' WHEN dismissed THEN 'dismissed' ELSE 'open' END AS status,
        CASE WHEN loaded THEN 'retried by batch ' || loaded_by WHEN dismissed THEN why
            WHEN refused_by IS NOT NULL THEN 'rejected again by batch ' || refused_by END AS note,
        array_to_string(list_distinct(list_transform(coalesce(new_causes, e.causes),
            lambda c: concat_ws(': ', c.role, c.column, c.reason))), '; ') AS rule
    FROM errors AS e LEFT JOIN outcomes AS o
        ON e.stream = o.stream AND e.batch = o.batch AND e._file = o._file AND e._record_number = o._record_number
    QUALIFY row_number() OVER (PARTITION BY e.stream, e.batch, e._file, e._record_number) = 1;
"""


def _load(
    connection: duckdb.DuckDBPyConnection,
    name: str,
    path: str,
    schema: pa.Schema,
    pipeline: str,
    without: Sequence[str] = (),
) -> None:
    """Create a table with the rows of a pipeline, without some columns; it is empty if there is no Delta table."""
    load_rows(connection, name, schema)
    if not has_table(path):
        return
    table = open_table(path)
    there = [each.name for each in table.schema().fields]
    columns = [column for column in schema.names if column in there and column not in without]
    missing = [column for column in schema.names if column not in there]
    if missing:
        raise DeltaTableError(
            f"the Delta table {path} has no column {missing[0]!r}, so it is not what Headrace writes; it has "
            f"{', '.join(there)}"
        )
    connection.register("given", scan_table(table, columns))
    connection.execute(f"INSERT INTO {name} BY NAME SELECT * FROM given WHERE pipeline = ?", [pipeline])  # noqa: S608 - a constant
    connection.unregister("given")


def _criteria(selection: Selection, statuses: Sequence[str]) -> tuple[str, list[Any]]:
    """Return the SQL condition of a selection, and its parameters."""
    clauses: list[tuple[str, Any]] = [("list_contains(?, status)", list(statuses))]
    if selection.ids:
        clauses.append(("list_contains(?, batch || '/' || _file || ':' || _record_number)", [*map(str, selection.ids)]))
    if selection.rules:
        wanted = [rule.casefold() for rule in selection.rules]
        clauses.append(("list_bool_or(list_transform(?, lambda t: contains(lower(rule), t)))", wanted))
    if selection.batches:
        clauses.append(("list_contains(?, batch)", list(selection.batches)))
    if selection.files:
        clauses.append(("list_contains(?, _file)", list(selection.files)))
    if selection.streams:
        wanted = list(selection.streams)
        clauses.append(("list_bool_or(list_transform(?, lambda t: starts_with(stream, t)))", wanted))
    return " AND ".join(text for text, _ in clauses), [value for _, value in clauses]


def _require_ids(connection: duckdb.DuckDBPyConnection, selection: Selection) -> None:
    """Raise an error if an id names no selected row, or rows of several streams."""
    for name in selection.ids:
        rows = connection.execute(
            "SELECT stream, status FROM judged WHERE batch = ? AND _file = ? AND _record_number = ?", list(name)
        ).fetchall()
        if not rows:
            raise RejectedRowsError(f"no rejected row is named {name}; `headrace errors show` lists them")
        streams = {stream for stream, _ in rows if any(map(stream.startswith, selection.streams or ("",)))}
        if len(streams) > 1:
            raise RejectedRowsError(
                f"{name} names rows of the streams {', '.join(sorted(streams))}; say which one with --stream"
            )
