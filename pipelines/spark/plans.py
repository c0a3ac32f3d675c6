"""Analyzed Spark plans as sequences of row-wise nodes, and the refusal of everything that is not.

A frame whose result depends only on each row, and is the same each time, consists of projections and filters of
deterministic expressions. `row_wise_nodes` reads them from the plan that Spark analyzed. Spark has no Python API for
its plans, so this module uses the Scala classes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import Column, DataFrame

__all__ = [
    "TIMES",
    "Item",
    "NotRowWiseError",
    "RowWiseNode",
    "analyzed",
    "as_column",
    "failing",
    "renumbered",
    "row_wise_nodes",
]

_REMEDY: Final = "do it in a query over the facts, or before the files arrive"
_OPERATORS: Final = {
    "Aggregate": "an aggregate combines several records",
    "Window": "a window function looks at other records",
    "Generate": "explode and other generators make several rows of one record, which has one outcome only",
    "Expand": "it makes several rows of one record, which has one outcome only",
    "Join": "a join reads other rows; a lookup does that",
    "AsOfJoin": "a join reads other rows; a lookup does that",
    "LateralJoin": "a join reads other rows",
    "Union": "a union adds rows",
    "Intersect": "it compares rows with others",
    "Except": "it compares rows with others",
    "Deduplicate": "it compares rows with each other; `duplicates` does that",
    "Distinct": "it compares rows with each other; `duplicates` does that",
    "Sort": "a batch has no order",
    "GlobalLimit": "it depends on the order of the rows",
    "LocalLimit": "it depends on the order of the rows",
    "Offset": "it depends on the order of the rows",
    "Tail": "it depends on the order of the rows",
    "Sample": "a sample is random",
    "MapInPandas": "it may add, remove and combine rows; use a udf",
    "MapInArrow": "it may add, remove and combine rows; use a udf",
    "PythonMapInArrow": "it may add, remove and combine rows; use a udf",
}
_TODAY: Final = {"now", "today", "tomorrow", "yesterday"}
TIMES: Final = ("date", "timestamp", "timestamp_ntz")
"""Spark's names of the types that have a year."""


class NotRowWiseError(Exception):
    """The plan is not row-wise or not deterministic; the message is the reason and the remedy."""


@dataclass(frozen=True)
class Item:
    """One output column of a projection.

    Parameters
    ----------
    name
        Name of the column.
    expression
        Catalyst expression of its value.
    named
        The same as a named expression, with the id that later nodes refer to.
    simple
        Whether it passes on a column or a constant that is not a time, which cannot fail.
    """

    name: str
    expression: Any
    named: Any
    simple: bool


@dataclass(frozen=True)
class RowWiseNode:
    """A projection (`items`) or a filter (`condition`) of an analyzed plan.

    Parameters
    ----------
    inputs
        Catalyst attributes of the rows that the node receives, in order.
    items
        Output columns of a projection; empty for a filter.
    condition
        Catalyst condition of a filter; None for a projection.
    calls_python
        Whether the node calls a user-defined function in Python.
    """

    inputs: tuple[Any, ...]
    items: tuple[Item, ...]
    condition: Any
    calls_python: bool


def analyzed(frame: DataFrame) -> Any:
    """Return the analyzed plan of a frame."""
    return frame._jdf.queryExecution().analyzed()  # noqa: SLF001 - the plan has no Python API


def as_column(expression: Any) -> Column:
    """Return a Catalyst expression as a column."""
    from pyspark.sql import Column  # noqa: PLC0415 - pyspark is heavy

    return Column(_jvm().org.apache.spark.sql.classic.ExpressionUtils.column(expression))


