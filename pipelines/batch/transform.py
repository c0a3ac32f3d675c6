"""Transformations between the source and the lookups: their check, and their application to the rows of a batch.

`check_transform` builds each step on an empty frame, without any record, so the steps cannot depend on the data of a
batch. The analyzed plans must be row-wise and deterministic (`headrace.pipelines.spark.plans`), so a replay of a batch
gives the same rows. `Transform.apply` then rebuilds these plans over the frame of a batch:

- The columns of Headrace (origin, state, causes, notes) pass through, whatever a step selects or renames.
- Only open rows are computed. A row for which an expression fails is rejected with the expression as its cause, and so
  is one for which it gives a time outside the years 1 to 9999, which many readers of tables cannot hold.
- A row that a condition removes gets the state `FILTERED`, so that the next stage counts it.
- A function in Python would run on every row. So the open rows are separated before it, and the others bypass it.
"""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from headrace.pipelines.batch.user_code import UserCodeError, imported_from, user_function
from headrace.pipelines.config.column_types import TYPE_NAMES, arrow_type
from headrace.pipelines.config.problems import DocumentPath, Problem
from headrace.pipelines.errors import PipelineFileError
from headrace.pipelines.spark.columns import quoted, spark_schema
from headrace.pipelines.spark.frame import FILE, MALFORMED, NOTE, RECORD_NUMBER, STATE, State
from headrace.pipelines.spark.plans import (
    TIMES,
    NotRowWiseError,
    RowWiseNode,
    analyzed,
    as_column,
    failing,
    renumbered,
    row_wise_nodes,
)
from headrace.storage.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from headrace.pipelines.config.model import PipelineConfig
    from headrace.pipelines.config.transform import TransformStep

__all__ = ["Transform", "check_transform"]

_OWN: Final = (FILE, RECORD_NUMBER, MALFORMED, STATE, NOTE)
_TODAY: Final = re.compile(r"\b(?:date|timestamp\w*)\s*(['\"])\s*(?:now|today|tomorrow|yesterday)\s*\1", re.IGNORECASE)
_SHOWN: Final = 200
_SQL_STATE: Final = re.compile(r"\s*SQLSTATE: \w+.*", re.DOTALL)
_ERROR_CLASS: Final = re.compile(r"^\[[A-Z_.0-9]+\] ")


@dataclass(frozen=True)
class _Step:
    """A checked step: its name in messages, and the nodes that it consists of."""

    label: str
    nodes: tuple[RowWiseNode, ...]


@dataclass(frozen=True)
class Transform:
    """The checked transformations of a pipeline.

    Parameters
    ----------
    schema
        Columns after the last step.
    """

    schema: pa.Schema
    _steps: tuple[_Step, ...]

    @property
    def python_steps(self) -> tuple[str, ...]:
        """Names of the steps that call user-defined functions in Python, whose errors stop a batch."""
        return tuple(step.label for step in self._steps if any(node.calls_python for node in step.nodes))

    def apply(self, frame: DataFrame, persisted: list[DataFrame]) -> DataFrame:
        """Return the transformed rows of a batch, with the columns of Headrace.

        Parameters
        ----------
        frame
            Rows as read: the source's columns, then the columns of Headrace.
        persisted
            List that receives the frames to unpersist after the batch.
        """
        columns = [name for name in frame.columns if name not in _OWN]
        frame = frame.select(*_own(), *map(quoted, columns))
        for step in self._steps:
            for node in step.nodes:
                frame = _applied(frame, node, step.label, persisted)
        return frame


# Check


