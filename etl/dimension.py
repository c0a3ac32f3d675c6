"""A dimension: its natural key, its surrogate key, and the validation and storage of its rows.

Contains the declaration, the numbering of members, and the build of the clustered table. Lookups are in `surrogate`.

The unknown member (surrogate key -1) belongs to the dimension that users query, so that an inner join with the facts
loses none. So do the other special members that the dimension declares. They have no natural key, so they are never
rows of the clustered table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.equality import Conformed, KeyRule, check_comparable, check_rule, conform
from headrace.etl.errors import DeclarationError, DimensionError
from headrace.etl.inputs import check_names
from headrace.etl.ranking import key_text, rank_rows
from headrace.etl.special import Special, SpecialMembers, as_names
from headrace.storage.format import plain, stored_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from headrace.storage import Table

__all__ = [
    "UNKNOWN_KEY",
    "Dimension",
    "build_table",
    "greatest_key",
    "is_special",
    "member_rows",
    "number_members",
    "with_spellings",
    "without_blank_keys",
]

UNKNOWN_KEY: Final = -1
_NAMED: Final = 10
_GREATEST: Final = 2**63 - 1


@dataclass(frozen=True)
class Dimension:
    """A dimension of the warehouse.

    Parameters
    ----------
    name
        Name of the dimension, for messages.
    natural_key
        Columns that identify a member in the source.
    surrogate_key
        Name of the int64 column with the warehouse's own key. Assigned keys are positive.
    schema
        Types of the natural key columns and of the attributes, in the order of the table. The surrogate key and the
        `inferred_flag` are optional in it.
    rules
        Normalization rules of natural key columns, by name. Other columns are not normalized.
    inferred_flag
        Name of the boolean column that is true for members that facts introduced before their attributes were known;
        None for no such column.
    special
        Special members of the dimension, with the values of their attributes.
    spellings
        For each natural key column whose first spelling is kept, the attribute of type string that holds it. A member
        has the spelling of the row that introduced it.

    Raises
    ------
    DeclarationError
        If a column is not in the schema or is there twice, a column is used for two purposes, a natural key column has
        a type that cannot be a key, such as a floating-point number, or a special member has a value that its attribute
        cannot hold.

    Examples
    --------
    >>> plane = Dimension("plane", ("tailnum",), "plane_key", pa.schema({"tailnum": pa.string(), "seats": pa.int32()}))
    >>> plane.table_schema.names
    ['plane_key', 'tailnum', 'seats', 'is_inferred']
    """

    name: str
    natural_key: tuple[str, ...]
    surrogate_key: str
    schema: pa.Schema
    rules: Mapping[str, KeyRule] = field(default_factory=dict)
    inferred_flag: str | None = "is_inferred"
    special: SpecialMembers = field(default_factory=SpecialMembers, repr=False)
    spellings: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "natural_key", as_names(self.natural_key))
        plain = [column.with_type(stored_type(column.type) or column.type) for column in self.schema]
        object.__setattr__(self, "schema", pa.schema(plain))
        if not self.natural_key:
            raise DeclarationError(f"dimension {self.name!r} has no natural key; name at least one column")
        names = self.schema.names
        check_names(names, names, f"dimension {self.name!r}", DeclarationError)
        for column in (*self.natural_key, *self.rules):
            if column not in names:
                raise DeclarationError(f"dimension {self.name!r} has no column {column!r}; it has {', '.join(names)}")
        inexact = [name for name in self.natural_key if pa.types.is_floating(self.schema.field(name).type)]
        if inexact:
            kind = self.schema.field(inexact[0]).type
            raise DeclarationError(
                f"dimension {self.name!r}: the natural key column {inexact[0]!r} is {kind}, which cannot be a key, "
                "since equal numbers may differ in their last bit; use a decimal, an integer or text"
            )
        for name in self.natural_key:
            kind = self.schema.field(name).type
            if stored_type(kind) is None:
                raise DeclarationError(
                    f"dimension {self.name!r}: the natural key column {name!r} is {kind}, which cannot be a key; use "
                    "an integer, a decimal of up to 38 digits, a date, a time, a boolean, text or binary"
                )
        apart = [*self.natural_key, self.surrogate_key, self.inferred_flag]
        twice = next((column for column in apart if apart.count(column) > 1), None)
        if twice is not None:
            raise DeclarationError(
                f"dimension {self.name!r} names {twice!r} twice among natural key, surrogate key and the flag of "
                "inferred members; give each a column of its own"
            )
        for column, rule in self.rules.items():
            check_rule(rule, self.schema.field(column).type, column)
        self.special.check(self.attributes, f"dimension {self.name!r}")
        for column, spelled in self.spellings.items():
            self._check_spelling(column, spelled)

    def _check_spelling(self, column: str, spelled: str) -> None:
        kinds = {each.name: each.type for each in self.attributes}
        if column not in self.natural_key or kinds.get(spelled) != pa.string():
            raise DeclarationError(
                f"dimension {self.name!r}: {spelled!r} keeps the spelling of {column!r}, so the first must be an "
                "attribute of type string, and the second a natural key column"
            )

    @property
    def key_schema(self) -> pa.Schema:
        """Schema of the natural key columns."""
        return pa.schema([pa.field(name, self.schema.field(name).type, nullable=False) for name in self.natural_key])

    @property
    def attributes(self) -> pa.Schema:
        """Schema of the attributes: all columns except the natural key, the surrogate key, and the inferred flag."""
        apart = {*self.natural_key, self.surrogate_key, self.inferred_flag}
        return pa.schema([column.with_nullable(nullable=True) for column in self.schema if column.name not in apart])

    @property
    def table_schema(self) -> pa.Schema:
        """Schema of the dimension's table: surrogate key, natural key, attributes, inferred flag."""
        columns = [pa.field(self.surrogate_key, pa.int64()), *self._nullable_key(), *self.attributes]
        if self.inferred_flag is not None:
            columns.append(pa.field(self.inferred_flag, pa.bool_()))
        return pa.schema(columns)

    def rule(self, column: str) -> KeyRule:
        """Return the normalization rule of a natural key column."""
        return self.rules.get(column, KeyRule())

    def conform_key(self, columns: Sequence[pa.Array]) -> list[Conformed]:
        """Convert columns, given in natural key order, to the key's types and normalize them."""
        return [
            conform(array, self.schema.field(name).type, self.rule(name), name)
            for name, array in zip(self.natural_key, columns, strict=True)
        ]

    def check_stream(self, columns: Mapping[str, pa.DataType]) -> None:
        """Raise `KeyInputError` unless each stream column, in key order, can equal its natural key column."""
        for name, (column, kind) in zip(self.natural_key, columns.items(), strict=True):
            check_comparable(kind, self.schema.field(name).type, column, self.rule(name))

    def unknown_member(self) -> pa.Table:
        """Return the row of the unknown member: surrogate key -1, declared attributes, everything else null."""
        return self.special_rows((Special.UNKNOWN,))

    def special_rows(self, members: Sequence[Special] | None = None) -> pa.Table:
        """Return the rows of special members, by default of all that the dimension has."""
        wanted = self.special.present if members is None else tuple(members)
        nulls = pa.table({name: pa.nulls(len(wanted), self.schema.field(name).type) for name in self.natural_key})
        rows = self.members(nulls, [int(member) for member in wanted])
        values = [self.special.values(member) or {} for member in wanted]
        for column in self.attributes:
            if any(column.name in each for each in values):
                texts = pa.array([each.get(column.name) for each in values], column.type)
                rows = rows.set_column(rows.schema.get_field_index(column.name), column, texts)
        return rows

    def members(self, natural_keys: pa.Table, surrogate_keys: Any, *, inferred: bool = False) -> pa.Table:
        """Return rows of `table_schema` for natural keys and their surrogate keys; attributes are null."""
        rows = natural_keys.num_rows
        given = {
            self.surrogate_key: pa.array(surrogate_keys, pa.int64()),
            **{name: natural_keys.column(name) for name in self.natural_key},
        }
        if self.inferred_flag is not None:
            given[self.inferred_flag] = pa.array(np.full(rows, inferred))
        columns = [given.get(column.name, pa.nulls(rows, column.type)) for column in self.table_schema]
        return pa.Table.from_arrays(columns, schema=self.table_schema)

    def _nullable_key(self) -> list[pa.Field]:
        return [column.with_nullable(nullable=True) for column in self.key_schema]


