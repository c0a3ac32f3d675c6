"""`headrace source`: the files of a pipeline's source, by state."""

from __future__ import annotations

import datetime as dt
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from headrace.cli.arguments.options import PATH, ReportingCommand, pass_console
from headrace.cli.reporting.blocks import Block, Grid, Pairs, Text
from headrace.cli.reporting.errors import ArgumentsError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace.cli.reporting.console import Console
    from headrace.pipelines.config import PipelineConfig
    from headrace.pipelines.source import LeftOut, SourceFile

__all__ = ["left_out_block", "source"]

DEFAULT = "pipeline.yml"
UNCHANGED = "the ledger of loaded files as it was"
NAMED = 20
SOURCE = click.option("--source", metavar="NAME", help="Source, if the pipeline has several.")


@click.group("source", short_help="List, skip, and adopt the files of a source.")
def source() -> None:
    """List the files of a pipeline's source by state, skip individual files, or adopt all files."""


@source.command("list", cls=ReportingCommand, short_help="Show the files of a source and their states.")
@click.argument("pipeline", type=PATH, default=DEFAULT)
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Number of files to show.")
@SOURCE
@pass_console
def list_(console: Console, /, pipeline: Path, limit: int, source: str | None) -> None:
    """Show the files in the source of PIPELINE (pipeline.yml by default), most recently modified first.

    With --json, all files are shown.
    """
    from headrace.pipelines.source import list_files

    with console.step(f"listing the source of {pipeline}", left=UNCHANGED, pipeline=pipeline):
        config = _of_source(pipeline, source)
        listing = list_files(config)
    document = {
        "pipeline": config.name,
        "source": config.source.path,
        "counts": listing.counts,
        "files": [asdict(file) for file in listing.files],
        "left_out": [left._asdict() for left in listing.left_out],
    }
    if not listing.files and not listing.left_out:
        console.result(document, Text(f"there are no files in {config.source.path}"))
        return
    blocks: list[Block] = [Pairs(f"Source of {config.name}: {config.source.path}", listing.counts)]
    blocks.append(_grid(listing.files[:limit]))
    if len(listing.files) > limit:
        blocks.append(Text(f"and {len(listing.files) - limit:,} more; --limit shows more, --json all"))
    console.result(document, *blocks, *left_out_block(listing.left_out))


@source.command("skip", cls=ReportingCommand, short_help="Skip the current content of files.")
@click.argument("files", nargs=-1, required=True, metavar="[PIPELINE] FILE...")
@SOURCE
@pass_console
def skip(console: Console, /, files: tuple[str, ...], source: str | None) -> None:
    """Skip the current content of each FILE, named relative to the source folder.

    PIPELINE is the first of several names if it ends in .yml or .yaml; otherwise it is pipeline.yml. A skipped file is
    loaded if its content changes later. A change to a loaded file is accepted without loading the file again.
    """
    from headrace.pipelines.source import skip_files

    named = len(files) > 1 and files[0].endswith((".yml", ".yaml"))
    pipeline = files[0] if named else DEFAULT
    with console.step(f"skipping files of {pipeline}", left=UNCHANGED, pipeline=pipeline):
        names = files[1:] if named else files
        skipped = skip_files(_of_source(pipeline, source, *names), names)
    console.result([asdict(file) for file in skipped], _grid(skipped))


@source.command("adopt", cls=ReportingCommand, short_help="Mark every file of a source as loaded.")
@click.argument("pipeline", type=PATH, default=DEFAULT)
@pass_console
def adopt(console: Console, /, pipeline: Path) -> None:
    """Mark every file in the source of PIPELINE (pipeline.yml by default) as loaded, and start a new stream.

    Use this if the checkpoint is missing, was copied, or does not belong to the fact table. Nothing is loaded.
    """
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.source import adopt_files, printable

    with console.step(f"adopting the files of {pipeline}", left=UNCHANGED, pipeline=pipeline):
        config = load_pipeline(pipeline)
        adopted = adopt_files(config)
    pairs = {"files taken as loaded": adopted.files, "stream": adopted.stream, "replaces": adopted.replaces}
    blocks: list[Block] = [Pairs(f"{config.name} begins a new stream", pairs)]
    if adopted.never_loaded:
        names = ", ".join(map(printable, adopted.never_loaded[:NAMED]))
        blocks.append(Text(f"among them are files of a batch that was not loaded, if its facts are not in: {names}"))
    console.result(asdict(adopted), *blocks)


def _of_source(pipeline: Path | str, source: str | None, *arguments: str) -> PipelineConfig:
    """Return the pipeline in a file, or one source of a pipeline with several; with further arguments for messages."""
    from headrace.pipelines.config import PipelineConfig, load_any

    config, command = load_any(pipeline), shlex.join([str(pipeline), *arguments])
    if isinstance(config, PipelineConfig):
        if source is not None:
            raise ArgumentsError(f"{config.name} has one source, which has no name; leave --source out")
        return config
    if source not in config.sources:
        given = "" if source is None else f"{source!r} is not one of them; "
        raise click.UsageError(
            f"the sources of {config.name} are {', '.join(config.sources)}; {given}name one, as in: "
            f"{click.get_current_context().command_path} {command} --source {next(iter(config.sources))}"
        )
    return config.of_source(source)


def left_out_block(left_out: Sequence[LeftOut]) -> list[Block]:
    """Return a block that shows the files that a listing left out; empty if it is complete."""
    if not left_out:
        return []
    from headrace.pipelines.source import printable

    rows = [(printable(left.name), left.reason) for left in left_out[:NAMED]]
    blocks: list[Block] = [Grid("Left out", ("name", "reason"), rows)]
    if len(left_out) > NAMED:
        blocks.append(Text(f"and {len(left_out) - NAMED:,} more; --json shows all"))
    return blocks


def _grid(files: Sequence[SourceFile]) -> Grid:
    from headrace.pipelines.source import printable

    rows = [(printable(file.name), file.state, file.batch, file.size, _moment(file.modified)) for file in files]
    return Grid("Files", ("name", "state", "batch", "bytes", "modified"), rows)


def _moment(seconds: float) -> dt.datetime | str:
    try:
        return dt.datetime.fromtimestamp(seconds, dt.UTC)
    except (ValueError, OverflowError, OSError):
        return f"{seconds:,.0f} s since 1970"
