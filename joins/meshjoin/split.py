"""How MeshJoin divides its memory between pages of the relation and stream tuples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.errors import MemoryBudgetError
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from headrace.storage.read import DeviceModel

__all__ = ["MeshSplit", "split_memory"]

_ROW_SECONDS = 5e-9  # to probe the multimap with one relation tuple
_STEP_SECONDS = 5e-4  # fixed cost of a step
_SURE = 2  # of more memory, more than half is for pages and tuples


@dataclass(frozen=True, slots=True)
class MeshSplit:
    """A division of the memory.

    Attributes
    ----------
    pages
        Pages in a chunk (the b of the MeshJoin paper).
    tuples
        Stream tuples that enter with each chunk (its w).
    chunks
        Chunks in the relation, each of which every tuple meets.
    buffers
        Chunks in memory: 2 if the next one is read while one is joined.
    """

    pages: int
    tuples: int
    chunks: int
    buffers: int = 1


def split_memory(
    memory: int,
    leaves: int,
    rows_per_page: float,
    tuple_nbytes: float,
    device: DeviceModel,
    read_pages: int | None = None,
    *,
    ahead: bool = False,
    reserved: int = 0,
) -> MeshSplit:
    """Return the split with the highest rate, as the authors of MeshJoin compute it.

    A step reads b pages and admits w tuples, so ``w / cost(b)`` is the rate, where the cost is that of the read and of
    joining, or the greater of the two with read-ahead. Tuples stay until they have met all
    ``k = leaves / b`` chunks, so ``b * page * buffers + (k + 1) * w * tuple`` has to fit in the memory; the one extra
    part is the tuples that arrive. For each b there is a greatest w. The best pair is found by trying every b.
    (Polyzotis and others, "Meshing Streaming Updates with Persistent Data in an Active Data Warehouse", TKDE 2008,
    section 4.)

    Parameters
    ----------
    memory
        Bytes for pages and tuples.
    leaves, rows_per_page
        Leaves of the relation, and average rows in each.
    tuple_nbytes
        Bytes of a stream tuple in memory, with its entry in the multimap.
    device
        Read costs and page size of the disk.
    read_pages
        Pages in a chunk; None to choose the best number.
    ahead
        Whether the next chunk may be read while one is joined.
    reserved
        Bytes that the operator has for other things, of which a part grows with its memory.

    Raises
    ------
    MemoryBudgetError
        If no split admits at least one tuple.
    """
    if read_pages is None:
        pages = np.arange(1, max(1, min(leaves, memory // device.page_size)) + 1)
    else:
        pages = np.array([max(1, min(read_pages, leaves))])
    chunks = -(-max(leaves, 1) // pages)
    reading = np.where(chunks > 1, device.seek + device.transfer * pages, 0.0)
    joining = _STEP_SECONDS + _ROW_SECONDS * pages * max(rows_per_page, 1.0)
    best, best_rate = MeshSplit(1, 0, 1), -np.inf
    for buffers, step in ((1, reading + joining), (2, np.maximum(reading, joining)))[: 1 + ahead]:
        tuples = np.floor((memory - buffers * pages * device.page_size) / ((chunks + 1) * tuple_nbytes))
        at = int(np.argmax(tuples / step))
        if tuples[at] / step[at] > best_rate:
            most = int(min(tuples[at], 2**30 // chunks[at]))
            best, best_rate = MeshSplit(int(pages[at]), most, int(chunks[at]), buffers), tuples[at] / step[at]
    if best.tuples < 1:
        needed = int(np.min(pages * device.page_size + (chunks + 1) * tuple_nbytes)) + 1
        raise _refusal(needed, memory, reserved)
    return best


def _refusal(needed: int, memory: int, reserved: int) -> MemoryBudgetError:
    return MemoryBudgetError.of(
        "MeshJoin holds every stream tuple until it has met the whole relation; it needs "
        f"{format_size(needed)} for pages and tuples, and has {format_size(max(memory, 0))}",
        reserved + memory + _SURE * (needed - memory),
    )
