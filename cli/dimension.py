"""`headrace dimension`: create, inspect, and check the dimensions that a pipeline file declares."""

from __future__ import annotations

import csv as csv_text
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.blocks import Grid, Pairs, Text, counted
from headrace.cli.exits import ExitCode
from headrace.cli.lazy import LazyGroup
from headrace.cli.options import PATH, ReportingCommand, csv_options, pass_console, pipeline_option
from headrace.storage.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pyarrow as pa

    from headrace.cli.console import Console
    from headrace.cli.streams import CsvFormat
    from headrace.pipelines.config import PipelineConfig
    from headrace.pipelines.dimension import DimensionSummary, Finding, Repair

__all__ = ["dimension", "with_types"]

UNCHANGED = "the dimension as it was"


@click.group(
    "dimension",
    cls=LazyGroup,
    places={
        "inferred": "headrace.cli.dimension_columns:inferred",
        "add-column": "headrace.cli.dimension_columns:add_column",
        "widen-column": "headrace.cli.dimension_columns:widen_column",
        "drop-column": "headrace.cli.dimension_columns:drop_column",
    },
    short_help="Create, inspect, change, and check dimensions.",
)
def dimension() -> None:
    """Create, inspect, and check the dimensions that a pipeline file declares."""


@dimension.command("create", cls=ReportingCommand)
@click.argument("name")
@click.argument("source", type=PATH)
@pipeline_option
@csv_options
@pass_console
def create(console: Console, /, name: str, source: Path, *, pipeline: Path, csv: CsvFormat) -> None:
    """Create the Delta table of dimension NAME from SOURCE: CSV, JSON lines, or Parquet; a file or a folder.

    Members are numbered from 1 in the order of their natural keys; the unknown member is -1.
    """
    import pyarrow as pa

    from headrace.cli.streams import open_stream
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import create_dimension

    with console.step(f"making dimension {name} from {source}", left="no dimension was made or changed"):
        config = load_pipeline(pipeline)
        stream = open_stream(source, csv=with_types(csv, config, _declared_types(config, name)))
        with console.progress("read", total=stream.rows):
            rows = pa.Table.from_batches(stream.batches(), stream.schema)
        summary = create_dimension(config, name, rows)
    _show(summary, console)


@dimension.command("list", cls=ReportingCommand)
@pipeline_option
@pass_console
def list_(console: Console, /, pipeline: Path) -> None:
    """Show all dimensions of the pipeline file."""
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import describe_dimension

    with console.step(f"reading the dimensions of {pipeline}", left="the dimensions as they were"):
        config = load_pipeline(pipeline)
        summaries = [describe_dimension(config, name) for name in config.dimensions]
    columns = ("dimension", "natural key", "surrogate key", "members", "inferred", "version")
    rows = [(s.name, s.natural_key, s.surrogate_key, s.members, s.inferred, s.version) for s in summaries]
    console.result([asdict(summary) for summary in summaries], Grid(f"Dimensions of {config.name}", columns, rows))


@dimension.command("info", cls=ReportingCommand)
@click.argument("name")
@pipeline_option
@pass_console
def info(console: Console, /, name: str, pipeline: Path) -> None:
    """Show the columns, keys, and size of dimension NAME."""
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import describe_dimension

    with console.step(f"reading dimension {name}", left=UNCHANGED):
        summary = describe_dimension(load_pipeline(pipeline), name)
    _show(summary, console)


@dimension.command("check", cls=ReportingCommand)
@click.argument("name")
@pipeline_option
@pass_console
@click.pass_context
def check(ctx: click.Context, console: Console, /, name: str, pipeline: Path) -> None:
    """Verify the keys of dimension NAME and of the facts that reference them.

    Exit code 0 if every check passes, 3 if a rule is violated.
    """
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import check_dimension

    with console.step(f"checking dimension {name}", left=UNCHANGED):
        findings = check_dimension(load_pipeline(pipeline), name)
    document = {"dimension": name, "ok": not findings, "findings": [asdict(finding) for finding in findings]}
    if not findings:
        console.result(document, Text(f"dimension {name} is sound"))
        ctx.exit(ExitCode.OK)
    rows = [(finding.rule, finding.rows) for finding in findings]
    grid = Grid(f"Dimension {name} breaks these rules", ("rule", "rows that break it"), rows)
    console.result(document, grid, *_examples("example", findings))
    ctx.exit(ExitCode.DAMAGED)


