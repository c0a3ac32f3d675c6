"""`headrace runs`: what the run catalog knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headrace.cli.options import PATH, ReportingCommand, pass_console

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cli.console import Console

__all__ = ["runs"]

STATES = """\b
States of a run:
  running  its process is at work
  done     everything that was there is loaded
  stopped  a signal ended it after a whole batch
  failed   the error says why; the next run goes on
  lost     its process was killed, or its machine stopped; the next run goes on

Spark's log of each run is in the folder `logs` of HEADRACE_CACHE (by default ~/.cache/headrace/logs) on the host
that ran it, named after the time and the process id; --run ID shows where it is."""


@click.command("runs", cls=ReportingCommand, short_help="Show what ran, and its batches.", epilog=STATES)
@click.argument("pipeline", type=PATH, default="pipeline.yml")
@click.option("--run", "wanted", metavar="ID", help="Show the batches of this run; the first letters of its id do.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Show the latest so many.")
@pass_console
def runs(console: Console, /, pipeline: Path, wanted: str | None, limit: int) -> None:
    """Show the latest runs of the pipeline file PIPELINE, or the batches of one run."""
    from headrace.cli.history import run_runs

    run_runs(pipeline, wanted, limit, console)
