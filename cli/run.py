"""`headrace run`: load a stream, once or following it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.cli.blocks import Pairs, Text
from headrace.cli.exits import ExitCode
from headrace.cli.options import PATH, ReportingCommand, pass_console
from headrace.cli.source import left_out_block

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cli.blocks import Block
    from headrace.cli.console import Console
    from headrace.pipelines.catalog import BatchRecord
    from headrace.pipelines.runner import RunResult

__all__ = ["load", "outcome_pairs", "run"]

LEFT = "batches already loaded; the next run completes the one that failed"


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
    result = load(pipeline, console, follow=follow)
    console.result(result.as_dict(), *_blocks(result))
    ctx.exit(ExitCode.OK if result.signal is None else ExitCode.INTERRUPTED)


def load(pipeline: Path, console: Console, *, follow: bool) -> RunResult:
    """Run a pipeline, telling of each batch."""
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.runner import run

    def tell(batch: BatchRecord) -> None:
        console.note(_batch_line(batch))

    with console.step(f"running {pipeline}", left=LEFT):
        config = load_pipeline(pipeline)
        console.note("starting Spark; the first time, Delta's jars are fetched and the kernels compiled")
        return run(config, follow=follow, on_batch=tell)


def outcome_pairs(result: RunResult) -> dict[str, Any]:
    """Return what became of the rows, as names and numbers to show."""
    document = result.as_dict()
    joins = sum(batch.pages_wanted for batch in result.batches), sum(batch.pages_read for batch in result.batches)
    rate = document["rows_in"] / result.seconds if result.seconds else 0.0
    return {
        "rows in": document["rows_in"],
        **{f"  {outcome}": count for outcome, count in document["outcomes"].items()},
        "loaded": document["loaded"],
        "duplicates dropped": document["dropped"],
        "duplicates routed": document["routed"],
        "rejected": document["rejected"],
        "new members": document["new_members"],
        "rate": f"{rate:,.0f} rows/s, {result.seconds:.1f} s in {len(result.batches)} batches",
        "hit ratio": _hit_ratio(result),
        "pages": f"{joins[0]:,} wanted, {joins[1]:,} read in {sum(batch.seeks for batch in result.batches):,} reads",
        "deadline misses": document["deadline_misses"],
    }


def _blocks(result: RunResult) -> list[Block]:
    places = {"facts": result.facts, "rejected rows": result.errors, "run": result.run}
    summary = Pairs(f"{result.pipeline}: {result.state}", {**outcome_pairs(result), **places})
    return [summary, *map(Text, result.notices), *left_out_block(result.left_out)]


def _hit_ratio(result: RunResult) -> str:
    """Return the batches' hit ratios, weighted by their rows."""
    rows = result.total("rows_in")
    if not rows:
        return "nothing was looked up"
    return f"{sum(batch.hit_ratio * batch.rows_in for batch in result.batches) / rows:.1%} of lookups needed no read"


def _batch_line(batch: BatchRecord) -> str:
    return (
        f"batch {batch.batch}: {batch.rows_in:,} rows in, {batch.loaded:,} loaded, {batch.rejected:,} rejected, "
        f"{batch.new_members:,} new members, {batch.seconds:.1f} s"
    )
