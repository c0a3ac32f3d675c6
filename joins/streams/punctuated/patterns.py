"""`Pattern`: what a punctuation says, as a constraint for each column (Tucker, Maier, Sheard and Fegaras).

A punctuation is a pattern over the columns of one input: no tuple that matches it will arrive any more. A column is
unconstrained (a wildcard), one of some values (one value, or a list), or within a range. Two patterns combine column by
column to the pattern of what both match. A bound pattern has typed values and matches whole batches.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.joins.errors import JoinInputError, StreamSchemaError
from headrace.joins.handle import check_batch
from headrace.storage.format import plain, stored_type

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["ANY", "Between", "BoundPattern", "ColumnTest", "OneOf", "Pattern", "Wildcard", "punctuation_of"]

_METADATA = b"headrace.punctuation"


@dataclass(frozen=True, slots=True)
class Wildcard:
    """Any value of a column, null included."""


ANY = Wildcard()
"""The wildcard."""


@dataclass(frozen=True, slots=True, init=False)
class OneOf:
    """One of some values; with no values, nothing.

    Parameters
    ----------
    *values
        Values, not null and not NaN.
    """

    values: tuple[Any, ...]

    def __init__(self, *values: object) -> None:
        object.__setattr__(self, "values", tuple(dict.fromkeys(map(_checked, values))))


@dataclass(frozen=True, slots=True)
class Between:
    """A range of values.

    Parameters
    ----------
    low, high
        Least and greatest value; None for no limit.
    include_low, include_high
        Whether the limits belong to the range.
    """

    low: Any = None
    high: Any = None
    include_low: bool = True
    include_high: bool = True

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _checked(getattr(self, name)))

    def holds(self, value: object) -> bool:
        """Return whether a value is in the range."""
        low: Any = self.low
        high: Any = self.high
        at: Any = value
        return (low is None or low < at or (self.include_low and at == low)) and (
            high is None or at < high or (self.include_high and at == high)
        )


Constraint: TypeAlias = "Wildcard | OneOf | Between"


class Pattern(Mapping[str, "Constraint"]):
    """Constraints on the columns of an input, by name. Columns that it does not name are unconstrained.

    Parameters
    ----------
    constraints
        For each column `ANY`, `OneOf`, `Between`, or a value, which is short for `OneOf` of that value.

    Raises
    ------
    JoinInputError
        If it is not a mapping of names, or a value is null, NaN, or not a single value.

    Examples
    --------
    >>> Pattern({"sno": 79, "ip": ANY})
    Pattern({'sno': OneOf(values=(79,))})
    >>> Pattern({"sno": Between(high=80)}) & Pattern({"sno": OneOf(79, 80, 81)})
    Pattern({'sno': OneOf(values=(79, 80))})
    >>> (Pattern({"sno": 1}) & Pattern({"sno": 2})).empty
    True
    """

    def __init__(self, constraints: Mapping[str, object]) -> None:
        if not isinstance(constraints, Mapping) or not all(isinstance(name, str) for name in constraints):
            raise JoinInputError(f"a pattern is a mapping of names of columns to constraints, not {constraints!r}")
        found: dict[str, Constraint] = {}
        for name, given in constraints.items():
            constraint = given if isinstance(given, Wildcard | OneOf | Between) else OneOf(given)
            if not isinstance(constraint, Wildcard):
                found[name] = constraint
        self._constraints = found

    def __getitem__(self, name: str) -> Constraint:
        return self._constraints[name]

    def __iter__(self) -> Any:
        return iter(self._constraints)

    def __len__(self) -> int:
        return len(self._constraints)

    def __repr__(self) -> str:
        return f"Pattern({self._constraints!r})"

    def __hash__(self) -> int:
        return hash(frozenset(self._constraints.items()))

    def __and__(self, other: Pattern) -> Pattern:
        """Return the pattern of the rows that match both.

        Raises
        ------
        JoinInputError
            If values of one column cannot be compared.
        """
        if not isinstance(other, Pattern):
            return NotImplemented
        merged: dict[str, Constraint] = dict(self._constraints)
        for name, constraint in other._constraints.items():
            try:
                merged[name] = _meet(merged.get(name, ANY), constraint)
            except TypeError as error:
                raise JoinInputError(
                    f"the patterns constrain column {name!r} with values that Python does not compare: {error}; give "
                    "values of one kind, times in microseconds or coarser"
                ) from error
        return Pattern(merged)

    @property
    def empty(self) -> bool:
        """Whether no row can match (Tucker's empty pattern). A range may be empty without being known to be."""
        return any(constraint == OneOf() for constraint in self._constraints.values())

    def bind(self, schema: pa.Schema, name: str = "the input") -> BoundPattern:
        """Return the pattern with the types of a schema.

        Parameters
        ----------
        schema
            Schema of the rows.
        name
            Name of the input, for messages.

        Raises
        ------
        StreamSchemaError
            If the schema lacks a column.
        JoinInputError
            If a column cannot have one of the values.
        """
        if not isinstance(schema, pa.Schema):
            raise JoinInputError(f"a pattern is bound to a pyarrow schema, not to {type(schema).__name__}")
        tests = []
        for column, constraint in self._constraints.items():
            if len(schema.get_all_field_indices(column)) != 1:
                raise StreamSchemaError(
                    f"{name} must have one column {column!r} for a punctuation; its columns are "
                    f"{', '.join(map(repr, schema.names))}"
                )
            at = schema.get_field_index(column)
            tests.append(ColumnTest.of(at, constraint, schema.field(at).type, column))
        return BoundPattern(schema, tuple(tests))

    def matches(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Return which rows of a batch match.

        Raises
        ------
        StreamSchemaError
            If it is not a record batch, or lacks a column.
        JoinInputError
            If a column cannot have one of the values.

        Examples
        --------
        >>> Pattern({"k": Between(2, 3)}).matches(pa.record_batch({"k": [1, 2, None, 3]})).tolist()
        [False, True, False, True]
        """
        check_batch(batch)
        return self.bind(batch.schema).matches(batch.columns, len(batch))


@dataclass(frozen=True, slots=True)
class ColumnTest:
    """A constraint of one column with typed values.

    Attributes
    ----------
    column
        Position of the column.
    values
        Allowed values; None for a range.
    low, high
        Limits of the range; None for no limit.
    include_low, include_high
        Whether the limits belong to the range.
    """

    column: int
    values: pa.Array | None
    low: pa.Scalar | None = None
    high: pa.Scalar | None = None
    include_low: bool = True
    include_high: bool = True

    @classmethod
    def of(cls, column: int, constraint: Constraint, dtype: pa.DataType, name: str) -> ColumnTest:
        """Return the test of a constraint on a column of a type."""
        target = _tested_type(dtype)
        if target is None:
            raise JoinInputError(
                f"column {name!r} has type {dtype}, which a punctuation cannot constrain; leave the column out"
            )
        if isinstance(constraint, OneOf):
            return cls(column, pa.array([_typed(value, target, name) for value in constraint.values], target))
        assert isinstance(constraint, Between)
        low, high = (
            None if limit is None else _typed(limit, target, name) for limit in (constraint.low, constraint.high)
        )
        return cls(column, None, low, high, constraint.include_low, constraint.include_high)

    def moved(self, column: int, dtype: pa.DataType) -> ColumnTest | None:
        """Return the test of the same values on another column; None if its type cannot have one of them."""
        target = _tested_type(dtype)
        if target is None:
            return None
        try:
            values = None if self.values is None else _exactly(self.values, target)
            low, high = (
                None if limit is None else _exactly(pa.repeat(limit, 1), target)[0] for limit in (self.low, self.high)
            )
        except pa.ArrowException:
            return None
        return ColumnTest(column, values, low, high, self.include_low, self.include_high)

    def passes(self, array: pa.Array) -> NDArray[np.bool_]:
        """Return which values of a column meet the constraint. Nulls do not."""
        target = _tested_type(array.type)
        assert target is not None
        array = _exactly(array, target)
        if self.values is not None:
            return _flags(self._among(array))
        passed = np.ones(len(array), dtype=np.bool_)
        if array.null_count:
            passed &= _flags(array.is_valid())
        if self.low is not None:
            passed &= _flags((pc.greater_equal if self.include_low else pc.greater)(array, self.low))
        if self.high is not None:
            passed &= _flags((pc.less_equal if self.include_high else pc.less)(array, self.high))
        return passed

    def _among(self, array: pa.Array) -> pa.Array:
        assert self.values is not None
        if pa.types.is_floating(array.type):  # -0.0 equals 0.0, which a hash table does not know
            array, values = pc.add(array, 0.0), pc.add(self.values, 0.0)
            return pc.is_in(array, value_set=values)
        return pc.is_in(array, value_set=self.values)

    @property
    def nbytes(self) -> int:
        """Bytes of the values, about."""
        limits = [limit for limit in (self.low, self.high) if limit is not None]
        return (0 if self.values is None else self.values.nbytes) + sum(pa.array([limit]).nbytes for limit in limits)


@dataclass(frozen=True, slots=True)
class BoundPattern:
    """A pattern with the types of a schema.

    Attributes
    ----------
    schema
        Schema of the rows.
    tests
        Constraints of columns, all of which must be met.
    """

    schema: pa.Schema
    tests: tuple[ColumnTest, ...]

    def matches(self, columns: Sequence[pa.Array], rows: int) -> NDArray[np.bool_]:
        """Return which of some rows match.

        Parameters
        ----------
        columns
            Columns of the schema.
        rows
            Number of rows.
        """
        passed = np.ones(rows, dtype=np.bool_)
        for test in self.tests:
            passed &= test.passes(columns[test.column])
        return passed

    @property
    def nbytes(self) -> int:
        """Bytes of the pattern, about."""
        return _OVERHEAD + sum(_OVERHEAD + test.nbytes for test in self.tests)

    @property
    def columns(self) -> frozenset[int]:
        """Constrained columns."""
        return frozenset(test.column for test in self.tests)

    def __str__(self) -> str:
        return str(dict(self.pattern(self.schema.names)))

    def pattern(self, names: Sequence[str]) -> Pattern:
        """Return the pattern over columns of these names."""
        return Pattern({names[test.column]: _constraint(test) for test in self.tests})

    def batch(self, schema: pa.Schema, names: Sequence[str]) -> pa.RecordBatch:
        """Return a batch without rows that carries the pattern, for a stream of batches.

        Parameters
        ----------
        schema
            Schema of the stream.
        names
            For each column of this pattern's schema, its name in the stream.
        """
        fields, values = [], []
        for test in self.tests:
            kind = "in" if test.values is not None else f"between {int(test.include_low)}{int(test.include_high)}"
            array = _limits(test) if test.values is None else test.values
            fields.append(pa.field(names[test.column], pa.list_(array.type), metadata={"kind": kind}))
            values.append(pa.ListArray.from_arrays([0, len(array)], array))
        rows = pa.RecordBatch.from_arrays(values, schema=pa.schema(fields))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            if fields:
                writer.write_batch(rows)
        carrier = schema.with_metadata({**(schema.metadata or {}), _METADATA: sink.getvalue().to_pybytes()})
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=carrier)


_OVERHEAD = 512
"""Bytes of an object with a few references and Arrow scalars, about."""


def punctuation_of(batch: pa.RecordBatch) -> Pattern | None:
    """Return the punctuation that a batch without rows carries; None for a batch of results.

    Raises
    ------
    StreamSchemaError
        If it is not a record batch.

    Examples
    --------
    >>> pattern = Pattern({"k": Between(low=3)})
    >>> schema = pa.schema([("k", pa.int64())])
    >>> punctuation_of(pattern.bind(schema).batch(schema, ["k"])) == pattern
    True
    """
    check_batch(batch)
    text = (batch.schema.metadata or {}).get(_METADATA)
    if text is None:
        return None
    constraints: dict[str, Constraint] = {}
    for rows in pa.ipc.open_stream(pa.py_buffer(text)):
        for field, column in zip(rows.schema, rows.columns, strict=True):
            kind = field.metadata[b"kind"].decode()
            values = [_plain(value) for value in column.flatten()]
            if kind == "in":
                constraints[field.name] = OneOf(*values)
            else:
                constraints[field.name] = Between(values[0], values[1], kind[-2] == "1", kind[-1] == "1")
    return Pattern(constraints)


def _checked(value: Any) -> Any:
    """Return a value, of an Arrow scalar its Python value; refuse null, NaN, and what is not a single value."""
    value = _plain(value) if isinstance(value, pa.Scalar) else value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise JoinInputError(f"a pattern cannot have the value {value!r}, which equals nothing; leave it out")
    if not isinstance(value, Hashable):
        raise JoinInputError(f"a pattern has single values, not {value!r}; give a list of values as OneOf(*values)")
    return value


def _meet(left: Constraint, right: Constraint) -> Constraint:
    if isinstance(left, Wildcard):
        return right
    if isinstance(right, Wildcard):
        return left
    if isinstance(left, OneOf):
        return OneOf(*(value for value in left.values if _holds(right, value)))
    if isinstance(right, OneOf):
        return _meet(right, left)
    low, include_low = _tighter(left, right, "low")
    high, include_high = _tighter(left, right, "high")
    if low is not None and high is not None and (high < low or (high == low and not (include_low and include_high))):
        return OneOf()
    return Between(low, high, include_low, include_high)


def _holds(constraint: Constraint, value: object) -> bool:
    if isinstance(constraint, OneOf):
        return any(value == allowed for allowed in constraint.values)
    return not isinstance(constraint, Between) or constraint.holds(value)


def _tighter(left: Between, right: Between, end: str) -> tuple[Any, bool]:
    """Return the tighter of two limits, and whether it belongs to the range."""
    first, second = getattr(left, end), getattr(right, end)
    inside, within = getattr(left, f"include_{end}"), getattr(right, f"include_{end}")
    if first is None or second is None:
        return (second, within) if first is None else (first, inside)
    if first == second:
        return first, inside and within
    return (second, within) if (first < second) == (end == "low") else (first, inside)


def _tested_type(dtype: pa.DataType) -> pa.DataType | None:
    """Return the type in which the values of a column are tested; None if there is no such test."""
    stored = dtype if pa.types.is_decimal256(dtype) else stored_type(dtype)
    return pa.float64() if stored is not None and pa.types.is_floating(stored) else stored


def _exactly(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Return values in another type. A value that would change raises an error of Arrow."""
    exact = pa.types.is_decimal(array.type) or pa.types.is_integer(array.type)
    if pa.types.is_decimal256(target) and exact:  # no type of a table
        return array.cast(target)
    return plain(array, target)


def _typed(value: object, target: pa.DataType, name: str) -> pa.Scalar:
    """Return a value as a scalar of a tested type, without loss."""
    try:
        array = pa.repeat(value if isinstance(value, pa.Scalar) else pa.scalar(value), 1)
        if pa.types.is_binary(target) != pa.types.is_binary(_tested_type(array.type) or target):
            raise pa.ArrowInvalid("text and binary differ")
        scalar = _exactly(array, target)[0]
        if not scalar.is_valid or (pa.types.is_floating(target) and math.isnan(scalar.as_py())):
            raise pa.ArrowInvalid("null and NaN equal nothing")
    except (pa.ArrowException, OverflowError, ValueError) as error:
        raise JoinInputError(
            f"column {name!r} has type {target} and cannot have the value {value!r} of a punctuation; give a value of "
            "that type"
        ) from error
    return scalar


def _limits(test: ColumnTest) -> pa.Array:
    dtype = next((limit.type for limit in (test.low, test.high) if limit is not None), pa.null())
    return pa.array([test.low, test.high], dtype)


def _constraint(test: ColumnTest) -> Constraint:
    if test.values is not None:
        return OneOf(*map(_plain, test.values))
    low, high = (None if limit is None else _plain(limit) for limit in (test.low, test.high))
    return Between(low, high, test.include_low, test.include_high)


def _plain(scalar: pa.Scalar) -> Any:
    """Return a Python value, or the scalar itself if Python has no such value."""
    whole = pa.types.is_timestamp(scalar.type) or pa.types.is_time64(scalar.type) or pa.types.is_duration(scalar.type)
    try:
        if whole and scalar.is_valid and scalar.type.unit == "ns":
            array = pa.repeat(scalar, 1)
            return plain(array, _in_microseconds(scalar.type))[0].as_py()
        return scalar.as_py()
    except (pa.ArrowException, OverflowError, ValueError):
        return scalar


def _in_microseconds(dtype: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(dtype):
        return pa.timestamp("us", dtype.tz)
    return pa.time64("us") if pa.types.is_time64(dtype) else pa.duration("us")


def _flags(array: pa.Array) -> NDArray[np.bool_]:
    flags: NDArray[np.bool_] = np.asarray(array.fill_null(False))  # noqa: FBT003 - positional in pyarrow
    return flags
