"""Hooks: functions that are called with the name of each step. Tests end a run there, and users see what it does.

A step that takes a while is a `Step`, which also describes the work that begins with it.
"""

from __future__ import annotations

from typing import Final, Self

__all__ = ["BEFORE_BATCHES", "CHECKED", "LISTED", "STARTED", "Step", "no_hook"]

STARTED: Final = "after start"
CHECKED: Final = "before checks"
LISTED: Final = "after listing"
BEFORE_BATCHES: Final = frozenset({STARTED, CHECKED, LISTED})
"""Steps before which, and after which, a run has written nothing."""


class Step(str):
    """Name of a step.

    Parameters
    ----------
    name
        The name, which the step equals.
    begins
        Description of the work that begins with the step; empty for none.

    Examples
    --------
    >>> step = Step("after join", "batch 3: writing tables")
    >>> step == "after join", step.begins
    (True, 'batch 3: writing tables')
    """

    __slots__ = ("begins",)

    begins: str

    def __new__(cls, name: str, begins: str = "") -> Self:
        """Return the step."""
        step = super().__new__(cls, name)
        step.begins = begins
        return step


def no_hook(_step: str) -> None:
    """Do nothing."""
