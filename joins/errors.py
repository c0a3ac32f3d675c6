"""Errors of the join operators. Bad input derives from `InputError`; misuse of an operator is a `JoinStateError`."""

from __future__ import annotations

from headrace.storage.errors import HeadraceError, InputError, MemoryBudgetError, SchemaError

__all__ = [
    "ClosedError",
    "FinishedError",
    "JoinError",
    "JoinInputError",
    "JoinStateError",
    "MemoryBudgetError",
    "StreamSchemaError",
]


class JoinError(HeadraceError):
    """Root of the errors that only join operators raise."""


class JoinInputError(JoinError, InputError):
    """A parameter of an operator or of its predicate cannot be used. Raised when the operator is made."""


class StreamSchemaError(JoinError, SchemaError):
    """A batch lacks the join column or differs in schema from earlier batches. No row of it was taken."""


class JoinStateError(JoinError):
    """An operator does not allow a call in its current state."""


class FinishedError(JoinStateError):
    """The operator was pushed to, ticked or flushed after `finish`."""


class ClosedError(JoinStateError):
    """The operator was used after `close`, or was closed before all of its results were taken."""
