"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from headrace.cli.reporting.console import Console
from headrace.cli.reporting.lazy import LazyGroup

if TYPE_CHECKING:
    from headrace.cli.arguments.streams import CsvFormat, Settings

    Members = Callable[[Settings], CsvFormat]

Function = TypeVar("Function", bound=Callable[..., Any])

__all__ = [
    "COLUMNS",
    "DELIMITER",
    "DURATION",
    "FOLDER",
    "NEW_FILE",
    "PAIRING",
    "PATH",
    "SIZE",
    "ReportingCommand",
    "ReportingGroup",
    "combined",
    "csv_options",
    "given_once",
    "match_options",
    "member_options",
    "pass_console",
    "pipeline_option",
]

PATH = click.Path(path_type=Path, readable=False)  # an unreadable path is a failure of its step, not a usage error
FOLDER = click.Path(path_type=Path, file_okay=False, readable=False)
NEW_FILE = click.Path(path_type=Path, dir_okay=False, readable=False)

pass_console = click.make_pass_decorator(Console)


class Size(click.ParamType[Any]):
    """A number of bytes, such as ``32MiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes."""
        from headrace.storage.errors import InputError
        from headrace.storage.units import parse_memory

        if isinstance(value, str) and value.strip().isdecimal():
            self.fail(
                f"{value} has no unit; write one, as in {value}MiB (units: B, KB, MB, GB, KiB, MiB, GiB)", param, ctx
            )
        try:
            return parse_memory(value)
        except InputError as error:
            self.fail(str(error), param, ctx)


class Duration(click.ParamType[Any]):
    """A duration, such as ``500ms``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number of seconds."""
        from headrace.storage.errors import InputError
        from headrace.storage.units import parse_duration

        try:
            return parse_duration(value)
        except InputError as error:
            self.fail(str(error), param, ctx)


class Delimiter(click.ParamType[Any]):
    r"""Field delimiter of a CSV; a tab may be written as ``\t``."""

    name = "delimiter"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return one character."""
        mark = "\t" if value == "\\t" else str(value)
        if len(mark) != 1 or not mark.isascii() or mark in '"\r\n\0':
            self.fail(f"{value!r} is not one ASCII character other than a quote or line end", param, ctx)
        return mark


class Columns(click.ParamType[Any]):
    """Column names, separated by commas; a name that contains a comma is quoted as in CSV."""

    name = "columns"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Return the names in the given order."""
        if isinstance(value, tuple):
            return value
        names, at = [], -1
        while at < len(value):
            name, at = _take_name(value, at + 1, ",")
            names.append(name)
        if not all(names) or len(set(names)) != len(names):
            self.fail(f"{value!r} is not a list of different column names separated by commas", param, ctx)
        return tuple(names)


class Pairing(click.ParamType[Any]):
    """Pairs of stream and table columns, such as ``dest=faa,day=day``; names may be quoted as in CSV."""

    name = "pairs"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[str, str], ...]:
        """Return (stream column, key column) pairs; a single name stands for both columns."""
        if isinstance(value, tuple):
            return value
        pairs, at = [], -1
        while at < len(value):
            start = at + 1
            stream, at = _take_name(value, start, ",=")
            key, at = _take_name(value, at + 1, ",") if value[at : at + 1] == "=" else (stream, at)
            if not stream or not key:
                self.fail(f"{value[start:at]!r} is not STREAM_COL=KEY_COL, as in dest=faa", param, ctx)
            pairs.append((stream, key))
        return tuple(pairs)


def _take_name(text: str, at: int, marks: str) -> tuple[str, int]:
    """Return the name that begins at a position, and the position of the next mark or of the end."""
    match = re.compile(rf'\s*(?:"((?:[^"]|"")*)"\s*(?=[{marks}]|\Z)|([^{marks}]*))').match(text, at)
    assert match is not None  # a plain name may be empty
    return match[2].strip() if match[1] is None else match[1].replace('""', '"'), match.end()


def combined(_ctx: click.Context, _param: click.Parameter, values: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...]:
    """Return the entries of an option that may be repeated, in order: callback of options with ``multiple=True``."""
    return tuple(entry for value in values for entry in value)


