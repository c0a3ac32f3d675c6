"""The one object between the commands and the terminal: results, progress, steps and failures.

Results go to standard output, everything else to standard error. With `--json`, standard output carries exactly
one document (or one per line, for commands that stream rows). Output does not rely on color; `NO_COLOR` and a
redirected stream disable the bold titles as well.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.reporting.blocks import Block, Text, as_json, render
from headrace.cli.reporting.errors import OutputFileError, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["Activity", "Console", "Failure", "Progress", "Step", "echo"]

REFRESH_SECONDS = 0.2
LINE_SECONDS = 30.0
STEP_SECONDS = 5.0


@dataclass(frozen=True)
class Step:
    """A step of the work, with the state that its failure leaves.

    Parameters
    ----------
    doing
        Description of the current action, such as ``joining stream.csv with flights.tbl``.
    left
        State after a failure of this step.
    repair
        Remedy if damage was found; empty if there is no remedy.
    pipeline
        Pipeline file that the step works on. It replaces the placeholder in the commands that an error recommends.
    """

    doing: str
    left: str
    repair: str = ""
    pipeline: Path | str | None = None


@dataclass(frozen=True)
class Failure:
    """A failure report: the step, its cause, the resulting state, and the command to continue with.

    `done` says what the step did before, and stays done.
    """

    kind: str
    exit_code: int
    step: str
    cause: str
    left: str
    again: str
    done: tuple[str, ...] = ()


def echo(text: str | bytes = "", *, nl: bool = True) -> None:
    """Print on standard output.

    Raises
    ------
    OutputFileError
        If that is refused, as by a full disk.
    """
    with writing("standard output"):
        click.echo(text, nl=nl)


class Progress:
    """Counts completed work and shows the count on standard error.

    On a terminal, one line is rewritten. Elsewhere, a line is printed every half minute, which keeps logs short.
    """

    def __init__(self, console: Console, label: str, unit: str, total: int | None) -> None:
        self._console = console
        self._label = label
        self._unit = unit
        self._total = total
        self._started = self._shown = console.clock()
        self.done = 0
        self._results: int | None = None

    def advance(self, amount: int, results: int | None = None) -> None:
        """Add `amount` to the count and show the count, and the number of results if given, if an update is due."""
        self.done += amount
        self._results = results
        now = self._console.clock()
        if now - self._shown >= (REFRESH_SECONDS if self._console.interactive else LINE_SECONDS):
            self._shown = now
            self._console.show_progress(self._line(now))

    def _line(self, now: float) -> str:
        seconds = max(now - self._started, 1e-9)
        share = f" of {self._total:,}" if self._total else ""
        results = "" if self._results is None else f", {self._results:,} results"
        return f"{self._label}: {self.done:,}{share} {self._unit}, {self.done / seconds:,.0f}/s{results}"


class Activity:
    """Shows what a command does now, on standard error.

    On a terminal, one line is rewritten every second, with the seconds of the step. Elsewhere, a step has one line, and
    only if it takes more than five seconds, which keeps logs short.
    """

    def __init__(self, console: Console, doing: str) -> None:
        self._console = console
        self._doing = doing
        self._began = console.clock()
        self._said = True

    def begin(self, doing: str) -> None:
        """Replace what is shown; an empty text shows nothing."""
        self._doing, self._began, self._said = doing, self._console.clock(), not doing
        self.refresh()

    def refresh(self) -> None:
        """Show the step, if that is due."""
        doing, seconds = self._doing, self._console.clock() - self._began
        if not doing:
            self._console.close_line()
        elif self._console.interactive:
            self._console.show_progress(f"{doing}, {seconds:.0f} s")
        elif not self._said and seconds >= STEP_SECONDS:
            self._said = True
            self._console.show_progress(doing)


class Console:
    """Prints the output of one run of the command.

    Parameters
    ----------
    clock
        Function that returns seconds, for rates and for the progress interval.
    now
        Function that returns the time of day, for notes and progress lines.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, now: Callable[[], dt.datetime] = dt.datetime.now
    ) -> None:
        self.clock = clock
        self._now = now
        self.json_mode = False
        self.quiet = False
        self.command_path = "headrace"
        self.failed_step: Step | None = None
        self._line_open = False
        self._lock = threading.RLock()  # an activity is shown by a thread of its own

    @property
    def interactive(self) -> bool:
        """Whether standard error is interactive."""
        return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def result(self, document: Any, *blocks: Block) -> None:
        """Print the result of the command: `document` as JSON with `--json`, else the blocks."""
        self.close_line()
        with (
            self.step("printing the result", left="what the command made; only its output is missing"),
            self.streaming(),
        ):
            if self.json_mode:
                echo(json.dumps(as_json(document), ensure_ascii=False))
            else:
                self._print(blocks)

    def _print(self, blocks: Sequence[Block]) -> None:
        for at, block in enumerate(blocks):
            lines = render(block)
            if at:
                echo()
            if lines and not isinstance(block, Text) and block.title:
                lines[0] = self._bold(lines[0])
            for line in lines:
                echo(line)

    def rows(self, documents: Iterable[Mapping[str, Any]]) -> None:
        """Print one JSON document per line."""
        self.close_line()
        for document in documents:
            echo(json.dumps(as_json(document), ensure_ascii=False))

    def note(self, text: str) -> None:
        """Print a note on standard error, unless `--quiet` is set."""
        if not self.quiet:
            with self._lock:
                self.close_line()
                click.echo(f"{self._time()} {text}", err=True)

    @contextmanager
    def step(
        self, doing: str, *, left: str | Callable[[], str], repair: str = "", pipeline: Path | str | None = None
    ) -> Iterator[None]:
        """Name the work inside the block, so that a failure report can name the step and the resulting state.

        The innermost failing step is reported. `left` may be a function, which is called when the step has failed.
        """
        try:
            yield
        except BaseException:
            if self.failed_step is None:
                self.failed_step = Step(doing, left if isinstance(left, str) else left(), repair, pipeline)
            raise

    @contextmanager
    def progress(self, label: str, *, unit: str = "rows", total: int | None = None) -> Iterator[Progress]:
        """Show the progress of the work inside the block."""
        progress = Progress(self, label, unit, total)
        try:
            yield progress
        finally:
            self.close_line()

    @contextmanager
    def activity(self, doing: str) -> Iterator[Activity]:
        """Show what the work inside the block does; `doing` was announced by a note."""
        activity, ended = Activity(self, doing), threading.Event()

        def show() -> None:
            with suppress(OSError, ValueError):  # standard error is closed; the command goes on
                while not ended.wait(1.0):
                    activity.refresh()

        shown = threading.Thread(target=show, name="headrace-activity", daemon=True)
        shown.start()
        try:
            yield activity
        finally:
            ended.set()
            shown.join()
            self.close_line()

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Allow the reader of standard output to close the pipe early, as `head` does, without a failure."""
        if sys.stdout is None:
            raise OutputFileError("standard output is closed; send it to a file, or to /dev/null to discard it")
        try:
            yield
        except BrokenPipeError:
            _forget_output()

    def show_progress(self, line: str) -> None:
        """Overwrite the previous progress line, or print a new line if standard error is not a terminal."""
        if self.quiet:
            return
        with self._lock:
            if self.interactive:
                width = shutil.get_terminal_size().columns - 1  # of a line that wraps, only the end would be rewritten
                click.echo(f"\r\x1b[2K{f'{self._time()} {line}'[:width]}", err=True, nl=False)
                self._line_open = True
            else:
                click.echo(f"{self._time()} {line}", err=True)

    def failure(self, failure: Failure) -> None:
        """Report the failed step, its cause, the resulting state, and how to continue."""
        self.close_line()
        if self.json_mode:
            try:
                click.echo(json.dumps({"error": as_json(failure)}, ensure_ascii=False))
            except OSError:  # this may be the failed stream; standard error reports the failure too
                _forget_output()
        click.echo(f"headrace: {failure.kind} while {failure.step}", err=True)
        done = (("done", text) for text in failure.done)
        for name, text in (("cause", failure.cause), *done, ("left", failure.left), ("go on", failure.again)):
            click.echo(f"  {name:<6} {text}", err=True)

    def _time(self) -> str:
        """Return the local time of day, with the date if the line may be read on another day."""
        return self._now().strftime("%H:%M:%S" if self.interactive else "%Y-%m-%d %H:%M:%S")

    def _bold(self, text: str) -> str:
        return text if "NO_COLOR" in os.environ else click.style(text, bold=True)

    def close_line(self) -> None:
        """Remove the progress line from the terminal."""
        with self._lock:
            if self._line_open:
                click.echo("\r\x1b[2K", err=True, nl=False)
                self._line_open = False


def _forget_output() -> None:
    """Discard buffered output, which would fail again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
