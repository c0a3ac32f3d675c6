"""The one object between the commands and the terminal: results, progress, steps and failures.

Results go to standard output, everything else to standard error. With JSON asked for, standard output carries exactly
one document (or one a line, for commands that stream rows). Nothing depends on colour; `NO_COLOR` and a redirected
stream switch off even the bold titles.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.blocks import Block, Text, as_json, render
from headrace.cli.errors import OutputFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["Console", "Failure", "Progress", "Step"]

REFRESH_SECONDS = 0.2
LINE_SECONDS = 30.0


@dataclass(frozen=True)
class Step:
    """A part of the work whose failure leaves something behind.

    Parameters
    ----------
    doing
        Current action, as in ``joining stream.csv with flights.tbl``.
    left
        State after a failure of this step.
    repair
        The remedy when damage was found; empty if there is none.
    pipeline
        The pipeline file that the step works on; it replaces the placeholder in the commands that an error names.
    """

    doing: str
    left: str
    repair: str = ""
    pipeline: Path | str | None = None


@dataclass(frozen=True)
class Failure:
    """What is said of a failure: the step, its cause, the state left, and the command to go on."""

    kind: str
    exit_code: int
    step: str
    cause: str
    left: str
    again: str


class Progress:
    """Counts what has been done and shows it on standard error.

    On a terminal one line is rewritten; elsewhere a line appears every half minute, so that logs stay short.
    """

    def __init__(self, console: Console, label: str, unit: str, total: int | None) -> None:
        self._console = console
        self._label = label
        self._unit = unit
        self._total = total
        self._started = self._shown = console.clock()
        self.done = 0

    def advance(self, amount: int) -> None:
        """Count `amount` more and show it when it is time."""
        self.done += amount
        now = self._console.clock()
        if now - self._shown >= (REFRESH_SECONDS if self._console.interactive else LINE_SECONDS):
            self._shown = now
            self._console.show_progress(self._line(now))

    def _line(self, now: float) -> str:
        seconds = max(now - self._started, 1e-9)
        share = f" of {self._total:,}" if self._total else ""
        return f"{self._label}: {self.done:,}{share} {self._unit}, {self.done / seconds:,.0f}/s"


class Console:
    """Prints for one run of the command.

    Parameters
    ----------
    clock
        Returns seconds, for rates and for how often progress is shown.
    now
        Returns the time of day, which notes and lines of progress carry.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, now: Callable[[], dt.datetime] = dt.datetime.now
    ) -> None:
        self.clock = clock
        self._now = now
        self.json_mode = False
        self.quiet = False
        self.failed_step: Step | None = None
        self._line_open = False

    @property
    def interactive(self) -> bool:
        """Whether a person watches standard error."""
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def result(self, document: Any, *blocks: Block) -> None:
        """Print the result of the command: `document` as JSON when asked for, else the blocks."""
        self._close_line()
        with self.streaming():
            if self.json_mode:
                click.echo(json.dumps(as_json(document), ensure_ascii=False))
            else:
                self._print(blocks)

    def _print(self, blocks: Sequence[Block]) -> None:
        for at, block in enumerate(blocks):
            lines = render(block)
            if at:
                click.echo()
            if lines and not isinstance(block, Text) and block.title:
                lines[0] = self._bold(lines[0])
            for line in lines:
                click.echo(line)

    def rows(self, documents: Iterable[Mapping[str, Any]]) -> None:
        """Print one JSON document a line."""
        self._close_line()
        for document in documents:
            click.echo(json.dumps(as_json(document), ensure_ascii=False))

    def note(self, text: str) -> None:
        """Tell something in passing, on standard error, unless `--quiet`."""
        if not self.quiet:
            self._close_line()
            click.echo(f"{self._time()} {text}", err=True)

    @contextmanager
    def step(self, doing: str, *, left: str, repair: str = "", pipeline: Path | str | None = None) -> Iterator[None]:
        """Name the work inside the block, so that a failure can say where it happened and what it left.

        The innermost step that fails is the one reported.
        """
        try:
            yield
        except BaseException:
            if self.failed_step is None:
                self.failed_step = Step(doing, left, repair, pipeline)
            raise

    @contextmanager
    def progress(self, label: str, *, unit: str = "rows", total: int | None = None) -> Iterator[Progress]:
        """Show how far the work inside the block has come."""
        progress = Progress(self, label, unit, total)
        try:
            yield progress
        finally:
            self._close_line()

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Let the reader of standard output leave when it has had enough, as `head` does: that is no failure."""
        if sys.stdout is None:
            raise OutputFileError("standard output is closed; send it to a file, or to /dev/null to discard it")
        try:
            yield
        except BrokenPipeError:
            _forget_output()

    def show_progress(self, line: str) -> None:
        """Write a line of progress over the one before, or below it if standard error is not a terminal."""
        if self.quiet:
            return
        if self.interactive:
            click.echo(f"\r\x1b[2K{self._time()} {line}", err=True, nl=False)
            self._line_open = True
        else:
            click.echo(f"{self._time()} {line}", err=True)

    def failure(self, failure: Failure) -> None:
        """Say what failed, why, what is left, and how to go on."""
        self._close_line()
        if self.json_mode:
            try:
                click.echo(json.dumps({"error": as_json(failure)}, ensure_ascii=False))
            except OSError:  # perhaps what failed; standard error tells the same
                _forget_output()
        click.echo(f"headrace: {failure.kind} while {failure.step}", err=True)
        for name, text in (("cause", failure.cause), ("left", failure.left), ("go on", failure.again)):
            click.echo(f"  {name:<6} {text}", err=True)

    def _time(self) -> str:
        """Return the local time of day; with the date where the line may be read another day."""
        return self._now().strftime("%H:%M:%S" if self.interactive else "%Y-%m-%d %H:%M:%S")

    def _bold(self, text: str) -> str:
        return text if "NO_COLOR" in os.environ else click.style(text, bold=True)

    def _close_line(self) -> None:
        if self._line_open:
            click.echo("\r\x1b[2K", err=True, nl=False)
            self._line_open = False


def _forget_output() -> None:
    """Send to nowhere what is still buffered: it would fail once more at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
