"""`headrace extract`: read a table or view of a database into Parquet files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.arguments.options import COLUMNS, FOLDER, ReportingCommand, pass_console
from headrace.cli.reporting.blocks import Pairs

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cli.reporting.console import Console

__all__ = ["extract"]


class DatabaseUrl(click.ParamType[Any]):
    """URL of a database; it is checked at once, so that no command line with a password is ever repeated."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the URL as it is written, with the names of variables."""
        from headrace.pipelines.database import require_no_secrets
        from headrace.pipelines.errors import ExtractionError

        try:
            require_no_secrets(value)
        except ExtractionError as error:
            self.fail(str(error), param, ctx)
        return str(value)


@click.command(
    "extract",
    cls=ReportingCommand,
    short_help="Read a table of a database into Parquet files.",
    epilog="Example: headrace extract sqlite:///shop.db orders -o orders --new-by id",
)
@click.argument("url", type=DatabaseUrl())
@click.argument("table")
@click.option("-o", "--out", type=FOLDER, required=True, help="Folder for the files.")
@click.option("--columns", type=COLUMNS, help="Extract only these columns, COL[,COL].")
@click.option("--new-by", metavar="COLUMN", help="Extract only rows with a greater value in COLUMN than all before.")
@click.option("--rows-per-file", type=click.IntRange(min=1), help="Rows of a file; 1,000,000 by default.")
@click.option("--schema", metavar="NAME", help="Schema of the table.")
@pass_console
def extract(console: Console, /, url: str, table: str, out: Path, **options: Any) -> None:
    """Read TABLE, a table or view of the database at URL, into Parquet files with exactly its values.

    URL is sqlite:///FILE, or 'postgresql+psycopg://USER:${PASSWORD}@HOST/DATABASE' with the password in the
    environment variable PASSWORD.
    """
    from headrace.pipelines.database import ROWS_PER_FILE
    from headrace.pipelines.database import extract as extracted

    growing, there = options["new_by"] is not None, _has_files(out)

    def left() -> str:
        if growing:
            return f"the complete files in {out}, if there are any; the next run continues after them"
        if _has_files(out) and not there:
            return f"the complete table in {out}; only the report is missing"
        return f"nothing; {out} was not written or changed"

    rows_per_file = options.pop("rows_per_file") or ROWS_PER_FILE
    started = console.clock()
    with console.step(f"extracting {table} to {out}", left=left), console.progress("read") as progress:
        result = extracted(url, table, out, rows_per_file=rows_per_file, on_rows=progress.advance, **options)
    seconds = console.clock() - started
    document = {
        "table": table,
        "out": str(out),
        "rows": result.rows,
        "files": result.files,
        "position": result.position,
        "seconds": seconds,
    }
    pairs = {
        "rows": result.rows,
        "files": len(result.files),
        "rate": f"{result.rows / seconds:,.0f} rows/s, {seconds:.2f} s",
    }
    if growing:
        pairs["position"] = "none" if result.position is None else f"{options['new_by']} = {result.position}"
    console.result(document, Pairs(f"Extracted {table} to {out}", pairs))


def _has_files(out: Path) -> bool:
    return os.path.exists(out / "part-000001.parquet")  # noqa: PTH110 - `Path.exists` fails without the permission
