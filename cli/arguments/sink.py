"""A Parquet file that is written atomically."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, Self

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.cli.reporting.errors import OutputFileError, writing
from headrace.pipelines.durable import sync_file, sync_folder
from headrace.storage.file import claimed, remove_remains, removed

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

__all__ = ["ParquetSink"]

GROUP_BYTES = 4 << 20


class ParquetSink:
    """Collects batches into row groups, writes them to a file next to `path`, and renames that file at the end.

    Temporary files that a killed process left next to `path` are removed.

    Parameters
    ----------
    path
        Path of the file, which appears when the block ends without an error. An existing file is replaced atomically.
    schema
        Schema of each batch.
    group_bytes
        Size of a row group in memory, which is also the maximum amount of buffered data.

    Raises
    ------
    OutputFileError
        If the folder does not exist or `path` is a folder.
    """

    def __init__(self, path: Path, schema: pa.Schema, *, group_bytes: int = GROUP_BYTES) -> None:
        check_place(path)
        self.rows = 0
        self._path = path
        self._schema = schema
        self._group_bytes = group_bytes
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._claim = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with writing(self._path), contextlib.ExitStack() as stack:
            remove_remains(self._path.parent, re.compile(rf"\.{re.escape(self._path.name)}\.\d+\.partial"))
            stack.enter_context(claimed(self._created))
            stack.callback(removed, self._partial)
            self._writer = pq.ParquetWriter(
                self._partial, self._schema, compression="zstd", use_dictionary=_texts(self._schema)
            )
            self._claim = stack.pop_all()
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch."""
        self.rows += batch.num_rows
        self._pending.append(batch)
        self._pending_bytes += batch.nbytes
        if self._pending_bytes >= self._group_bytes:
            self._flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._claim:
            if error is not None:
                with contextlib.suppress(OSError):  # the first error is the one to report
                    self._writer.close()
                return
            self._flush()
            with writing(self._path):
                self._writer.close()
                _publish(self._partial, self._path)

    def _created(self) -> Path:
        self._partial.touch()
        return self._partial

    def _flush(self) -> None:
        if self._pending:
            with writing(self._path):
                self._writer.write_table(pa.Table.from_batches(self._pending, self._schema))
        self._pending = []
        self._pending_bytes = 0


def check_place(path: Path, reads: Iterable[Path] = ()) -> None:
    """Raise before any work if no file can be created at `path`, or if it would overwrite one of `reads`."""
    if path.is_dir():
        raise OutputFileError(f"{path} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise OutputFileError(f"{path} is no regular file and would be lost; name another one")
    if not path.parent.is_dir():
        raise OutputFileError(f"there is no folder {path.parent} to write {path.name} into; make it first")
    if any(source.exists() and path.exists() and path.samefile(source) for source in reads):
        raise OutputFileError(f"{path} is what this command reads and would be lost; write elsewhere")


def _texts(schema: pa.Schema) -> list[str]:
    """Return the columns worth a dictionary: text. For numbers, it takes ten times the memory of the rows."""
    return [column.name for column in schema if pa.types.is_string(column.type) or pa.types.is_binary(column.type)]


def _publish(partial: Path, path: Path) -> None:
    sync_file(partial)
    partial.replace(path)
    sync_folder(path.parent)
