"""`headrace device`: measure the cost of reads on a disk."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from headrace.cli.arguments.options import PATH, SIZE, ReportingCommand, pass_console
from headrace.cli.reporting.blocks import Pairs
from headrace.cli.reporting.errors import InputFileError

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cli.reporting.console import Console
    from headrace.storage.read import DeviceModel

__all__ = ["device"]

DEFAULT_PAGE_SIZE = 8192


@click.command("device", cls=ReportingCommand, short_help="Measure the cost of reads on a disk.")
@click.argument("path", type=PATH)
@click.option("--page-size", type=SIZE, help="Page size; by default that of the table, or 8KiB.")
@click.option("--queue-depth", type=click.IntRange(1, 256), default=16, show_default=True, help="Reads in flight.")
@click.option("--save/--no-save", default=True, show_default=True, help="Save the costs next to the table at PATH.")
@pass_console
def device(console: Console, /, path: Path, page_size: int | None, queue_depth: int, *, save: bool) -> None:
    """Measure the cost of a seek and of a page read on the disk that holds PATH, a table or a folder.

    Joins use these costs to plan their reads. Without a measurement, they assume a typical NVMe disk.
    """
    from headrace.storage.format import check_page_size
    from headrace.storage.read import device_path, measure, save_device

    with console.step(f"measuring the disk of {path}", left="nothing; the temporary file is gone"):
        if not path.exists():
            raise InputFileError(f"there is no file or folder {path}")
        is_table = path.is_file() and _begins_like_a_table(path)
        size = page_size or (_page_size_of(path) if is_table else DEFAULT_PAGE_SIZE)
        check_page_size(size)
        console.note("measuring takes a few seconds")
        model = measure(path, size, queue_depth)
        saved = save and is_table
        if saved:
            save_device(path, model)
    kept = str(device_path(path)) if saved else None
    console.result({"path": str(path), **asdict(model), "saved": kept}, _block(path, model, kept))


def _begins_like_a_table(path: Path) -> bool:
    from headrace.storage.format import MAGIC

    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _page_size_of(path: Path) -> int:
    from headrace.storage import Table

    with Table.open(path) as table:
        return table.stats.page_size


def _block(path: Path, model: DeviceModel, kept: str | None) -> Pairs:
    return Pairs(
        f"Reads on the disk of {path}",
        {
            "seek (S)": f"{model.seek * 1e6:,.1f} us a read",
            "transfer (T)": f"{model.transfer * 1e6:,.2f} us a page of {model.page_size:,} bytes",
            "random pages": f"{1 / (model.seek + model.transfer):,.0f} a second",
            "sequential": f"{model.page_size / model.transfer / 1e6:,.0f} MB a second",
            "reads together": f"pages up to {model.max_distance:,.0f} apart",
            "reads in flight": model.queue_depth,
            "past the page cache": model.direct,
            "kept in": kept,
        },
    )
