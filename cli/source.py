"""`headrace source`: the files of a pipeline's source, by what became of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headrace.cli.options import PATH, ReportingCommand, pass_console

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cli.console import Console

__all__ = ["source"]

DEFAULT = "pipeline.yml"


@click.group("source", short_help="List, skip and adopt the files of a source.")
def source() -> None:
    """List the files of a pipeline's source by state, skip some of them, or adopt all of them."""


@source.command("list", cls=ReportingCommand)
@click.argument("pipeline", type=PATH, default=DEFAULT)
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Show so many files.")
@pass_console
def list_(console: Console, /, pipeline: Path, limit: int) -> None:
    """Show the files in the source of PIPELINE (pipeline.yml by default), the one modified last first.

    With --json, all of them are shown.
    """
    from headrace.cli.sources import run_list

    run_list(pipeline, limit, console)


@source.command("skip", cls=ReportingCommand)
@click.argument("files", nargs=-1, required=True, metavar="[PIPELINE] FILE...")
@pass_console
def skip(console: Console, /, files: tuple[str, ...]) -> None:
    """Record that each FILE, named relative to the source folder, is not to be loaded as it is now.

    PIPELINE is the pipeline file: the first of several names, if it ends in .yml or .yaml; else pipeline.yml. A file
    whose content changes afterwards is loaded. A change of a loaded file is accepted without being loaded.
    """
    from pathlib import Path

    from headrace.cli.sources import run_skip

    named = len(files) > 1 and files[0].endswith((".yml", ".yaml"))
    run_skip(Path(files[0] if named else DEFAULT), files[1:] if named else files, console)


@source.command("adopt", cls=ReportingCommand)
@click.argument("pipeline", type=PATH, default=DEFAULT)
@pass_console
def adopt(console: Console, /, pipeline: Path) -> None:
    """Take every file in the source of PIPELINE (pipeline.yml by default) as loaded, and begin a new stream.

    For a pipeline whose checkpoint is gone, was copied, or does not belong to its fact table. Nothing is loaded.
    """
    from headrace.cli.sources import run_adopt

    run_adopt(pipeline, console)
