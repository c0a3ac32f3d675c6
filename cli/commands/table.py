"""`headrace table`: build, inspect, check, and read a clustered table."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from headrace import storage
from headrace.cli.arguments.options import COLUMNS, NEW_FILE, PATH, SIZE, ReportingCommand, csv_options, pass_console
from headrace.cli.reporting.blocks import Grid, Pairs, Text
from headrace.cli.reporting.errors import ArgumentsError
from headrace.cli.reporting.exits import ExitCode
from headrace.storage.errors import CorruptionError, NotATableError
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa

    from headrace.cli.arguments.streams import CsvFormat, FileStream
    from headrace.cli.reporting.blocks import Block
    from headrace.cli.reporting.console import Console

__all__ = ["table"]

FILTER_BITS = click.FloatRange(4, 16)


@click.group("table", short_help="Build, inspect, check, and read a table.")
def table() -> None:
    """Build, inspect, check, and read a clustered table."""


@table.command(
    "build",
    cls=ReportingCommand,
    short_help="Build a table from files.",
    epilog="Example: headrace table build planes.csv --key tailnum --unique -o planes.tbl",
)
@click.argument("source", type=PATH)
@click.option("--key", type=COLUMNS, required=True, help="Columns to cluster by, COL[,COL].")
@click.option("--unique", is_flag=True, help="Reject rows with duplicate keys.")
@click.option("--page-size", type=SIZE, default="8KiB", show_default=True, help="Page size, from 4KiB to 64KiB.")
@click.option(
    "--fill", type=click.FloatRange(0.1, 1.0), default=0.8, show_default=True, help="Fill factor of the pages."
)
@click.option("--memory", type=SIZE, default="1GiB", show_default=True, help="Memory limit of the sort.")
@click.option("--overwrite", is_flag=True, help="Replace an existing table.")
@click.option("--filter-bits", type=FILTER_BITS, help="Add a filter with this many bits per key; see `table filter`.")
@click.option("-o", "--out", type=NEW_FILE, required=True, help="Table to create.")
@csv_options
@pass_console
def build(console: Console, /, source: Path, out: Path, key: tuple[str, ...], csv: CsvFormat, **options: Any) -> None:
    """Build a clustered table from SOURCE: CSV, JSON lines, or Parquet; a file or a folder.

    The rows may be in any order and may exceed memory. The table appears only after it is completely on disk.
    """
    import pyarrow as pa

    from headrace.cli.arguments.sink import check_place
    from headrace.cli.arguments.streams import open_stream

    with console.step(f"building {out} from {source}", left=f"nothing; {out} was not written or changed"):
        check_place(out)
        if out.exists() and not options["overwrite"]:
            raise ArgumentsError(f"{out} exists already; name another file, or replace it with --overwrite")
        stream = open_stream(source, csv=csv)
        check_place(out, stream.files)
        started = console.clock()
        with console.progress("read", total=stream.rows) as progress, stream.placing():
            table = storage.Table.build(
                out,
                pa.RecordBatchReader.from_batches(stream.schema, _counted(stream, progress)),
                key=list(key),
                **options,
            )
        with table:
            document, schema = _describe(out, table), table.schema
    seconds = console.clock() - started
    typeless = f"{source} has no record that shows the types of its columns, so all are string; build the table again"
    notes = [Text(f"{typeless} when it has records: --overwrite")] if stream.typeless else []
    blocks = [*_info_blocks(document, schema), *notes, Text(f"Built in {seconds:.2f} s")]
    console.result({**document, "seconds": seconds}, *blocks)


@table.command("info", cls=ReportingCommand)
@click.argument("path", metavar="TABLE", type=PATH)
@pass_console
def info(console: Console, /, path: Path) -> None:
    """Show the schema, key, and size of TABLE."""
    with (
        console.step(f"opening {path}", left="the table as it was", repair=_after_damage(path)),
        storage.Table.open(path) as table,
    ):
        document, schema = _describe(path, table), table.schema
    console.result(document, *_info_blocks(document, schema))


def _require_table(path: Path) -> None:
    """Raise an error if a file is no table at all; a check tells what is damaged in one."""
    try:
        storage.Table.open(path).close()
    except NotATableError:
        raise
    except CorruptionError:
        return


@table.command("check", cls=ReportingCommand)
@click.argument("path", metavar="TABLE", type=PATH)
@pass_console
@click.pass_context
def check(ctx: click.Context, console: Console, /, path: Path) -> None:
    """Verify every page of TABLE. Exit code 0 if it is intact, 3 if it is damaged."""
    from headrace.storage.check import check_file

    with console.step(
        f"checking {path}",
        left="the table as it was",
        repair="build the table again from its source: headrace table build ... --overwrite",
    ):
        _require_table(path)
        report = check_file(path)
    violations = [asdict(violation) for violation in report.violations]
    document = {"table": str(path), "ok": report.ok, "violations": violations, "unfiltered": report.unfiltered}
    if report.ok:
        remark = f"Its filter knows nothing of {report.unfiltered} leaves; make it again: headrace table filter {path}"
        console.result(document, Text(f"{path} is sound"), *([Text(remark)] if report.unfiltered else []))
        ctx.exit(ExitCode.OK)
    rows = [tuple(violation.values()) for violation in violations]
    console.result(
        document,
        Grid(f"{path} is damaged", list(violations[0]), rows),
        Text("Build it again from its source: headrace table build ... --overwrite"),
    )
    ctx.exit(ExitCode.DAMAGED)


@table.command("scan", cls=ReportingCommand, short_help="Print rows in key order.")
@click.argument("path", metavar="TABLE", type=PATH)
@click.option("--low", help="First key, VALUE[,VALUE], inclusive.")
@click.option("--high", help="Last key, VALUE[,VALUE], inclusive.")
@click.option("--columns", type=COLUMNS, help="Show only these columns.")
@click.option("--limit", type=click.IntRange(min=0), help="Maximum number of rows to print.")
@pass_console
def scan(
    console: Console,
    /,
    path: Path,
    low: str | None,
    high: str | None,
    columns: tuple[str, ...] | None,
    limit: int | None,
) -> None:
    """Print rows of TABLE in key order: as CSV, or with --json as one JSON object per line."""
    from headrace.cli.arguments.rows import limited, objects, parse_key, print_csv

    with (
        console.step(f"reading {path}", left="the table as it was", repair=_after_damage(path)),
        storage.Table.open(path) as table,
        console.streaming(),
    ):
        key = [table.schema.field(name) for name in table.key]
        batches = table.scan(parse_key(low, key), parse_key(high, key), list(columns) if columns else None)
        batches = limited(iter(batches), limit)
        if console.json_mode:
            for batch in batches:
                console.rows(objects(batch))
        else:
            print_csv(batches, list(columns or table.schema.names))


@table.command("dump", cls=ReportingCommand)
@click.argument("path", metavar="TABLE", type=PATH)
@click.option("--page", type=click.IntRange(min=0), help="Show only this page, with its bytes where relevant.")
@pass_console
def dump(console: Console, /, path: Path, page: int | None) -> None:
    """Show the structure of TABLE page by page, even if it is damaged."""
    from headrace.cli.commands.dump import run_dump

    run_dump(path, page, console)


@table.command("compact", cls=ReportingCommand, short_help="Restore the key order on disk and free unused space.")
@click.argument("path", metavar="TABLE", type=PATH)
@pass_console
def compact(console: Console, /, path: Path) -> None:
    """Restore the key order of TABLE on disk and free unused space, while readers continue."""
    with (
        console.step(f"compacting {path}", left="the table with all its rows", repair=_after_damage(path)),
        storage.Table.open(path, mode="w") as table,
    ):
        done, size = table.compact(), table.stats.page_size
    before, after = done.pages_before * size, done.pages_after * size
    document = {"table": str(path), "bytes_before": before, "bytes_after": after, "shrunk": done.shrunk}
    text = f"{path} is in key order: {format_size(before)} became {format_size(after)}"
    later = Text("A reader still needs an earlier state: compact again when it is done, to give its space back")
    console.result(document, Text(text), *([] if done.shrunk else [later]))


@table.command("filter", cls=ReportingCommand, epilog="Example: headrace table filter planes.tbl --bits 8")
@click.argument("path", metavar="TABLE", type=PATH)
@click.option("--bits", type=FILTER_BITS, default=8, show_default=True, help="Number of filter bits per key.")
@click.option("--drop", is_flag=True, help="Remove the filter instead.")
@pass_console
def make_filter(console: Console, /, path: Path, bits: float, *, drop: bool) -> None:
    """Create a filter next to TABLE. Joins use it to detect most absent keys without reading a page."""
    with (
        console.step(f"making a filter for {path}", left="the table as it was", repair=_after_damage(path)),
        storage.Table.open(path) as table,
    ):
        dropped = drop and table.drop_filter()
        if not drop:
            table.build_filter(bits)
        stats = table.stats
    document = {"table": str(path), "filter_bits": stats.filter_bits, "filter_bytes": stats.filter_bytes}
    made = f"{path} has a filter of {stats.filter_bits:.1f} bits a key, {format_size(stats.filter_bytes)}"
    gone = f"{path} has no filter any more" if dropped else f"{path} had no filter"
    console.result(document, Text(gone if drop else made))


def _counted(stream: FileStream, progress: Any) -> Iterator[pa.RecordBatch]:
    for batch in stream.batches():
        yield batch
        progress.advance(batch.num_rows)


def _after_damage(path: Path) -> str:
    return f"see what is damaged with: headrace table check {path}"


def _describe(path: Path, table: storage.Table) -> dict[str, Any]:
    return {
        "table": str(path),
        "key": list(table.key),
        "columns": {field.name: str(field.type) for field in table.schema},
        "stats": asdict(table.stats),
    }


def _info_blocks(document: dict[str, Any], schema: pa.Schema) -> list[Block]:
    """Return what a table is, with types as a pipeline file has them; the document has Arrow's names, as Python has."""
    from headrace.pipelines.config import type_name

    stats = {name.replace("_", " "): _readable(name, value) for name, value in document["stats"].items()}
    columns = [(each.name, type_name(each.type), "key" if each.name in document["key"] else "") for each in schema]
    return [Pairs(document["table"], stats), Grid("Columns", ("name", "type", ""), columns)]


def _readable(name: str, value: Any) -> Any:
    return format_size(value) if (isinstance(value, int) and name.endswith("bytes")) or name == "page_size" else value
