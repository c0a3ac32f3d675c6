"""`headrace dimension`: make, look at and check the dimensions that a pipeline file declares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.cli.options import PATH, ReportingCommand, csv_options, pass_console

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace.cli.console import Console

__all__ = ["dimension"]


def pipeline_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option that names the pipeline file."""
    option = click.option(
        "-p",
        "--pipeline",
        type=PATH,
        default="pipeline.yml",
        show_default=True,
        help="File that declares the dimensions.",
    )
    return option(function)


@click.group("dimension", short_help="Make, inspect and check dimensions.")
def dimension() -> None:
    """Make, inspect and check the dimensions that a pipeline file declares."""


@dimension.command("create", cls=ReportingCommand)
@click.argument("name")
@click.argument("source", type=PATH)
@pipeline_option
@csv_options
@pass_console
def create(console: Console, /, name: str, source: Path, **choices: Any) -> None:
    """Make the Delta table of dimension NAME from SOURCE: CSV, JSON lines or Parquet, a file or a folder.

    Members are numbered from 1 in the order of their natural keys; the unknown member is -1.
    """
    from headrace.cli.dimensions import run_create

    run_create(name, source, console, **choices)


@dimension.command("list", cls=ReportingCommand)
@pipeline_option
@pass_console
def list_(console: Console, /, pipeline: Path) -> None:
    """Show all dimensions of the pipeline file."""
    from headrace.cli.dimensions import run_list

    run_list(pipeline, console)


@dimension.command("info", cls=ReportingCommand)
@click.argument("name")
@pipeline_option
@pass_console
def info(console: Console, /, name: str, pipeline: Path) -> None:
    """Show columns, keys and size of dimension NAME."""
    from headrace.cli.dimensions import run_info

    run_info(name, pipeline, console)


@dimension.command("check", cls=ReportingCommand)
@click.argument("name")
@pipeline_option
@pass_console
@click.pass_context
def check(ctx: click.Context, console: Console, /, name: str, pipeline: Path) -> None:
    """Verify the keys of dimension NAME and of the facts that carry them.

    Exit code 0 when all is sound, 3 when a rule is broken.
    """
    from headrace.cli.dimensions import run_check

    ctx.exit(run_check(name, pipeline, console))


@dimension.command("repair", cls=ReportingCommand)
@click.argument("name")
@pipeline_option
@pass_console
@click.pass_context
def repair(ctx: click.Context, console: Console, /, name: str, pipeline: Path) -> None:
    """Show what would repair dimension NAME and the facts that carry its keys. Nothing is changed.

    Exit code 0 when there is nothing to repair, 3 otherwise.
    """
    from headrace.cli.dimensions import run_repair

    ctx.exit(run_repair(name, pipeline, console))


@dimension.command("lookup", cls=ReportingCommand)
@click.argument("name")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@pipeline_option
@pass_console
def lookup(console: Console, /, name: str, keys: tuple[str, ...], pipeline: Path) -> None:
    """Show the members of dimension NAME with these natural keys; a key of several columns is written VALUE,VALUE."""
    from headrace.cli.dimensions import run_lookup

    run_lookup(name, keys, pipeline, console)
