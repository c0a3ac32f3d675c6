"""The compiled planner: cut at expensive gaps, dynamic program with a sliding-window minimum inside long runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from headrace.storage.format import I64

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["first_of_reads", "greedy_first_of_reads"]


@njit(cache=True, nogil=True)
def first_of_reads(pages: npt.NDArray[np.int64], seek: float, transfer: float, max_scan: int) -> npt.NDArray[np.int64]:
    """Return for each read of the cheapest plan the index of its first page, and `len(pages)` at the end.

    Parameters
    ----------
    pages
        Page numbers, ascending, each once.
    seek, transfer
        Cost of a read and of a page in it; not negative.
    max_scan
        Most disk pages in a read; at least 1.
    """
    count = len(pages)
    first = np.empty(count + 1, np.int64)
    reads = begin = I64(0)  # typed: numba compiles a callee again for a literal
    while begin < count:
        end = begin + 1
        while end < count and transfer * (pages[end] - pages[end - 1] - 1) <= seek:
            end += 1
        if pages[end - 1] - pages[begin] < max_scan:
            first[reads] = begin
            reads += 1
        else:
            reads = _cut_run(pages, begin, end, seek, transfer, max_scan, first, reads)
        begin = end
    first[reads] = count
    return first[: reads + 1].copy()


@njit(cache=True, nogil=True)
def greedy_first_of_reads(
    pages: npt.NDArray[np.int64], seek: float, transfer: float, max_scan: int
) -> npt.NDArray[np.int64]:
    """Return what `first_of_reads` does, for the plan whose reads are as long as they may be, one after the other."""
    count = len(pages)
    first = np.empty(count + 1, np.int64)
    reads = 0
    for at in range(count):
        far = at > 0 and transfer * (pages[at] - pages[at - 1] - 1) > seek
        if at == 0 or far or pages[at] - pages[first[reads - 1]] >= max_scan:
            first[reads] = at
            reads += 1
    first[reads] = count
    return first[: reads + 1].copy()


@njit(cache=True, nogil=True)
def _cut_run(
    pages: npt.NDArray[np.int64],
    begin: int,
    end: int,
    seek: float,
    transfer: float,
    max_scan: int,
    first: npt.NDArray[np.int64],
    reads: int,
) -> int:
    size = end - begin
    rest = np.zeros(size + 1, np.float64)  # the paper's OPT: cost of reading page j of the run and all after it
    last = np.empty(size, np.int64)  # where the read that begins at page j ends
    value = np.empty(size, np.float64)  # cost, up to what depends on j, of ending a read at page k
    window = np.empty(size, np.int64)  # candidates k, ascending in value; those furthest right come first
    head = tail = 0
    origin = pages[begin]
    for j in range(size - 1, -1, -1):
        offset = pages[begin + j] - origin
        value[j] = transfer * offset + rest[j + 1]
        while tail > head and value[window[tail - 1]] > value[j]:
            tail -= 1
        window[tail] = j
        tail += 1
        while pages[begin + window[head]] - origin - offset >= max_scan:
            head += 1
        last[j] = window[head]
        rest[j] = seek + transfer * (1 - offset) + value[last[j]]
    j = 0
    while j < size:
        first[reads] = begin + j
        reads += 1
        j = last[j] + 1
    return reads
