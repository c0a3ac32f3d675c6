"""The source of a pipeline as Spark meets it: a folder that was checked, and the frame of pieces of a batch's files."""

from __future__ import annotations

import heapq
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from headrace.pipelines.errors import PipelineFileError
from headrace.pipelines.frame import PIECES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession

    from headrace.pipelines.config import SourceConfig
    from headrace.pipelines.discovery import FoundFile

__all__ = ["check_source", "option_text", "piece_frame", "spread"]

_LEAST_BYTES: Final = 4 << 20


def check_source(source: SourceConfig) -> None:
    """Refuse a source that cannot be read, before anything else is done.

    Raises
    ------
    PipelineFileError
        If the folder is not there, cannot be read, or is not on a file system of this host.
    """
    if "://" in source.path:
        raise PipelineFileError(
            f"source.path: {source.path} is not a folder of this host's file systems; mount it, or copy its files to "
            "a folder"
        )
    if not Path(source.path).is_dir():
        raise PipelineFileError(f"source.path: there is no folder {source.path}; create it, or correct the path")
    if not os.access(source.path, os.R_OK | os.X_OK):
        raise PipelineFileError(f"source.path: the folder {source.path} may not be read; change its permissions")


def piece_frame(spark: SparkSession, folder: str, files: Sequence[FoundFile]) -> DataFrame:
    """Return the pieces of files as a frame with the columns `PIECES`, spread over the cores by their size."""
    rows: list[dict[str, Any]] = [
        {
            "file": file.name, "path": f"{folder}/{file.name}", "start": 0, "stop": file.size,
            "first_record": 1, "size": file.size, "mtime_ns": file.mtime_ns,
        }
        for file in files
    ]  # fmt: skip
    parts = spread([row["stop"] - row["start"] for row in rows], spark.sparkContext.defaultParallelism)
    batches = [pa.RecordBatch.from_pylist([rows[index] for index in part], PIECES) for part in parts]
    return spark.createDataFrame(pa.Table.from_batches(batches, PIECES))


def spread(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Return which items go to which part, so that parts are alike in size.

    Spark cuts a local table into partitions of equally many rows, the one at `i` from ``i * n // parts``. So each part
    has the number of items that its partition has, and the largest item goes to the part that holds least.

    Parameters
    ----------
    sizes
        Size of each item.
    parts
        The number of parts; with fewer items there are as many parts as items.

    Returns
    -------
    list of lists
        Positions of the items of each part.

    Examples
    --------
    >>> spread([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    count = len(sizes)
    parts = min(parts, count)
    room = [(part + 1) * count // parts - part * count // parts for part in range(parts)]
    chosen: list[list[int]] = [[] for _ in range(parts)]
    least = [(0, part) for part in range(parts)]
    for index in sorted(range(count), key=lambda index: (-sizes[index], index)):
        size, part = heapq.heappop(least)
        chosen[part].append(index)
        if len(chosen[part]) < room[part]:
            heapq.heappush(least, (size + sizes[index], part))
    return chosen


def option_text(value: str | float) -> str:
    """Return an option as Spark writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
