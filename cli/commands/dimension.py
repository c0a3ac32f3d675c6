"""`headrace dimension`: create, inspect, and check the dimensions that a pipeline file declares."""

from __future__ import annotations

import csv as csv_text
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import click

from headrace.cli.arguments.options import PATH, ReportingCommand, member_options, pass_console, pipeline_option
from headrace.cli.commands.rejects import changes_blocks, pipeline_words
from headrace.cli.commands.source import left_out_block
from headrace.cli.reporting.begun import Begun, in_spark
from headrace.cli.reporting.blocks import Grid, Pairs, Text, counted
from headrace.cli.reporting.errors import ArgumentsError
from headrace.cli.reporting.exits import ExitCode, with_pipeline
from headrace.cli.reporting.lazy import LazyGroup

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace.cli.arguments.options import Members
    from headrace.cli.reporting.blocks import Block
    from headrace.cli.reporting.console import Console
    from headrace.pipelines.changes import ApplyResult
    from headrace.pipelines.config import PipelineConfig
    from headrace.pipelines.dimension import DimensionSummary, Finding, Repair

__all__ = ["dimension"]

UNCHANGED = "the dimension as it was"
COMMITTED = ("after changes", "before errors", "before moved")  # steps of an apply that follow its first commit


@click.group(
    "dimension",
    cls=LazyGroup,
    places={
        "restate": "headrace.cli.commands.restate:restate",
        "inferred": "headrace.cli.commands.dimension_columns:inferred",
        "complete": "headrace.cli.commands.dimension_columns:complete",
        "add-column": "headrace.cli.commands.dimension_columns:add_column",
        "widen-column": "headrace.cli.commands.dimension_columns:widen_column",
        "drop-column": "headrace.cli.commands.dimension_columns:drop_column",
    },
    short_help="Create, inspect, change, and check dimensions.",
)
def dimension() -> None:
    """Create, inspect, and check the dimensions that a pipeline file declares."""


@dimension.command("create", cls=ReportingCommand, short_help="Create the Delta table of a dimension from files.")
@click.argument("name")
@click.argument("source", type=PATH)
@pipeline_option
@member_options
@pass_console
def create(console: Console, /, name: str, source: Path, *, pipeline: Path, members: Members) -> None:
    """Create the Delta table of dimension NAME from SOURCE: CSV, JSON lines, or Parquet; a file or a folder.

    SOURCE must have the columns that the pipeline file declares for the dimension. Text is read as that of the
    pipeline's source (encoding, decimal mark, dates, ...); options override this.

    Members are numbered from 1 in the order of their natural keys; the unknown member is -1.
    """
    from headrace.cli.arguments.streams import Settings, read_whole
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import create_dimension, member_columns, refuse_creation

    with console.step(
        f"making dimension {name} from {source}", left="no dimension was made or changed", pipeline=pipeline
    ):
        config = load_pipeline(pipeline)
        refuse_creation(config, name)
        settings = Settings(config.source, *member_columns(config, name))
        stream, rows = read_whole(source, members(settings), console)
        with stream.placing():
            summary = create_dimension(config, name, rows)
    _show(summary, console)


