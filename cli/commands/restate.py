"""`headrace dimension restate`: correct facts that point to another version since the last changes of a dimension."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from headrace.cli.arguments.options import PATH, ReportingCommand, pass_console
from headrace.cli.reporting.begun import Begun, in_spark
from headrace.cli.reporting.blocks import Grid, Text

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cli.reporting.console import Console

__all__ = ["restate"]

LEFT = "the batches already corrected; run the same command again to correct the rest"


@click.command("restate", cls=ReportingCommand, short_help="Correct facts that point to another version.")
@click.argument("name", required=False)
@click.option("--dry-run", is_flag=True, help="Count the facts; change nothing.")
@click.option(
    "--batch-facts", type=click.IntRange(min=1), help="Most facts in one commit, of whole days. The default is 5000000."
)
@click.option(
    "-p",
    "--pipeline",
    type=PATH,
    default="pipeline.yml",
    show_default=True,
    help="File that declares the dimensions and the facts.",
)
@pass_console
def restate(console: Console, /, name: str | None, *, dry_run: bool, batch_facts: int | None, pipeline: Path) -> None:
    """Correct the facts that point to another version of dimension NAME since the last changes were applied.

    Without NAME, the facts of all dimensions with history are corrected. Each fact is corrected exactly once, even
    across failures. No run of the pipeline may be active.
    """
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.restating import MOST_FACTS
    from headrace.pipelines.restating import restate as correct

    begun = Begun("the facts as they were", LEFT)
    with console.step(f"restating the facts of {pipeline}", left=begun.left, pipeline=pipeline):
        config = load_pipeline(pipeline)
        with in_spark(console, begun) as hook:
            roles = correct(config, name, dry_run=dry_run, most_facts=batch_facts or MOST_FACTS, hook=hook)
    columns = ("role", "dimension", "moved ranges", "facts in them", "restated", "kept", "commits")
    rows = [(r.role, r.dimension, r.ranges, r.facts, r.restated, r.kept, r.batches) for r in roles]
    title = "Facts that would be restated; nothing has been changed" if dry_run else "Restated facts"
    blocks = [Grid(title, columns, rows)] if rows else [Text("There are no facts of dimensions with history")]
    console.result([asdict(role) for role in roles], *blocks)