@dimension.command("repair", cls=ReportingCommand)
@click.argument("name")
@pipeline_option
@pass_console
@click.pass_context
def repair(ctx: click.Context, console: Console, /, name: str, pipeline: Path) -> None:
    """Show how to repair dimension NAME and the facts that reference its keys. Nothing is changed.

    Exit code 0 if there is nothing to repair, 3 otherwise.
    """
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import plan_repair

    with console.step(f"checking dimension {name}", left=UNCHANGED):
        repairs = plan_repair(load_pipeline(pipeline), name)
    document = {"dimension": name, "ok": not repairs, "changed": False, "repairs": [asdict(each) for each in repairs]}
    if not repairs:
        console.result(document, Text(f"dimension {name} is sound; there is nothing to repair"))
        ctx.exit(ExitCode.OK)
    title = f"What would repair dimension {name}; nothing has been changed"
    grid = Grid(title, ("rule", "repair", "rows"), [(each.rule, each.action, each.rows) for each in repairs])
    console.result(document, grid, *_examples("change", repairs))
    ctx.exit(ExitCode.DAMAGED)


@dimension.command("lookup", cls=ReportingCommand)
@click.argument("name")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@pipeline_option
@pass_console
def lookup(console: Console, /, name: str, keys: tuple[str, ...], pipeline: Path) -> None:
    """Show the members of dimension NAME with these natural keys. Write a composite key as VALUE,VALUE."""
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import find_members

    with console.step(f"looking up members of {name}", left=UNCHANGED):
        config = load_pipeline(pipeline)
        values = [_parts(key, config, name) for key in keys]
        members, missing = find_members(config, name, values)
    rows = [tuple(row.values()) for row in members.to_pylist()]
    found = Grid(f"{len(keys) - len(missing)} of {counted(len(keys), 'key')} found", members.column_names, rows)
    absent = Text(f"Not found: {', '.join(keys[at] for at in missing)}")
    console.result(members.to_pylist(), found, *([absent] if missing else []))


def _examples(title: str, found: list[Finding] | list[Repair]) -> list[Grid]:
    """Return a grid for each rule that has examples."""
    return [Grid(each.rule, (title,), [(text,) for text in each.examples]) for each in found if each.examples]


def _parts(key: str, config: PipelineConfig, name: str) -> list[str]:
    natural = config.dimensions[name].natural_key if name in config.dimensions else [name]
    parts = [key] if len(natural) == 1 else next(csv_text.reader([key]))
    if len(parts) != len(natural):
        raise InputError(f"the natural key is {', '.join(natural)}; write {len(natural)} values, not {key!r}")
    return parts


def with_types(form: CsvFormat, config: PipelineConfig, types: Mapping[str, pa.DataType]) -> CsvFormat:
    """Return the format with column types, and the source time zone that the pipeline file declares."""
    source = config.source
    return replace(form, declared=dict(types), time_zone=source.time_zone, ambiguous_time=source.ambiguous_time)


def _declared_types(config: PipelineConfig, name: str) -> dict[str, pa.DataType]:
    from headrace.pipelines.config import arrow_schema

    declared = config.dimensions[name].columns if name in config.dimensions else None
    return {column.name: column.type for column in arrow_schema(declared or {})}


def _show(summary: DimensionSummary, console: Console) -> None:
    facts: dict[str, Any] = {key: value for key, value in asdict(summary).items() if key not in {"name", "columns"}}
    pairs = Pairs(f"Dimension {summary.name}", {key.replace("_", " "): value for key, value in facts.items()})
    grid = [Grid("Columns", ("name", "type"), summary.columns)] if summary.columns else []
    console.result({**asdict(summary), "columns": dict(summary.columns)}, pairs, *grid)