def number_members(dimension: Dimension, rows: pa.Table, base: int = 0) -> pa.Table:
    """Return source rows as rows of the dimension's table, numbered from `base + 1` in key order.

    Parameters
    ----------
    dimension
        The dimension.
    rows
        Rows with natural key and attributes, in any order. Missing attributes become null.
    base
        Greatest surrogate key already assigned.

    Raises
    ------
    DimensionError
        If a natural key is null, does not fit its type, or occurs twice after normalization, an attribute does not fit
        its type, a column is there twice, or the surrogate keys exceed 64 bits.
    """
    check_names(
        rows.schema.names,
        [name for name in dimension.attributes.names if name in rows.schema.names],
        f"dimension {dimension.name!r}: the source",
        DimensionError,
    )
    keys = _conformed_keys(dimension, rows)
    ranks, distinct = rank_rows(keys.columns)
    if not 0 <= base <= _GREATEST - distinct:
        raise DimensionError(
            f"dimension {dimension.name!r}: {distinct} surrogate keys above {base} are not all from 1 to {_GREATEST}; "
            "give another `base`"
        )
    if distinct < rows.num_rows:
        _refuse_repeated(dimension, keys, ranks)
    members = dimension.members(keys, base + 1 + ranks)
    for column in dimension.attributes:
        if column.name in rows.column_names:
            position = members.schema.get_field_index(column.name)
            members = members.set_column(position, column, _fitted(dimension, rows, column))
    return with_spellings(dimension, members, rows).take(pa.array(np.argsort(ranks)))


