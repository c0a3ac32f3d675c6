"""Command output as data, and the pure functions that render it as lines of text or as JSON.

Does not write to the terminal: `headrace.cli.reporting.console` prints the lines.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Block", "Grid", "Pairs", "Text", "as_json", "as_text", "counted", "render"]

INDENT = "  "
SMALL = 10


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph, printed unchanged."""

    text: str


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Names and values, one pair per line, aligned."""

    title: str
    pairs: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table: numbers are right-aligned, text is left-aligned."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


Block = Text | Pairs | Grid


def as_text(value: Any, decimals: int = 2) -> str:
    """Format one value for people; a fraction gets `decimals` decimals.

    Examples
    --------
    >>> as_text(336776), as_text(0.5), as_text(None), as_text(True)
    ('336,776', '0.50', '-', 'yes')
    """
    match value:
        case None:
            text = "-"
        case bool():
            text = "yes" if value else "no"
        case int() if not isinstance(value, enum.Enum):
            text = f"{value:,}"
        case float():
            text = f"{value:,.{decimals}f}"
        case dt.datetime():
            text = value.isoformat(sep=" ", timespec="seconds")
        case bytes():
            text = value.hex()
        case tuple() | list():
            text = ", ".join(as_text(item) for item in value)
        case _:
            text = str(value)
    return text


def as_json(value: Any) -> Any:
    """Return a value that `json.dumps` accepts: bytes become hexadecimal, NaN null, other non-JSON types text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    plain: Any
    match value:
        case float() if not math.isfinite(value):
            plain = None
        case None | bool() | int() | float() | str():
            plain = value
        case Mapping():
            plain = {str(key): as_json(item) for key, item in value.items()}
        case bytes():
            plain = value.hex()
        case dt.datetime() | dt.date() | dt.time():
            plain = value.isoformat()
        case set() | frozenset() | Sequence():
            plain = [as_json(item) for item in value]
        case _:
            plain = as_json(value.tolist()) if hasattr(value, "tolist") else str(value)
    return plain


def render(block: Block) -> list[str]:
    """Return the lines of a block; the first line of a titled block is its title."""
    if isinstance(block, Text):
        return block.text.splitlines()
    lines = _pair_lines(block) if isinstance(block, Pairs) else _grid_lines(block)
    return [block.title, *(INDENT + line for line in lines)] if block.title else lines


def _pair_lines(block: Pairs) -> list[str]:
    width = max((len(name) for name in block.pairs), default=0)
    return [f"{name:<{width}}  {as_text(value)}".rstrip() for name, value in block.pairs.items()]


def _grid_lines(block: Grid) -> list[str]:
    places = [_decimals(row[at] for row in block.rows) for at in range(len(block.columns))]
    cells = [[as_text(value, decimals) for value, decimals in zip(row, places, strict=True)] for row in block.rows]
    widths = [max(len(name), *(len(row[at]) for row in cells), 0) for at, name in enumerate(block.columns)]
    right = [_is_numeric(row[at] for row in block.rows) for at in range(len(block.columns))]
    lines = [block.columns, ["-" * width for width in widths], *cells]
    return [
        INDENT.join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]


def _decimals(values: Iterable[Any]) -> int:
    """Return the number of decimals for a column: 0 for whole numbers, 2 if all values are small, else 1."""
    fractions = [value for value in values if isinstance(value, float) and math.isfinite(value)]
    if all(value.is_integer() for value in fractions):
        return 0
    return 2 if max(map(abs, fractions)) < SMALL else 1


def _is_numeric(values: Iterable[Any]) -> bool:
    kinds = [isinstance(value, numbers.Number) for value in values if value is not None]
    return bool(kinds) and all(kinds)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, pluralized unless the count is 1.

    Parameters
    ----------
    count
        Number of items.
    noun
        Singular noun, such as ``read``. The plural adds ``s``, or ``es`` after ``ch``.

    Examples
    --------
    >>> counted(1, "read"), counted(2_000, "batch")
    ('1 read', '2,000 batches')
    """
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{count:,} {noun if count == 1 else plural}"
