"""The source of a pipeline for Spark: the check of the folder, and the frame of a batch's file pieces."""

from __future__ import annotations

import heapq
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from headrace.pipelines.config.source_format import record_format
from headrace.pipelines.errors import PipelineFileError, SourceFileError
from headrace.pipelines.source.discovery import leave_out_advice, printable
from headrace.pipelines.spark.frame import PIECES
from headrace.storage.records import RecordFileError, split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession

    from headrace.pipelines.config.model import SourceConfig
    from headrace.pipelines.source.discovery import FoundFile
    from headrace.storage.records import RecordFormat

__all__ = ["check_source", "piece_frame", "piece_rows", "spread"]

_LEAST_BYTES: Final = 16 << 20  # dividing a file takes a pass over it, so it pays off for large files only
_PIECES_OF_A_CORE: Final = 2


def check_source(source: SourceConfig) -> None:
    """Refuse a source that cannot be read, before any other work.

    Raises
    ------
    PipelineFileError
        If the folder does not exist, cannot be read, or is not on a file system of this host.
    """
    if "://" in source.path:
        raise PipelineFileError(
            f"{source.place}.path: {source.path} is not a folder of this host's file systems; mount it, or copy its "
            "files to a folder"
        )
    if not Path(source.path).is_dir():
        raise PipelineFileError(
            f"{source.place}.path: there is no folder {source.path}; create it, or correct the path"
        )
    if not os.access(source.path, os.R_OK | os.X_OK):
        raise PipelineFileError(
            f"{source.place}.path: the folder {source.path} may not be read; change its permissions"
        )


def piece_frame(
    spark: SparkSession, source: SourceConfig, files: Sequence[FoundFile], *, skippable: bool = True
) -> DataFrame:
    """Return the pieces of files as a frame with the columns `PIECES`, distributed over the cores by size.

    Parameters
    ----------
    spark, source, files
        Spark session, source configuration, and the files.
    skippable
        Whether `headrace source skip` knows the files.

    Raises
    ------
    SourceFileError
        If a file cannot be divided because it cannot be read.
    """
    cores = spark.sparkContext.defaultParallelism
    rows = piece_rows(source, files, cores, skippable=skippable)
    parts = spread([row["bytes"] for row in rows], cores)
    batches = [pa.RecordBatch.from_pylist([rows[index] for index in part], PIECES) for part in parts]
    return spark.createDataFrame(pa.Table.from_batches(batches, PIECES))


def piece_rows(
    source: SourceConfig, files: Sequence[FoundFile], cores: int, *, skippable: bool = True
) -> list[dict[str, Any]]:
    """Return the pieces of files as rows of `PIECES`, with the size of each in bytes.

    Parameters
    ----------
    source, files
        Source configuration, and the files.
    cores
        Number of tasks that read the pieces.
    skippable
        Whether `headrace source skip` knows the files.

    Raises
    ------
    SourceFileError
        If a file cannot be divided because it cannot be read.
    """
    each = max(_LEAST_BYTES, sum(file.size for file in files) // (cores * _PIECES_OF_A_CORE))
    form = record_format(source)
    return [row for file in files for row in _pieces(source, file, form, each, skippable=skippable)]


def _pieces(
    source: SourceConfig, file: FoundFile, form: RecordFormat, bytes_each: int, *, skippable: bool
) -> list[dict[str, Any]]:
    """Return the pieces of a file as rows of `PIECES`, with the size of each in bytes."""
    path = f"{source.path}/{file.name}"
    try:
        pieces = split(path, form, bytes_each)
    except RecordFileError as error:
        advice = leave_out_advice(file.name, skippable=skippable, source=source.label)
        raise SourceFileError(
            f"{printable(str(error))}. Repair the file or correct its declaration, or {advice}"
        ) from error
    same = {"file": file.name, "path": path, "size": file.size, "mtime_ns": file.mtime_ns}
    return [
        {
            **same, "start": piece.start, "stop": file.size if piece.stop is None else piece.stop,
            "first_record": piece.first_record, "bytes": file.size // len(pieces),
        }
        for piece in pieces
    ]  # fmt: skip


def spread(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Return the assignment of items to parts of similar total size.

    Spark divides a local table into partitions of nearly equal row counts; partition `i` starts at row ``i * n //
    parts``. So each part has as many items as its partition, and the largest remaining item goes to the part with the
    smallest total.

    Parameters
    ----------
    sizes
        Size of each item.
    parts
        Number of parts. If there are fewer items, there is one part per item.

    Returns
    -------
    list of lists
        Positions of the items in each part.

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
