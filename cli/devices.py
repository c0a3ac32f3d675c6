"""What `headrace device` does."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from headrace.cli.blocks import Pairs
from headrace.cli.errors import InputFileError
from headrace.storage.format import MAGIC, check_page_size
from headrace.storage.read import DeviceModel, device_path, measure, save_device

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cli.console import Console

__all__ = ["run_device"]

DEFAULT_PAGE_SIZE = 8192


def run_device(path: Path, page_size: int | None, queue_depth: int, console: Console, *, save: bool) -> None:
    """Measure, print, and keep the model beside the table if `path` is one."""
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
