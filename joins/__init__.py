"""Joins of a stream with a stored relation, and of streams with streams.

The former are SSIJ, and MeshJoin and index nested loops to compare it with.

In: record batches of a stream, pushed as they arrive, and a clustered table (`headrace.storage`). Out: result batches.

- `protocol`, `handle`: the calls that all operators share; `base` adds those of joins with a relation
- `predicates`: which pairs of tuples join
- `memory`: the memory budget
- `ssij`, `meshjoin`, `inlj`: one operator each
- `streams`: joins of streams with streams

Names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.joins.inlj.operator import IndexNestedLoops
    from headrace.joins.memory.allocators import keep_little_freed_memory
    from headrace.joins.meshjoin.operator import MeshJoin
    from headrace.joins.predicates import AsOf, Band, Equality, Range
    from headrace.joins.protocol import JoinStats, MemoryUse, Operator, Output, SSIJStats
    from headrace.joins.ssij.operator import SSIJ
    from headrace.storage.units import parse_duration, parse_memory

__all__ = [
    "SSIJ",
    "AsOf",
    "Band",
    "Equality",
    "IndexNestedLoops",
    "JoinStats",
    "MemoryUse",
    "MeshJoin",
    "Operator",
    "Output",
    "Range",
    "SSIJStats",
    "keep_little_freed_memory",
    "parse_duration",
    "parse_memory",
]

_HOMES = {
    "SSIJ": "headrace.joins.ssij.operator",
    "AsOf": "headrace.joins.predicates",
    "Band": "headrace.joins.predicates",
    "Equality": "headrace.joins.predicates",
    "IndexNestedLoops": "headrace.joins.inlj.operator",
    "JoinStats": "headrace.joins.protocol",
    "MemoryUse": "headrace.joins.protocol",
    "MeshJoin": "headrace.joins.meshjoin.operator",
    "Operator": "headrace.joins.protocol",
    "Output": "headrace.joins.protocol",
    "Range": "headrace.joins.predicates",
    "SSIJStats": "headrace.joins.protocol",
    "keep_little_freed_memory": "headrace.joins.memory.allocators",
    "parse_duration": "headrace.storage.units",
    "parse_memory": "headrace.storage.units",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
