"""Read plans: which reads fetch the wanted pages at the least cost (paper, section IV-D). Does no I/O.

Under the cost model ``C(N) = S + T * N`` a gap is worth reading over while its pages cost no more than a seek. So the
wanted pages are cut wherever the gap costs more. What is left are runs; one that is no longer than `max_scan` is one
read, in a longer one the paper's recurrence

    OPT[j] = S + T * (1 - offset[j]) + min over k of (T * offset[k] + OPT[k + 1]),  offset[k] - offset[j] < max_scan

is solved from right to left. Both ends of the window over k move one way only, so a queue of candidates in ascending
value gives each minimum in constant time on average: O(n) in all, where the paper's program takes O(n * max_scan).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.errors import InputError
from headrace.storage.read._plan_kernels import first_of_reads, greedy_first_of_reads

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["ReadPlan", "plan_cost", "plan_reads", "plan_reads_greedily"]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """A sequence of reads, ascending on disk, each beginning and ending on a wanted page.

    Attributes
    ----------
    start
        int64[reads], first disk page of each read.
    length
        int64[reads], disk pages in each read, the unwanted ones in its gaps included.
    first
        int64[reads + 1], index of the read's first page among the wanted pages: read `r` brings in
        ``pages[first[r]:first[r + 1]]``.
    """

    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)

    @property
    def pages_wanted(self) -> int:
        """Pages that were asked for."""
        return int(self.first[-1])

    @property
    def pages_read(self) -> int:
        """Pages that come from the disk, gaps included."""
        return int(self.length.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the plan itself."""
        return self.start.nbytes + self.length.nbytes + self.first.nbytes


def plan_reads(pages: npt.NDArray[np.int64], seek: float, transfer: float, max_scan: int) -> ReadPlan:
    """Return the cheapest plan that reads all pages.

    Parameters
    ----------
    pages
        int64[n], page numbers in ascending order, each once.
    seek, transfer
        Cost of a read, and of each page in it, in seconds or any other unit: the paper's S and T.
    max_scan
        Most disk pages in one read, the unwanted ones included.

    Raises
    ------
    InputError
        If `max_scan` is less than 1, a cost is negative, or the pages are not strictly ascending.

    Examples
    --------
    >>> import numpy as np
    >>> plan = plan_reads(np.array([1, 2, 5, 90]), seek=10.0, transfer=1.0, max_scan=200)
    >>> plan.start.tolist(), plan.length.tolist(), plan.first.tolist()
    ([1, 90], [5, 1], [0, 3, 4])
    """
    pages = _checked(pages, seek, transfer, max_scan)
    return _plan(pages, first_of_reads(pages, float(seek), float(transfer), int(max_scan)))


def plan_reads_greedily(pages: npt.NDArray[np.int64], seek: float, transfer: float, max_scan: int) -> ReadPlan:
    """Return the plan that makes each read as long as it may be, for comparison.

    A read ends where it has `max_scan` pages, or where a gap costs more than a seek. (The greedy algorithm of Seeger,
    Larson and McFayden, "Reading a Set of Disk Pages", VLDB 1993, as the paper tells it in section IV-D.) See
    `plan_reads` for the parameters and what is raised.

    Examples
    --------
    >>> import numpy as np
    >>> pages = np.array([0, 3, 4, 5, 6])
    >>> plan_reads_greedily(pages, seek=4.0, transfer=1.0, max_scan=4).start.tolist()
    [0, 4]
    >>> plan_reads(pages, seek=4.0, transfer=1.0, max_scan=4).start.tolist()
    [0, 3]
    """
    pages = _checked(pages, seek, transfer, max_scan)
    return _plan(pages, greedy_first_of_reads(pages, float(seek), float(transfer), int(max_scan)))


def plan_cost(plan: ReadPlan, seek: float, transfer: float) -> float:
    """Return what a plan costs under ``C(N) = S + T * N``, in the unit of `seek` and `transfer`."""
    return seek * len(plan) + transfer * plan.pages_read


def _checked(pages: npt.NDArray[np.int64], seek: float, transfer: float, max_scan: int) -> npt.NDArray[np.int64]:
    pages = np.ascontiguousarray(pages, dtype=np.int64)
    if max_scan < 1:
        raise InputError(f"max_scan is the most pages in a read, so at least 1, not {max_scan}")
    if not (seek >= 0 and transfer >= 0):
        raise InputError(f"seek and transfer are costs and cannot be negative: {seek}, {transfer}")
    if len(pages) and bool((pages[1:] <= pages[:-1]).any()):
        raise InputError("the pages of a read plan must be ascending, each once")
    return pages


def _plan(pages: npt.NDArray[np.int64], first: npt.NDArray[np.int64]) -> ReadPlan:
    start = pages[first[:-1]]
    return ReadPlan(start, pages[first[1:] - 1] - start + 1, first)