def given_once(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Return the value of an option, and refuse a second one, of which click would silently use the last."""
    if len(values) > 1:
        raise click.BadParameter(f"it is given {len(values)} times; give it once", ctx, param)
    return values[0] if values else None


SIZE = Size()
DURATION = Duration()
DELIMITER = Delimiter()
COLUMNS = Columns()
PAIRING = Pairing()


def csv_options(function: Function) -> Function:
    """Add the CSV options; the function receives them as one argument `csv`."""

    @functools.wraps(function)
    def gather(*args: Any, delimiter: str | None, nulls: tuple[str, ...], text: tuple[str, ...], **kwargs: Any) -> Any:
        from headrace.cli.arguments.streams import CsvFormat, text_columns

        return function(*args, csv=CsvFormat(delimiter, nulls, text_columns(text)), **kwargs)

    for option in (
        click.option("--text", type=COLUMNS, multiple=True, callback=combined, help="CSV columns to keep as text."),
        click.option("--null", "nulls", multiple=True, help="CSV spelling of a missing value, besides an empty field."),
        click.option("--delimiter", type=DELIMITER, help="CSV field delimiter; detected from the header by default."),
    ):
        gather = option(gather)
    return cast("Function", gather)


def member_options(function: Function) -> Function:
    """Add the options of files of members, which override the source's settings.

    The function receives them as one argument `members`: a function that returns the format for what a pipeline says.
    """

    @functools.wraps(function)
    def gather(*args: Any, csv: Any, header: bool | None, encoding: str | None, decimal: Any, **kwargs: Any) -> Any:
        def members(settings: Settings) -> CsvFormat:
            from dataclasses import replace

            given = replace(settings, header=header, encoding=encoding, decimal=decimal)
            return cast("CsvFormat", replace(csv, settings=given))

        return function(*args, members=members, **kwargs)

    for option in (
        click.option("--decimal", type=click.Choice([".", ","]), help="Mark before the fraction of a number."),
        click.option("--encoding", help="Encoding of text, such as windows-1252."),
        click.option("--header/--no-header", default=None, help="Whether the first record of a CSV names the columns."),
    ):
        gather = option(gather)
    return cast("Function", csv_options(gather))


def match_options(function: Function) -> Function:
    """Add the match options; the function receives them as one argument `match`."""
    names = ("on", "as_of", "band", "direction", "tolerance", "below", "above")

    @functools.wraps(function)
    def gather(*args: Any, **kwargs: Any) -> Any:
        from headrace.cli.arguments.matching import Match

        return function(*args, match=Match(**{name: kwargs.pop(name) for name in names}), **kwargs)

    for option in (
        click.option("--above", help="Width of the band above the value, such as 10, 2.5, or 5s; 0 by default."),
        click.option("--below", help="Width of the band below the value; 0 by default."),
        click.option(
            "--tolerance", help="Maximum distance of the nearest key, such as 2.5 or 5s; unlimited by default."
        ),
        click.option(
            "--direction",
            type=click.Choice(["backward", "forward"]),
            help="Nearest key at or below the value (backward, the default), or at or above it (forward).",
        ),
        click.option(
            "--band", type=PAIRING, multiple=True, callback=combined, help="STREAM_COL=KEY_COL: match keys in a band."
        ),
        click.option(
            "--as-of", type=PAIRING, multiple=True, callback=combined, help="STREAM_COL=KEY_COL: match the nearest key."
        ),
        click.option(
            "--on",
            type=PAIRING,
            multiple=True,
            callback=combined,
            help="STREAM_COL=KEY_COL[,...]: columns to match by equality.",
        ),
    ):
        gather = option(gather)
    return cast("Function", gather)


def pipeline_option(function: Function) -> Function:
    """Add the option that names the pipeline file."""
    option = click.option(
        "-p",
        "--pipeline",
        type=PATH,
        default="pipeline.yml",
        show_default=True,
        help="Pipeline file.",
    )
    return option(function)


class ReportingCommand(click.Command):
    """A command with the options `--json` and `--quiet`, which configure the console."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += _console_flags()

    def invoke(self, ctx: click.Context) -> Any:
        """Invoke the command; the console knows its name from then on, for advice."""
        ctx.ensure_object(Console).command_path = ctx.command_path
        return super().invoke(ctx)


class ReportingGroup(ReportingCommand, LazyGroup):
    """A group that is a command of its own."""


def _console_flags() -> list[click.Parameter]:
    return [
        _console_flag(["-q", "--quiet"], "Show no progress."),
        _console_flag(["--json", "json_mode"], "Print the result as JSON."),
    ]


def _console_flag(names: list[str], text: str) -> click.Option:
    """Return a flag that sets the console attribute of the same name before other options are processed."""

    def choose(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            setattr(ctx.find_object(Console), str(param.name), True)

    return click.Option(names, is_flag=True, is_eager=True, expose_value=False, callback=choose, help=text)
