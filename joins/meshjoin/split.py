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

_ROW_SECONDS = 1e-8  # to probe the multimap with one relation tuple
_BATCH_SECONDS = 2e-5  # to output the matches of one batch in the window
_STEP_SECONDS = 5e-4  # for each step, whatever it does


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
    """

    pages: int
    tuples: int
    chunks: int


def split_memory(
    memory: int,
    leaves: int,
    rows_per_page: float,
    tuple_nbytes: float,
    device: DeviceModel,
    read_pages: int | None = None,
) -> MeshSplit:
    """Return the split with the highest rate, as the authors of MeshJoin compute it.

    A step reads b pages and admits w tuples, so ``w / cost(b)`` is the rate, where the cost is that of the read and of
    joining. Tuples stay until they have met all ``k = leaves / b`` chunks, so ``b * page + (k + 1) * w * tuple`` has to
    fit in the memory; the one extra part is the tuples that arrive. For each b there is a greatest w. The best pair is
    found by trying every b. (Polyzotis and others, "Meshing Streaming Updates with Persistent Data in an Active Data
    Warehouse", TKDE 2008, section 4.)

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
    needed = pages * device.page_size + (chunks + 1) * tuple_nbytes
    tuples = np.floor((memory - pages * device.page_size) / ((chunks + 1) * tuple_nbytes))
    if tuples.max() < 1:
        raise MemoryBudgetError(
            f"MeshJoin holds every stream tuple until it has met the whole relation; it needs at least "
            f"{format_size(int(needed.min()))} for pages and tuples, and has {format_size(max(memory, 0))}"
        )
    reading = np.where(chunks > 1, device.seek + device.transfer * pages, 0.0)
    joining = _STEP_SECONDS + _BATCH_SECONDS * chunks + _ROW_SECONDS * pages * max(rows_per_page, 1.0)
    best = int(np.argmax(tuples / (reading + joining)))
    return MeshSplit(int(pages[best]), int(min(tuples[best], 2**30 // chunks[best])), int(chunks[best]))
