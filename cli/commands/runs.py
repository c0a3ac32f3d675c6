"""`headrace runs`: show the run catalog."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from headrace.cli.arguments.options import PATH, ReportingCommand, pass_console
from headrace.cli.reporting.blocks import Grid, Pairs, Text
from headrace.cli.reporting.errors import ArgumentsError

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cli.reporting.console import Console
    from headrace.pipelines.catalog import BatchRecord, Catalog, RunRecord

__all__ = ["runs"]

SEARCHED = 10_000
_TIMES = {"started", "ended", "alive"}
_LABELS = {"alive": "last alive", "spark_log": "Spark's log"}

STATES = """\b
States of a run:
  running  its process is at work
  done     everything that was there is loaded
  stopped  a signal ended it after a whole batch
  failed   the error says why; the next run goes on
  lost     its process was killed, or its machine stopped; the next run goes on

Spark's log of each run is in the folder `logs` of HEADRACE_CACHE (by default ~/.cache/headrace/logs) on the host
that ran it, named after the time and the process id; --run ID shows where it is."""


@click.command("runs", cls=ReportingCommand, short_help="Show runs and their batches.", epilog=STATES)
@click.argument("pipeline", type=PATH, default="pipeline.yml")
@click.option("--run", "wanted", metavar="ID", help="Show the batches of this run; a prefix of its id is enough.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Number of latest runs to show."
)
@pass_console
def runs(console: Console, /, pipeline: Path, wanted: str | None, limit: int) -> None:
    """Show the latest runs of the pipeline file PIPELINE, or the batches of one run."""
    from headrace.pipelines.catalog import Catalog
    from headrace.pipelines.config import load_any

    with console.step(f"reading the run catalog of {pipeline}", left="the catalog as it was", pipeline=pipeline):
        config = load_any(pipeline)
        with Catalog(str(config.catalog)) as catalog:
            if wanted is not None:
                run = _find(catalog, config.name, wanted)
                _show_run(run, catalog.batches(run.id), console)
            else:
                _show_runs(config.name, catalog.runs(config.name, limit), console)


def _find(catalog: Catalog, pipeline: str, wanted: str) -> RunRecord:
    found = [run for run in catalog.runs(pipeline, SEARCHED) if run.id.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ArgumentsError(f"no run of {pipeline} begins with {wanted!r}; `headrace runs` lists them")
    raise ArgumentsError(f"{len(found)} runs begin with {wanted!r}; write more of the id")


def _show_runs(pipeline: str, runs: list[RunRecord], console: Console) -> None:
    if not runs:
        console.result([], Text(f"{pipeline} has not run yet"))
        return
    columns = (
        "run",
        "mode",
        "state",
        "started",
        "last alive",
        "seconds",
        "batches",
        "rows in",
        "loaded",
        "rejected",
        "new members",
    )
    rows = [
        (
            run.id[:8],
            run.mode,
            run.state,
            _moment(run.started),
            _moment(run.alive or run.ended or run.started),
            run.ended - run.started if run.ended else None,
            run.batches,
            run.rows_in,
            run.loaded,
            run.rejected,
            run.new_members,
        )
        for run in runs
    ]
    console.result([asdict(run) for run in runs], Grid(f"Runs of {pipeline}", columns, rows))


def _show_run(run: RunRecord, batches: list[BatchRecord], console: Console) -> None:
    from headrace.pipelines.spark import spark_log

    times = {name: moment and _moment(moment) for name, moment in asdict(run).items() if name in _TIMES}
    seconds = run.ended - run.started if run.ended else None
    told = {**asdict(run), **times, "pid": str(run.pid), "seconds": seconds, "spark_log": spark_log(run.host, run.pid)}
    summary = {_LABELS.get(name, name.replace("_", " ")): value for name, value in told.items()}
    columns = (
        "batch",
        "seconds",
        "rows in",
        "loaded",
        "rejected",
        "new members",
        "hit ratio",
        "wanted",
        "read",
        "reads",
    )
    rows = [
        (
            batch.batch,
            batch.seconds,
            batch.rows_in,
            batch.loaded,
            batch.rejected,
            batch.new_members,
            batch.hit_ratio,
            batch.pages_wanted,
            batch.pages_read,
            batch.seeks,
        )
        for batch in batches
    ]
    document = {**asdict(run), "spark_log": told["spark_log"], "batch_records": [asdict(batch) for batch in batches]}
    console.result(document, Pairs(f"Run {run.id}", summary), Grid("Batches", columns, rows))


def _moment(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)
