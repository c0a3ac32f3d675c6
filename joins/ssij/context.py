"""What the phases of SSIJ share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.joins.emitter import Emitter
    from headrace.joins.input_buffer import Arrivals
    from headrace.joins.predicates import Bound
    from headrace.joins.protocol import Progress
    from headrace.joins.ssij.cost import PhaseEstimate
    from headrace.joins.ssij.memory.store import Store
    from headrace.joins.stats import Counters
    from headrace.joins.workers import Workers
    from headrace.storage.read import PageReader, ReadQueue
    from headrace.storage.tree import Snapshot

__all__ = ["SSIJContext"]


@dataclass(frozen=True, slots=True)
class SSIJContext:
    """One stream and one snapshot, in one memory.

    Attributes
    ----------
    snapshot, reader, queue
        Snapshot of the relation, reader of its pages, and queue of asynchronous reads.
    store
        Cache, buffers, and their account.
    bound, emitter
        Bound predicate, and emitter of results.
    outer
        Whether tuples without a match give a row of nulls.
    estimate
        Estimate of a join phase's duration.
    workers
        Threads for parts of a batch.
    counters
        Running counts of the operator.
    completed
        Called with the arrival and the number of tuples that are complete.
    progress
        Seconds that the operator has worked, and tasks that it has left.
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
    progress: Progress
