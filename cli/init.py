"""`headrace init`: a folder with a pipeline that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headrace.cli.options import FOLDER, ReportingCommand, pass_console

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cli.console import Console

__all__ = ["init"]


@click.command("init", cls=ReportingCommand, short_help="Write a pipeline file and example rows.")
@click.argument("folder", type=FOLDER, default=".")
@pass_console
def init(console: Console, /, folder: Path) -> None:
    """Write a commented pipeline file and a few example rows into FOLDER, to be changed into your own.

    Nothing that is already there is touched.
    """
    from headrace.cli.scaffold import run_init

    run_init(folder, console)
