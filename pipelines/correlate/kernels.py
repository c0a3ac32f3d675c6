"""Compiles the kernels of a correlation before the first batch, once for all workers of a machine."""

from __future__ import annotations

from functools import cache
from threading import Thread
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.pipelines.replica.kernels import compile_kernels, compile_readers

if TYPE_CHECKING:
    from headrace.joins.streams.tuples.conditions import Conditions

__all__ = ["compiling"]

_ROWS = 64


def compiling(*, with_steps: bool) -> Thread:
    """Start the compilation in the background; return the thread, which the caller joins before the first batch.

    Parameters
    ----------
    with_steps
        Whether results go through lookups, which need the kernels of ordinary pipelines too.
    """
    thread = Thread(target=_compile_all if with_steps else _compile, name="headrace-compile", daemon=True)
    thread.start()
    return thread


def _compile_all() -> None:
    _compile()
    compile_kernels()


@cache
def _compile() -> None:
    """Read files, and join rows by keys of one word and of several, with and without a band."""
    from headrace.etl import digests_of  # noqa: PLC0415 - numba comes in here
    from headrace.joins.streams import Near  # noqa: PLC0415 - as above
    from headrace.joins.streams.hashing.kept_rows import KeptRows  # noqa: PLC0415 - as above

    compile_readers()
    number = pa.array(range(_ROWS))
    batch = pa.record_batch([number, number.cast(pa.string()), number.cast(pa.bool_())], names=["k", "t", "b"])
    conditions: tuple[Conditions, ...] = (
        [("l.k", "r.k")],
        [("l.t", "r.t")],
        [("l.k", "r.k"), Near("l.k", "r.k", 1)],
    )
    for on in conditions:
        rows = KeptRows({"l": batch.schema, "r": batch.schema}, on, "4MiB")
        for side in (0, 1):
            rows.keep(side, batch)
            for _ in rows.probe(side, batch, _ROWS):
                digests_of(rows.graph.keys[side][0].encode(batch)[0])
