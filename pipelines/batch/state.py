"""State of a micro-batch: its identity, the surrogate keys that its attempts assigned, and its phase durations."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.pipelines.source.identity import application

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyspark.sql import DataFrame

    from headrace.pipelines.batch.resolutions import RetryOf

__all__ = ["Batch"]


@dataclass
class Batch:
    """One batch in the protocol.

    Parameters
    ----------
    number
        Number of the batch in the stream.
    stream
        Identity of the stream.
    attempt
        Id of the attempt, as in the ledger.
    files
        Partition columns of each table whose files the tasks write, by table path.
    clock
        Function that returns seconds since 1970.
    retry
        Rejected rows that the batch retries; None for a batch of files.

    Attributes
    ----------
    began
        Start time of the batch, by the clock.
    own
        Ranges (above, up to) of surrogate keys that attempts at this batch assigned to new members, by role.
    versions
        Delta version that each role joined at.
    phases
        Duration of each phase so far, in seconds.
    persisted
        Frames to unpersist.
    pieces
        Pieces of the batch's files.
    """

    number: int
    stream: str
    attempt: str
    files: Mapping[str, tuple[str, ...]]
    clock: Callable[[], float] = time.time
    retry: RetryOf | None = None
    began: float = field(init=False)
    own: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    persisted: list[DataFrame] = field(default_factory=list)
    pieces: DataFrame | None = None

    def __post_init__(self) -> None:
        self.began = self.clock()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a phase."""
        began = self.clock()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + self.clock() - began

    def application(self, part: str) -> str:
        """Return the application id of Delta's transactions for a stream and its part in a table."""
        return application(self.stream, part)
