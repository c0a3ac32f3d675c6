"""`History`: declares the attributes with history, the columns of changes, and the layout of versions.

Contains the declaration and its checks. The docstring of the package explains the concepts.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import pyarrow as pa

from headrace.etl.errors import DeclarationError
from headrace.etl.special import SpecialMembers, as_names
from headrace.storage.format import scale_of, stored_type

if TYPE_CHECKING:
    from headrace.etl.dimension import Dimension

__all__ = ["AT", "BEGINNING", "GIVEN", "SEQUENCE", "AttributeType", "History"]

AT: Final = "_at"
SEQUENCE: Final = "_sequence"
GIVEN: Final = "_sequence_"
BEGINNING: Final = dt.date(1, 1, 1)
UPSERTS: Final = ("I", "U", "insert", "update", "upsert", "update_postimage")
DELETES: Final = ("D", "delete")
_RECORDED: Final = "_recorded_"
_SPELLED: Final = "_spelled"

AttributeType = Literal["0", "1", "1 current", "2", "audit"]


@dataclass(frozen=True)
class History:
    """A dimension with history: one row per version of a member.

    Parameters
    ----------
    dimension
        Base dimension, whose schema contains the natural key and the attributes. It must have an `inferred_flag`.
    effective
        Column of the changes with the start of validity.
    effective_type
        Type of the column `effective`: `date32`, or a timestamp in microseconds, with or without a zone.
    by_day
        Whether versions begin on whole days although the changes have timestamps. The last change of a member on a day
        (UTC) defines the version of that day.
    sequence
        Column of the changes that decides between changes of a member with the same effective time: the greatest value
        wins. The default is the effective time itself, which matters with `by_day`.
    sequence_type
        Type of the column `sequence`: integer, decimal, date, or timestamp.
    operation
        Column of the changes that marks deletes; None if there are no deletes.
    upserts, deletes
        Values of the column `operation` for upserts and for deletes.
    partial
        Column of the changes with the names of the attributes that a change gives, as a list of text; all others keep
        their value as of the time of the change. None if every change is a full row; see `headrace.etl.history`.
    type_0
        Attributes that keep their first value.
    type_1
        Attributes whose newest value applies to all versions.
    type_1_current
        Attributes whose changes apply only to the current version; closed versions keep their values.
    type_2
        Attributes whose changes open a new version; None for all attributes without another type.
    audit
        Attributes that describe the change that opened a version, such as a load number. They are never
        compared.
    valid_from, valid_to, is_current, version, is_deleted
        Names of the additional columns of versions.
    end
        Value of `valid_to` in the current version: None for null, or a date such as 9999-12-31.
    special
        Special members of the dimension.

    Raises
    ------
    DeclarationError
        If an attribute is named twice or not at all, is not in the dimension, or a column has an unsuitable type.

    Examples
    --------
    >>> from headrace.etl import Dimension
    >>> columns = pa.schema({"id": pa.int64(), "city": pa.string(), "phone": pa.string()})
    >>> customer = Dimension("customer", ("id",), "customer_key", columns)
    >>> history = History(customer, effective="moved_on", effective_type=pa.date32(), type_1=("phone",))
    >>> history.type_of("city"), history.type_of("phone")
    ('2', '1')
    >>> history.version_schema.names[:6]
    ['customer_key', 'id', 'city', 'phone', 'valid_from', 'valid_to']
    >>> history.version_schema.names[6:]
    ['is_current', 'version', 'is_deleted', 'is_inferred']
    """

    dimension: Dimension
    effective: str = "effective"
    effective_type: pa.DataType = field(default_factory=lambda: pa.timestamp("us", "UTC"))
    by_day: bool = False
    sequence: str | None = None
    sequence_type: pa.DataType = field(default_factory=pa.int64)
    operation: str | None = None
    upserts: tuple[str, ...] = UPSERTS
    deletes: tuple[str, ...] = DELETES
    partial: str | None = None
    type_0: tuple[str, ...] = ()
    type_1: tuple[str, ...] = ()
    type_1_current: tuple[str, ...] = ()
    type_2: tuple[str, ...] | None = None
    audit: tuple[str, ...] = ()
    valid_from: str = "valid_from"
    valid_to: str = "valid_to"
    is_current: str = "is_current"
    version: str = "version"
    is_deleted: str = "is_deleted"
    end: dt.date | None = None
    special: SpecialMembers = field(default_factory=SpecialMembers)

    def __post_init__(self) -> None:
        for name in ("upserts", "deletes", "type_0", "type_1", "type_1_current", "audit"):
            object.__setattr__(self, name, as_names(getattr(self, name)))
        named = [*self.type_0, *self.type_1, *self.type_1_current, *self.audit]
        if self.type_2 is None:
            rest = tuple(name for name in self.dimension.attributes.names if name not in named)
            object.__setattr__(self, "type_2", rest)
        else:
            object.__setattr__(self, "type_2", as_names(self.type_2))
        _check_attributes(self, [*named, *self.versioned])
        _check_columns(self)
        _check_times(self)
        self.special.check(self.dimension.attributes, self._name)

    @property
    def _name(self) -> str:
        return f"dimension {self.dimension.name!r}"

    @property
    def versioned(self) -> tuple[str, ...]:
        """Attributes of type 2."""
        return self.type_2 or ()

    def type_of(self, attribute: str) -> AttributeType:
        """Return the type of an attribute, which defines the treatment of its changes."""
        kinds: dict[AttributeType, tuple[str, ...]] = {
            "0": self.type_0,
            "1": self.type_1,
            "1 current": self.type_1_current,
            "audit": self.audit,
        }
        return next((kind for kind, names in kinds.items() if attribute in names), "2")

    @property
    def instant_type(self) -> pa.DataType:
        """Type of `valid_from` and `valid_to`."""
        return pa.date32() if self.by_day or pa.types.is_date(self.effective_type) else self.effective_type

    @property
    def stored_sequence(self) -> pa.DataType:
        """Type of the stored sequence."""
        return self.effective_type if self.sequence is None else self.sequence_type

    @property
    def spelled(self) -> dict[str, str]:
        """Column with the original spelling, for each normalized column of the natural key."""
        keys = self.dimension.natural_key
        return {name: name + _SPELLED for name in keys if self.dimension.rule(name).changes_spelling}

    @property
    def recorded(self) -> dict[str, str]:
        """Entry column with the value of its own change, for each column where the version may show another value."""
        if self.partial is not None:
            return {name: _RECORDED + name for name in self.registers}
        apart = [*self.type_0, *self.type_1, *self.type_1_current, *self.audit, *self.spelled.values()]
        return {name: _RECORDED + name for name in apart}

    @property
    def registers(self) -> tuple[str, ...]:
        """Columns that partial changes set one by one; each has a sequence of its own."""
        return (*self.dimension.attributes.names, *self.spelled.values(), self.is_deleted)

    @property
    def given(self) -> dict[str, str]:
        """Column with the sequence of the change that set a register, null if no change of that time did."""
        return {} if self.partial is None else {name: GIVEN + name for name in self.registers}

    @property
    def version_schema(self) -> pa.Schema:
        """Columns of a version, as users query them."""
        flag = self.dimension.inferred_flag
        assert flag is not None
        return pa.schema(
            [
                pa.field(self.dimension.surrogate_key, pa.int64()),
                *(column.with_nullable(nullable=True) for column in self.dimension.key_schema),
                *self._spelled_fields(),
                *self.dimension.attributes,
                pa.field(self.valid_from, self.instant_type),
                pa.field(self.valid_to, self.instant_type),
                pa.field(self.is_current, pa.bool_()),
                pa.field(self.version, pa.int64()),
                pa.field(self.is_deleted, pa.bool_()),
                pa.field(flag, pa.bool_()),
            ]
        )

    @property
    def entry_key(self) -> tuple[str, ...]:
        """Key of the table of entries: the natural key, then the start of validity of the entry's change."""
        return (*self.dimension.natural_key, AT)

    @property
    def entry_schema(self) -> pa.Schema:
        """Columns of an entry: the columns of its version, its time and sequence, and the values of its own change."""
        shown = self.version_schema
        own = [pa.field(column, shown.field(name).type) for name, column in self.recorded.items()]
        own += [pa.field(column, self.stored_sequence) for column in self.given.values()]
        key = [column.with_nullable(nullable=False) for column in self.dimension.key_schema]
        rest = [column for column in shown if column.name not in self.dimension.natural_key]
        at = pa.field(AT, self.instant_type, nullable=False)
        return pa.schema([*key, at, pa.field(SEQUENCE, self.stored_sequence), *rest, *own])

    def _spelled_fields(self) -> list[pa.Field]:
        return [pa.field(column, pa.string()) for column in self.spelled.values()]


