"""Command groups that import the module of a command on demand and turn errors into exit codes."""

from __future__ import annotations

import importlib
import logging
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from headrace.cli.reporting.console import Console
from headrace.cli.reporting.exits import guarded, was_interrupted
from headrace.storage.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LazyGroup", "RootGroup", "handle_termination", "time_log_lines"]


class LazyGroup(click.Group):
    """A group that declares its commands by import path and imports each on demand.

    Parameters
    ----------
    places
        Import path ``module:attribute`` of each command, by name. The modules import only click and other light
        modules, so that help stays fast; a command imports its dependencies when it runs.
    """

    def __init__(self, *args: Any, places: dict[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in declaration order."""
        return [*self._places, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command and return the command."""
        if cmd_name not in self._places:
            return super().get_command(ctx, cmd_name)
        module, attribute = self._places[cmd_name].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for an unknown name, the error lists the valid names."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            names = self.list_commands(ctx)
            ctx.fail(f"there is no command {name!r}{nearest(name, names)}; the commands are {', '.join(names)}")
        return super().resolve_command(ctx, args)


class RootGroup(LazyGroup):
    """The root command: creates the console of the run and turns errors into exit codes."""

    def main(  # type: ignore[override] # always standalone: the process exits here, so click's overloads do not apply
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run the command line and exit the process with its exit code."""
        arguments = list(sys.argv[1:] if args is None else args)
        console = Console()
        extra = {**extra, "standalone_mode": False, "obj": console}

        def work() -> Any:
            return super(RootGroup, self).main(arguments, prog_name or "headrace", **extra)

        sys.exit(guarded(work, console, ["headrace", *arguments]))


def handle_termination() -> None:
    """Handle SIGTERM and SIGHUP like Ctrl-C, and let only the console report them.

    When an interrupt hits a call into the JVM or a database, py4j or SQLAlchemy logs it, or an error that follows from
    it, with its stack.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` ignores it, so that the command continues
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    for handler in logging.getLogger().handlers:  # a filter of the root logger would not see what others log
        handler.addFilter(_is_no_interrupt)


def time_log_lines() -> None:
    """Send logged warnings to standard error with a timestamp, like notes."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not was_interrupted(record.exc_info[1])
