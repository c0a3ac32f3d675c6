"""`headrace run`: load a stream, once or following it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headrace.cli.options import PATH, ReportingCommand, pass_console

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cli.console import Console

__all__ = ["run"]


@click.command("run", cls=ReportingCommand, short_help="Load a stream, once or following it.")
@click.argument("pipeline", type=PATH)
@click.option("--once", is_flag=True, help="Load what is there, then end.")
@click.option("--follow", is_flag=True, help="Go on with what arrives until interrupted.")
@pass_console
@click.pass_context
def run(ctx: click.Context, console: Console, /, pipeline: Path, once: bool, follow: bool) -> None:
    """Run the pipeline file PIPELINE, with --once or --follow.

    Every record is loaded exactly once, whatever happens in between: after a failure or a crash run the same command
    again. Ctrl-C ends the run after the batch that is being done.
    """
    if once == follow:
        both = "--once and --follow exclude each other; " if once else ""
        raise click.UsageError(f"{both}say --once to load what is there, or --follow to go on with what arrives")
    from headrace.cli.running import run_pipeline

    ctx.exit(run_pipeline(pipeline, console, follow=follow))
