"""Facts that accumulate: the merge of a batch's rows into the fact table by a declared key.

The rows of a key in a batch are ordered by `sink.order_by`, then by the time and the name of their file, as files are
loaded, and by record number; nulls come first. They are collected per key, so the table changes as if each row had been
merged on its own:

- A key that the table lacks is inserted. Kept columns get the values of its first row.
- A stored row is updated from the rows that are not older than it by `sink.order_by`. If all are older, it stays.
- With `nulls: keep`, each column takes its last value that is not null. The surrogate key and the attributes of a
  lookup come together from the last row that gives the columns of the lookup, so they describe the member that these
  name.

Spark's MERGE writes the result in one commit (`headrace.pipelines.delta.merges`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, Any, Final

from headrace.pipelines.config.merge import kept_columns, lookup_columns, lookup_inputs
from headrace.pipelines.delta.constraints import constraint_columns
from headrace.pipelines.delta.merges import SOURCE, TARGET, MergeClauses
from headrace.pipelines.errors import ConservationError, DeltaTableError
from headrace.pipelines.spark.columns import quoted
from headrace.pipelines.spark.frame import FILE, RECORD_NUMBER

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

    from headrace.pipelines.config.model import PipelineConfig
    from headrace.pipelines.delta.support import Described

__all__ = ["MERGE_KEY", "Folded", "MergeRule", "check_merge", "merge_rule"]

MERGE_KEY: Final = "headrace.mergeKey"
_ROWS: Final = "_rows"
_COUNT: Final = "_count"
_ORDER: Final = "_order"
_PLACED: Final = "_placed_file"
_TIME: Final = "_placed_time"
_PRUNED: Final = ("tinyint", "smallint", "int", "bigint", "string")
"""Types of the first key column whose bounds skip files. Python's times have neither the range nor the zone of Spark's,
so bounds of these are not collected."""


@dataclass(frozen=True)
class MergeRule:
    """Rule by which rows become facts.

    Parameters
    ----------
    key, order_by
        Columns that identify a fact, and columns that order the rows of a key.
    columns
        Columns of the fact table that the pipeline writes.
    kept
        Columns that keep the values of the first row.
    nulls_keep
        Whether a null leaves the stored value as it is.
    looked_up
        Columns of the stream that each column of a lookup follows from, without those of the key.
    """

    key: tuple[str, ...]
    order_by: tuple[str, ...]
    columns: tuple[str, ...]
    kept: tuple[str, ...]
    nulls_keep: bool
    looked_up: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def updated(self) -> tuple[str, ...]:
        """Columns that a later row updates."""
        return tuple(name for name in self.columns if name not in {*self.key, *self.kept})

    def fold(self, rows: DataFrame, pieces: DataFrame, persisted: list[DataFrame]) -> Folded:
        """Return one row for each key of a batch.

        Parameters
        ----------
        rows
            Facts of the batch, with the file and the record number of each.
        pieces
            Pieces of the batch's files, with the time of each file.
        persisted
            List that receives the frames to unpersist after the batch.
        """
        from pyspark import StorageLevel  # noqa: PLC0415 - pyspark is heavy
        from pyspark.sql import functions  # noqa: PLC0415 - as above

        order = functions.struct(*(functions.col(quoted(name)) for name in self.order_by)).alias(_ORDER)
        times = pieces.select(functions.col("file").alias(_PLACED), functions.col("mtime_ns").alias(_TIME)).distinct()
        rows = rows.join(functions.broadcast(times), functions.col(FILE) == functions.col(_PLACED), "left")
        place = (_TIME, _PLACED, functions.col(RECORD_NUMBER))
        values = (functions.col(quoted(name)) for name in self.columns if name not in self.key)
        ordered = [order] if self.order_by else []
        whole = functions.struct(*ordered, *place, *values)
        folded = rows.groupBy(*map(quoted, self.key)).agg(
            functions.sort_array(functions.collect_list(whole)).alias(_ROWS), functions.count("*").alias(_COUNT)
        )
        folded = folded.persist(StorageLevel.MEMORY_AND_DISK_DESER)
        persisted.append(folded)
        first = functions.col(quoted(self.key[0]))
        prunes = dict(rows.dtypes)[self.key[0]] in _PRUNED
        bounds = [functions.min(first), functions.max(first)] if prunes else []
        keys, count, *found = folded.agg(functions.count("*"), functions.sum(_COUNT), *bounds).collect()[0]
        return Folded(self, folded, keys, count or 0, (found[0], found[1]) if keys and prunes else None)


@dataclass(frozen=True)
class Folded:
    """The rows of a batch, one for each key.

    Parameters
    ----------
    rule
        Rule of the merge.
    frame
        Key columns, and the ordered rows of each key as an array of structs.
    keys, rows
        Number of keys, and of rows.
    bounds
        Least and greatest value of the first key column; None if they skip no files.
    """

    rule: MergeRule
    frame: DataFrame
    keys: int
    rows: int
    bounds: tuple[Any, Any] | None

    def clauses(self) -> MergeClauses:
        """Return the clauses of the merge."""
        from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

        rule = self.rule
        rows = _source(_ROWS)
        stored = functions.struct(*(_target(name).alias(name) for name in rule.order_by)) if rule.order_by else None
        usable = rows if stored is None else functions.filter(rows, lambda row: row[_ORDER] >= stored)
        keys = {name: _source(name) for name in rule.key}
        last = functions.element_at(rows, -1)
        inserts = {name: self._last(rows, name, last[name]) for name in rule.updated}
        inserts |= {name: functions.element_at(rows, 1)[name] for name in rule.kept}
        updates = {name: self._last(usable, name, _target(name)) for name in rule.updated}
        newer = None if stored is None else functions.element_at(rows, -1)[_ORDER] >= stored
        return MergeClauses(self._on(), newer, updates, {**keys, **inserts})

    def counts(self, metrics: Mapping[str, str]) -> dict[str, int]:
        """Return what became of the rows, from the metrics of the merge's commit.

        Raises
        ------
        ConservationError
            If the commit does not account for every key.
        """
        inserted, updated = (int(metrics.get(f"numTargetRows{name}", 0)) for name in ("Inserted", "Updated"))
        if int(metrics.get("numSourceRows", self.keys)) != self.keys or inserted + updated > self.keys:
            raise ConservationError(
                f"{self.keys} facts were to be merged, but the commit inserted {inserted} and updated {updated}: the "
                f"fact table has several rows of one key ({', '.join(self.rule.key)}), which another writer added; "
                "remove them, and restore the table to its version before this batch"
            )
        return {
            "inserted": inserted,
            "updated": updated,
            "superseded": self.rows - self.keys,
            "older": self.keys - inserted - updated,
        }

    def _last(self, rows: Column, name: str, otherwise: Column) -> Column:
        """Return the last value of a column; if nulls do not overwrite, the last that is given, or another value."""
        from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

        if not self.rule.nulls_keep:
            return functions.try_element_at(rows, functions.lit(-1))[name]
        given = self.rule.looked_up.get(name, (name,))
        if given:
            rows = functions.filter(rows, lambda row: reduce(and_, (row[each].isNotNull() for each in given)))
        found = functions.try_element_at(rows, functions.lit(-1))[name]
        return functions.when(functions.size(rows) > 0, found).otherwise(otherwise)

    def _on(self) -> Column:
        """Return the condition on the key, with the bounds of its first column, by which Delta skips files."""
        from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

        name = self.rule.key[0]
        on = _target(name) == _source(name)
        if self.bounds is not None:
            least, greatest = self.bounds
            on &= (_target(name) >= functions.lit(least)) & (_target(name) <= functions.lit(greatest))
        for name in self.rule.key[1:]:
            on &= _target(name) == _source(name)
        return on


def merge_rule(config: PipelineConfig, facts: pa.Schema) -> MergeRule | None:
    """Return the merge rule of a pipeline; None if it appends its facts."""
    sink = config.sink
    if sink.mode != "merge":
        return None
    names = tuple(facts.names)
    return MergeRule(
        tuple(sink.key),
        tuple(sink.order_by),
        names,
        kept_columns(config, names),
        nulls_keep=sink.nulls == "keep",
        looked_up=_looked_up(config),
    )


def _looked_up(config: PipelineConfig) -> dict[str, tuple[str, ...]]:
    """Return the columns of lookups, and the columns of the stream that they follow from; a fact's key has no null."""
    found: dict[str, tuple[str, ...]] = {}
    for lookup in config.lookups:
        given = tuple(name for name in lookup_inputs(lookup) if name not in config.sink.key)
        found |= dict.fromkeys(lookup_columns(lookup), given)
    return found


