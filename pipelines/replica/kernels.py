"""Compiles the kernels that a worker needs before the first batch, once for all workers of a machine.

The compiled code is cached next to the packages (or in the user's cache), so a worker loads it in milliseconds instead
of compiling for half a minute.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.pipelines.hooks import STARTED, Step
from headrace.pipelines.replica.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["compile_kernels", "compile_readers", "compiling", "finish_compiling"]

_ROWS = 64
_INDEX = pa.array(range(_ROWS))


def compiling() -> Thread:
    """Start the compilation in the background; return the thread, which the caller joins before the first batch."""
    thread = Thread(target=compile_kernels, name="headrace-compile", daemon=True)
    thread.start()
    return thread


def finish_compiling(kernels: Thread, hook: Callable[[str], None]) -> None:
    """Wait until the compilation has ended; a hook learns of the wait."""
    if kernels.is_alive():
        hook(Step(STARTED, "loading compiled code; the first run on a machine compiles it"))
    kernels.join()


@cache
def compile_kernels() -> None:
    """Run tables and joins with every type of key and of column."""
    with tempfile.TemporaryDirectory(prefix="headrace-compile-") as folder:
        for key in (_INDEX, _INDEX.cast(pa.string())):
            _exercise(Path(folder) / f"{key.type}.headrace", key)
            _exercise_as_of(Path(folder) / f"{key.type}-versions.headrace", key)
    compile_readers()


@cache
def compile_readers() -> None:
    """Read files with every type of column."""
    with tempfile.TemporaryDirectory(prefix="headrace-compile-") as folder:
        _exercise_files(Path(folder))


def _exercise_files(folder: Path) -> None:
    """Read a value of every column type from CSV and JSON lines."""
    from headrace.storage.records import Piece, RecordFormat, kind_of, read_records  # noqa: PLC0415 - numba comes in here

    types = [
        pa.int64(),
        pa.decimal128(9, 2),
        pa.float64(),
        pa.bool_(),
        pa.date32(),
        pa.timestamp("us", "UTC"),
        pa.string(),
    ]
    columns = pa.schema([(str(place), dtype) for place, dtype in enumerate(types)])
    texts = {"csv": ",".join(columns.names) + '\n1,1,1,true,2024-01-01,2024-01-01,"é"""\n', "jsonl": "{}\n"}
    for suffix, text in texts.items():
        path = folder / f"rows.{suffix}"
        path.write_text(text, encoding="utf-8")
        form = RecordFormat(kind_of(path) or "csv", columns, nulls=("NA",), missing_fields="null")
        for _ in read_records(Piece(str(path)), form):
            pass


def _exercise(path: Path, key: pa.Array) -> None:
    from headrace.etl import shard_of  # noqa: PLC0415 - numba comes in here
    from headrace.joins import SSIJ  # noqa: PLC0415 - as above
    from headrace.storage import Table  # noqa: PLC0415 - as above

    rows = pa.table({"key": key, "number": _INDEX, "text": _INDEX.cast(pa.string())})
    keys = pa.record_batch([key], names=["key"])
    kind = pa.schema([("key", key.type)])
    shard_of([key], kind, 2)
    Recent.of(rows, kind).find([key])
    with Table.build(path, rows.slice(0, _ROWS // 2), key=["key"], unique=True) as table:
        operator = SSIJ(table, on=[("key", "key")], how="left")
        operator.push(keys).drain()
        operator.apply(upserts=rows.slice(_ROWS // 2)).drain()
        operator.push(keys).drain()
        operator.finish().drain()


def _exercise_as_of(path: Path, key: pa.Array) -> None:
    """Look up versions by key and time, in both directions."""
    from headrace.joins import SSIJ, AsOf  # noqa: PLC0415 - numba comes in here
    from headrace.storage import Table  # noqa: PLC0415 - as above

    at = _INDEX.view(pa.timestamp("us"))
    rows = pa.table({"key": key, "at": at, "number": _INDEX})
    facts = pa.record_batch([key, at], names=["key", "time"])
    with Table.build(path, rows, key=["key", "at"], unique=True) as table:
        for direction in ("backward", "forward"):
            operator = SSIJ(table, on=AsOf("time", "at", [("key", "key")], direction), how="left", columns=["number"])
            operator.push(facts).drain()
            operator.finish().drain()
            operator.close()