def _check_attributes(history: History, named: list[str]) -> None:
    attributes = history.dimension.attributes.names
    where = f"history of dimension {history.dimension.name!r}"
    for name in named:
        if name not in attributes:
            raise DeclarationError(f"{where}: there is no attribute {name!r}; it has {', '.join(attributes) or 'none'}")
        if named.count(name) > 1:
            raise DeclarationError(f"{where}: attribute {name!r} is named twice; an attribute has one type")
    missing = [name for name in attributes if name not in named]
    if missing:
        raise DeclarationError(
            f"{where}: attribute {missing[0]!r} has no type; name it, or leave out `type_2`, which then takes the rest"
        )


def _check_columns(history: History) -> None:
    where = f"history of dimension {history.dimension.name!r}"
    if history.dimension.inferred_flag is None:
        raise DeclarationError(f"{where}: the dimension needs a flag of inferred members; give it an `inferred_flag`")
    names = history.entry_schema.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DeclarationError(f"{where}: two columns are called {twice!r}; choose another name for one of them")
    if set(history.upserts) & set(history.deletes):
        raise DeclarationError(f"{where}: an operation is both in `upserts` and in `deletes`")
    _check_partial(history, where)


def _check_partial(history: History, where: str) -> None:
    if history.partial is None:
        return
    taken = [*history.dimension.schema.names, history.effective, history.sequence, history.operation]
    if history.partial in taken:
        raise DeclarationError(f"{where}: `partial` names column {history.partial!r}, which has another purpose")
    if history.type_0:
        raise DeclarationError(
            f"{where}: attribute {history.type_0[0]!r} of type 0 keeps the value of the first full row, so its changes "
            "cannot be partial; give it another type, or send full rows and leave out `partial`"
        )


def _check_times(history: History) -> None:
    where = f"history of dimension {history.dimension.name!r}"
    kind = history.effective_type
    timestamp = pa.types.is_timestamp(kind) and kind.unit == "us"
    if not (timestamp or kind == pa.date32()):
        raise DeclarationError(f"{where}: `effective_type` is date32 or a timestamp in microseconds, not {kind}")
    order = history.sequence_type
    if history.sequence is not None and (stored_type(order) is None or scale_of(order) is None):
        raise DeclarationError(f"{where}: `sequence_type` is an integer, decimal, date or timestamp, not {order}")
    if history.end is not None and history.end <= BEGINNING:
        raise DeclarationError(f"{where}: `end` is a day after {BEGINNING}, not {history.end}")