def check_merge(rule: MergeRule, table: Described) -> None:
    """Refuse a fact table into which a merge could fail, or give a wrong result.

    Raises
    ------
    DeltaTableError
        If a constraint spans columns that a merged row takes from several records, or several rows have one key.
    """
    for name, expression in table.constraints.items():
        columns = set(constraint_columns(expression, table.schema)) - set(rule.key)
        mixed = columns & set(rule.kept) and columns & set(rule.updated)
        if len(columns) > 1 and (mixed or rule.nulls_keep):
            raise DeltaTableError(
                f"the fact table {table.path} has the CHECK constraint {name} ({expression}), whose columns a merged "
                "row takes from several records (sink.update, sink.keep or `nulls: keep`), so a merge could break it; "
                f"merge these columns alike, or drop it: ALTER TABLE delta.`{table.path}` DROP CONSTRAINT `{name}`"
            )
    if table.properties.get(MERGE_KEY) != json.dumps(rule.key):
        _require_unique(rule, table)


def _require_unique(rule: MergeRule, table: Described) -> None:
    """Refuse a table with several rows of one key, or with a null in a key."""
    from delta.tables import DeltaTable  # noqa: PLC0415 - pyspark is heavy
    from pyspark.sql import SparkSession, functions  # noqa: PLC0415 - as above

    stored = DeltaTable.forPath(SparkSession.active(), table.path).toDF()
    counted = stored.groupBy(*map(quoted, rule.key)).agg(functions.count("*").alias(_COUNT))
    no_key = reduce(or_, (functions.col(quoted(name)).isNull() for name in rule.key))
    shown_as = (functions.col(quoted(name)).cast("string").alias(name) for name in rule.key)  # Spark's zone and range
    found = counted.where((functions.col(_COUNT) > 1) | no_key).limit(1).select(_COUNT, *shown_as).collect()
    if found:
        shown = ", ".join(f"{name} = {found[0][name]}" for name in rule.key)
        raise DeltaTableError(
            f"the fact table {table.path} has {found[0][_COUNT]} rows with {shown}, but sink.key identifies one row; "
            "correct sink.key, remove the other rows, or name another table"
        )


def _source(name: str) -> Column:
    from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

    return functions.col(f"{SOURCE}.{quoted(name)}")


def _target(name: str) -> Column:
    from pyspark.sql import functions  # noqa: PLC0415 - pyspark is heavy

    return functions.col(f"{TARGET}.{quoted(name)}")
