"""The `headrace` command and its list of subcommands."""

from __future__ import annotations

import click

from headrace.cli.reporting.lazy import RootGroup, handle_termination, time_log_lines
from headrace.joins import keep_little_freed_memory

__all__ = ["entry_point", "headrace"]


@click.group(
    cls=RootGroup,
    places={
        "demo": "headrace.cli.commands.demo:demo",
        "init": "headrace.cli.commands.init:init",
        "run": "headrace.cli.commands.run:run",
        "runs": "headrace.cli.commands.runs:runs",
        "source": "headrace.cli.commands.source:source",
        "errors": "headrace.cli.commands.rejects:errors",
        "dimension": "headrace.cli.commands.dimension:dimension",
        "extract": "headrace.cli.commands.extract:extract",
        "table": "headrace.cli.commands.table:table",
        "join": "headrace.cli.commands.join:join",
        "correlate": "headrace.cli.commands.correlate:correlate",
        "device": "headrace.cli.commands.device:device",
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 ok, 1 failure, 2 usage, 3 damage or bad quality, 70 bug, 130 interrupted.",
)
@click.version_option(package_name="headrace", prog_name="headrace")
def headrace() -> None:
    """Join fast streams with disk-resident dimension tables, within a memory budget and a deadline.

    Start with `headrace demo`, then use `headrace init` for your own data.
    """


def entry_point() -> None:
    """Run the command line. The installed script calls this function."""
    keep_little_freed_memory()
    time_log_lines()
    handle_termination()
    headrace()
