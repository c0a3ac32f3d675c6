"""The Arrow type of each column of a source table, and the check of each of its values.

Values are taken as the driver has them, without SQLAlchemy's conversions: these round decimals of SQLite. A value that
is not of its column's type is refused, and so is a column whose type has no exact counterpart.

| type of the column | Arrow type |
|---|---|
| integers of 2, 4 and 8 bytes | int16, int32, int64; of SQLite, whose integers have no width, int64 |
| numeric(p, s) | decimal128(p, s), or decimal256(p, s) for more than 38 digits |
| real of PostgreSQL; other floats | float; double |
| boolean | bool |
| text, char, enum, uuid | string |
| binary | binary |
| date, time | date32, time64[us] |
| timestamp without and with a zone | timestamp[us], timestamp[us, UTC] |
| interval without years and months | duration[us] |

Times are read as text, which also has the values that Python has no type for, such as infinity and years before 1.
"""

from __future__ import annotations

import datetime as dt
import decimal
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from sqlalchemy import Double, Text, cast, quoted_name, type_coerce, types
from sqlalchemy import column as sql_column
from sqlalchemy.dialects import postgresql
from sqlalchemy.types import NullType

from headrace.pipelines.database.source import SQLITE

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import ColumnClause, ColumnElement
    from sqlalchemy.engine.interfaces import ReflectedColumn
    from sqlalchemy.types import TypeEngine

    _Convert = Callable[[Any], Any]

__all__ = ["Column", "clause_of", "column_of", "unsupported_reason"]

_DIGITS128, _DIGITS256 = 38, 76
_FLOAT_DIGITS = 15  # decimals of so many digits are different floats, so a float that has no more names one decimal
_WIDE = decimal.Context(prec=1000, Emin=-99999, Emax=99999, traps=[decimal.Inexact, decimal.InvalidOperation])
_CLOCK = r"[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?"
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIME = re.compile(_CLOCK)
_MOMENT = re.compile(rf"{_DATE.pattern}[ T]{_CLOCK}")
_INSTANT = re.compile(rf"{_MOMENT.pattern}\+00")
_INTERVAL = re.compile(
    r"(?:(?P<days>[+-]?[0-9]+) days?(?: |\Z))?"
    r"(?:(?P<sign>[+-]?)(?P<hours>[0-9]+):(?P<minutes>[0-9]{2}):(?P<seconds>[0-9]{2})(?:\.(?P<fraction>[0-9]{1,6}))?)?"
)
_INT64 = 2**63


@dataclass(frozen=True)
class Column:
    """A column to extract.

    Parameters
    ----------
    name
        Name in the database and in the files.
    dtype
        Arrow type in the files.
    clause
        The column in SQL.
    expression
        What to select for it.
    convert
        Returns what Arrow takes for a value of the driver; raises a `ValueError` with the reason if there is none.
    ordered
        Whether the database compares its values as numbers or times, and no two that are equal differ.
    declared
        Type in the database, for messages.
    """

    name: str
    dtype: pa.DataType
    clause: ColumnClause[Any]
    expression: ColumnElement[Any]
    convert: _Convert
    ordered: bool
    declared: str


@dataclass(frozen=True)
class _Type:
    """Arrow type of a column, the check of a value, and the type that the database casts it to, if any."""

    dtype: pa.DataType
    convert: _Convert
    through: TypeEngine[Any] | None = None


def clause_of(reflected: ReflectedColumn) -> ColumnClause[Any]:
    """Return a column in SQL, whose name is quoted and so taken literally; a domain has the type that it restricts."""
    declared = reflected["type"]
    while isinstance(declared, postgresql.DOMAIN):
        declared = declared.data_type
    return sql_column(quoted_name(reflected["name"], quote=True), declared)


def column_of(clause: ColumnClause[Any], backend: str) -> Column | None:
    """Return how a column is extracted; None if its type has no exact counterpart."""
    sqlite = backend == SQLITE
    found = _sqlite_type(clause.type) if sqlite else _postgresql_type(clause.type)
    if found is None:
        return None
    read: ColumnElement[Any] = clause if found.through is None else cast(clause, found.through)
    # SQLite compares times as their texts, and decimals as floats.
    kinds = pa.types.is_decimal, pa.types.is_date, pa.types.is_timestamp
    ordered = pa.types.is_integer(found.dtype) or (not sqlite and any(kind(found.dtype) for kind in kinds))
    return Column(
        name=str(clause.name),
        dtype=found.dtype,
        clause=clause,
        expression=type_coerce(read, NullType()),
        convert=found.convert,
        ordered=ordered,
        declared=_type_name(clause.type),
    )


def unsupported_reason(clause: ColumnClause[Any]) -> str:
    """Return the name of a column and why it is not supported."""
    lacking = isinstance(clause.type, types.Numeric) and clause.type.precision is None
    return f"{clause.name!r} ({_type_name(clause.type)}{' without a number of digits' if lacking else ''})"


def _type_name(declared: TypeEngine[Any]) -> str:
    if isinstance(declared, NullType):
        return "a type that is not known"
    return str(getattr(declared, "__visit_name__", type(declared).__name__)).upper()


def _sqlite_type(declared: TypeEngine[Any]) -> _Type | None:
    listed = _listed(declared, _SQLITE_TYPES)
    return _decimal_type(declared, _number_of_sqlite) if listed is None else listed


def _postgresql_type(declared: TypeEngine[Any]) -> _Type | None:
    if isinstance(declared, types.DateTime) and declared.timezone:
        return _Type(pa.timestamp("us", "UTC"), _instant, Text())
    if isinstance(declared, types.Time) and declared.timezone:
        return None
    listed = _listed(declared, _POSTGRESQL_TYPES)
    return _decimal_type(declared, _only(decimal.Decimal)) if listed is None else listed