def check_transform(config: PipelineConfig, source: pa.Schema) -> Transform:
    """Check the transformations of a pipeline against the columns of its source; no record is read.

    Raises
    ------
    PipelineFileError
        If a step cannot be computed, is not row-wise, or may give other rows when a batch is repeated. The message
        names the line, the step and the column.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415 - pyspark is heavy

    spark = SparkSession.active()
    _refuse_reserved(config, source.names, ("source", "schema"), "source column")
    steps: list[_Step] = []
    schema = spark.createDataFrame([], spark_schema(source)).schema
    with _strict(spark):
        for number, step in enumerate(config.transform):
            given = spark.createDataFrame([], schema)
            checker = _Checker(config, step, number, given)
            after, nodes = checker.checked()
            steps.append(_Step(checker.label, nodes))
            schema = spark.createDataFrame([], after.schema).schema
    return Transform(_arrow_schema(config, given=schema), tuple(steps))


class _Checker:
    """The check of one step on an empty frame."""

    def __init__(self, config: PipelineConfig, step: TransformStep, number: int, given: DataFrame) -> None:
        self._config = config
        self._step = step
        self._place: DocumentPath = ("transform", number, step.kind)
        self._given = given
        self.label = f"transform.{number}.{step.kind}"

    def checked(self) -> tuple[DataFrame, tuple[RowWiseNode, ...]]:
        """Return the empty result, and the nodes that lead to it."""
        frame: DataFrame = getattr(self, f"_{self._step.kind}")()
        return frame, self._nodes(frame, self._place)

    def _nodes(self, frame: DataFrame, place: DocumentPath) -> tuple[RowWiseNode, ...]:
        """Return the nodes of a frame that was made from the given one; refuse those that are not row-wise."""
        try:
            nodes = row_wise_nodes(frame, self._given)
        except NotRowWiseError as error:
            raise self._refused(str(error), place) from error
        for name in dict.fromkeys(item.name for node in nodes for item in node.items):
            if name.startswith("_"):
                raise self._refused(f"column {name!r} begins with '_', which is kept for Headrace; rename it", place)
        names = frame.columns
        for at, name in enumerate(names):
            twin = next((other for other in names[:at] if other.lower() == name.lower()), None)
            if twin is not None:
                how = "occurs twice" if twin == name else f"and {twin!r} differ only in case, and Spark ignores case"
                raise self._refused(f"column {name!r} {how}; rename one", place)
        return nodes

    def _derive(self) -> DataFrame:
        assert self._step.derive is not None
        columns: dict[str, Column] = {}
        for name, value in self._step.derive.items():
            place = (*self._place, name)
            twin = next((each for each in self._given.columns if each.lower() == name.lower()), name)
            if twin != name:
                raise self._refused(f"column {name!r} and {twin!r} differ only in case; write {twin!r}", place)
            columns[name] = self._expression(value, place)
            with self._explained(place):
                self._nodes(self._given.select(columns[name].alias(name)), place)
        with self._explained(self._place):
            return self._given.withColumns(columns)

    def _where(self) -> DataFrame:
        assert self._step.where is not None
        with self._explained(self._place):
            return self._given.where(self._expression(self._step.where, self._place))

    def _rename(self) -> DataFrame:
        assert self._step.rename is not None
        for old in self._step.rename:
            self._require(old, (*self._place, old))
        names = ((name, self._step.rename.get(name, name)) for name in self._given.columns)
        return self._given.select(*(self._given[quoted(old)].alias(new) for old, new in names))

    def _select(self) -> DataFrame:
        assert self._step.select is not None
        for at, name in enumerate(self._step.select):
            self._require(name, (*self._place, at))
        return self._given.select(*map(quoted, self._step.select))

    def _python(self) -> DataFrame:
        assert self._step.python is not None
        try:
            function = user_function(self._step.python, self._config.folder)
            with imported_from(self._config.folder), self._explained(self._place):
                first, second = function(self._given), function(self._given)
        except UserCodeError as error:
            raise self._refused(str(error), self._place) from error
        except PipelineFileError:
            raise
        except Exception as error:
            text = f"{self._step.python} failed for an empty frame: {type(error).__name__}: {error}; correct it"
            raise self._refused(text, self._place) from error
        self._require_frame(first)
        self._nodes(first, self._place)
        if _without_ids(first) != _without_ids(second):
            text = f"{self._step.python} gives two plans when it is called twice; a replay would give other rows"
            raise self._refused(f"{text}; do not use the time, random numbers or state in it", self._place)
        return first

    def _require_frame(self, returned: Any) -> None:
        from pyspark.sql import DataFrame  # noqa: PLC0415 - pyspark is heavy

        if not isinstance(returned, DataFrame):
            text = f"{self._step.python} returned {type(returned).__name__}; return a Spark DataFrame"
            raise self._refused(text, self._place)

    def _expression(self, value: str | float, place: DocumentPath) -> Column:
        from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

        text = _text(value)
        if _TODAY.search(text):
            shown = "a literal such as date 'today' changes from day to day, so a replay would give other rows"
            raise self._refused(f"{shown}; derive the value from the record's columns, or use `sink.audit`", place)
        with self._explained(place):
            return functions.expr(text)

    def _require(self, name: str, place: DocumentPath) -> None:
        if name not in self._given.columns:
            raise self._refused(self._unknown(name), place)

    def _unknown(self, name: str) -> str:
        names = self._given.columns
        derived = self._step.derive or {}
        if name in derived:
            return f"{name!r} is derived in this step; an expression sees the columns before the step, so use two steps"
        return f"there is no column {name!r}{nearest(name, names)}; this step has {', '.join(names)}"

    @contextmanager
    def _explained(self, place: DocumentPath) -> Iterator[None]:
        """Convert an analysis error of Spark to an error that names the line and the nearest column."""
        from pyspark.errors import PySparkException  # noqa: PLC0415 - pyspark is heavy

        try:
            with _quiet():
                yield
        except PySparkException as error:
            raise self._refused(self._reason(error), place) from error

    def _reason(self, error: Any) -> str:
        kind = error.getCondition() or ""
        if kind.startswith("UNRESOLVED_COLUMN"):
            return self._unknown((error.getMessageParameters() or {}).get("objectName", "?").replace("`", ""))
        if kind == "MISSING_GROUP_BY":
            return "an aggregate combines several records; a step is computed row by row"
        first = _SQL_STATE.sub("", str(error)).strip().splitlines()
        return _ERROR_CLASS.sub("", first[0] if first else kind).rstrip(".") + "; correct the step"

    def _refused(self, reason: str, place: DocumentPath) -> PipelineFileError:
        return self._config.error([Problem(place, f"{'.'.join(map(str, place))}: {reason}")])


def _refuse_reserved(config: PipelineConfig, names: Sequence[str], place: DocumentPath, label: str) -> None:
    for name in names:
        if name.startswith("_"):
            text = f"{label} {name!r} begins with '_', which is kept for Headrace; rename it"
            raise config.error([Problem((*place, name), text)])


def _arrow_schema(config: PipelineConfig, given: Any) -> pa.Schema:
    """Return the resulting columns; refuse types that facts cannot have."""
    fields = []
    for field in given:
        kind = field.dataType.simpleString()
        if "." in field.name or "`" in field.name:
            text = (
                f"transform: column {field.name!r} has a dot or a backtick, which Spark's stages do not take; rename it"
            )
            raise config.error([Problem(("transform", len(config.transform) - 1), text)])
        try:
            fields.append(pa.field(field.name, arrow_type(kind)))
        except PipelineFileError as error:
            place = ("transform", len(config.transform) - 1)
            text = (
                f"transform: column {field.name!r} has the type {kind}, which facts cannot hold; cast it to one of "
                f"{', '.join(TYPE_NAMES)}, or leave it out with `select`"
            )
            raise config.error([Problem(place, text)]) from error
    return pa.schema(fields)


def _text(value: str | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _without_ids(frame: DataFrame) -> str:
    """Return a plan as text, without the expression ids, which Spark assigns again in each analysis."""
    return re.sub(r"#\d+L?", "", str(analyzed(frame).toString()))


@contextmanager
def _strict(spark: SparkSession) -> Iterator[None]:
    """Analyze expressions under ANSI rules, whatever the session says: a value that does not convert is an error."""
    name = "spark.sql.ansi.enabled"
    before = spark.conf.get(name)
    spark.conf.set(name, "true")
    try:
        yield
    finally:
        spark.conf.set(name, before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep PySpark from logging an analysis error, which is reported with its line instead."""
    logger = logging.getLogger("SQLQueryContextLogger")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


