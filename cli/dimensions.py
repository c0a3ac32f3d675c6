"""What `headrace dimension` does."""

from __future__ import annotations

import csv
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.cli.blocks import Grid, Pairs, Text
from headrace.cli.exits import ExitCode
from headrace.cli.streams import CsvFormat, open_stream
from headrace.pipelines.config import PipelineConfig, arrow_schema, load_pipeline
from headrace.pipelines.dimension import (
    check_dimension,
    create_dimension,
    describe_dimension,
    find_members,
    plan_repair,
)
from headrace.storage.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cli.console import Console
    from headrace.pipelines.dimension import DimensionSummary, Finding, Repair

__all__ = ["run_check", "run_create", "run_info", "run_list", "run_lookup", "run_repair"]

UNCHANGED = "the dimension as it was"


def run_create(name: str, source: Path, console: Console, *, pipeline: Path, csv: CsvFormat) -> None:
    """Make a dimension and print what it is."""
    with console.step(f"making dimension {name} from {source}", left="no dimension was made or changed"):
        config = load_pipeline(pipeline)
        stream = open_stream(source, csv=_typed(csv, config, name))
        with console.progress("read", total=stream.rows):
            rows = pa.Table.from_batches(stream.batches(), stream.schema)
        summary = create_dimension(config, name, rows)
    _show(summary, console)


def run_list(pipeline: Path, console: Console) -> None:
    """Print all dimensions of a pipeline."""
    with console.step(f"reading the dimensions of {pipeline}", left="the dimensions as they were"):
        config = load_pipeline(pipeline)
        summaries = [describe_dimension(config, name) for name in config.dimensions]
    columns = ("dimension", "natural key", "surrogate key", "members", "inferred", "version")
    rows = [(s.name, s.natural_key, s.surrogate_key, s.members, s.inferred, s.version) for s in summaries]
    console.result([asdict(summary) for summary in summaries], Grid(f"Dimensions of {config.name}", columns, rows))


def run_info(name: str, pipeline: Path, console: Console) -> None:
    """Print what a dimension is."""
    with console.step(f"reading dimension {name}", left=UNCHANGED):
        summary = describe_dimension(load_pipeline(pipeline), name)
    _show(summary, console)


def run_check(name: str, pipeline: Path, console: Console) -> ExitCode:
    """Verify a dimension, print the rules it breaks, and return the exit code."""
    with console.step(f"checking dimension {name}", left=UNCHANGED):
        findings = check_dimension(load_pipeline(pipeline), name)
    document = {"dimension": name, "ok": not findings, "findings": [asdict(finding) for finding in findings]}
    if not findings:
        console.result(document, Text(f"dimension {name} is sound"))
        return ExitCode.OK
    rows = [(finding.rule, finding.rows) for finding in findings]
    grid = Grid(f"Dimension {name} breaks these rules", ("rule", "rows that break it"), rows)
    console.result(document, grid, *_examples("example", findings))
    return ExitCode.DAMAGED


def run_repair(name: str, pipeline: Path, console: Console) -> ExitCode:
    """Print what would repair a dimension, and return the exit code."""
    with console.step(f"checking dimension {name}", left=UNCHANGED):
        repairs = plan_repair(load_pipeline(pipeline), name)
    document = {"dimension": name, "ok": not repairs, "changed": False, "repairs": [asdict(each) for each in repairs]}
    if not repairs:
        console.result(document, Text(f"dimension {name} is sound; there is nothing to repair"))
        return ExitCode.OK
    title = f"What would repair dimension {name}; nothing has been changed"
    grid = Grid(title, ("rule", "repair", "rows"), [(each.rule, each.action, each.rows) for each in repairs])
    console.result(document, grid, *_examples("change", repairs))
    return ExitCode.DAMAGED


def _examples(title: str, found: list[Finding] | list[Repair]) -> list[Grid]:
    """Return a grid of examples for each rule that has some."""
    return [Grid(each.rule, (title,), [(text,) for text in each.examples]) for each in found if each.examples]


def run_lookup(name: str, keys: tuple[str, ...], pipeline: Path, console: Console) -> None:
    """Print members by natural key; say which keys are not there."""
    with console.step(f"looking up members of {name}", left=UNCHANGED):
        config = load_pipeline(pipeline)
        values = [_parts(key, config, name) for key in keys]
        members = find_members(config, name, values)
    rows = [tuple(row.values()) for row in members.to_pylist()]
    console.result(members.to_pylist(), Grid(f"{len(rows)} of {len(keys)} found", members.column_names, rows))


def _parts(key: str, config: PipelineConfig, name: str) -> list[str]:
    natural = config.dimensions[name].natural_key if name in config.dimensions else [name]
    parts = [key] if len(natural) == 1 else next(csv.reader([key]))
    if len(parts) != len(natural):
        raise InputError(f"the natural key is {', '.join(natural)}; write {len(natural)} values, not {key!r}")
    return parts


def _typed(form: CsvFormat, config: PipelineConfig, name: str) -> CsvFormat:
    """Give columns the types that the pipeline file declares, and times the zone of its source."""
    declared = config.dimensions[name].columns if name in config.dimensions else None
    types = {column.name: column.type for column in arrow_schema(declared or {})}
    source = config.source
    return replace(form, declared=types, time_zone=source.time_zone, ambiguous_time=source.ambiguous_time)


def _show(summary: DimensionSummary, console: Console) -> None:
    facts: dict[str, Any] = {key: value for key, value in asdict(summary).items() if key not in {"name", "columns"}}
    pairs = Pairs(f"Dimension {summary.name}", {key.replace("_", " "): value for key, value in facts.items()})
    grid = [Grid("Columns", ("name", "type"), summary.columns)] if summary.columns else []
    console.result({**asdict(summary), "columns": dict(summary.columns)}, pairs, *grid)
