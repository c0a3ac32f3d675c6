"""Compiles the kernels that a worker needs before the first batch does, once for all workers of a machine.

Compiled code is kept beside the packages (or in the user's cache), so a worker loads in milliseconds what would take
each of them half a minute.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from threading import Thread

import pyarrow as pa

__all__ = ["compile_kernels", "compiling"]

_ROWS = 64
_INDEX = pa.array(range(_ROWS))


def compiling() -> Thread:
    """Start to compile in the background and return the thread, to be joined before the first batch."""
    thread = Thread(target=compile_kernels, name="headrace-compile", daemon=True)
    thread.start()
    return thread


@cache
def compile_kernels() -> None:
    """Exercise tables and joins with each kind of key and of column."""
    with tempfile.TemporaryDirectory(prefix="headrace-compile-") as folder:
        for key in (_INDEX, _INDEX.cast(pa.string())):
            _exercise(Path(folder) / f"{key.type}.headrace", key)


def _exercise(path: Path, key: pa.Array) -> None:
    from headrace.etl import shard_of  # noqa: PLC0415 - numba comes in here
    from headrace.joins import SSIJ  # noqa: PLC0415 - as above
    from headrace.storage import Table  # noqa: PLC0415 - as above

    rows = pa.table({"key": key, "number": _INDEX, "text": _INDEX.cast(pa.string())})
    keys = pa.record_batch([key], names=["key"])
    shard_of([key], pa.schema([("key", key.type)]), 2)
    with Table.build(path, rows.slice(0, _ROWS // 2), key=["key"], unique=True) as table:
        operator = SSIJ(table, on=[("key", "key")], how="left")
        operator.push(keys).drain()
        operator.apply(upserts=rows.slice(_ROWS // 2)).drain()
        operator.push(keys).drain()
        operator.finish().drain()