@dimension.command("apply", cls=ReportingCommand, short_help="Apply changes to a dimension with history.")
@click.argument("name")
@click.argument("source", type=PATH)
@pipeline_option
@click.option("--again", is_flag=True, help="Read files again that were applied before.")
@click.option("--snapshot", "at", metavar="TIME", help="SOURCE has all members as of this time, not changes.")
@click.option(
    "--missing",
    type=click.Choice(["keep", "delete"]),
    default="keep",
    show_default=True,
    help="What happens to members that a snapshot lacks.",
)
@click.option("--sequence", help="Sequence of a snapshot's changes, if the history has a sequence.")
@click.option("--spark", is_flag=True, help="Apply the changes in Spark's workers instead of in this process.")
@pass_console
def apply(
    console: Console,
    /,
    name: str,
    source: Path,
    *,
    pipeline: Path,
    again: bool,
    at: str | None,
    missing: Literal["delete", "keep"],
    sequence: str | None,
    spark: bool,
) -> None:
    """Apply the changes in SOURCE to dimension NAME, which has a history.

    SOURCE is a file or a folder of CSV, JSON lines, or Parquet, or a Delta table. Changes may come in any order.
    Each file is applied once; changes that were applied before add nothing.
    """
    from headrace.pipelines.changes import SnapshotOptions, apply_files, changes_not_applied, restate_advice, restates
    from headrace.pipelines.config import load_pipeline

    if at is None and (sequence is not None or missing != "keep"):
        raise ArgumentsError(f"{'--missing' if sequence is None else '--sequence'} belongs to --snapshot")
    begun = Begun("no change was applied", "changes that were committed; run again to continue", COMMITTED)
    with console.step(f"applying {source} to dimension {name}", left=begun.left, pipeline=pipeline):
        config = load_pipeline(pipeline)
        snapshot = None if at is None else SnapshotOptions(at, sequence, missing)
        engine: Literal["local", "spark"] = "spark" if spark else "local"
        with in_spark(console, begun) if spark else nullcontext(begun.note) as hook:
            result = apply_files(config, name, source, again=again, snapshot=snapshot, engine=engine, hook=hook)
        kept = {} if result.batches else changes_not_applied(config)
        ranges = result.total("moved_ranges")
        advice = restate_advice(name, ranges) if ranges and restates(config, name) else None
    notes = changes_blocks({name: kept[name]} if name in kept else {}, pipeline)
    if advice is not None:
        notes.append(Text(with_pipeline(advice, pipeline)))
    _show_applied(result, notes, pipeline, console)


@dimension.command(
    "compact", cls=ReportingCommand, short_help="Write the files of a dimension's table into fewer ones."
)
@click.argument("name")
@pipeline_option
@pass_console
def compact(console: Console, /, name: str, pipeline: Path) -> None:
    """Compact the Delta table of dimension NAME: fewer files, without removed rows. No row changes."""
    from headrace.pipelines.changes import compact_dimension
    from headrace.pipelines.config import load_pipeline

    with console.step(f"compacting dimension {name}", left=UNCHANGED, pipeline=pipeline):
        found = compact_dimension(load_pipeline(pipeline), name)
    pairs = {key.replace("_", " "): value for key, value in asdict(found).items()}
    console.result({"dimension": name, **asdict(found)}, Pairs(f"Dimension {name}", pairs))


@dimension.command("list", cls=ReportingCommand)
@pipeline_option
@pass_console
def list_(console: Console, /, pipeline: Path) -> None:
    """Show all dimensions of the pipeline file."""
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import describe_dimension

    with console.step(f"reading the dimensions of {pipeline}", left="the dimensions as they were", pipeline=pipeline):
        config = load_pipeline(pipeline)
        summaries = [describe_dimension(config, name) for name in config.dimensions]
    columns = ("dimension", "natural key", "surrogate key", "members", "versions", "inferred", "Delta version")
    rows = [(s.name, s.natural_key, s.surrogate_key, s.members, s.versions, s.inferred, s.version) for s in summaries]
    console.result([asdict(summary) for summary in summaries], Grid(f"Dimensions of {config.name}", columns, rows))


@dimension.command("info", cls=ReportingCommand)
@click.argument("name")
@pipeline_option
@pass_console
def info(console: Console, /, name: str, pipeline: Path) -> None:
    """Show the columns, keys, and size of dimension NAME."""
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import describe_dimension

    with console.step(f"reading dimension {name}", left=UNCHANGED, pipeline=pipeline):
        summary = describe_dimension(load_pipeline(pipeline), name)
    _show(summary, console)