def _listed(declared: TypeEngine[Any], listed: tuple[tuple[type, _Type], ...]) -> _Type | None:
    return next((found for kind, found in listed if isinstance(declared, kind)), None)


def _decimal_type(declared: TypeEngine[Any], number: _Convert) -> _Type | None:
    """Return the decimal type of a numeric column; None if there is none with its digits, or it is no such column."""
    if not isinstance(declared, types.Numeric):
        return None
    digits, scale = declared.precision, declared.scale or 0
    if digits is None or not 0 <= scale <= digits <= _DIGITS256:
        return None
    dtype = pa.decimal128(digits, scale) if digits <= _DIGITS128 else pa.decimal256(digits, scale)
    unit, limit = decimal.Decimal(1).scaleb(-scale), decimal.Decimal(10) ** (digits - scale)

    def convert(value: Any) -> decimal.Decimal:
        found = number(value)
        if not found.is_finite():
            raise ValueError("is not a number that a decimal has")
        try:
            exact = _WIDE.quantize(found, unit)
        except decimal.DecimalException:
            exact = limit
        if abs(exact) >= limit:
            raise ValueError(f"has more digits than decimal({digits}, {scale})")
        return exact

    return _Type(dtype, convert)


def _only(kind: type) -> _Convert:
    def convert(value: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"is {_kind(value)}")
        return value

    return convert


def _kind(value: Any) -> str:
    names = {str: "text", bytes: "bytes", int: "a whole number", float: "a float"}
    return names.get(type(value), "text that is not UTF-8" if isinstance(value, bytes) else type(value).__name__)


_text = _only(str)


def _flag(value: Any) -> bool:
    if type(value) is not int or value not in (0, 1):
        raise ValueError("is neither 0 nor 1")
    return value == 1


def _number_of_sqlite(value: Any) -> decimal.Decimal:
    """Return the one decimal of at most 15 digits that a number of SQLite stands for."""
    if type(value) is int:
        return decimal.Decimal(value)
    if type(value) is not float:
        raise ValueError(f"is {_kind(value)}")
    found = decimal.Decimal(repr(value))
    if len(found.as_tuple().digits) > _FLOAT_DIGITS:
        raise ValueError(f"is a float of more than {_FLOAT_DIGITS} digits, which is not an exact decimal")
    return found


def _parsed(pattern: re.Pattern[str], parse: Callable[[str], Any], form: str) -> _Convert:
    def convert(value: Any) -> Any:
        if type(value) is str and pattern.fullmatch(value):
            try:
                return parse(value)
            except ValueError:
                pass
        raise ValueError(f"is not {form}")

    return convert


_date = _parsed(_DATE, dt.date.fromisoformat, "a date YYYY-MM-DD of the years 1 to 9999")
_time = _parsed(_TIME, dt.time.fromisoformat, "a time HH:MM:SS, with at most 6 decimals")
_moment = _parsed(
    _MOMENT,
    dt.datetime.fromisoformat,
    "a time YYYY-MM-DD HH:MM:SS of the years 1 to 9999, with at most 6 decimals and without a zone",
)
_instant = _parsed(_INSTANT, dt.datetime.fromisoformat, "a time of the years 1 to 9999")


def _interval(value: Any) -> int:
    """Return the microseconds of an interval in PostgreSQL's own style."""
    match = _INTERVAL.fullmatch(_text(value))
    if match is None or not value:
        raise ValueError("is not an interval of days and times; years and months have no fixed length")
    clock = [int(match[name] or 0) for name in ("hours", "minutes", "seconds")]
    seconds = clock[0] * 3600 + clock[1] * 60 + clock[2]
    micros = seconds * 10**6 + int((match["fraction"] or "").ljust(6, "0"))
    total = int(match["days"] or 0) * 86_400 * 10**6 + (-micros if match["sign"] == "-" else micros)
    if not -_INT64 <= total < _INT64:
        raise ValueError("is longer than 64 bits of microseconds")
    return total


_SHARED_TYPES: tuple[tuple[type, _Type], ...] = (
    (types.Float, _Type(pa.float64(), _only(float))),
    (types.String, _Type(pa.string(), _only(str))),
    (types.LargeBinary, _Type(pa.binary(), _only(bytes))),
)
_SQLITE_TYPES: tuple[tuple[type, _Type], ...] = (
    (types.Integer, _Type(pa.int64(), _only(int))),
    (types.Boolean, _Type(pa.bool_(), _flag)),
    (types.Date, _Type(pa.date32(), _date)),
    (types.Time, _Type(pa.time64("us"), _time)),
    (types.DateTime, _Type(pa.timestamp("us"), _moment)),
    *_SHARED_TYPES,
)
_POSTGRESQL_TYPES: tuple[tuple[type, _Type], ...] = (
    (types.SmallInteger, _Type(pa.int16(), _only(int))),
    (types.BigInteger, _Type(pa.int64(), _only(int))),
    (types.Integer, _Type(pa.int32(), _only(int))),
    (types.Boolean, _Type(pa.bool_(), _only(bool))),
    (types.REAL, _Type(pa.float32(), _only(float), Double())),  # its text has fewer digits than its value
    (types.Uuid, _Type(pa.string(), _only(str), Text())),
    (types.Date, _Type(pa.date32(), _date, Text())),
    (types.Time, _Type(pa.time64("us"), _time, Text())),
    (types.DateTime, _Type(pa.timestamp("us"), _moment, Text())),
    (postgresql.INTERVAL, _Type(pa.duration("us"), _interval, Text())),
    *_SHARED_TYPES,
)
"""The first entry that a type is an instance of holds."""
