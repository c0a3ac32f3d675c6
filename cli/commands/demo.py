"""`headrace demo`: load a year of flights into a warehouse and query it. `brokerage` has its subcommand."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from headrace.cli.arguments.options import FOLDER, ReportingGroup, pass_console
from headrace.cli.commands.run import load, outcome_pairs
from headrace.cli.reporting.blocks import Grid, Pairs, Text

if TYPE_CHECKING:
    from headrace.cli.reporting.blocks import Block
    from headrace.cli.reporting.console import Console
    from headrace.pipelines.dimension import DimensionSummary
    from headrace.pipelines.runner import RunResult
    from headrace.samples import Facts
    from headrace.samples.questions import Answer

__all__ = ["demo"]


@dataclass(frozen=True)
class Demo:
    """Result of a demo: the folder, the run, the dimensions after it, the answers, and the verified facts."""

    folder: Path
    result: RunResult
    dimensions: list[DimensionSummary]
    answers: list[Answer]
    facts: Facts


@click.group(
    "demo",
    cls=ReportingGroup,
    places={"brokerage": "headrace.cli.commands.brokerage:brokerage"},
    invoke_without_command=True,
    short_help="Load a year of real flights and query the warehouse.",
)
@click.option("--dir", "folder", type=FOLDER, default=Path("demo"), show_default=True, help="Folder of the warehouse.")
@pass_console
@click.pass_context
def demo(ctx: click.Context, console: Console, /, folder: Path) -> None:
    """Load the flights of New York in 2013 into Delta tables and ask three questions.

    Replaces an earlier demo in the folder. A command loads other data.
    """
    if ctx.invoked_subcommand is None:
        _load_flights(console, folder)
    elif ctx.get_parameter_source("folder") is not ParameterSource.DEFAULT:
        raise click.UsageError(f"give --dir behind the command: headrace demo {ctx.invoked_subcommand} --dir {folder}")


def _load_flights(console: Console, folder: Path) -> None:
    from headrace.samples.demo import make_dimensions, prepare

    left = f"at most an unfinished demo in {folder}, which the next one replaces"
    with console.step(f"making the dimensions in {folder}", left=left):
        pipeline = prepare(folder)
        before = make_dimensions(pipeline)
        console.note(f"dimensions: {', '.join(f'{s.name} {s.members:,}' for s in before)} members")
    result = load(pipeline, console, follow=False)
    with console.step("asking the warehouse", left=f"the loaded warehouse in {folder / 'warehouse'}"):
        asked = _asked(folder, pipeline, result)
    console.result(_document(asked), *_blocks(asked))


def _asked(folder: Path, pipeline: Path, result: RunResult) -> Demo:
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import describe_dimension
    from headrace.samples.demo import DIMENSIONS
    from headrace.samples.questions import ask, find_facts

    warehouse = folder / "warehouse"
    config = load_pipeline(pipeline)
    dimensions = [describe_dimension(config, name) for name in DIMENSIONS]
    return Demo(folder, result, dimensions, ask(warehouse), find_facts(warehouse))


def _document(demo: Demo) -> dict[str, Any]:
    from headrace.samples.questions import TABLES

    return {
        "run": demo.result.as_dict(),
        "facts": asdict(demo.facts),
        "dimensions": [asdict(dimension) for dimension in demo.dimensions],
        "answers": [asdict(answer) for answer in demo.answers],
        "tables": {name: str(demo.folder / "warehouse" / name) for name in TABLES},
        "pipeline": str(demo.folder / "pipeline.yml"),
    }


def _blocks(demo: Demo) -> list[Block]:
    from headrace.samples.questions import TABLES

    members = [(d.name, (d.members or 0) - (d.inferred or 0), d.inferred, d.version) for d in demo.dimensions]
    found = {name.replace("_", " "): count for name, count in asdict(demo.facts).items()}
    return [
        *(Grid(answer.question, answer.columns, answer.rows) for answer in demo.answers),
        Pairs("Loaded the flights of New York, 2013", outcome_pairs(demo.result)),
        Grid("Outcomes by lookup", *_lookups(demo.result)),
        Grid("Members", ("dimension", "known before", "inferred", "Delta version"), members),
        Pairs("Found again in the Delta tables", found),
        Text(
            f"The Delta tables are in {demo.folder / 'warehouse'}: {', '.join(TABLES)}.\n"
            f"Run `headrace run {demo.folder / 'pipeline.yml'} --once` again: nothing is loaded twice."
        ),
    ]


def _lookups(result: RunResult) -> tuple[list[str], list[list[Any]]]:
    """Return a table with the number of rows per lookup and outcome."""
    tallies: dict[str, dict[str, int]] = {}
    for batch in result.batches:
        for role, counts in batch.detail.get("outcomes", {}).get("lookups", {}).items():
            tally = tallies.setdefault(role, {})
            for outcome, count in counts.items():
                tally[outcome] = tally.get(outcome, 0) + count
    outcomes = list(dict.fromkeys(outcome for tally in tallies.values() for outcome in tally))
    return ["lookup", *outcomes], [
        [role, *(tally.get(name, 0) for name in outcomes)] for role, tally in tallies.items()
    ]
