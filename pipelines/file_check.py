"""Parquet files that lack a column of the schema: Spark would read nulls, and no row would say so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

import pyarrow.parquet as pq

from headrace.pipelines.errors import SourceFileError
from headrace.pipelines.frame import FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa

    from headrace.pipelines.steps import Task

__all__ = ["FileCheckStep"]


@dataclass(frozen=True)
class FileCheckStep:
    """Compares each local file that rows come from with the schema's columns, as Spark does without regard to case.

    Parameters
    ----------
    columns
        Columns that each file must have.
    """

    columns: tuple[str, ...]

    def run(self, batches: Iterable[pa.RecordBatch], task: Task) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - as other steps
        """Yield the batches as they are.

        Raises
        ------
        SourceFileError
            If a file lacks a column.
        """
        checked: set[str] = set()
        for batch in batches:
            for name in set(batch.column(FILE).unique().to_pylist()) - {None} - checked:
                self._check(name)
                checked.add(name)
            yield batch

    def _check(self, name: str) -> None:
        place = urlparse(name)
        path = Path(unquote(place.path))
        if place.scheme not in {"", "file"} or not path.is_file():
            return
        there = pq.read_schema(path).names
        lower = {column.lower() for column in there}
        missing = [column for column in self.columns if column.lower() not in lower]
        if missing:
            raise SourceFileError(
                f"{path} has no column {missing[0]!r}; it has {', '.join(there)}; correct the file or the schema"
            )
