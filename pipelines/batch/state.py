"""State of a micro-batch: its identity, the surrogate keys that its attempts assigned, and its phase durations."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.pipelines.source.identity import application

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyspark.sql import DataFrame

    from headrace.pipelines.batch.resolutions import RetryOf
    from headrace.pipelines.catalog import BatchRecord
    from headrace.pipelines.delta.data_files import DataFile

__all__ = ["Batch", "Upstream"]


@dataclass(frozen=True)
class Upstream:
    """What an earlier part of a pipeline, such as a join of sources, did for a batch before its steps.

    Parameters
    ----------
    began
        Start of the batch.
    note
        Entries of the note of the facts' commit.
    rejected
        Files of the error table with the rows that it rejected; no commit names them yet.
    completed
        Function that adds its counts to the record of a batch.
    """

    began: float
    note: Mapping[str, Any]
    rejected: tuple[DataFile, ...] = ()
    completed: Callable[[BatchRecord], BatchRecord] = lambda record: record


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
    upstream
        What came before the steps of the batch; None if they read the files of a source.

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
    upstream: Upstream | None = None
    began: float = field(init=False)
    own: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    persisted: list[DataFrame] = field(default_factory=list)
    pieces: DataFrame | None = None

    def __post_init__(self) -> None:
        self.began = self.clock() if self.upstream is None else self.upstream.began

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
