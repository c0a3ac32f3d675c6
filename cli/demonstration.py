"""What `headrace demo` does: dimensions, flights, questions, report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headrace.cli.blocks import Grid, Pairs, Text
from headrace.cli.running import load, outcome_pairs
from headrace.pipelines.config import load_pipeline
from headrace.pipelines.dimension import describe_dimension
from headrace.samples.demo import DIMENSIONS, make_dimensions, prepare
from headrace.samples.questions import TABLES, ask, find_facts

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cli.blocks import Block
    from headrace.cli.console import Console
    from headrace.pipelines.dimension import DimensionSummary
    from headrace.pipelines.runner import RunResult
    from headrace.samples import Facts
    from headrace.samples.questions import Answer

__all__ = ["run_demo"]


@dataclass(frozen=True)
class Demo:
    """What came of a demo: where it lies, its run, the dimensions after it, the answers, the facts found again."""

    folder: Path
    result: RunResult
    dimensions: list[DimensionSummary]
    answers: list[Answer]
    facts: Facts


def run_demo(folder: Path, console: Console) -> None:
    """Make the warehouse in a folder, ask it, and print what came of it."""
    left = f"at most an unfinished demo in {folder}, which the next one replaces"
    with console.step(f"making the dimensions in {folder}", left=left):
        pipeline = prepare(folder)
        before = make_dimensions(pipeline)
        console.note(f"dimensions: {', '.join(f'{s.name} {s.members:,}' for s in before)} members")
    result = load(pipeline, console, follow=False)
    with console.step("asking the warehouse", left=f"the loaded warehouse in {folder / 'warehouse'}"):
        demo = _asked(folder, pipeline, result)
    console.result(_document(demo), *_blocks(demo))


def _asked(folder: Path, pipeline: Path, result: RunResult) -> Demo:
    warehouse = folder / "warehouse"
    config = load_pipeline(pipeline)
    dimensions = [describe_dimension(config, name) for name in DIMENSIONS]
    return Demo(folder, result, dimensions, ask(warehouse), find_facts(warehouse))


def _document(demo: Demo) -> dict[str, Any]:
    return {
        "run": demo.result.as_dict(),
        "facts": asdict(demo.facts),
        "dimensions": [asdict(dimension) for dimension in demo.dimensions],
        "answers": [asdict(answer) for answer in demo.answers],
        "tables": {name: str(demo.folder / "warehouse" / name) for name in TABLES},
        "pipeline": str(demo.folder / "pipeline.yml"),
    }


def _blocks(demo: Demo) -> list[Block]:
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
    """Return a table of how often each lookup ended how."""
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
