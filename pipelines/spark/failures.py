"""Readable Spark errors: the relevant cause, without the stack traces around it."""

from __future__ import annotations

import logging
import re
import subprocess
from contextlib import contextmanager, suppress
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
_ENDING_SECONDS = 5.0


@contextmanager
def explained(step: str, again: str = "the next run repeats this batch") -> Iterator[None]:
    """Convert Spark errors inside the block to one `BatchError` that names the step and the cause.

    Parameters
    ----------
    step
        What the block does.
    again
        How the step is repeated.

    Raises
    ------
    BatchError
        If Spark failed, or its process ended. Headrace errors propagate unchanged.
    """
    try:
        with _silent_connection():
            yield
    except HeadraceError:
        raise
    except Exception as error:
        if _ended(error):
            raise BatchError(
                f"Spark's process ended during {step}: it was killed, perhaps because the machine's memory was "
                f"exhausted, or it crashed; nothing is lost; {again}"
            ) from error
        raise BatchError(f"{step} failed: {cause_of(error)}; nothing is lost; {again}") from error


@contextmanager
def _silent_connection() -> Iterator[None]:
    """Leave out what py4j logs of a lost connection: the traceback of an error that it raises, too."""

    def relevant(record: logging.LogRecord) -> bool:
        return not (record.exc_info and _is_lost(record.exc_info[1]))

    loggers = [logging.getLogger(name) for name in (None, "py4j.clientserver", "py4j.java_gateway")]
    for logger in loggers:
        logger.addFilter(relevant)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(relevant)


def _is_lost(error: BaseException | None) -> bool:
    """Return whether an error, or what it arose from, is of the connection to Spark's process."""
    from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped] # noqa: PLC0415 - heavy

    while error is not None:
        if isinstance(error, ConnectionError) or (
            isinstance(error, Py4JError) and not isinstance(error, Py4JJavaError)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _ended(error: BaseException) -> bool:
    """Return whether an error arose because Spark's process, if it is a child of this one, ended."""
    from pyspark import SparkContext  # noqa: PLC0415 - Spark is heavy

    process = getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001 - there is no public way to ask
    if process is None:
        return False
    if _is_lost(error):  # it may be about to end
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_SECONDS)
    return process.poll() is not None


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