def _takeable(column: pa.ChunkedArray) -> pa.Array:
    """Return a column in its stored type, if it has one. Arrow cannot take rows from views."""
    kind = stored_type(column.type)
    return column if kind is None else plain(column, kind)


def _fitted(dimension: Dimension, rows: pa.Table, column: pa.Field) -> pa.Array:
    """Return an attribute of source rows in its type, with the same values."""
    try:
        return plain(rows.column(column.name), column.type)
    except pa.ArrowException as error:
        raise DimensionError(
            f"dimension {dimension.name!r}: column {column.name!r} does not fit its type {column.type}: "
            f"{str(error).splitlines()[0]}, or give the column another type"
        ) from error


def with_spellings(dimension: Dimension, members: pa.Table, given: pa.Table) -> pa.Table:
    """Return new members with the spellings of their keys, unless `given` has a column for the spelling itself.

    Parameters
    ----------
    dimension
        The dimension.
    members
        Rows of the dimension's table.
    given
        Rows that introduced the members, in the same order, with natural keys as they were spelled.
    """
    for name, spelled in dimension.spellings.items():
        if spelled not in given.column_names:
            position = members.schema.get_field_index(spelled)
            members = members.set_column(position, members.schema.field(position), given.column(name).cast(pa.string()))
    return members


def is_special(dimension: Dimension, rows: pa.Table) -> pa.ChunkedArray:
    """Return which rows are special members: -1, and -2 and -3 if they have no natural key."""
    key = rows.column(dimension.surrogate_key)
    others = pa.array([int(member) for member in Special if member is not Special.UNKNOWN], pa.int64())
    special = pc.is_in(key.cast(pa.int64()), value_set=others)
    nameless = pc.is_null(rows.column(dimension.natural_key[0]))
    for name in dimension.natural_key[1:]:
        nameless = pc.or_(nameless, pc.is_null(rows.column(name)))
    unknown = pc.fill_null(pc.equal(key, UNKNOWN_KEY), fill_value=False)
    return pc.or_(unknown, pc.and_(special, nameless))


