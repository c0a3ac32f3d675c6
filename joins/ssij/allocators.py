"""What allocators keep of the memory that was freed is given back before memory of another kind is wanted.

Tuples, pages and scratch arrays come from allocators of their own: Arrow's, the system's, the C library's. Each keeps
what was freed to use it again, which the account does not see. It matters where much changes hands: a join phase frees
all tuples, and pages take their room. Not before its first read, where the memory is wanted at once again.
"""

from __future__ import annotations

import pyarrow as pa

__all__ = ["give_back_freed_memory"]

_WORTHWHILE = 4 << 20


def give_back_freed_memory(nbytes: int) -> None:
    """Make the allocators return what they keep, if so many bytes that change hands are worth the time."""
    if nbytes >= _WORTHWHILE:
        pa.default_memory_pool().release_unused()
        pa.system_memory_pool().release_unused()  # which is the C library, where numpy's arrays come from
