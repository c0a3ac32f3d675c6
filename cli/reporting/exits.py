"""Exit codes, and the mapping from errors to exit codes."""

from __future__ import annotations

import enum
import re
import shlex
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.reporting.console import Console, Failure, Step

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["ExitCode", "exit_code_of", "guarded", "was_interrupted", "with_pipeline"]

UNNAMED_STEP = Step("reading the arguments", "nothing was changed")


class ExitCode(enum.IntEnum):
    """Exit code of the process."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    DAMAGED = 3
    BUG = 70
    INTERRUPTED = 130


_PLACEHOLDER = re.compile(r"(headrace source (?:skip|adopt)|--pipeline) PIPELINE\b")

KINDS = {
    ExitCode.FAILURE: "failed",
    ExitCode.DAMAGED: "found damage or bad quality",
    ExitCode.INTERRUPTED: "interrupted",
}


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of an error, based on its family.

    Damaged data and bad data quality give 3. Every other `HeadraceError` and every operating system error gives 1,
    and so does a file that is no table at all.
    An unexpected error is a bug.
    """
    from headrace.pipelines.errors import QualityError
    from headrace.storage.errors import CorruptionError, HeadraceError, NotATableError

    families: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], ExitCode], ...] = (
        ((KeyboardInterrupt, click.Abort), ExitCode.INTERRUPTED),
        (click.UsageError, ExitCode.USAGE),
        (NotATableError, ExitCode.FAILURE),  # a wrong file, not a damaged one
        ((CorruptionError, QualityError), ExitCode.DAMAGED),
        ((HeadraceError, click.ClickException, OSError, MemoryError), ExitCode.FAILURE),
    )
    code = next((code for family, code in families if isinstance(error, family)), ExitCode.BUG)
    return ExitCode.INTERRUPTED if code is ExitCode.BUG and was_interrupted(error) else code


def was_interrupted(error: BaseException | None) -> bool:
    """Whether an interrupt caused an error: an interrupted import may raise a different error."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def guarded(work: Callable[[], Any], console: Console, command: list[str]) -> int:
    """Run `work` and return the exit code. Failures are reported on standard error.

    Parameters
    ----------
    work
        Function that returns an exit code; any other value means success.
    console
        Console that reports failures and tracks the failed step.
    command
        Command line, such as ``["headrace", "join", ...]``.
    """
    try:
        outcome = work()
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 - the boundary of the process: every error gets its code here
        return _report(error, console, command)
    return outcome if isinstance(outcome, int) else ExitCode.OK


def _report(error: BaseException, console: Console, command: list[str]) -> int:
    code = exit_code_of(error)
    if isinstance(error, click.UsageError):
        error.show()
    elif code is ExitCode.BUG:
        _report_bug(error, console, command)
    else:
        step = console.failed_step or UNNAMED_STEP
        again = _way_on(error, code, step, console.command_path, shlex.join(command))
        cause, *done = (with_pipeline(each, step.pipeline) for each in (_cause(error), *_notes(error)))
        console.failure(Failure(KINDS[code], code, step.doing, cause, step.left, again, tuple(done)))
    return code


def _way_on(error: BaseException, code: ExitCode, step: Step, path: str, command: str) -> str:
    from headrace.pipelines.errors import OtherCommandError, SeveralSourcesError
    from headrace.storage.errors import NotATableError

    if isinstance(error, SeveralSourcesError):
        return "use a command that supports several sources: headrace run, runs, errors, source list or source skip"
    if isinstance(error, OtherCommandError):
        return "use the command that the cause names"
    if isinstance(error, NotATableError):
        return "name a table, or build it from its source: headrace table build ... -o TABLE"
    if code is ExitCode.INTERRUPTED:
        return command
    if code is ExitCode.DAMAGED and step.repair:
        return step.repair
    return _correction(error, step, path) or f"fix the cause, then run: {command}"


def _correction(error: BaseException, step: Step, path: str) -> str:
    """Return how to go on where the command itself is wrong, or may be; an empty text elsewhere."""
    from headrace.cli.reporting.errors import ArgumentsError
    from headrace.pipelines.errors import RejectedRowsError, SnapshotOptionsError, UnknownDimensionError

    if isinstance(
        error, ArgumentsError | SnapshotOptionsError
    ):  # the same command would fail again, whatever its files hold
        return f"correct the command; its arguments: {path} --help"
    of_command = step.pipeline is None  # else the pipeline file gives what does not fit
    if isinstance(error, UnknownDimensionError | RejectedRowsError) or (of_command and _may_be_of_arguments(error)):
        return f"correct the command or the cause, then run it again; its arguments: {path} --help"
    return ""


def _may_be_of_arguments(error: BaseException) -> bool:
    """Whether an argument does not fit what the command found, so that either may be wrong."""
    from headrace.cli.reporting.errors import OutputFileError
    from headrace.joins.errors import JoinInputError
    from headrace.pipelines.errors import ExtractionError
    from headrace.storage.errors import (
        InputError,
        MemoryBudgetError,
        SchemaError,
        TableExistsError,
        TableNotFoundError,
    )

    families = (
        ExtractionError
        | JoinInputError
        | MemoryBudgetError
        | OutputFileError
        | SchemaError
        | TableExistsError
        | TableNotFoundError
    )
    return isinstance(error, families) or type(error) is InputError


def _cause(error: BaseException) -> str:
    if exit_code_of(error) is ExitCode.INTERRUPTED:
        return "stopped by the keyboard or a signal"
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _notes(error: BaseException) -> list[str]:
    """Return what was done before an error, and stays done."""
    return list(getattr(error, "__notes__", ()))


def with_pipeline(cause: str, pipeline: Path | str | None) -> str:
    """Insert the name of the pipeline file into the commands that a text recommends.

    The pipelines layer writes a placeholder, because it does not know the file name that the caller used.
    """
    if pipeline is None:
        return cause
    name = shlex.quote(str(pipeline))
    return _PLACEHOLDER.sub(lambda match: f"{match[1]} {name}", cause)


def _report_bug(error: BaseException, console: Console, command: list[str]) -> None:
    import platform
    import tempfile
    import traceback
    from importlib import metadata

    details = "".join(
        [
            f"headrace {metadata.version('headrace')}, Python {platform.python_version()}, {platform.platform()}\n",
            f"{shlex.join(command)}\n\n",
            *traceback.format_exception(error),
        ]
    )
    try:
        with tempfile.NamedTemporaryFile("w", prefix="headrace-bug-", suffix=".log", delete=False) as log:
            log.write(details)
        place = log.name
    except OSError:
        click.echo(details, err=True)
        place = "the lines above"
    if console.json_mode:
        failure = {"kind": "bug", "exit_code": int(ExitCode.BUG), "cause": repr(error), "log": place}
        console.rows([{"error": failure}])
    click.echo(
        f"headrace: this is a bug ({type(error).__name__}); nothing you did; please report it with {place}", err=True
    )
