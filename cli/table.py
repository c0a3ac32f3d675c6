"""`headrace table`: build, look at, check and read a clustered table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.cli.options import COLUMNS, NEW_FILE, PATH, SIZE, ReportingCommand, csv_options, pass_console

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cli.console import Console

__all__ = ["table"]

FILTER_BITS = click.FloatRange(4, 16)


@click.group("table", short_help="Build, inspect, check and read a table.")
def table() -> None:
    """Build, inspect, check and read a clustered table."""


@table.command(
    "build",
    cls=ReportingCommand,
    epilog="Example: headrace table build planes.csv --key tailnum --unique -o planes.tbl",
)
@click.argument("source", type=PATH)
@click.option("--key", type=COLUMNS, required=True, help="The column or columns to cluster by, COL[,COL].")
@click.option("--unique", is_flag=True, help="Refuse two rows with one key.")
@click.option("--page-size", type=SIZE, default="8KiB", show_default=True, help="From 4KiB to 64KiB.")
@click.option(
    "--fill", type=click.FloatRange(0.1, 1.0), default=0.8, show_default=True, help="How full pages are made."
)
@click.option("--memory", type=SIZE, default="1GiB", show_default=True, help="Most that sorting may hold.")
@click.option("--overwrite", is_flag=True, help="Replace a table that is already there.")
@click.option("--filter-bits", type=FILTER_BITS, help="Give it a filter of so many bits a key; see `table filter`.")
@click.option("-o", "--out", type=NEW_FILE, required=True, help="The table to make.")
@csv_options
@pass_console
def build(console: Console, /, source: Path, out: Path, **choices: Any) -> None:
    """Build a clustered table from SOURCE: CSV, JSON lines or Parquet, a file or a folder.

    The rows may be in any order and more than fit in memory. The table appears when all of it is on disk.
    """
    from headrace.cli.tables import BuildRequest, run_build

    run_build(BuildRequest(source=source, out=out, **choices), console)


@table.command("info", cls=ReportingCommand)
@click.argument("path", metavar="TABLE", type=PATH)
@pass_console
def info(console: Console, /, path: Path) -> None:
    """Show schema, key and size of TABLE."""
    from headrace.cli.tables import run_info

    run_info(path, console)


@table.command("check", cls=ReportingCommand)
@click.argument("path", metavar="TABLE", type=PATH)
@pass_console
@click.pass_context
def check(ctx: click.Context, console: Console, /, path: Path) -> None:
    """Verify every page of TABLE; exit code 0 when it is sound, 3 when it is damaged."""
    from headrace.cli.tables import run_check

    ctx.exit(run_check(path, console))


@table.command("scan", cls=ReportingCommand)
@click.argument("path", metavar="TABLE", type=PATH)
@click.option("--low", help="First key, VALUE[,VALUE]; itself included.")
@click.option("--high", help="Last key, VALUE[,VALUE]; itself included.")
@click.option("--columns", type=COLUMNS, help="Show only these columns.")
@click.option("--limit", type=click.IntRange(min=0), help="Stop after so many rows.")
@pass_console
def scan(console: Console, /, path: Path, **choices: Any) -> None:
    """Print rows of TABLE in key order: as CSV, or with --json as one JSON object a line."""
    from headrace.cli.tables import ScanRequest, run_scan

    run_scan(ScanRequest(path=path, **choices), console)


@table.command("dump", cls=ReportingCommand)
@click.argument("path", metavar="TABLE", type=PATH)
@click.option("--page", type=click.IntRange(min=0), help="Show this page alone, byte by byte where it matters.")
@pass_console
def dump(console: Console, /, path: Path, page: int | None) -> None:
    """Show what TABLE is made of, page by page, even when it is damaged."""
    from headrace.cli.dump import run_dump

    run_dump(path, page, console)


@table.command("compact", cls=ReportingCommand)
@click.argument("path", metavar="TABLE", type=PATH)
@pass_console
def compact(console: Console, /, path: Path) -> None:
    """Bring TABLE back into key order on disk and give space back, while readers go on."""
    from headrace.cli.tables import run_compact

    run_compact(path, console)


@table.command("filter", cls=ReportingCommand, epilog="Example: headrace table filter planes.tbl --bits 8")
@click.argument("path", metavar="TABLE", type=PATH)
@click.option("--bits", type=FILTER_BITS, default=8, show_default=True, help="For each key.")
@click.option("--drop", is_flag=True, help="Remove it instead.")
@pass_console
def make_filter(console: Console, /, path: Path, bits: float, *, drop: bool) -> None:
    """Make a filter beside TABLE, by which joins know most absent keys without reading a page."""
    from headrace.cli.tables import run_filter

    run_filter(path, bits, drop=drop, console=console)
