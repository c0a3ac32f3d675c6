"""The demo's folder: a copy of the sample's pipeline file and the dimensions, ready for the flights."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from headrace.samples import NYCFLIGHTS13
from headrace.storage.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.pipelines.dimension import DimensionSummary

__all__ = ["DIMENSIONS", "PIPELINE_NAME", "STREAM_LINE", "make_dimensions", "prepare"]

PIPELINE_NAME = "pipeline.yml"
STREAM_LINE = "path: flights "
DIMENSIONS = {"plane": NYCFLIGHTS13.planes, "airport": NYCFLIGHTS13.airports, "carrier": NYCFLIGHTS13.airlines}


def prepare(folder: Path) -> Path:
    """Create the folder, or remove an earlier demo from it, and return the path of its pipeline file.

    Raises
    ------
    InputError
        If the folder contains files that no demo wrote.
    """
    pipeline = folder / PIPELINE_NAME
    text = NYCFLIGHTS13.pipeline.read_text().replace(STREAM_LINE, f"path: '{NYCFLIGHTS13.flights}' ")
    if folder.exists() and any(folder.iterdir()):
        if not pipeline.is_file() or "name: nycflights13" not in pipeline.read_text():
            raise InputError(f"{folder} holds files that no demo wrote; name another folder with --dir")
        for old in ("warehouse", ".headrace"):
            shutil.rmtree(folder / old, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    pipeline.write_text(text)
    return pipeline


def make_dimensions(pipeline: Path) -> list[DimensionSummary]:
    """Create the Delta tables of planes, airports, and airlines."""
    import pyarrow.parquet as pq  # noqa: PLC0415 - heavy, as is what follows

    from headrace.pipelines.config import load_pipeline  # noqa: PLC0415 - as above
    from headrace.pipelines.dimension import create_dimension  # noqa: PLC0415 - as above

    config = load_pipeline(pipeline)
    return [create_dimension(config, name, pq.read_table(source)) for name, source in DIMENSIONS.items()]
