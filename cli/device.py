"""`headrace device`: what a read costs on a disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headrace.cli.options import PATH, SIZE, ReportingCommand, pass_console

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cli.console import Console

__all__ = ["device"]


@click.command("device", cls=ReportingCommand, short_help="Measure what reads cost on a disk.")
@click.argument("path", type=PATH)
@click.option("--page-size", type=SIZE, help="Bytes in a page; by default the table's, or 8KiB.")
@click.option("--queue-depth", type=click.IntRange(1, 256), default=16, show_default=True, help="Reads in flight.")
@click.option("--save/--no-save", default=True, show_default=True, help="Keep the costs beside the table at PATH.")
@pass_console
def device(console: Console, /, path: Path, page_size: int | None, queue_depth: int, *, save: bool) -> None:
    """Measure what a seek and a page cost on the disk that holds PATH, a table or a folder.

    Joins plan their reads by these costs, and by those of a common NVMe disk for a table that was never measured.
    """
    from headrace.cli.devices import run_device

    run_device(path, page_size, queue_depth, console, save=save)
