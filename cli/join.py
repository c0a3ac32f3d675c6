"""`headrace join`: a file or folder as a stream, joined with a table, written as Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.cli.options import (
    DURATION,
    NEW_FILE,
    PATH,
    SIZE,
    ReportingCommand,
    csv_options,
    match_options,
    pass_console,
)

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cli.console import Console

__all__ = ["join"]


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
    help="left keeps stream rows without a match.",
)
@click.option(
    "--algorithm",
    type=click.Choice(["ssij", "meshjoin", "inlj"]),
    default="ssij",
    show_default=True,
    help="The join operator.",
)
@click.option("--memory", type=SIZE, default="32MiB", show_default=True, help="Most that the operator may hold.")
@click.option("--deadline", type=DURATION, help="Longest a stream row may wait, as in 500ms (ssij only).")
@click.option(
    "--deadline-column",
    metavar="COLUMN",
    help="Stream column with the seconds, or duration, that each row may wait; null means --deadline (ssij only).",
)
@click.option("-o", "--out", type=NEW_FILE, required=True, help="The Parquet file to write.")
@csv_options
@pass_console
def join(console: Console, /, table: Path, stream: Path, out: Path, **choices: Any) -> None:
    """Join the rows of STREAM with TABLE.

    STREAM is CSV, JSON lines or Parquet, a file or a folder. The result has the stream's columns, then the table's
    without its key; a name that occurs on both sides gets the suffix _right. OUT appears when all of it is written.

    With --as-of or --band the columns of --on are the first ones of the table's key, and the compared one is the next.
    """
    from headrace.cli.joining import JoinRequest, run_join

    run_join(JoinRequest(table=table, stream=stream, out=out, **choices), console)