def renumbered(frame: DataFrame, column: int, attribute: Any) -> Column:
    """Return a column of a frame under the name and id of an attribute, so that analyzed expressions refer to it.

    An id is given once: Spark would replace an id that one plan gives twice.
    """
    jvm = _jvm()
    none, empty = jvm.scala.Option.empty(), jvm.PythonUtils.toSeq([])
    own = analyzed(frame).output().apply(column)
    if own.exprId().equals(attribute.exprId()):
        return as_column(own)
    alias = jvm.org.apache.spark.sql.catalyst.expressions.Alias
    return as_column(alias(own, attribute.name(), attribute.exprId(), empty, none, empty))


def row_wise_nodes(frame: DataFrame, given: DataFrame) -> tuple[RowWiseNode, ...]:
    """Return the nodes that lead from one frame to another, first node first.

    Parameters
    ----------
    frame
        Resulting frame.
    given
        Frame that it was made from.

    Raises
    ------
    NotRowWiseError
        If a node is neither a projection nor a filter, or an expression is not deterministic.
    """
    node, start = analyzed(frame), analyzed(given)
    nodes: list[RowWiseNode] = []
    while not node.equals(start):
        kind = _class(node)
        if kind not in {"Project", "Filter", "SubqueryAlias"}:
            raise _refused(node, kind)
        if kind != "SubqueryAlias":
            nodes.append(_node(node, kind))
        node = node.children().apply(0)
    return tuple(reversed(nodes))


def failing(expression: Any) -> Any:
    """Return an analyzed expression that fails where Spark gives a wrong value without an error; else it is the same.

    Spark's conversion of a number to a decimal makes null of NaN and infinity even under ANSI rules, while a conversion
    of text fails. So the number is converted by way of text: its shortest digits, which Spark uses for the decimal too.
    Only `try_cast` is to give null. And `date_add` and `date_sub` wrap around at the ends of 32 bits.

    Parameters
    ----------
    expression
        Catalyst expression, analyzed under ANSI rules.
    """
    children = list(map(failing, _each(expression.children())))
    expression = expression.withNewChildren(_jvm().PythonUtils.toSeq(children))
    kind = _class(expression)
    if kind in {"DateAdd", "DateSub"}:
        return _checked_days(expression, kind)
    if kind != "Cast" or str(expression.evalMode().toString()) == "TRY":
        return expression
    for leaf in ("DoubleType", "StringType"):
        given, wanted = expression.child().dataType(), expression.dataType()
        way = _by_way_of(given, wanted, getattr(_types(), leaf))
        if not way.equals(given):
            child = expression.copy(expression.child(), way, expression.timeZoneId(), expression.evalMode())
            expression = expression.withNewChildren(_jvm().PythonUtils.toSeq([child]))
    return expression


def _checked_days(expression: Any, kind: str) -> Any:
    """Return the sum or difference of a date and a number of days with the check of an overflow."""
    catalyst = _jvm().org.apache.spark.sql.catalyst.expressions
    day, days = _each(expression.children())
    ansi = catalyst.EvalMode.ANSI()
    days = catalyst.Cast(days, _types().IntegerType, _jvm().scala.Option.empty(), ansi)
    operator = catalyst.Add if kind == "DateAdd" else catalyst.Subtract
    less_precise = True  # of decimals only
    context = catalyst.NumericEvalContext(ansi, less_precise)
    return catalyst.DateFromUnixDate(operator(catalyst.UnixDate(day), days, context))


def _by_way_of(given: Any, wanted: Any, leaf: Any) -> Any:
    """Return a type with another type for each floating-point number in it that is to become a decimal."""
    kinds = _class(given), _class(wanted)
    if kinds[0] in {"FloatType$", "DoubleType$"} and kinds[1] == "DecimalType":
        return leaf
    if kinds == ("ArrayType", "ArrayType"):
        return given.copy(_by_way_of(given.elementType(), wanted.elementType(), leaf), given.containsNull())
    if kinds == ("MapType", "MapType"):
        key = _by_way_of(given.keyType(), wanted.keyType(), leaf)
        return given.copy(key, _by_way_of(given.valueType(), wanted.valueType(), leaf), given.valueContainsNull())
    if kinds == ("StructType", "StructType"):
        fields = [
            one.copy(one.name(), _by_way_of(one.dataType(), other.dataType(), leaf), one.nullable(), one.metadata())
            for one, other in zip(given.fields(), wanted.fields(), strict=True)
        ]
        return _types().createStructType(fields)
    return given


