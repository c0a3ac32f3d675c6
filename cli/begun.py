"""What a failed run left, by the steps that it reported."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Begun"]

READING = "after listing"


@dataclass
class Begun:
    """Notes whether a run began a batch: `note` is the hook of a run, `left` the text of a step of the console.

    Parameters
    ----------
    nothing
        What a failure before the first batch leaves.
    something
        What a later failure leaves.
    """

    nothing: str
    something: str
    begun: bool = False

    def note(self, step: str) -> None:
        """Note a step of the run; a listing of the source begins nothing."""
        self.begun = self.begun or step != READING

    def left(self) -> str:
        """Return what the run left."""
        return self.something if self.begun else self.nothing
