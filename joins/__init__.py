"""Joins of a stream with a stored relation: SSIJ, and MeshJoin and index nested loops to compare it with.

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joins.inlj.operator import IndexNestedLoops
    from joins.meshjoin.operator import MeshJoin
    from joins.predicates import Equality
    from joins.process_memory import keep_little_freed_memory
    from joins.protocol import JoinStats, MemoryUse, Operator, Output, SSIJStats
    from joins.ranges import AsOf, Band, Range
    from joins.ssij.operator import SSIJ
    from storage.units import parse_duration, parse_memory

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
    "SSIJ": "joins.ssij.operator",
    "AsOf": "joins.ranges",
    "Band": "joins.ranges",
    "Equality": "joins.predicates",
    "IndexNestedLoops": "joins.inlj.operator",
    "JoinStats": "joins.protocol",
    "MemoryUse": "joins.protocol",
    "MeshJoin": "joins.meshjoin.operator",
    "Operator": "joins.protocol",
    "Output": "joins.protocol",
    "Range": "joins.ranges",
    "SSIJStats": "joins.protocol",
    "keep_little_freed_memory": "joins.process_memory",
    "parse_duration": "storage.units",
    "parse_memory": "storage.units",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