def _types() -> Any:
    return _jvm().org.apache.spark.sql.types.DataTypes


def _node(node: Any, kind: str) -> RowWiseNode:
    for expression in _each(node.expressions()):
        _require_deterministic(expression)
    items = tuple(map(_item, _each(node.projectList()))) if kind == "Project" else ()
    return RowWiseNode(
        tuple(_each(node.child().output())),
        items,
        node.condition() if kind == "Filter" else None,
        calls_python=any(_contains(each, "PYTHON_UDF") for each in _each(node.expressions())),
    )


def _item(named: Any) -> Item:
    expression = named.child() if _class(named) == "Alias" else named
    kind = _class(expression)
    simple = kind == "AttributeReference" or (kind == "Literal" and _type(expression) not in TIMES)
    return Item(named.name(), expression, named, simple)


def _refused(node: Any, kind: str) -> NotRowWiseError:
    if not node.children().size():
        return NotRowWiseError("the returned frame is not made from the one that the function received; return that")
    reason = _OPERATORS.get(kind, "a step derives, renames, selects and filters row by row")
    return NotRowWiseError(f"Spark's operator {kind} is not allowed: {reason}; {_REMEDY}")


def _require_deterministic(expression: Any) -> None:
    """Raise an error if an expression may give another value for the same row.

    Raises
    ------
    NotRowWiseError
        If so. The message names the function.
    """
    if _contains(expression, "PLAN_EXPRESSION"):
        raise NotRowWiseError(f"a subquery reads rows outside the record; use a lookup, or {_REMEDY}")
    for each in _tree(expression):
        name = _class(each)
        if _type(each) in TIMES:
            for text in filter(_names_today, _each(each.children())):
                raise _changing(f"the text {text.sql()} as a time")
        if name == "VariableReference":
            raise _changing(f"the session variable {each.sql()}")
    if expression.deterministic() and not _contains(expression, "CURRENT_LIKE"):
        return
    culprit = [each for each in _tree(expression) if not each.deterministic() or _contains(each, "CURRENT_LIKE")][-1]
    raise _changing(f"{culprit.prettyName()}()" if hasattr(culprit, "prettyName") else culprit.sql())


def _changing(what: str) -> NotRowWiseError:
    return NotRowWiseError(
        f"{what} may give another value when a batch is repeated; derive the value from the record's columns, or use "
        "`sink.audit` for the file, the batch and the time of loading"
    )


def _names_today(operand: Any) -> bool:
    """Return whether the operand of a conversion to a time is a constant text such as 'today', in any spelling."""
    if _type(operand) != "string" or not operand.foldable():
        return False
    texts = [each.value() for each in _tree(operand) if _class(each) == "Literal"]
    with suppress(Exception):  # not every constant can be computed before the plan is optimized
        texts.append(operand.eval(_jvm().org.apache.spark.sql.catalyst.InternalRow.empty()))
    return any(str(text).strip().lower() in _TODAY for text in texts)


def _tree(expression: Any) -> Iterator[Any]:
    """Yield an expression and everything below it, from the top."""
    yield expression
    for child in _each(expression.children()):
        yield from _tree(child)


def _contains(expression: Any, pattern: str) -> bool:
    patterns = _jvm().org.apache.spark.sql.catalyst.trees.TreePattern
    return bool(expression.containsPattern(getattr(patterns, pattern)()))


def _type(expression: Any) -> str:
    return str(expression.dataType().simpleString())


def _class(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _each(sequence: Any) -> Iterator[Any]:
    return (sequence.apply(at) for at in range(sequence.size()))


def _jvm() -> Any:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - pyspark is heavy

    return SparkSession.active()._jvm  # noqa: SLF001 - the gateway to Spark's classes
