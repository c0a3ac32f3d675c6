"""`headrace join`: join a file or folder, read as a stream, with a table and write Parquet."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from headrace import joins, storage
from headrace.cli.arguments.options import (
    DURATION,
    NEW_FILE,
    PATH,
    SIZE,
    ReportingCommand,
    csv_options,
    match_options,
    pass_console,
)
from headrace.cli.reporting.blocks import Pairs, counted
from headrace.cli.reporting.errors import ArgumentsError, require_column
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pyarrow as pa

    from headrace.cli.arguments.matching import Match
    from headrace.cli.arguments.sink import ParquetSink
    from headrace.cli.arguments.streams import CsvFormat, FileStream
    from headrace.cli.reporting.console import Console
    from headrace.joins.protocol import Operator

__all__ = ["JoinReport", "JoinRequest", "join"]


@dataclass(frozen=True)
class JoinRequest:
    """Options of `headrace join`."""

    table: Path
    stream: Path
    out: Path
    match: Match
    how: str
    algorithm: str
    memory: int
    deadline: float | None
    deadline_column: str | None
    csv: CsvFormat


@dataclass(frozen=True)
class JoinReport:
    """Result of a join.

    Attributes
    ----------
    rows_in, rows_out
        Number of stream rows read and of result rows written.
    seconds, rows_per_second
        Time from the first row read to the last row written, and stream rows per second of that time.
    hit_ratio
        Share of stream rows that needed no read from the table.
    pages_wanted, pages_read, seeks
        Number of table pages requested, of pages read from disk (including bridged gaps), and of reads.
    longest_wait_seconds, deadline_misses
        Longest time from a row's arrival to its result, and number of rows that waited longer than the deadline.
    memory, memory_peak
        Memory budget and peak memory of the operator, in bytes.
    """

    algorithm: str
    out: str
    rows_in: int
    rows_out: int
    seconds: float
    rows_per_second: float
    hit_ratio: float
    pages_wanted: int
    pages_read: int
    seeks: int
    longest_wait_seconds: float
    deadline_misses: int
    memory: int
    memory_peak: int


@click.command(
    "join",
    cls=ReportingCommand,
    short_help="Join a stream of files with a table.",
    epilog="Example: headrace join planes.tbl flights --on tailnum=tailnum --how left -o joined.parquet",
)
@click.argument("table", type=PATH)
@click.argument("stream", type=PATH)
@match_options
@click.option(
    "--how",
    type=click.Choice(["inner", "left"]),
    default="inner",
    show_default=True,
    help="left keeps unmatched stream rows.",
)
@click.option(
    "--algorithm",
    type=click.Choice(["ssij", "meshjoin", "inlj"], case_sensitive=False),
    default="ssij",
    show_default=True,
    help="Join operator.",
)
@click.option("--memory", type=SIZE, default="32MiB", show_default=True, help="Memory budget of the operator.")
@click.option("--deadline", type=DURATION, help="Maximum wait of a stream row, such as 500ms (ssij only).")
@click.option(
    "--deadline-column",
    metavar="COLUMN",
    help="Stream column with each row's maximum wait, seconds or duration; null means --deadline (ssij only).",
)
@click.option("-o", "--out", type=NEW_FILE, required=True, help="Parquet file to write.")
@csv_options
@pass_console
def join(console: Console, /, table: Path, stream: Path, out: Path, **choices: Any) -> None:
    """Join the rows of STREAM with TABLE.

    STREAM is CSV, JSON lines, or Parquet; a file or a folder. The result has the stream's columns, then the table's
    columns without the key; a table column whose name is also in the stream gets the suffix _right. OUT appears only
    after it is complete.

    With --as-of or --band, the columns of --on are the leading columns of the table's key, and the compared column is
    the next one.
    """
    from headrace.cli.arguments.sink import check_place
    from headrace.cli.arguments.streams import open_stream

    request = JoinRequest(table=table, stream=stream, out=out, **choices)
    with console.step(
        f"joining {stream} with {table}",
        left=f"nothing; {out} was not written or changed",
        repair=f"see what is damaged with: headrace table check {table}",
    ):
        check_place(out, (table, stream))
        _refuse_own_tail(request)
        _refuse_name_of_csv(out)
        with storage.Table.open(table) as relation:
            form = _typed_csv(request, relation.schema)
            request.match.check_key(relation.key)
            arriving = open_stream(stream, csv=form)
            _require_columns(request, arriving.schema)
            with _operator(request, relation) as operator:
                started = console.clock()
                rows_out = _pump(operator, arriving, out, console)
                report = _report(request, operator, rows_out, console.clock() - started)
    console.result(asdict(report), _block(report))


def _refuse_own_tail(request: JoinRequest) -> None:
    if request.stream.is_dir() and request.out.resolve().is_relative_to(request.stream.resolve()):
        raise ArgumentsError(
            f"{request.out} lies in the stream's folder and would be read as part of it; write elsewhere"
        )


def _refuse_name_of_csv(out: Path) -> None:
    from headrace.cli.arguments.streams import kind_of

    if kind_of(out) == "csv":
        raise ArgumentsError(
            f"{out} is named as a CSV, but the result is Parquet; write to {out.with_suffix('.parquet')}"
        )


def _typed_csv(request: JoinRequest, table: pa.Schema) -> CsvFormat:
    """Give the join columns of a CSV the types of their key columns, so that 007 matches the text '007'."""
    for _, key in request.match.pairs:
        require_column("the table", key, table.names)
    keys = {stream: table.field(key).type for stream, key in request.match.pairs}
    return replace(request.csv, types={**request.csv.types, **keys})


def _require_columns(request: JoinRequest, stream: pa.Schema) -> None:
    """Raise an error if the stream lacks a column that is to match."""
    for name, _ in request.match.pairs:
        require_column(request.stream, name, stream.names)


def _operator(request: JoinRequest, table: storage.Table) -> Operator:
    options: dict[str, Any] = {
        "on": request.match.predicate(table.schema),
        "how": request.how,
        "memory": request.memory,
    }
    if request.algorithm == "ssij":
        return joins.SSIJ(table, **options, deadline=request.deadline, deadline_column=request.deadline_column)
    for option, given in (("--deadline-column", request.deadline_column), ("--deadline", request.deadline)):
        if given is not None:
            raise ArgumentsError(f"{request.algorithm} knows no deadlines; leave out {option} or use --algorithm ssij")
    kind = joins.MeshJoin if request.algorithm == "meshjoin" else joins.IndexNestedLoops
    return kind(table, **options)


def _pump(operator: Operator, stream: FileStream, out: Path, console: Console) -> int:
    from headrace.cli.arguments.sink import ParquetSink

    with (
        console.progress("joined", total=stream.rows) as progress,
        ParquetSink(out, operator.output_schema(stream.schema)) as sink,
    ):
        for batch in stream.batches():
            _drain(operator.push(batch), sink)
            _drain(operator.tick(), sink)
            while operator.due is not None and operator.due <= time.monotonic():
                _drain(operator.tick(), sink)  # a join phase advances in steps
            progress.advance(batch.num_rows)
        _drain(operator.finish(), sink)
    return sink.rows


def _drain(results: Iterable[pa.RecordBatch], sink: ParquetSink) -> None:
    for batch in results:
        sink.write(batch)


def _report(request: JoinRequest, operator: Operator, rows_out: int, seconds: float) -> JoinReport:
    stats = operator.stats
    return JoinReport(
        algorithm=request.algorithm,
        out=str(request.out),
        rows_in=stats.rows_in,
        rows_out=rows_out,
        seconds=seconds,
        rows_per_second=stats.rows_in / seconds if seconds else 0.0,
        hit_ratio=stats.hit_ratio,
        pages_wanted=stats.pages_wanted,
        pages_read=stats.pages_read,
        seeks=stats.seeks,
        longest_wait_seconds=stats.longest_wait,
        deadline_misses=stats.deadline_misses,
        memory=request.memory,
        memory_peak=stats.memory.peak,
    )


def _block(report: JoinReport) -> Pairs:
    return Pairs(
        f"Wrote {report.out}",
        {
            "rows in": report.rows_in,
            "rows out": report.rows_out,
            "rate": f"{report.rows_per_second:,.0f} rows/s, {report.seconds:.2f} s",
            "hit ratio": f"{report.hit_ratio:.1%} of the stream needed no read",
            "pages": f"{report.pages_wanted:,} wanted, {report.pages_read:,} read in {counted(report.seeks, 'read')}",
            "longest wait": f"{report.longest_wait_seconds * 1000:,.0f} ms",
            "deadline misses": report.deadline_misses,
            "memory": f"{format_size(report.memory_peak)} at most of {format_size(report.memory)}",
        },
    )
