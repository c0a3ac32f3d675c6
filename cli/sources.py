"""What `headrace source` does."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict
from typing import TYPE_CHECKING

from headrace.cli.blocks import Block, Grid, Pairs, Text
from headrace.pipelines.config import load_pipeline
from headrace.pipelines.source import adopt_files, list_files, printable, skip_files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace.cli.console import Console
    from headrace.pipelines.source import LeftOut, SourceFile

__all__ = ["left_out_block", "printable", "run_adopt", "run_list", "run_skip"]

UNCHANGED = "the ledger of loaded files as it was"
NAMED = 20


def run_list(pipeline: Path, limit: int, console: Console) -> None:
    """Print the files of a source by state."""
    with console.step(f"listing the source of {pipeline}", left=UNCHANGED):
        config = load_pipeline(pipeline)
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


def run_skip(pipeline: Path, files: Sequence[str], console: Console) -> None:
    """Skip files, and print the states they have now."""
    with console.step(f"skipping files of {pipeline}", left=UNCHANGED):
        skipped = skip_files(load_pipeline(pipeline), files)
    console.result([asdict(file) for file in skipped], _grid(skipped))


def run_adopt(pipeline: Path, console: Console) -> None:
    """Adopt all files, and print what was done."""
    with console.step(f"adopting the files of {pipeline}", left=UNCHANGED):
        config = load_pipeline(pipeline)
        adopted = adopt_files(config)
    pairs = {"files taken as loaded": adopted.files, "stream": adopted.stream, "replaces": adopted.replaces}
    blocks: list[Block] = [Pairs(f"{config.name} begins a new stream", pairs)]
    if adopted.never_loaded:
        names = ", ".join(map(printable, adopted.never_loaded[:NAMED]))
        blocks.append(Text(f"among them are files of a batch that was not loaded, if its facts are not in: {names}"))
    console.result(asdict(adopted), *blocks)


def left_out_block(left_out: Sequence[LeftOut]) -> list[Block]:
    """Return what a listing left out, to be shown; nothing if that is nothing."""
    if not left_out:
        return []
    rows = [(printable(left.name), left.reason) for left in left_out[:NAMED]]
    blocks: list[Block] = [Grid("Left out", ("name", "reason"), rows)]
    if len(left_out) > NAMED:
        blocks.append(Text(f"and {len(left_out) - NAMED:,} more; --json shows all"))
    return blocks


def _grid(files: Sequence[SourceFile]) -> Grid:
    rows = [(printable(file.name), file.state, file.batch, file.size, _moment(file.modified)) for file in files]
    return Grid("Files", ("name", "state", "batch", "bytes", "modified"), rows)


def _moment(seconds: float) -> dt.datetime | str:
    try:
        return dt.datetime.fromtimestamp(seconds, dt.UTC)
    except (ValueError, OverflowError, OSError):
        return f"{seconds:,.0f} s since 1970"
