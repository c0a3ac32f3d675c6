"""`headrace run`: load a stream once, or follow it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.cli.arguments.options import PATH, ReportingCommand, pass_console
from headrace.cli.commands.rejects import changes_blocks
from headrace.cli.commands.source import left_out_block
from headrace.cli.reporting.begun import Begun, in_spark
from headrace.cli.reporting.blocks import Pairs, Text, counted
from headrace.cli.reporting.exits import ExitCode, with_pipeline
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from headrace.cli.reporting.blocks import Block
    from headrace.cli.reporting.console import Console
    from headrace.pipelines.catalog import BatchRecord
    from headrace.pipelines.runner import RunResult

__all__ = ["LEFT", "NOTHING", "load", "note_batch", "outcome_pairs", "run"]

LEFT = "batches already loaded; the next run completes the one that failed"
NOTHING = "what was loaded before; this run began no batch"


@click.command("run", cls=ReportingCommand, short_help="Load a stream once, or follow it.")
@click.argument("pipeline", type=PATH)
@click.option("--once", is_flag=True, help="Load the available data, then exit.")
@click.option("--follow", is_flag=True, help="Keep loading new data until interrupted.")
@pass_console
@click.pass_context
def run(ctx: click.Context, console: Console, /, pipeline: Path, once: bool, follow: bool) -> None:
    """Run the pipeline file PIPELINE, with --once or --follow.

    Every record is loaded exactly once, even across failures: after a failure or a crash, run the same command again.
    Ctrl-C ends the run after the current batch.
    """
    if once == follow:
        both = "--once and --follow exclude each other; " if once else ""
        raise click.UsageError(f"{both}say --once to load what is there, or --follow to go on with what arrives")
    result = load(pipeline, console, follow=follow)
    applied = applied_blocks(result, pipeline)
    console.result(result.as_dict(), *_blocks(result), *applied, *changes_blocks(_not_applied(result), pipeline))
    ctx.exit(ExitCode.OK if result.signal is None else ExitCode.INTERRUPTED)


def load(pipeline: Path, console: Console, *, follow: bool) -> RunResult:
    """Run a pipeline and report each batch."""
    from headrace.pipelines.config import load_any
    from headrace.pipelines.runner import run

    begun = Begun(NOTHING, LEFT)
    with console.step(f"running {pipeline}", left=begun.left, pipeline=pipeline):
        config = load_any(pipeline)
        with in_spark(console, begun) as hook:
            return run(config, follow=follow, on_batch=note_batch(console), hook=hook)


def applied_blocks(result: RunResult, pipeline: Path) -> list[Block]:
    """Return a note for each dimension whose changes the run read, with the command that corrects moved facts."""
    from headrace.pipelines.changes import told_changes

    return [Text(with_pipeline(text, pipeline)) for text in told_changes(result.changes, result.moved_ranges)]


def note_batch(console: Console) -> Callable[[BatchRecord], None]:
    """Return a function that reports a batch on the console."""
    return lambda batch: console.note(_batch_line(batch))


def outcome_pairs(result: RunResult) -> dict[str, Any]:
    """Return the row counts of a run by name, for display."""
    document = result.as_dict()
    counts = ("pages_wanted", "pages_read", "seeks")
    wanted, read, seeks = (sum(getattr(batch, name) for batch in result.batches) for name in counts)
    rate = document["rows_in"] / result.seconds if result.seconds else 0.0
    return {
        "rows in": document["rows_in"],
        **{f"  {outcome}": count for outcome, count in document["outcomes"].items()},
        "loaded": document["loaded"],
        **{f"  {name}": count for name, count in document.get("merged", {}).items()},
        "duplicates dropped": document["dropped"],
        "duplicates routed": document["routed"],
        "rejected": document["rejected"],
        "new members": document["new_members"],
        "rate": f"{rate:,.0f} rows/s, {result.seconds:.1f} s in {counted(len(result.batches), 'batch')}",
        "hit ratio": _hit_ratio(result),
        "pages": f"{wanted:,} wanted, {read:,} read in {counted(seeks, 'read')}",
        "deadline misses": document["deadline_misses"],
    }


def _blocks(result: RunResult) -> list[Block]:
    joined = bool(result.sources)
    counts = _correlation_pairs(result) if joined else outcome_pairs(result)
    places = {"table" if joined else "facts": result.facts, "rejected rows": result.errors, "run": result.run}
    summary = Pairs(f"{result.pipeline}: {result.state}", {**counts, **places})
    return [summary, *map(Text, result.notices), *left_out_block(result.left_out)]


def _not_applied(result: RunResult) -> dict[str, int]:
    """Return the number of changes that the run did not apply, by dimension that has any."""
    counts = {name: sum(each.get(what, 0) for what in ("rejected", "routed")) for name, each in result.changes.items()}
    return {name: count for name, count in counts.items() if count}


def _correlation_pairs(result: RunResult) -> dict[str, Any]:
    """Return the row counts of a run that joined several sources, by name, for display."""
    details = [batch.detail for batch in result.batches if "sources" in batch.detail]
    read = {
        f"  {name}": sum(detail["sources"].get(name, {}).get("rows", 0) for detail in details)
        for name in result.sources
    }
    rows = result.total("rows_in")
    rate = rows / result.seconds if result.seconds else 0.0
    return {
        "rows in": rows,
        **read,
        **_step_pairs(result, details),
        "rejected": result.total("rejected"),
        "rate": f"{rate:,.0f} rows/s, {result.seconds:.1f} s in {counted(len(result.batches), 'batch')}",
        "state": _state(details[-1]["state"]) if details else "not changed",
    }


def _step_pairs(result: RunResult, details: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of results, and what became of them if they went through steps."""
    if not any("results" in detail for detail in details):
        return {"results": result.total("loaded")}
    document = result.as_dict()
    return {
        "results": sum(detail.get("results", 0) for detail in details),
        **{f"  {outcome}": count for outcome, count in document["outcomes"].items()},
        "loaded": document["loaded"],
        "duplicates dropped": document["dropped"],
        "duplicates routed": document["routed"],
        "new members": document["new_members"],
    }


def _state(state: dict[str, int]) -> str:
    return f"{counted(state['rows'], 'row')}, {format_size(state['bytes'])} in {counted(state['runs'], 'run')}"


def _hit_ratio(result: RunResult) -> str:
    """Return the hit ratio of all batches, weighted by rows."""
    rows = result.total("rows_in")
    if not rows:
        return "nothing was looked up"
    return f"{sum(batch.hit_ratio * batch.rows_in for batch in result.batches) / rows:.1%} of lookups needed no read"


def _batch_line(batch: BatchRecord) -> str:
    if "results" in batch.detail:
        results = counted(batch.detail["results"], "result")
        counts = f"{counted(batch.rows_in, 'row')} in, {results}, {batch.loaded:,} loaded, {batch.rejected:,} rejected"
        return f"batch {batch.batch}: {counts}, {counted(batch.new_members, 'new member')}, {batch.seconds:.1f} s"
    if "sources" in batch.detail:
        counts = f"{counted(batch.rows_in, 'row')} in, {counted(batch.loaded, 'result')}, {batch.rejected:,} rejected"
        return f"batch {batch.batch}: {counts}, {batch.seconds:.1f} s"
    return (
        f"batch {batch.batch}: {counted(batch.rows_in, 'row')} in, {batch.loaded:,} loaded, "
        f"{batch.rejected:,} rejected, {counted(batch.new_members, 'new member')}, {batch.seconds:.1f} s"
    )
