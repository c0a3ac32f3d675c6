"""One micro-batch on its way: what it is, which keys its attempts gave, and how long its phases took."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.pipelines.source.identity import application

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyspark.sql import DataFrame

__all__ = ["Batch"]


@dataclass
class Batch:
    """One batch on its way through the protocol.

    Parameters
    ----------
    number
        Its number in the stream.
    stream
        The stream's identity.
    attempt
        The attempt at it that the ledger knows.
    files
        Tables that take files from tasks, with the columns that each is partitioned by.
    clock
        Seconds since 1970.

    Attributes
    ----------
    began
        When, by the clock.
    own
        For each role, the ranges (above, up to) of surrogate keys that attempts at this batch gave to new members.
    versions
        For each role, the Delta version that it joined at.
    phases
        Seconds of each phase so far.
    persisted
        Frames to unpersist.
    """

    number: int
    stream: str
    attempt: str
    files: Mapping[str, tuple[str, ...]]
    clock: Callable[[], float] = time.time
    began: float = field(init=False)
    own: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    persisted: list[DataFrame] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time within to a phase."""
        began = self.clock()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + self.clock() - began

    def application(self, part: str) -> str:
        """Return the application of Delta's transactions for a table's part of the stream."""
        return application(self.stream, part)
