"""Inputs of `headrace correlate`: named files as streams, and the conditions between their columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.cli.arguments.matching import distance
from headrace.cli.arguments.streams import PLAIN, CsvFormat, FileStream, open_stream
from headrace.cli.reporting.errors import ArgumentsError, require_column
from headrace.joins.streams import Near
from headrace.storage.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Inputs", "open_inputs"]

_TWO = 2
Pair = tuple[tuple[str, str], tuple[str, str]]
"""Input and column on the left, and on the right."""


@dataclass(frozen=True)
class Inputs:
    """Streams by name, and the conditions between them.

    Attributes
    ----------
    streams
        Files of each input.
    conditions
        Conditions, with columns as ``input.column``.
    """

    streams: Mapping[str, FileStream]
    conditions: list[tuple[str, str] | Near]

    @property
    def schemas(self) -> dict[str, pa.Schema]:
        """Schema of each input."""
        return {name: stream.schema for name, stream in self.streams.items()}

    @property
    def rows(self) -> int | None:
        """Number of rows of all inputs, if known."""
        rows = [stream.rows for stream in self.streams.values()]
        return None if None in rows else sum(count or 0 for count in rows)

    def columns_named(self, names: Sequence[str], option: str) -> dict[str, str]:
        """Return a column of each input, given as ``column`` for all others or as ``input.column``.

        Raises
        ------
        InputError
            If an input has no such column.
        """
        found: dict[str, str] = {}
        for text in names:
            side, column = _split(text, self.streams)
            for name in self.streams if side is None else [side]:
                if side is not None or name not in found:
                    found[name] = column
        for name, stream in self.streams.items():
            if found.get(name) not in stream.schema.names:
                raise ArgumentsError(
                    f"{option} names no column of {name}; its columns are {', '.join(stream.schema.names)}"
                )
        return found


def open_inputs(
    paths: Sequence[tuple[str, Path]],
    on: Sequence[tuple[str, str]],
    near: Sequence[tuple[str, str]],
    within: str | None,
    csv: CsvFormat,
) -> Inputs:
    """Inspect the files of all inputs, and resolve the conditions.

    If a column of a CSV is compared with text, it is text too. A CSV without records has the types of the columns that
    its own are compared with. If whole numbers of a CSV or JSON file are compared with
    floats, they are floats too. Otherwise they would never match. Dictionaries and views are read as plain values.

    Parameters
    ----------
    paths
        Name and path of each input.
    on, near
        Pairs of columns, ``input.column``; in a join of two inputs also ``column``, the left one of the first input. A
        single name in `on` stands for this column of all inputs.
    within
        Greatest difference of the columns of `near`.
    csv
        Format of CSV files.

    Raises
    ------
    InputError
        If files, names or columns cannot be used.
    """
    streams = {name: _opened(path, replace(csv, types={})) for name, path in paths}
    known = _present(csv.types, streams)
    for name, types in known.items():
        streams[name] = _opened(dict(paths)[name], replace(csv, types=types))
    pairs = [pair for each in on for pair in _pairs(each, list(streams))]
    nears = [pair for each in near for pair in _pairs(each, list(streams))]
    _check_columns([*pairs, *nears], streams)
    for name, types in _agreed([*pairs, *nears], streams).items():
        streams[name] = _opened(dict(paths)[name], replace(csv, types={**known.get(name, {}), **types}))
    conditions: list[tuple[str, str] | Near] = [(_text(left), _text(right)) for left, right in pairs]
    conditions += [_near(pair, within or "0", streams) for pair in nears]
    return Inputs(streams, conditions)


def _opened(path: Path, csv: CsvFormat) -> FileStream:
    """Open an input, with plain values in place of dictionaries, which a join of streams does not hold."""
    stream = open_stream(path, csv=csv)
    plain = {field.name: kind for field in stream.schema if (kind := _plain(field.type)) != field.type}
    return open_stream(path, csv=replace(csv, declared=plain)) if plain else stream


def _plain(dtype: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(dtype):
        return _plain(dtype.value_type)
    return PLAIN.get(dtype, dtype)


def _present(types: Mapping[str, pa.DataType], streams: Mapping[str, FileStream]) -> dict[str, dict[str, pa.DataType]]:
    """Return the types of columns that are known, for each input that has some of them."""
    found = {
        name: {column: kind for column, kind in types.items() if column in stream.schema.names}
        for name, stream in streams.items()
    }
    unknown = [column for column in types if not any(column in each for each in found.values())]
    if unknown:
        columns = "; ".join(f"{name} has {', '.join(stream.schema.names)}" for name, stream in streams.items())
        raise ArgumentsError(f"--text names {unknown[0]!r}, which is a column of no input: {columns}")
    return {name: each for name, each in found.items() if each}


def _split(text: str, inputs: Mapping[str, object] | Sequence[str]) -> tuple[str | None, str]:
    """Return input and column; None for the input if the text does not name one."""
    name, dot, column = text.partition(".")
    return (name, column) if dot and name in inputs else (None, text)


def _pairs(pair: tuple[str, str], names: Sequence[str]) -> list[Pair]:
    (left_side, left), (right_side, right) = (_split(text, names) for text in pair)
    if left_side is None and right_side is None and left == right:
        return [((names[0], left), (name, right)) for name in names[1:]]
    if len(names) > _TWO and (left_side is None or right_side is None):
        _refuse_unknown(pair[0] if left_side is None else pair[1], names)
        raise ArgumentsError(
            f"{pair[0]}={pair[1]} does not name two inputs; write INPUT.COL=INPUT.COL, with two of {', '.join(names)}"
        )
    return [((left_side or names[0], left), (right_side or names[1], right))]


def _check_columns(pairs: Sequence[Pair], streams: Mapping[str, FileStream]) -> None:
    for name, column in (end for pair in pairs for end in pair):
        names = streams[name].schema.names
        if column not in names:
            _refuse_unknown(column, list(streams))
            require_column(f"input {name}", column, names)


def _refuse_unknown(text: str, inputs: Sequence[str]) -> None:
    """Raise an error if a text that is no column names an input that there is not."""
    name, dot, _ = text.partition(".")
    if dot and name not in inputs:
        raise ArgumentsError(f"no input is named {name!r}{nearest(name, inputs)}; the inputs are {', '.join(inputs)}")


def _agreed(pairs: Sequence[Pair], streams: Mapping[str, FileStream]) -> dict[str, dict[str, pa.DataType]]:
    """Return the types of CSV and JSON columns that follow the columns that they are compared with.

    A type spreads along a chain of conditions, so the pairs are gone through until no type changes. Types change from
    none to some, and from whole numbers to floats to text, so this ends.
    """
    agreed: dict[tuple[str, str], pa.DataType] = {}

    def type_of(end: tuple[str, str]) -> pa.DataType | None:
        name, column = end
        return agreed.get(end, None if streams[name].typeless else streams[name].schema.field(column).type)

    ends = [turned for pair in pairs for turned in (pair, pair[::-1])]
    changed = True
    while changed:
        changed = False
        for end, compared in ends:
            kind = _following(type_of(end), type_of(compared), streams[end[0]].kind)
            if kind is not None:
                agreed[end] = kind
                changed = True
    types: dict[str, dict[str, pa.DataType]] = {}
    for (name, column), kind in agreed.items():
        types.setdefault(name, {})[column] = kind
    return types


def _following(found: pa.DataType | None, wanted: pa.DataType | None, kind: str) -> pa.DataType | None:
    """Return the type that a column of a file takes to match another; None if it keeps its own. None is unknown."""
    if found is None or wanted is None:
        return wanted
    if kind == "csv" and _is_text(wanted) and not _is_text(found):
        return pa.string()
    if kind != "parquet" and pa.types.is_floating(wanted) and pa.types.is_integer(found):
        return pa.float64()
    return None


def _is_text(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_string(dtype) or pa.types.is_large_string(dtype))


def _text(end: tuple[str, str]) -> str:
    return ".".join(end)


def _near(pair: Pair, within: str, streams: Mapping[str, FileStream]) -> Near:
    types = {_text((name, column)): streams[name].schema.field(column).type for name, column in pair}
    width = distance("--within", within, types)
    floating = all(map(pa.types.is_floating, types.values()))
    return Near(_text(pair[0]), _text(pair[1]), width if isinstance(width, str) or not floating else float(width))
