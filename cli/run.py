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
@click.option("--once", "mode", flag_value="once", help="Load what is there, then end.")
@click.option("--follow", "mode", flag_value="follow", help="Go on with what arrives until interrupted.")
@pass_console
@click.pass_context
def run(ctx: click.Context, console: Console, /, pipeline: Path, mode: str | None) -> None:
    """Run the pipeline file PIPELINE, with --once or --follow.

    Every record is loaded exactly once, whatever happens in between: after a failure or a crash run the same command
    again. Ctrl-C ends the run after the batch that is being done.
    """
    if mode is None:
        raise click.UsageError("say --once to load what is there, or --follow to go on with what arrives")
    from headrace.cli.running import run_pipeline

    ctx.exit(run_pipeline(pipeline, console, follow=mode == "follow"))
