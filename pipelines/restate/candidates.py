"""Facts that may have to change: those of a moved member and time, or of a retired or updated version."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from headrace.pipelines.history.moved import (
    CAUSE,
    DIMENSION_VERSION,
    MOVED_FROM,
    MOVED_TO,
    VERSION_KEY,
    Cause,
    moved_path,
)
from headrace.pipelines.spark.columns import quoted, spark_schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import Column, DataFrame, SparkSession

    from headrace.etl import Dimension
    from headrace.etl.history import AsOfLookup
    from headrace.pipelines.restate.progress import Span

__all__ = ["FILE_ID", "OLD", "ROW", "TIME", "candidates", "file_id", "moved_facts", "moved_ranges", "old_columns"]

FILE_ID: Final = "_fact_file"
ROW: Final = "_fact_row"
OLD: Final = "_old_"
TIME: Final = "_at_time"
_ID_DIGITS: Final = 15  # hexadecimal digits, so that an id fits in a bigint
_KEY: Final = "_key_"


def moved_facts(spark: SparkSession, dimension_path: str, span: Span) -> DataFrame:
    """Return the rows of the table of moved facts that are to be restated."""
    rows = spark.read.format("delta").load(moved_path(dimension_path))
    version = rows[DIMENSION_VERSION]
    return rows.where((version > span.above) & (version <= span.up_to))


def candidates(
    lookup: AsOfLookup, facts: DataFrame, moved: DataFrame, undated: str | None = None, *, placed: bool = False
) -> DataFrame:
    """Return the facts that may point to another version.

    Parameters
    ----------
    lookup
        Lookup of the role, as the pipeline file declares it.
    facts
        The fact table.
    moved
        Result of `moved_facts`.
    undated
        Column that is null in the facts to return, for the facts without event time of a lookup that gives them the
        current version; None for all facts.
    placed
        Whether to add the place of each fact in the table's data files.

    Returns
    -------
    DataFrame
        One row for each fact: its stream columns of the lookup, `TIME`, its key and carried columns with the prefix
        `OLD`, and, with `placed`, the id of its data file (`FILE_ID`) and its position there (`ROW`).
    """
    kept = [*_asked(lookup, facts), *_old(lookup, facts), *(_places(facts) if placed else ())]
    if undated is not None:
        facts = facts.where(facts[quoted(undated)].isNull())
    if lookup.event_time is None:
        return _of_versions(lookup, facts, moved, kept)
    return _of_moved(lookup, facts, moved, kept)


def file_id(name: str) -> int:
    """Return the id of a data file, by its name without folders: short, since each fact carries it."""
    return int(hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()[:_ID_DIGITS], 16)


def _places(facts: DataFrame) -> list[Column]:
    from pyspark.sql import functions as f  # noqa: PLC0415 - pyspark is heavy

    hidden = facts.metadataColumn("_metadata")
    digits = f.substring(f.md5(hidden["file_name"].cast("binary")), 1, _ID_DIGITS)
    position = f.when(hidden["row_index"].isNotNull(), hidden["row_index"])  # nullable, as columns of tasks are
    return [f.conv(digits, 16, 10).cast("bigint").alias(FILE_ID), position.alias(ROW)]


def old_columns(lookup: AsOfLookup) -> list[str]:
    """Return the columns that a restatement changes: the surrogate key, and the carried columns."""
    return lookup.added_schema().names[:-2]


def _of_versions(lookup: AsOfLookup, facts: DataFrame, moved: DataFrame, kept: list[Column]) -> DataFrame:
    """Return the facts of retired and updated versions for a lookup of current versions, at the version's start."""
    from pyspark.sql import functions as f  # noqa: PLC0415 - pyspark is heavy

    versions = moved.where(_counts(lookup, moved)).where(moved[VERSION_KEY].isNotNull())
    # A version never begins later than before, so it was last valid at the earliest of its starts.
    versions = versions.groupBy(VERSION_KEY).agg(f.min(MOVED_FROM).alias(MOVED_FROM))
    met = facts.join(versions, facts[quoted(lookup.key_column)] == versions[VERSION_KEY])
    return met.select(versions[MOVED_FROM].alias(TIME), *kept)


def _counts(lookup: AsOfLookup, moved: DataFrame) -> Column:
    """Return which rows matter to a lookup: updated versions matter only if facts carry attributes."""
    from pyspark.sql import functions as f  # noqa: PLC0415 - pyspark is heavy

    return f.lit(bool(lookup.carry)) | (moved[CAUSE] != Cause.UPDATED)


