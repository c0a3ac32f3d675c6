"""The plan of a join of several sources: a chain of joins of two inputs, each with its own keys and its own state.

The first stage joins two sources, each later stage joins the results of the stage before it with one more source. Each
stage has an equality, whose columns decide which task gets a row. Columns between the stages are named
``source.column``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from headrace.joins.errors import JoinInputError
from headrace.joins.predicates.offsets import ticks
from headrace.joins.streams import JoinGraph, Near
from headrace.joins.streams.tuples.results import result_schema
from headrace.storage.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.joins.streams.tuples.conditions import Edge
    from headrace.joins.streams.tuples.keys import KeySpec

__all__ = ["LEFT", "RIGHT", "JoinPlan", "JoinStage", "TimeBand", "definition_changes", "join_plan"]

LEFT: Final = 0
RIGHT: Final = 1
_SIDES: Final = ("left", "right")
_DATE_BITS: Final = 32

Condition = tuple[str, str] | Near


@dataclass(frozen=True)
class TimeBand:
    """A condition between two times.

    Parameters
    ----------
    at
        Its position in `JoinStage.bands`.
    columns
        Columns of the left and the right input.
    kind
        Their type, whose unit is a tick.
    within
        Greatest distance in ticks.
    """

    at: int
    columns: tuple[str, str]
    kind: pa.DataType
    within: int

    def clamped(self, ticks: int) -> int:
        """Return a number of ticks, or that of the earliest time if it is before that."""
        return max(ticks, -(1 << (self.kind.bit_width - 1)))

    def ticks(self, duration: str | float) -> int:
        """Return a duration as a number of ticks.

        Raises
        ------
        JoinInputError
            If it is not a whole number of them.
        """
        found = ticks(f"{duration}s" if isinstance(duration, int | float) else duration, self.kind, "lateness")
        if found.denominator != 1:
            raise JoinInputError(
                f"`lateness` is {duration}, but times of type {self.kind} differ by whole units; write it in them"
            )
        return int(found)


@dataclass(frozen=True)
class JoinStage:
    """A join of two inputs.

    Parameters
    ----------
    source
        Source of the right input. The left input is the first source, or the results of the stage before.
    inputs
        Schemas of the left and the right input.
    conditions
        Conditions between columns of the left and the right input, in this order.
    """

    source: str
    inputs: tuple[pa.Schema, pa.Schema]
    conditions: tuple[Condition, ...]

    def __reduce__(self) -> tuple[type[JoinStage], tuple[Any, ...]]:
        return JoinStage, (self.source, self.inputs, self.conditions)

    @cached_property
    def graph(self) -> JoinGraph:
        """Join graph of the two inputs."""
        return JoinGraph(dict(zip(_SIDES, self.inputs, strict=True)), self.named_conditions)

    @property
    def named_conditions(self) -> list[Condition]:
        """Conditions as an operator with the inputs ``left`` and ``right`` takes them."""
        named: list[Condition] = []
        for condition in self.conditions:
            if isinstance(condition, Near):
                named.append(Near(f"left.{condition.left}", f"right.{condition.right}", condition.within))
            else:
                named.append((f"left.{condition[0]}", f"right.{condition[1]}"))
        return named

    @property
    def output(self) -> pa.Schema:
        """Schema of the results."""
        return pa.schema([*self.inputs[LEFT], *self.inputs[RIGHT]])

    def equal_keys(self) -> tuple[KeySpec, KeySpec]:
        """Return the columns of the left and the right input that are equal in each result."""
        return self._keys(next(edge for edge in self.graph.edges if edge.width is None))

    def bands(self) -> list[tuple[tuple[KeySpec, KeySpec], int]]:
        """Return columns whose key words differ by a distance at most, and the distance; none of them are floats."""
        return [
            (self._keys(edge), edge.width.words)
            for edge in self.graph.edges
            if edge.width is not None and not edge.width.floating
        ]

    def time_band(self) -> TimeBand:
        """Return the first condition between times.

        Raises
        ------
        InputError
            If there is none.
        """
        exact = [
            (condition, kind)
            for condition in self.conditions
            if isinstance(condition, Near)
            and not pa.types.is_floating(kind := self.inputs[LEFT].field(condition.left).type)
        ]
        for at, (condition, kind) in enumerate(exact):
            if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
                assert not isinstance(condition.within, float), "times have no float between them"
                within = int(ticks(condition.within, kind, "within"))
                return TimeBand(at, (condition.left, condition.right), kind, within)
        raise InputError("`lateness` needs a condition in `near` between times, but those in the file compare numbers")

    def time_word(self, side: int, ticks: int) -> int:
        """Return the key word of a time in the column of `time_band`; of the earliest time if it is before that."""
        band = self.time_band()
        time = pa.array([band.clamped(ticks)], pa.int32() if band.kind.bit_width == _DATE_BITS else pa.int64())
        time = time.view(band.kind)
        schema = self.inputs[side]
        columns = [time if field.name == band.columns[side] else pa.nulls(1, field.type) for field in schema]
        key = self.bands()[band.at][0][side]
        return int(key.encode(pa.RecordBatch.from_arrays(columns, schema=schema))[0].prefix[0])

    def _keys(self, edge: Edge) -> tuple[KeySpec, KeySpec]:
        return self.graph.keys[LEFT][edge.key_of(LEFT)], self.graph.keys[RIGHT][edge.key_of(RIGHT)]


@dataclass(frozen=True)
class JoinPlan:
    """A chain of joins.

    Parameters
    ----------
    first
        Source of the left input of the first stage.
    stages
        Joins in order.
    schema
        Schema of the results of the pipeline.
    order
        Column of the last stage for each column of `schema`.
    """

    first: str
    stages: tuple[JoinStage, ...]
    schema: pa.Schema
    order: tuple[str, ...]

    def place(self, source: str) -> tuple[int, int]:
        """Return the stage and the side that the rows of a source enter."""
        if source == self.first:
            return 0, LEFT
        return next((at, RIGHT) for at, stage in enumerate(self.stages) if stage.source == source)

    def definition(self) -> str:
        """Return the text that two plans share if the state of one can be used by the other."""
        return json.dumps(
            [
                {
                    "columns": [[f"{field.name} {field.type}" for field in schema] for schema in stage.inputs],
                    "conditions": [_plain(condition, stage.inputs) for condition in stage.conditions],
                }
                for stage in self.stages
            ]
        )


def join_plan(sources: Mapping[str, pa.Schema], conditions: Sequence[Condition]) -> JoinPlan:
    """Return the plan of a join.

    Sources are joined in the order of the file, as far as an equality connects each with those before it.

    Parameters
    ----------
    sources
        Schema of each source by name.
    conditions
        Conditions between columns named ``source.column``.

    Raises
    ------
    JoinInputError, StreamSchemaError, KeyInputError
        If the conditions do not fit the sources.
    InputError
        If no equality connects a source with the others.
    """
    JoinGraph(sources, conditions)
    named = {name: _named(name, schema) for name, schema in sources.items()}
    first, *waiting = sources
    left, placed, stages = named[first], {first}, []
    while waiting:
        source = next((name for name in waiting if _meets(name, placed, conditions)), None)
        if source is None:
            raise InputError(
                f"no equality in `on` connects {', '.join(map(repr, waiting))} with {', '.join(map(repr, placed))}; "
                "add one, since rows find their task by equal columns"
            )
        between = tuple(turned for each in conditions if (turned := _turned(each, placed, source)) is not None)
        stages.append(JoinStage(source, (left, named[source]), between))
        left = stages[-1].output
        placed.add(source)
        waiting.remove(source)
    order = tuple(name for source in sources for name in named[source].names)
    schema = result_schema(list(sources), list(sources.values()), [False] * len(sources))
    return JoinPlan(first, tuple(stages), schema, order)


def _named(source: str, schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_name(f"{source}.{field.name}") for field in schema])


def _columns(condition: Condition) -> tuple[str, str]:
    return (condition.left, condition.right) if isinstance(condition, Near) else condition


def _meets(source: str, placed: set[str], conditions: Sequence[Condition]) -> bool:
    return any(not isinstance(each, Near) and _turned(each, placed, source) is not None for each in conditions)


def _turned(condition: Condition, placed: set[str], source: str) -> Condition | None:
    """Return a condition between sources that are placed and one more, which is on the right; None for others."""
    one, other = _columns(condition)
    sides = one.partition(".")[0], other.partition(".")[0]
    if sides[0] in placed and sides[1] == source:
        return condition
    if sides[1] in placed and sides[0] == source:
        return Near(other, one, condition.within) if isinstance(condition, Near) else (other, one)
    return None


def _plain(condition: Condition, inputs: tuple[pa.Schema, pa.Schema]) -> str:
    """Return a text that is the same for conditions with the same meaning, however their distance is written."""
    left, right = _columns(condition)
    if not isinstance(condition, Near):
        return f"{left} = {right}"
    kinds = [schema.field(name).type for schema, name in zip(inputs, (left, right), strict=True)]
    if any(map(pa.types.is_floating, kinds)):
        return f"{left} = {right} within {float(condition.within)}"  # type: ignore[arg-type]
    within = ticks(condition.within, kinds[LEFT], "within")  # type: ignore[arg-type]
    return f"{left} = {right} within {within} units of {kinds[LEFT]}"


def definition_changes(before: str, after: str) -> str:
    """Return how two definitions of plans differ, for messages.

    Parameters
    ----------
    before, after
        Texts that `JoinPlan.definition` returned.
    """
    old, new = _parts(before), _parts(after)
    gone, added = [part for part in old if part not in new], [part for part in new if part not in old]
    if not gone and not added:
        gone, added = old, new  # in another order
    return f"before: {', '.join(gone) or 'nothing'}; now: {', '.join(added) or 'nothing in its place'}"


def _parts(definition: str) -> list[str]:
    stages = json.loads(definition)
    columns = [f"column {name}" for stage in stages for side in stage["columns"] for name in side]
    return list(dict.fromkeys([*columns, *(f"condition {text}" for stage in stages for text in stage["conditions"])]))
