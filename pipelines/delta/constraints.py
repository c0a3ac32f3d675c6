"""CHECK constraints of Delta tables whose meaning is the same in Spark and in DuckDB, which checks rows in a task.

Supported are comparisons of columns with numbers, texts and each other, IN, BETWEEN, IS NULL, AND, OR and NOT. Any
other constraint is refused before the first row is read. Spark checks the rows again when it writes them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

__all__ = ["broken", "constraint_columns", "unsupported_part"]

_COMPARISONS: Final = {
    "COMPARE_EQUAL", "COMPARE_NOTEQUAL", "COMPARE_LESSTHAN", "COMPARE_GREATERTHAN", "COMPARE_LESSTHANOREQUALTO",
    "COMPARE_GREATERTHANOREQUALTO", "COMPARE_BETWEEN", "COMPARE_IN", "COMPARE_NOT_IN",
}  # fmt: skip
_NUMBER, _TEXT, _TRUTH = "number", "text", "truth"


def unsupported_part(expression: str, schema: pa.Schema) -> str | None:
    """Return the part of a constraint that cannot be checked here; None if the whole constraint can be checked.

    Examples
    --------
    >>> schema = pa.schema({"amount": pa.int64(), "code": pa.string()})
    >>> unsupported_part("amount >= 0 AND code IN ('a', 'b')", schema) is None
    True
    >>> unsupported_part("hash(code) > 0", schema)
    'a function'
    """
    if "\\" in expression:
        return "a backslash, which Spark reads as an escape"
    try:
        kind = _kind(_parsed(expression), schema)
    except _UnsupportedError as error:
        return str(error)
    except (KeyError, IndexError, TypeError):
        return "its syntax"
    return None if kind == _TRUTH else "its type"


def constraint_columns(expression: str, schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns that a supported constraint names, spelled as in the table.

    Examples
    --------
    >>> constraint_columns("AMOUNT >= 0 AND amount < 9", pa.schema({"amount": pa.int64()}))
    ('amount',)
    """
    there = {name.lower(): name for name in schema.names}
    named = (there[name.lower()] for name in _names(_parsed(expression)) if name.lower() in there)
    return tuple(dict.fromkeys(named))


def broken(expression: str, rows: pa.Table) -> NDArray[np.bool_]:
    """Return a mask of the rows that violate a constraint, including rows for which it is null."""
    import duckdb  # noqa: PLC0415 - heavy, and few tables have constraints

    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false")
        connection.execute("SET threads = 1")
        connection.register("checked", rows)
        sql = f"SELECT NOT coalesce(({_translated(expression)}), false) AS broken FROM checked"  # noqa: S608 - parsed before
        found = connection.sql(sql).to_arrow_table()
    return np.asarray(found.column("broken"), dtype=bool)


def _parsed(expression: str) -> Any:
    """Return DuckDB's syntax tree of an expression."""
    import duckdb  # noqa: PLC0415 - heavy, and few tables have constraints

    statement = f"SELECT {_translated(expression)}"
    with duckdb.connect() as connection:
        try:
            row = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [statement]).fetchone()
        except duckdb.Error as error:
            raise _UnsupportedError(str(error)) from error
    assert row is not None
    document: dict[str, Any] = json.loads(row[0])
    if document.get("error"):
        raise _UnsupportedError(str(document.get("error_message", "its syntax")))
    return document["statements"][0]["node"]["select_list"][0]


def _names(node: Any) -> Iterator[str]:
    """Yield the column names anywhere in a syntax tree."""
    if isinstance(node, dict):
        if node.get("class") == "COLUMN_REF":
            yield node["column_names"][-1]
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _names(child)


def _translated(expression: str) -> str:
    return expression if '"' in expression else expression.replace("`", '"')


class _UnsupportedError(Exception):
    """The unsupported part of a constraint."""


def _kind(node: Mapping[str, Any], schema: pa.Schema) -> str:
    """Return the value kind of an expression node."""
    shape = node["class"]
    if shape == "COLUMN_REF":
        return _column_kind(node["column_names"], schema)
    if shape == "CONSTANT":
        return _constant_kind(node)
    if shape == "CONJUNCTION":
        return _all_of(node["children"], schema, _TRUTH)
    if shape in {"COMPARISON", "BETWEEN"} or node["type"] in _COMPARISONS:
        return _comparison_kind(node, schema)
    if shape == "OPERATOR" and node["type"] in {"OPERATOR_IS_NULL", "OPERATOR_IS_NOT_NULL"}:
        for child in node["children"]:
            _kind(child, schema)
        return _TRUTH
    if shape == "OPERATOR" and node["type"] == "OPERATOR_NOT":
        return _all_of(node["children"], schema, _TRUTH)
    raise _UnsupportedError(f"a {shape.lower()}")


def _comparison_kind(node: Mapping[str, Any], schema: pa.Schema) -> str:
    parts = [node[name] for name in ("left", "right", "input", "lower", "upper") if name in node]
    kinds = {_kind(part, schema) for part in [*parts, *node.get("children", ())]}
    if len(kinds) != 1:
        raise _UnsupportedError("a comparison of different types")
    return _TRUTH


def _all_of(nodes: list[Mapping[str, Any]], schema: pa.Schema, kind: str) -> str:
    if any(_kind(node, schema) != kind for node in nodes):
        raise _UnsupportedError(f"a value that is no {kind}")
    return kind


def _column_kind(names: list[str], schema: pa.Schema) -> str:
    there = {name.lower(): name for name in schema.names}
    if len(names) != 1 or names[0].lower() not in there:
        raise _UnsupportedError(f"column {'.'.join(names)}")
    kind = schema.field(there[names[0].lower()]).type
    if pa.types.is_integer(kind) or pa.types.is_float64(kind) or pa.types.is_decimal(kind):
        return _NUMBER
    if pa.types.is_string(kind):
        return _TEXT
    if pa.types.is_boolean(kind):
        return _TRUTH
    raise _UnsupportedError(f"column {names[0]} of type {kind}")


def _constant_kind(node: Mapping[str, Any]) -> str:
    """Return the kind of a constant, as described by DuckDB 2 or an earlier version."""
    name = node["literal"]["kind"] if "literal" in node else node["value"]["type"]["id"]
    if name in {"INTEGER", "NUMERIC", "BIGINT", "HUGEINT", "DECIMAL", "SMALLINT", "TINYINT"}:
        return _NUMBER
    if name in {"STRING", "VARCHAR"}:
        return _TEXT
    if name == "BOOLEAN":
        return _TRUTH
    raise _UnsupportedError(f"a constant of type {name}")