# Application


def _applied(frame: DataFrame, node: RowWiseNode, label: str, persisted: list[DataFrame]) -> DataFrame:
    """Return a frame after one node."""
    width = len(_OWN)
    inputs = (renumbered(frame, width + at, attribute) for at, attribute in enumerate(node.inputs))
    frame = frame.select(*_own(), *inputs)
    if not node.calls_python:
        return _computed(frame, node, label)
    from pyspark import StorageLevel  # noqa: PLC0415 - pyspark is heavy

    frame = frame.persist(StorageLevel.MEMORY_AND_DISK_DESER)
    persisted.append(frame)
    computed = _computed(frame.where(_is_open()), node, label)
    return computed.union(_closed(frame, computed))


def _closed(frame: DataFrame, computed: DataFrame) -> DataFrame:
    """Return the rows that bypass a function in Python: no values, with the columns of the computed rows."""
    from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

    fields = computed.schema.fields[len(_OWN) :]
    empty = (functions.lit(None).cast(field.dataType).alias(field.name) for field in fields)
    return frame.where(~_is_open()).select(*_own(), *empty)


def _computed(frame: DataFrame, node: RowWiseNode, label: str) -> DataFrame:
    """Return a frame after a projection or a filter of its open rows."""
    from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

    inputs = [as_column(attribute) for attribute in node.inputs]
    attempts = _attempts(node)
    results = [
        functions.when(_is_open(), _attempted(each)).alias(f"_result_{at}") for at, each in enumerate(attempts.values())
    ]
    frame = frame.select(*_own(), *inputs, *results)
    state, malformed = _judged(node, attempts, label)
    values = inputs
    if node.condition is None:
        places = {name: at for at, name in enumerate(attempts)}
        values = [
            as_column(item.named) if item.simple else _value(places[item.name], item.expression).alias(item.name)
            for item in node.items
        ]
    own = {STATE: state.alias(STATE), MALFORMED: malformed.alias(MALFORMED)}
    return frame.select(*(own.get(name, functions.col(name)) for name in _OWN), *values)