@dimension.command("check", cls=ReportingCommand, short_help="Verify the keys of a dimension and of its facts.")
@click.argument("name")
@pipeline_option
@pass_console
@click.pass_context
def check(ctx: click.Context, console: Console, /, name: str, pipeline: Path) -> None:
    """Verify the keys of dimension NAME and of the facts that reference them.

    Exit code 0 if every check passes, 3 if a rule is violated.
    """
    from headrace.pipelines.changes import check_history
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import check_dimension

    with console.step(f"checking dimension {name}", left=UNCHANGED, pipeline=pipeline):
        config = load_pipeline(pipeline)
        findings = check_history(config, name) if _has_history(config, name) else check_dimension(config, name)
    broken = [finding for finding in findings if not finding.allowed]
    document = {"dimension": name, "ok": not broken, "findings": [asdict(finding) for finding in findings]}
    rows = [(finding.rule, finding.rows) for finding in broken]
    grid = Grid(f"Dimension {name} breaks these rules", ("rule", "rows that break it"), rows)
    blocks: list[Block] = [grid, *_examples("example", broken)] if broken else [Text(f"dimension {name} is sound")]
    blocks += _remedies(name, pipeline, broken)
    blocks += [Text(f"{finding.rows} {finding.rule}") for finding in findings if finding.allowed]
    console.result(document, *blocks)
    ctx.exit(ExitCode.DAMAGED if broken else ExitCode.OK)


@dimension.command("repair", cls=ReportingCommand)
@click.argument("name")
@pipeline_option
@click.option("--dry-run", is_flag=True, help="Show what would be fixed, and change nothing.")
@pass_console
@click.pass_context
def repair(ctx: click.Context, console: Console, /, name: str, *, pipeline: Path, dry_run: bool) -> None:
    """Repair dimension NAME.

    What needs no decision is fixed, and the rest is listed, with the facts that reference the keys. Exit code 0 if
    nothing is left to repair, 3 otherwise.
    """
    from headrace.pipelines.changes import repair_history
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import repair_dimension

    with console.step(f"reading {pipeline}", left=UNCHANGED, pipeline=pipeline):
        config = load_pipeline(pipeline)
    left = UNCHANGED if dry_run else "what was fixed before the failure, if anything; run again to continue"
    with console.step(f"repairing dimension {name}", left=left, pipeline=pipeline):
        repaired = repair_history if _has_history(config, name) else repair_dimension
        done = repaired(config, name, dry_run=dry_run)
    fixed, repairs = done.fixed, done.left
    document = {
        "dimension": name,
        "ok": not (repairs or (fixed and dry_run)),
        "changed": bool(fixed) and not dry_run,
        "fixed": [asdict(each) for each in fixed],
        "repairs": [asdict(each) for each in repairs],
    }
    blocks = _repairs(f"What {'would be' if dry_run else 'was'} fixed in dimension {name}", fixed)
    blocks += _repairs(f"What would repair dimension {name}; nothing of this has been changed", repairs)
    if not blocks:
        blocks = [Text(f"dimension {name} is sound; there is nothing to repair")]
    console.result(document, *blocks)
    ctx.exit(ExitCode.OK if document["ok"] else ExitCode.DAMAGED)


def _remedies(name: str, pipeline: Path, broken: Sequence[Finding]) -> list[Block]:
    """Return the commands that correct what a check found."""
    of = f"{name}{pipeline_words(pipeline)}"
    restate = (
        f"`headrace dimension restate {of}` corrects facts whose version changed after they were loaded; with "
        "--dry-run it counts them. Facts that it does not correct have to be loaded again; docs/operations.md, 'Load a "
        "day again'"
    )
    repair = f"`headrace dimension repair {of} --dry-run` says what repairs this dimension"
    kinds = ((restate, True), (repair, False))
    return [Text(text) for text, kind in kinds if any(finding.restated is kind for finding in broken)]


def _repairs(title: str, repairs: Sequence[Repair]) -> list[Block]:
    if not repairs:
        return []
    grid = Grid(title, ("rule", "repair", "rows"), [(each.rule, each.action, each.rows) for each in repairs])
    return [grid, *_examples("change", repairs)]


