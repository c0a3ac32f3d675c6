"""A folder of Parquet files that grows while results come."""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING, Self

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.cli.reporting.errors import OutputFileError, writing
from headrace.storage.file import claimed, remove_remains

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

__all__ = ["INCOMPLETE", "PartsSink"]

INCOMPLETE = "_incomplete"
PART_BYTES = 16 << 20
PART_SECONDS = 1.0
_OWN = re.compile(r"part-\d{6}\.parquet|\.part-\d{6}\.partial")


class PartsSink:
    """Writes batches to a folder as ``part-000000.parquet`` and so on, each complete when it appears.

    Until all results are there, the folder has a file ``_incomplete``, which readers of Parquet folders skip. A folder
    that a failed or killed command left is written again from the beginning.

    Parameters
    ----------
    folder
        Folder, which must be new, empty, or marked as incomplete.
    schema
        Schema of each batch.
    clock
        Returns seconds. A part is written a second after the last one, or when it has 16 MiB.

    Raises
    ------
    OutputFileError
        If the folder cannot be used.
    """

    def __init__(self, folder: Path, schema: pa.Schema, clock: Callable[[], float] = time.monotonic) -> None:
        check_folder(folder)
        self.rows = 0
        self._folder = folder
        self._schema = schema
        self._clock = clock
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = self._parts = 0
        self._written = -PART_SECONDS
        self._claim = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
            remove_remains(self._folder, re.compile(INCOMPLETE))
            if (self._folder / INCOMPLETE).exists():
                raise OutputFileError(f"another command is writing to {self._folder}; name another folder")
            self._claim.enter_context(claimed(self._marked))
            for path in self._folder.iterdir():
                if _OWN.fullmatch(path.name):
                    path.unlink()
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch."""
        self.rows += batch.num_rows
        self._pending.append(batch)
        self._pending_bytes += batch.nbytes
        self.settle()

    def settle(self) -> None:
        """Write a part if it is time."""
        if self._pending and (self._pending_bytes >= PART_BYTES or self._clock() - self._written >= PART_SECONDS):
            self._flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                if self._pending or not self._parts:
                    self._flush()
                with writing(self._folder):
                    (self._folder / INCOMPLETE).unlink()
        finally:
            self._claim.close()

    def _marked(self) -> Path:
        mark = self._folder / INCOMPLETE
        mark.write_text("The results in this folder are not complete.\n")
        return mark

    def _flush(self) -> None:
        partial = self._folder / f".part-{self._parts:06}.partial"
        try:
            with writing(self._folder):
                pq.write_table(pa.Table.from_batches(self._pending, self._schema), partial, compression="zstd")
                partial.replace(self._folder / f"part-{self._parts:06}.parquet")
        finally:
            partial.unlink(missing_ok=True)
        self._parts += 1
        self._written = self._clock()
        self._pending, self._pending_bytes = [], 0


def check_folder(folder: Path) -> None:
    """Raise before any work if results cannot be written to a folder."""
    if folder.exists() and not folder.is_dir():
        raise OutputFileError(f"{folder} is no folder; name a new folder")
    if not folder.exists() and not folder.parent.is_dir():
        raise OutputFileError(f"there is no folder {folder.parent} to make {folder.name} in; make it first")
    if folder.is_dir():
        names = {path.name for path in folder.iterdir()}
        others = sorted(name for name in names - {INCOMPLETE} if not _OWN.fullmatch(name))
        if others or (names and INCOMPLETE not in names):
            raise OutputFileError(f"{folder} holds {(others or sorted(names))[0]} already; name a new or empty folder")
