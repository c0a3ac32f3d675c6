"""The new values of facts, from an as-of lookup at the dimension's version, and their commits to the fact table.

Corrections are committed in batches of whole days: by `headrace.pipelines.restate.rewriting` where the fact table
allows it, else by Delta's `MERGE`. The result of a lookup depends on the natural key and the time of a fact alone, so
`MERGE` gives it to all facts that have these. A correction of facts that are right already changes nothing, so a
restatement that was killed begins again.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from headrace.etl.history import AsOfLookup
from headrace.etl.lookup import Policy
from headrace.pipelines.batch.steps import LookupStep
from headrace.pipelines.batch.worker import Stage
from headrace.pipelines.delta.commits import conflicts
from headrace.pipelines.errors import BatchError, TableMovedError
from headrace.pipelines.restate.candidates import OLD, TIME, old_columns
from headrace.pipelines.spark.columns import quoted, spark_schema
from headrace.pipelines.spark.frame import NOTE, SHARD, STATE, ShardRule, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import Column, DataFrame, SparkSession

    from headrace.pipelines.batch.stages import Prepared, StageRun, Target

__all__ = ["Batch", "batches_of", "corrections", "differing", "merge", "of_batch"]

_ATTEMPTS: Final = 20
_METADATA: Final = "spark.databricks.delta.commitInfo.userMetadata"
_DAY: Final = "_day"


def corrections(rows: DataFrame, prepared: Prepared, role: str, target: Target, run: StageRun) -> DataFrame:
    """Return candidates with the columns that the lookup adds now, and `_state`.

    Parameters
    ----------
    rows
        Result of `candidates`.
    prepared, role
        The prepared pipeline, and the role.
    target
        Version of the dimension to look up at.
    run
        Context of the stage.
    """
    declared = prepared.lookups[role]
    assert isinstance(declared, AsOfLookup)
    # A member that is not there is an error of the dimension, which `headrace dimension check` finds: the fact stays.
    lookup = replace(declared, policy=Policy.REJECT, event_time=TIME)
    again = replace(prepared, lookups={**prepared.lookups, role: lookup})
    step = again.step(role, target, run)
    assert isinstance(step, LookupStep)
    kinds = _arrow_schema(rows)
    schema = pa.schema([*kinds, pa.field(STATE, pa.int8()), pa.field(NOTE, pa.string()), *lookup.added_schema()])
    dimension = lookup.dimension
    rule = ShardRule(lookup.stream_columns, dimension.key_schema, target.shards, dimension.rules)
    frame = _open(rows)
    if target.shards > 1:
        sharded = pa.schema([*_arrow_schema(frame), pa.field(SHARD, pa.int32())])
        frame = frame.mapInArrow(_Sharded(rule), spark_schema(sharded)).repartitionById(target.shards, SHARD)
    stage = Stage(0, run.owner, None, (step,), None, None, schema)
    return frame.mapInArrow(stage, spark_schema(schema))


def differing(frame: DataFrame, lookup: AsOfLookup) -> DataFrame:
    """Return the facts whose values are not those of the lookup; facts that it rejects stay as they are."""
    differs = [~frame[quoted(name)].eqNullSafe(frame[quoted(OLD + name)]) for name in old_columns(lookup)]
    return frame.where(frame[STATE] == int(State.OPEN)).where(reduce(lambda one, other: one | other, differs))


@dataclass(frozen=True)
class Batch:
    """The facts of a range of days, inclusive; days are text, since Python cannot hand early years to Spark."""

    first: str
    last: str
    facts: int


def batches_of(changed: DataFrame, most: int) -> list[Batch]:
    """Divide facts to correct into batches of whole days, each of at most `most` facts or of a single day."""
    from pyspark.sql import functions as f  # noqa: PLC0415 - pyspark is heavy

    days = changed.groupBy(f.to_date(TIME).alias(_DAY)).count().orderBy(_DAY)
    batches: list[Batch] = []
    for day, facts in days.select(days[_DAY].cast("string"), "count").collect():
        if batches and batches[-1].facts + facts <= most:
            batches[-1] = replace(batches[-1], last=day, facts=batches[-1].facts + facts)
        else:
            batches.append(Batch(day, day, facts))
    return batches


def of_batch(changed: DataFrame, batch: Batch) -> DataFrame:
    """Return the facts of a batch."""
    from pyspark.sql import functions as f  # noqa: PLC0415 - pyspark is heavy

    days = f.to_date(changed[TIME])
    return changed.where(days.between(f.lit(batch.first).cast("date"), f.lit(batch.last).cast("date")))


def merge(
    spark: SparkSession,
    path: str,
    lookup: AsOfLookup,
    changed: DataFrame,
    batch: Batch,
    note: dict[str, Any],
    undated: str | None = None,
) -> None:
    """Give the facts of a batch their new values in one commit; with `undated`, only those where this column is null.

    Raises
    ------
    BatchError
        If other writers change the facts during every attempt.
    """
    from delta.tables import DeltaTable  # noqa: PLC0415 - pyspark is heavy
    from pyspark.sql import functions as f  # noqa: PLC0415 - as above

    dated = lookup.event_time is not None
    values = [changed[quoted(name)].alias(f"_new_{place}") for place, name in enumerate(old_columns(lookup))]
    identity = [changed[quoted(name)].alias(f"_on_{place}") for place, name in enumerate(lookup.stream_columns)]
    identity.append(changed[TIME if dated else quoted(OLD + lookup.key_column)].alias("_by"))
    source = of_batch(changed, batch).select(*identity, *values).distinct()
    names = [*lookup.stream_columns, lookup.event_time if lookup.event_time is not None else lookup.key_column]
    own = [column for column in source.columns if not column.startswith("_new_")]
    same = reduce(lambda one, other: one & other, map(_equal, names, own))
    if undated is not None:
        same &= f.col(f"t.{quoted(undated)}").isNull()
    to = {quoted(name): f.col(f"s._new_{place}") for place, name in enumerate(old_columns(lookup))}
    stale = reduce(lambda one, other: one | other, (~f.col(f"t.{name}").eqNullSafe(new) for name, new in to.items()))
    for attempt in range(_ATTEMPTS):
        try:
            with _metadata(spark, note), conflicts(f"another writer changed {path}"):
                target = DeltaTable.forPath(spark, path).alias("t")
                target.merge(source.alias("s"), same).whenMatchedUpdate(stale, to).execute()
                return
        except TableMovedError:
            time.sleep(min(2.0, 0.05 * 2**attempt))
    raise BatchError(
        f"other writers changed {path} during each of {_ATTEMPTS} attempts to restate facts; run again when they are "
        "done"
    )


def _equal(name: str, own: str) -> Column:
    from pyspark.sql import functions as f  # noqa: PLC0415 - pyspark is heavy

    return f.col(f"t.{quoted(name)}") == f.col(f"s.{own}")


@contextmanager
def _metadata(spark: SparkSession, note: dict[str, Any]) -> Iterator[None]:
    """Give the commits of the block a note."""
    spark.conf.set(_METADATA, json.dumps(note))
    try:
        yield
    finally:
        spark.conf.unset(_METADATA)


def _arrow_schema(frame: DataFrame) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415 - pyspark is heavy

    return pa.schema([(field.name, field.type) for field in to_arrow_schema(frame.schema, timezone="UTC")])


def _open(rows: DataFrame) -> DataFrame:
    """Return rows as open rows of a stage."""
    from pyspark.sql import functions as f  # noqa: PLC0415 - pyspark is heavy

    state = f.lit(int(State.OPEN)).cast("tinyint").alias(STATE)
    return rows.select("*", state, f.lit(None).cast("string").alias(NOTE))


@dataclass(frozen=True)
class _Sharded:
    """Appends the shard to rows. Picklable."""

    rule: ShardRule

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield self.rule.append_to(batch)
