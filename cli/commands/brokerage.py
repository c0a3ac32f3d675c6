"""`headrace demo brokerage`: load a history and daily batches in the shape of TPC-DI."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headrace.cli.arguments.options import FOLDER, ReportingCommand, pass_console
from headrace.cli.reporting.begun import Begun, in_spark
from headrace.cli.reporting.blocks import Grid, Text

if TYPE_CHECKING:
    from headrace.cli.reporting.blocks import Block
    from headrace.cli.reporting.console import Console
    from headrace.samples.brokerage import Loaded

__all__ = ["brokerage"]

LEFT = "what the warehouse holds already; the same command loads the rest"


@click.command("brokerage", cls=ReportingCommand, short_help="Load a brokerage: a history and daily batches.")
@click.option("--source", type=FOLDER, required=True, help="Folder with the batches: Batch1, Batch2, and so on.")
@click.option(
    "--dir", "folder", type=FOLDER, default=Path("brokerage"), show_default=True, help="Folder of the warehouse."
)
@click.option("--batches", type=click.IntRange(min=1), help="Last batch to load; by default, all that are there.")
@pass_console
def brokerage(console: Console, /, source: Path, folder: Path, batches: int | None) -> None:
    """Load the batches of a brokerage into Delta tables.

    Batches that the warehouse holds are not loaded again. If the load was interrupted, run the same command again.
    """
    from headrace.samples.brokerage import batches_of

    with console.step(f"looking for batches in {source}", left="nothing was written"):
        there = batches_of(source)
    with console.step(f"loading {source} into {folder}", left=LEFT):
        from headrace.samples.brokerage import load

        with in_spark(console, Begun("", LEFT)):
            results = load(source, folder, batches or there, on_batch=lambda loaded: console.note(_line(loaded)))
    warehouse = folder / "warehouse"
    console.result(
        {"batches": [asdict(loaded) for loaded in results], "warehouse": str(warehouse)}, *_blocks(results, warehouse)
    )


def _line(loaded: Loaded) -> str:
    if not loaded.rows:
        return f"batch {loaded.batch}: the warehouse holds it already"
    return (
        f"batch {loaded.batch}: {sum(loaded.rows.values()):,} rows in {len(loaded.rows)} tables, {loaded.seconds:.1f} s"
    )


def _blocks(results: list[Loaded], warehouse: Path) -> list[Block]:
    new = [loaded for loaded in results if loaded.rows]
    where = Text(f"The Delta tables are in {warehouse}.")
    if not new:
        return [Text("The warehouse holds all batches already."), where]
    columns = ["table", *(f"after batch {loaded.batch}" for loaded in new)]
    rows = [[table, *(loaded.rows[table] for loaded in new)] for table in new[0].rows]
    return [Grid("Rows", columns, rows), where]
