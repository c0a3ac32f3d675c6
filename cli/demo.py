"""`headrace demo`: a year of flights becomes a warehouse, and the warehouse is asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from headrace.cli.options import FOLDER, ReportingCommand, pass_console

if TYPE_CHECKING:
    from headrace.cli.console import Console

__all__ = ["demo"]


@click.command("demo", cls=ReportingCommand, short_help="Load a year of real flights and query the warehouse.")
@click.option("--dir", "folder", type=FOLDER, default=Path("demo"), show_default=True, help="Where the warehouse goes.")
@pass_console
def demo(console: Console, /, folder: Path) -> None:
    """Load the flights of New York in 2013 into Delta tables and ask three questions.

    An earlier demo in the folder is replaced.
    """
    from headrace.cli.demonstration import run_demo

    run_demo(folder, console)