def _attempts(node: RowWiseNode) -> dict[str, Any]:
    """Return the expressions of a node that can fail, by column; a condition has no column."""
    if node.condition is not None:
        return {"": node.condition}
    return {item.name: item.expression for item in node.items if not item.simple}


def _attempted(expression: Any) -> Column:
    """Return a struct with the value of an expression; null if the expression fails."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - pyspark is heavy

    jvm = SparkSession.active()._jvm  # noqa: SLF001 - the gateway to Spark's classes
    catalyst = jvm.org.apache.spark.sql.catalyst.expressions
    text = jvm.org.apache.spark.sql.types.DataTypes.StringType
    name = catalyst.Literal(jvm.org.apache.spark.unsafe.types.UTF8String.fromString("value"), text)
    struct = catalyst.CreateNamedStruct(jvm.PythonUtils.toSeq([name, failing(expression)]))
    return as_column(catalyst.TryEval(struct))


def _result(at: int) -> Column:
    from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

    return functions.col(f"_result_{at}").getField("value")


def _value(at: int, expression: Any) -> Column:
    """Return the value of an attempt; null if it is a time outside the years 1 to 9999."""
    from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

    outside = _outside(_result(at), expression)
    return _result(at) if outside is None else functions.when(~outside, _result(at))


def _outside(value: Column, expression: Any) -> Column | None:
    """Return whether the value of an expression is outside the years 1 to 9999 (in UTC); None if it has no year."""
    from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

    kind = str(expression.dataType().simpleString())
    if kind not in TIMES:
        return None
    zone = "Z" if kind == "timestamp" else ""
    bounds = ("0001-01-01", "9999-12-31")
    if kind != "date":
        bounds = (f"{bounds[0]}T00:00:00{zone}", f"{bounds[1]}T23:59:59.999999{zone}")
    return ~value.between(*(functions.lit(bound).cast(kind) for bound in bounds))


def _judged(node: RowWiseNode, attempts: dict[str, Any], label: str) -> tuple[Column, Column]:
    """Return the new state and causes of each row."""
    from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

    state, malformed = functions.col(STATE), functions.col(MALFORMED)
    failures = [_is_open() & functions.col(f"_result_{at}").isNull() for at in range(len(attempts))]
    if node.condition is not None:
        kept = functions.coalesce(functions.col("_result_0").getField("value"), functions.lit(col=False))
        state = functions.when(_is_open() & ~kept, _state(State.FILTERED)).otherwise(state)
    if not failures:
        return state, malformed
    causes = [
        functions.when(failed, _cause(name, expression, label))
        for failed, (name, expression) in zip(failures, attempts.items(), strict=True)
    ]
    for at, (name, expression) in enumerate(attempts.items()):
        outside = _outside(_result(at), expression)
        if outside is not None:
            failures.append(_is_open() & outside)
            reason = f"{label}: {_shortened(expression.sql())} is not within the years 1 to 9999"
            causes.append(functions.when(failures[-1], _told(name, _result(at).cast("string"), reason)))
    failed = reduce(or_, failures)
    state = functions.when(failed, _state(State.MALFORMED)).otherwise(state)
    return state, functions.when(failed, functions.array_compact(functions.array(*causes))).otherwise(malformed)


def _cause(name: str, expression: Any, label: str) -> Column:
    """Return the cause of a row for which an expression fails: the column, the values that it used, and the reason."""
    from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

    used = {each.name(): as_column(each).cast("string") for each in _references(expression)}
    if len(used) == 1:
        value = next(iter(used.values()))
    else:
        parts = [
            functions.concat(functions.lit(f"{column} = "), functions.coalesce(text, functions.lit("null")))
            for column, text in used.items()
        ]
        value = functions.concat_ws(", ", *parts)
    return _told(name, value, f"{label}: {_shortened(expression.sql())} fails for this record")


def _told(name: str, value: Column, reason: str) -> Column:
    from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

    return functions.struct(
        functions.lit(name or None).cast("string").alias("column"),
        functions.substring(value, 1, _SHOWN).alias("value"),
        functions.lit(reason).alias("reason"),
    )


def _references(expression: Any) -> list[Any]:
    found = expression.references().toSeq()
    return sorted((found.apply(at) for at in range(found.size())), key=lambda each: str(each.name()))


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _own() -> list[Column]:
    from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

    return [functions.col(name) for name in _OWN]


def _is_open() -> Column:
    from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

    return functions.col(STATE) == int(State.OPEN)


def _state(state: State) -> Column:
    from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

    return functions.lit(int(state)).cast("tinyint")