def moved_ranges(lookup: AsOfLookup, moved: DataFrame) -> DataFrame:
    """Return the ranges that matter to a lookup with event time: natural key, `MOVED_FROM`, and `MOVED_TO`."""
    keys = [moved[quoted(name)].alias(f"{_KEY}{place}") for place, name in enumerate(lookup.dimension.natural_key)]
    in_time = moved.where(_counts(lookup, moved)).where(moved[CAUSE] != Cause.RETIRED)
    return in_time.select(*keys, MOVED_FROM, MOVED_TO)


def _of_moved(lookup: AsOfLookup, facts: DataFrame, moved: DataFrame, kept: list[Column]) -> DataFrame:
    assert lookup.event_time is not None
    natural, ranges = lookup.dimension.natural_key, moved_ranges(lookup, moved)
    rows = facts.select(facts[quoted(lookup.event_time)].alias(TIME), *kept)
    keyed = _keyed(lookup, _possible(rows, ranges))
    times = [_comparable(keyed, TIME), *(_comparable(ranges, name) for name in (MOVED_FROM, MOVED_TO))]
    conditions = [keyed[f"{_KEY}{place}"] == ranges[f"{_KEY}{place}"] for place in range(len(natural))]
    conditions += [ranges[MOVED_FROM].isNull() | (times[0] >= times[1])]
    conditions += [ranges[MOVED_TO].isNull() | (times[0] < times[2])]
    met = keyed.join(ranges, reduce(lambda one, other: one & other, conditions), "leftsemi")
    return met.drop(*(f"{_KEY}{place}" for place in range(len(natural))))


def _possible(rows: DataFrame, ranges: DataFrame) -> DataFrame:
    """Return the facts within the bounds of all ranges, so that Delta skips the files of other times."""
    from pyspark.sql import functions as f  # noqa: PLC0415 - pyspark is heavy

    low, high = ranges[MOVED_FROM], ranges[MOVED_TO]
    kind = dict(ranges.dtypes)[MOVED_FROM]
    # As text, since Python's datetime has neither the range nor the zone of Spark's timestamps.
    bounds = ranges.agg(
        f.count(f.lit(1)).alias("count"),
        f.when(f.count(f.when(low.isNull(), 1)) == 0, f.min(low)).cast("string").alias("low"),
        f.when(f.count(f.when(high.isNull(), 1)) == 0, f.max(high)).cast("string").alias("high"),
    ).first()
    assert bounds is not None
    rows = rows.where(rows[TIME].isNotNull() & f.lit(bounds["count"] > 0))
    if bounds["low"] is not None:
        rows = rows.where(rows[TIME] >= f.lit(bounds["low"]).cast(kind))
    return rows if bounds["high"] is None else rows.where(rows[TIME] < f.lit(bounds["high"]).cast(kind))


def _comparable(frame: DataFrame, name: str) -> Column:
    """Return a time for comparison with others: a date is its midnight."""
    kind = dict(frame.dtypes)[name]
    return frame[name].cast("timestamp") if kind == "date" else frame[name]


def _asked(lookup: AsOfLookup, facts: DataFrame) -> list[Column]:
    return [facts[quoted(name)] for name in lookup.stream_columns]


def _old(lookup: AsOfLookup, facts: DataFrame) -> list[Column]:
    return [facts[quoted(name)].alias(f"{OLD}{name}") for name in old_columns(lookup)]


def _keyed(lookup: AsOfLookup, rows: DataFrame) -> DataFrame:
    """Return facts with their natural key as the dimension stores it."""
    dimension, names = lookup.dimension, lookup.stream_columns
    key = spark_schema(dimension.key_schema)
    equal = all(rows.schema[name].dataType == field.dataType for name, field in zip(names, key, strict=True))
    plain = equal and not any(dimension.rule(name).changes_spelling for name in dimension.natural_key)
    if plain:
        return rows.select("*", *(rows[quoted(name)].alias(f"{_KEY}{place}") for place, name in enumerate(names)))
    from pyspark.sql.types import StructField, StructType  # noqa: PLC0415 - pyspark is heavy

    added = [StructField(f"{_KEY}{place}", field.dataType) for place, field in enumerate(key)]
    return rows.mapInArrow(_Conform(dimension, names), StructType([*rows.schema.fields, *added]))


@dataclass(frozen=True)
class _Conform:
    """Appends the normalized natural key to rows. Picklable."""

    dimension: Dimension
    names: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            keys: list[Any] = self.dimension.conform_key([batch.column(name) for name in self.names])
            names = [*batch.schema.names, *(f"{_KEY}{place}" for place in range(len(keys)))]
            yield pa.RecordBatch.from_arrays([*batch.columns, *(key.values for key in keys)], names=names)