@dimension.command("lookup", cls=ReportingCommand)
@click.argument("name")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@pipeline_option
@pass_console
@click.pass_context
def lookup(ctx: click.Context, console: Console, /, name: str, keys: tuple[str, ...], pipeline: Path) -> None:
    """Show the members of dimension NAME with these natural keys. Write a composite key as VALUE,VALUE.

    Exit code 0 if a member is found, 1 if none is.
    """
    from headrace.cli.arguments.rows import table_objects, table_rows
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import find_members

    with console.step(f"looking up members of {name}", left=UNCHANGED, pipeline=pipeline):
        config = load_pipeline(pipeline)
        values = [_parts(key, config, name) for key in keys]
        members, missing = find_members(config, name, values)
    title = f"{len(keys) - len(missing)} of {counted(len(keys), 'key')} found"
    found = Grid(title, members.column_names, table_rows(members))
    not_found = [keys[at] for at in missing]
    document = {"dimension": name, "members": table_objects(members), "not_found": not_found}
    console.result(document, found, *([Text(f"Not found: {', '.join(not_found)}")] if missing else []))
    ctx.exit(ExitCode.OK if members.num_rows else ExitCode.FAILURE)


def _show_applied(result: ApplyResult, notes: Sequence[Block], pipeline: Path, console: Console) -> None:
    """Show what became of the changes."""
    followed = [
        (name, outcome, count)
        for name, outcomes in result.followed.items()
        for outcome, count in sorted(outcomes.items())
    ]
    others = (
        [Grid("Changes of dimensions that follow", ("dimension", "outcome", "changes"), followed)] if followed else []
    )
    left_out = left_out_block(result.left_out)
    if not result.batches:
        files = "all files that are not left out" if result.left_out else "all files"
        text = f"{result.path} has the changes of {files} already; read them again with --again"
        console.result(result.as_dict(), Text(text), *others, *notes, *left_out)
        return
    names = ("rows", "inserted", "updated", "retired", "moved_ranges", "late")
    pairs = {"path": result.path, "version": result.version, "files": result.files}
    pairs |= {name.replace("_", " "): result.total(name) for name in names}
    shown = Pairs(f"Dimension {result.dimension}", pairs)
    outcomes = Grid("Changes by outcome", ("outcome", "changes"), sorted(result.outcomes.items()))
    kept = sum(result.outcomes.get(each, 0) for each in ("rejected", "routed"))
    note = changes_blocks({result.dimension: kept} if kept else {}, pipeline)
    console.result(result.as_dict(), shown, outcomes, *others, *note, *notes, *left_out)


def _has_history(config: PipelineConfig, name: str) -> bool:
    """Return whether a dimension is declared with a history."""
    declared = config.dimensions.get(name)
    return declared is not None and declared.history is not None


def _examples(title: str, found: Sequence[Finding] | Sequence[Repair]) -> list[Grid]:
    """Return a grid for each rule that has examples."""
    return [Grid(each.rule, (title,), [(text,) for text in each.examples]) for each in found if each.examples]


def _parts(key: str, config: PipelineConfig, name: str) -> list[str]:
    natural = config.dimensions[name].natural_key if name in config.dimensions else [name]
    parts = [key] if len(natural) == 1 else next(csv_text.reader([key]))
    if len(parts) != len(natural):
        raise ArgumentsError(f"the natural key is {', '.join(natural)}; write {len(natural)} values, not {key!r}")
    return parts


def _show(summary: DimensionSummary, console: Console) -> None:
    facts: dict[str, Any] = {key: value for key, value in asdict(summary).items() if key not in {"name", "columns"}}
    pairs = Pairs(f"Dimension {summary.name}", {key.replace("_", " "): value for key, value in facts.items()})
    internal = set() if summary.versions is None else {"_entries"}  # of a nested type, which no one can read
    shown = [column for column in summary.columns if column[0] not in internal]
    grid = [Grid("Columns", ("name", "type"), shown)] if shown else []
    console.result({**asdict(summary), "columns": dict(summary.columns)}, pairs, *grid)
