"""What SSIJ's phases share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.joins._counters import Counters
    from headrace.joins._emit import Emitter
    from headrace.joins._input_buffer import Arrivals
    from headrace.joins.predicates import Bound
    from headrace.joins.ssij.phase_estimate import PhaseEstimate
    from headrace.joins.ssij.store import Store
    from headrace.joins.ssij.workers import Workers
    from headrace.storage.read import PageReader, ReadQueue
    from headrace.storage.tree import Snapshot

__all__ = ["SSIJState"]


@dataclass(frozen=True, slots=True)
class SSIJState:
    """One stream and one snapshot, in one memory.

    Attributes
    ----------
    snapshot, reader, queue
        The relation.
    store
        Cache, buffers and their account.
    bound, emitter
        From tuples to keys, and from matches to results.
    outer
        Whether tuples without a match give a row of nulls.
    estimate
        How long a join phase takes.
    workers
        For parts of a batch.
    counters
        To be kept up to date.
    completed
        To be told of tuples that are complete.
    busy
        Returns the seconds that the operator has worked.
    """

    snapshot: Snapshot
    reader: PageReader
    queue: ReadQueue
    store: Store
    bound: Bound
    emitter: Emitter
    outer: bool
    estimate: PhaseEstimate
    workers: Workers
    counters: Counters
    completed: Callable[[Arrivals, int], None]
    busy: Callable[[], float]
