"""The steps that a run reports: what a failed run left, and what users see while Spark works."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.pipelines.hooks import BEFORE_BATCHES, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from headrace.cli.reporting.console import Console

__all__ = ["Begun", "in_spark"]


@dataclass
class Begun:
    """Notes whether a run began a batch: `note` is the hook of a run, `left` the text of a step of the console.

    Parameters
    ----------
    nothing
        What a failure before the first batch leaves.
    something
        What a later failure leaves.
    steps
        Steps that begin something; None for all but those that precede the batches of a run.
    """

    nothing: str
    something: str
    steps: Collection[str] | None = None
    begun: bool = False

    def note(self, step: str) -> None:
        """Note a step of the run."""
        begins = step not in BEFORE_BATCHES if self.steps is None else step in self.steps
        self.begun = self.begun or begins

    def left(self) -> str:
        """Return what the run left."""
        return self.something if self.begun else self.nothing


@contextmanager
def in_spark(console: Console, begun: Begun) -> Iterator[Callable[[str], None]]:
    """Say that Spark starts, and yield the hook of a run, which shows the run's steps within the block."""
    from headrace.pipelines.spark import jars_are_cached

    cached = jars_are_cached()
    fetched = "" if cached else "; Delta's jars are fetched first, since the cache does not hold them"
    console.note(f"starting Spark{fetched}")
    with console.activity("starting Spark" if cached else "fetching Delta's jars and starting Spark") as activity:

        def hook(step: str) -> None:
            begun.note(step)
            if isinstance(step, Step):
                activity.begin(step.begins)

        yield hook
