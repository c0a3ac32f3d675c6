"""One micro-batch on its way: what it is, the versions it joins at, and how long its phases took."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame

__all__ = ["Batch", "application"]


@dataclass
class Batch:
    """One batch on its way through the protocol.

    Parameters
    ----------
    number
        Its number in the stream.
    stream
        The stream's identity.
    plan
        For each role the target that the catalog keeps.
    files
        Tables that take files from tasks.
    clock
        Seconds since 1970.

    Attributes
    ----------
    began
        When, by the clock.
    phases
        Seconds of each phase so far.
    persisted
        Frames to give back.
    """

    number: int
    stream: str
    plan: dict[str, Any]
    files: frozenset[str]
    clock: Callable[[], float] = time.time
    began: float = field(init=False)
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


def application(stream: str, part: str) -> str:
    """Return the application of Delta's transactions for a stream and a table's part of it."""
    return f"headrace:{stream}:{part}"
