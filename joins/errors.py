"""Errors of the join operators. Bad input derives from `InputError`; a misused operator is a `JoinStateError`."""

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
    """Root of the errors that only a join operator raises."""


class JoinInputError(JoinError, InputError):
    """A parameter of an operator or its predicate cannot be used. Raised when the operator is made."""


class StreamSchemaError(JoinError, SchemaError):
    """A batch of the stream lacks the join column or differs from the batches before it. Nothing of it was taken."""


class JoinStateError(JoinError):
    """An operator was called in a state that does not allow the call."""


class FinishedError(JoinStateError):
    """The operator was pushed to, ticked or flushed after `finish`."""


class ClosedError(JoinStateError):
    """The operator was used after `close`, or was closed before all of its results were taken."""
