"""Conditions between inputs: as users state them, and as a join graph whose columns and types are resolved.

A condition compares columns of two inputs. All equalities between the same two inputs are one edge of the graph with a
key of several columns; a band is an edge of its own. The graph must connect all inputs. So chains, stars and snowflakes
are graphs without cycles; cycles are allowed too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.joins.errors import JoinInputError, StreamSchemaError
from headrace.joins.streams.tuples.keys import KeySpec, Width, band_width, check_comparable, key_types

if TYPE_CHECKING:
    from typing import TypeAlias

    from headrace.joins.predicates.offsets import Offset

__all__ = ["Conditions", "Edge", "JoinGraph", "Near", "conditions_of"]

_LEAST_INPUTS = 2


@dataclass(frozen=True, slots=True)
class Near:
    """The values of two columns differ by at most `within`.

    Parameters
    ----------
    left, right
        Columns of two inputs, ``"input.column"``; for a join of two inputs also ``"column"``, the left one of the
        first input.
    within
        Greatest distance, itself included: a whole number or a decimal; for dates and times a whole number of their
        unit, or a duration such as ``"5s"``; between floats a float. Floats are subtracted as 64-bit floats.

    Examples
    --------
    >>> Near("a.time", "b.time", within="5s")
    Near(left='a.time', right='b.time', within='5s')
    """

    left: str
    right: str
    within: Offset | float


Conditions: TypeAlias = "str | Near | Sequence[str | tuple[str, str] | Near]"
"""What `on` may be: pairs of equal columns, and `Near`; in a join of two inputs also names of shared columns."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A condition between two inputs.

    Attributes
    ----------
    sides
        Positions of the two inputs.
    keys
        For each of the two, the position of the key among the keys of that input.
    width
        Greatest distance of the keys; None if they must be equal.
    """

    sides: tuple[int, int]
    keys: tuple[int, int]
    width: Width | None = None

    def key_of(self, side: int) -> int:
        """Return the position of the key among the keys of this input."""
        return self.keys[self.sides.index(side)]

    def other(self, side: int) -> int:
        """Return the other input."""
        return self.sides[1 - self.sides.index(side)]


class JoinGraph:
    """Inputs and the conditions between them, checked.

    Parameters
    ----------
    inputs
        Schema of each input by name.
    on
        Conditions.

    Attributes
    ----------
    names
        Names of the inputs.
    schemas
        Schemas of the inputs.
    keys
        For each input, its keys. Conditions on the same columns share a key.
    edges
        Conditions.

    Raises
    ------
    JoinInputError
        If inputs or conditions cannot be used, or do not connect all inputs.
    StreamSchemaError
        If an input lacks a column, or has it twice.
    KeyInputError
        If two columns have types that never match.

    Examples
    --------
    >>> a, b = pa.schema([("x", pa.int64())]), pa.schema([("x", pa.int32()), ("y", pa.string())])
    >>> graph = JoinGraph({"a": a, "b": b, "c": b}, [("a.x", "b.x"), ("b.y", "c.y")])
    >>> [edge.sides for edge in graph.edges], [len(keys) for keys in graph.keys]
    ([(0, 1), (1, 2)], [1, 2, 1])
    """

    def __init__(self, inputs: Mapping[str, pa.Schema], on: Conditions) -> None:
        self.names, self.schemas = _inputs(inputs)
        self.keys: list[list[KeySpec]] = [[] for _ in self.names]
        self.edges: list[Edge] = []
        pairs: dict[tuple[int, int], list[tuple[str, str]]] = {}
        nears: list[tuple[tuple[int, int], tuple[str, str], Offset | float]] = []
        for condition in conditions_of(on):
            left, right, within = _parts(condition)
            sides, columns = self._resolve(left, right, within)
            if within is None:
                known = pairs.setdefault(sides, [])
                if columns not in known:
                    known.append(columns)
            else:
                nears.append((sides, columns, within))
        for sides, equal in pairs.items():
            self._add_equality(sides, equal)
        for sides, near, within in nears:
            self._add_band(sides, near, within)
        self._check_connected()

    def edges_of(self, side: int) -> list[Edge]:
        """Return the edges of an input."""
        return [edge for edge in self.edges if side in edge.sides]

    def side(self, name: object) -> int:
        """Return the position of an input.

        Raises
        ------
        JoinInputError
            If there is no such input.
        """
        if not isinstance(name, str) or name not in self.names:
            raise JoinInputError(f"there is no input {name!r}; the inputs are {', '.join(map(repr, self.names))}")
        return self.names.index(name)

    @property
    def banded(self) -> bool:
        """Whether any condition is a band."""
        return any(edge.width is not None for edge in self.edges)

    def _resolve(self, left: str, right: str, within: object) -> tuple[tuple[int, int], tuple[str, str]]:
        """Return the sides and columns of a condition; of an equality in the order of the sides."""
        first, second = self._column(left, 0), self._column(right, 1)
        if first[0] == second[0]:
            raise JoinInputError(
                f"the condition on {left!r} and {right!r} compares an input with itself; name columns of two inputs"
            )
        if within is None and first[0] > second[0]:
            first, second = second, first
        return (first[0], second[0]), (first[1], second[1])

    def _column(self, text: str, position: int) -> tuple[int, str]:
        """Return input and column of a name."""
        name, dot, column = text.partition(".")
        if dot and name in self.names:
            return self.names.index(name), column
        if len(self.names) > _LEAST_INPUTS:
            raise JoinInputError(
                f"column {text!r} must name its input, as in '{self.names[0]}.column'; the inputs are "
                f"{', '.join(map(repr, self.names))}"
            )
        return position, text

    def _positions(self, side: int, columns: Sequence[str]) -> list[int]:
        schema = self.schemas[side]
        for column in columns:
            if len(schema.get_all_field_indices(column)) != 1:
                raise StreamSchemaError(
                    f"input {self.names[side]!r} must have one column {column!r}; its columns are "
                    f"{', '.join(map(repr, schema.names))}"
                )
        return [schema.get_field_index(column) for column in columns]

    def _add_equality(self, sides: tuple[int, int], columns: list[tuple[str, str]]) -> None:
        lefts, rights = zip(*columns, strict=True)
        at = self._positions(sides[0], lefts)
        types = key_types([self.schemas[sides[0]].field(place).type for place in at], lefts)
        keys = (
            self._add_key(sides[0], KeySpec(at, lefts, types)),
            self._add_key(sides[1], KeySpec(self._positions(sides[1], rights), rights, types)),
        )
        self.edges.append(Edge(sides, keys))

    def _add_band(self, sides: tuple[int, int], columns: tuple[str, str], within: Offset | float) -> None:
        at = [self._positions(side, [column])[0] for side, column in zip(sides, columns, strict=True)]
        found = [self.schemas[side].field(place).type for side, place in zip(sides, at, strict=True)]
        width = band_width(within, found[0], found[1], columns)
        types = [_band_type(dtype) for dtype in found]
        keys = [
            self._add_key(side, KeySpec([place], [column], [dtype]))
            for side, place, column, dtype in zip(sides, at, columns, types, strict=True)
        ]
        self.edges.append(Edge(sides, (keys[0], keys[1]), width))

    def _add_key(self, side: int, spec: KeySpec) -> int:
        check_comparable(spec, self.schemas[side])
        identities = [key.identity for key in self.keys[side]]
        if spec.identity not in identities:
            self.keys[side].append(spec)
            identities.append(spec.identity)
        return identities.index(spec.identity)

    def _check_connected(self) -> None:
        reached, growing = {0}, True
        while growing:
            found = {side for edge in self.edges if reached & set(edge.sides) for side in edge.sides}
            growing = not found <= reached
            reached |= found
        missing = [name for side, name in enumerate(self.names) if side not in reached]
        if missing:
            raise JoinInputError(
                f"no condition connects {', '.join(map(repr, missing))} with {self.names[0]!r}; add one for each input"
            )


def _inputs(inputs: Mapping[str, pa.Schema]) -> tuple[list[str], list[pa.Schema]]:
    if not isinstance(inputs, Mapping) or len(inputs) < _LEAST_INPUTS:
        raise JoinInputError(f"`inputs` must map the names of two or more inputs to their schemas, not {inputs!r}")
    for name, schema in inputs.items():
        if not isinstance(name, str) or not name or "." in name:
            raise JoinInputError(f"the name of an input must be text without a dot, not {name!r}")
        if not isinstance(schema, pa.Schema):
            raise JoinInputError(f"input {name!r} must be given by its pyarrow schema, not by {type(schema).__name__}")
    return list(inputs), list(inputs.values())


def conditions_of(on: Conditions) -> list[object]:
    """Return conditions as a list.

    Raises
    ------
    JoinInputError
        If they are none.
    """
    if isinstance(on, str | Near):
        return [on]
    if not isinstance(on, Sequence) or not on:
        raise JoinInputError(_refusal(on))
    return list(on)


def _parts(condition: object) -> tuple[str, str, Offset | float | None]:
    match condition:
        case Near(str() as left, str() as right, within):
            return left, right, within
        case str():
            return condition, condition, None
        case str() as left, str() as right:
            return left, right, None
    raise JoinInputError(_refusal(condition))


def _refusal(given: object) -> str:
    return f"`on` must be pairs of columns ('input.column', 'input.column') or Near(...), not {given!r}"


def _band_type(dtype: pa.DataType) -> pa.DataType:
    """Return the type of the keys of a band: one for all widths of integers and of floats."""
    if pa.types.is_floating(dtype):
        return pa.float64()
    if pa.types.is_unsigned_integer(dtype):
        return pa.uint64()
    return pa.int64() if pa.types.is_integer(dtype) else dtype