def member_rows(dimension: Dimension, rows: pa.Table | pa.RecordBatch) -> pa.Table:
    """Return the dimension's rows as the clustered table stores them: normalized and without special members.

    Parameters
    ----------
    dimension
        The dimension.
    rows
        Rows with at least the columns of `Dimension.table_schema`, in any column order.

    Raises
    ------
    DimensionError
        If a column is missing or there twice, the natural key or surrogate key of a member other than the special
        members is null, or a value does not fit its column.
    """
    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    names = dimension.table_schema.names
    check_names(table.column_names, names, f"dimension {dimension.name!r}: the table", DimensionError)
    table = pa.table({
        name: _takeable(table.column(name)) if name in dimension.natural_key else _fitted(dimension, table, column)
        for name, column in zip(names, dimension.table_schema, strict=True)
    })  # fmt: skip
    table = table.filter(pc.invert(is_special(dimension, table)))
    if table.column(dimension.surrogate_key).null_count:
        raise DimensionError(
            f"dimension {dimension.name!r}: a member has no surrogate key ({dimension.surrogate_key!r})"
        )
    table = without_blank_keys(dimension, table)
    keys = _conformed_keys(dimension, table)
    for name in dimension.natural_key:
        table = table.set_column(table.column_names.index(name), name, keys.column(name))
    return table.cast(dimension.table_schema)


def build_table(dimension: Dimension, path: str, rows: Iterable[pa.RecordBatch], **options: Any) -> Table:
    """Build the clustered table of a dimension from rows of `Dimension.table_schema` in any order.

    Parameters
    ----------
    dimension
        The dimension.
    path
        Path of the new table.
    rows
        Batches of members, consumed once. They may exceed memory.
    options
        Options of `headrace.storage.Table.build`.
    """
    from headrace.storage import Table  # noqa: PLC0415 - numba comes in only when a table is built

    checked = (batch for piece in rows for batch in member_rows(dimension, piece).to_batches())
    reader = pa.RecordBatchReader.from_batches(dimension.table_schema, checked)
    return Table.build(path, reader, key=list(dimension.natural_key), unique=True, **options)


def greatest_key(surrogate_keys: pa.Array | pa.ChunkedArray) -> int:
    """Return the greatest surrogate key of a column, or 0 if no key is assigned."""
    return max(0, pc.max(surrogate_keys).as_py() or 0)


def without_blank_keys(dimension: Dimension, rows: pa.Table) -> pa.Table:
    """Remove members whose key is blank if the rules of the key make blank text null: they identify no member."""
    named = np.ones(rows.num_rows, dtype=np.bool_)
    for name in dimension.natural_key:
        if {"trim", "blank"} & {*dimension.rule(name).normalise}:
            trimmed = pc.utf8_trim_whitespace(rows.column(name).cast(pa.large_string()))
            named &= np.asarray(pc.fill_null(pc.not_equal(trimmed, ""), fill_value=True))
    return rows if named.all() else rows.filter(pa.array(named))


def _conformed_keys(dimension: Dimension, rows: pa.Table) -> pa.Table:
    where = f"dimension {dimension.name!r}: the source"
    check_names(rows.schema.names, dimension.natural_key, where, DimensionError, "natural key column")
    dimension.check_stream({name: rows.schema.field(name).type for name in dimension.natural_key})
    keys = dimension.conform_key([rows.column(name) for name in dimension.natural_key])
    for name, key in zip(dimension.natural_key, keys, strict=True):
        if key.values.null_count:
            row = int(np.flatnonzero(np.asarray(key.values.is_null()))[0])
            value = f"{_shown(rows.column(name)[row])}, which is not a valid key of type {key.values.type}"
            raise DimensionError.of_row(row, partial(_unfit_key, dimension.name, name, value))
    return pa.table({name: key.values for name, key in zip(dimension.natural_key, keys, strict=True)})


def _unfit_key(dimension: str, column: str, value: str, place: str) -> str:
    return f"dimension {dimension!r}: natural key column {column!r} of {place} is {value}; correct or leave out the row"


def _shown(value: pa.Scalar) -> str:
    return repr(str(value)) if value.is_valid else "missing (null)"


def _refuse_repeated(dimension: Dimension, keys: pa.Table, ranks: np.ndarray[Any, Any]) -> None:
    counts = np.bincount(ranks)
    repeated = np.flatnonzero(counts > 1)
    first = np.unique(ranks, return_index=True)[1][repeated[:_NAMED]]
    named = key_text(keys.take(pa.array(first)).columns).to_pylist()
    raise DimensionError(
        f"dimension {dimension.name!r}: {len(repeated)} natural keys occur more than once, the first ones: "
        f"{'; '.join(named)}; keep one row for each"
    )
