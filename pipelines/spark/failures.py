"""Readable Spark errors: the relevant cause, without the stack traces around it."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.pipelines.errors import BatchError
from headrace.storage.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["cause_of", "explained"]

_TRACEBACK = "Traceback (most recent call last)"
_PYTHON_ERROR = re.compile(r"^((?:\w+\.)*)([A-Z]\w*): (.+)$", re.MULTILINE)
_CLASS = re.compile(r"^(?:[a-z]\w*\.)+[A-Z]\w*: ")
_BEGINNING, _END = 1200, 800


@contextmanager
def explained(step: str) -> Iterator[None]:
    """Convert Spark errors inside the block to one `BatchError` that names the step and the cause.

    Raises
    ------
    BatchError
        If Spark failed. Headrace errors propagate unchanged.
    """
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        raise BatchError(
            f"{step} failed: {cause_of(error)}; nothing is lost; the next run repeats this batch"
        ) from error


def cause_of(error: BaseException) -> str:
    """Return the cause of a Spark error: the innermost Java cause, or the error of a Python worker."""
    text = _innermost(error)
    traced = next((each for each in (text, str(error)) if _TRACEBACK in each), "")
    raised = _PYTHON_ERROR.findall(traced.rpartition(_TRACEBACK)[2])
    if raised:
        module, name, message = raised[-1]
        own = module.startswith("headrace.")  # such an error says all in its message
        return _shortened(message if own else f"{message} ({name})")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return _shortened(_CLASS.sub("", first))


def _shortened(message: str) -> str:
    """Return the message without its middle if it is long: the position is at the start, the remedy at the end."""
    if len(message) <= _BEGINNING + _END:
        return message
    return f"{message[:_BEGINNING]} ... {message[-_END:]}"


def _innermost(error: BaseException) -> str:
    """Return the message of the last exception in Java's cause chain, or the message of a Python error."""
    exception: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    if exception is None or not hasattr(exception, "getCause"):
        return str(error)
    while exception.getCause() is not None:
        exception = exception.getCause()
    return str(exception.toString())
