"""The facts that a restatement may have to change, found in the data files without Spark's scan.

A task reads the columns of the lookup, compares natural keys and times with the ranges that moved, and returns the
facts in these with their places. It is what `headrace.pipelines.restate.candidates` does with Spark, on fewer processor
cycles: most facts are not in a range, and they never leave the arrays that were read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.history.instants import ticks_of, to_instants
from headrace.etl.history.values import single
from headrace.pipelines.delta.live_files import read_live_file
from headrace.pipelines.history.moved import MOVED_FROM, MOVED_TO
from headrace.pipelines.restate.candidates import FILE_ID, OLD, ROW, TIME, moved_ranges, old_columns
from headrace.pipelines.spark.columns import spark_schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

    from headrace.etl.history import AsOfLookup
    from headrace.pipelines.delta.live_files import LiveFile

__all__ = ["FindFacts", "MovedRanges", "found_facts", "merged_ranges"]

_IDS: Final = pa.schema([(FILE_ID, pa.int64())])
_LEAST, _GREATEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_BLOCK_ROWS: Final = 1 << 20  # the keys of ranges are hashed again for each block
_OUT_ROWS: Final = 1 << 16
_MOST_RANGES: Final = 4_000_000
_TASKS_OF_A_CORE: Final = 4


@dataclass(frozen=True)
class MovedRanges:
    """Ranges of facts that moved: natural keys, and half-open ranges of time. Picklable.

    Parameters
    ----------
    keys
        Natural keys, each once, in no particular order.
    starts
        Place of the first range of each key, and the number of ranges.
    low, high
        Bounds of the ranges in microseconds since 1970, by key and time; ranges of a key do not overlap.
    """

    keys: pa.Table
    starts: NDArray[np.int64]
    low: NDArray[np.int64]
    high: NDArray[np.int64]

    @cached_property
    def _ends(self) -> tuple[int, int]:
        return int(self.low.min(initial=_GREATEST)), int(self.high.max(initial=_LEAST))

    def among(self, keys: list[pa.Array], at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of facts that are in a range.

        Parameters
        ----------
        keys
            Natural keys of the facts, as the dimension stores them.
        at
            Times of the facts in microseconds since 1970; the least number without a time.
        """
        least, greatest = self._ends
        asked = np.flatnonzero((at >= least) & (at < greatest) & (at != _LEAST))
        member = self._members([key if len(asked) == len(at) else key.take(pa.array(asked)) for key in keys])
        named = member >= 0
        asked, member = asked[named], member[named]
        return asked[self._covered(member, at[asked])]

    def _members(self, keys: list[pa.Array]) -> NDArray[np.int64]:
        """Return the place of each key; -1 if it has no range."""
        if len(keys) == 1:
            values = single(self.keys.column(0))
            return np.asarray(pc.index_in(keys[0], values, skip_nulls=True).fill_null(-1)).astype(np.int64)
        names = [str(place) for place in range(len(keys))]
        held = self.keys.rename_columns(names).append_column("member", pa.array(np.arange(self.keys.num_rows)))
        wanted = pa.table([*keys, pa.array(np.arange(len(keys[0])))], names=[*names, "row"])
        met = wanted.join(held, names, join_type="inner")  # null meets nothing
        found = np.full(len(keys[0]), -1, np.int64)
        found[np.asarray(met.column("row"))] = np.asarray(met.column("member"))
        return found

    def _covered(self, member: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which times are in a range of their member, by a binary search among the member's ranges."""
        first, end = self.starts[member], self.starts[member + 1]
        place, stop = first.copy(), end.copy()
        while (searching := place < stop).any():  # log2 of the most ranges of a member
            middle = (place + stop) // 2
            after = searching & (self.low[np.minimum(middle, len(self.low) - 1)] <= at)
            place = np.where(after, middle + 1, place)
            stop = np.where(searching & ~after, middle, stop)
        held = place > first
        return held & (at < self.high[np.maximum(place - 1, 0)])


def merged_ranges(natural_key: tuple[str, ...], moved: pa.Table) -> MovedRanges:
    """Return the ranges of moved facts; ranges of a member that overlap or meet become one.

    Parameters
    ----------
    natural_key
        Columns of the natural key.
    moved
        Natural keys, `MOVED_FROM` and `MOVED_TO`, null for an open range. A key with a null has no facts.
    """
    for name in natural_key:
        moved = moved.filter(moved.column(name).is_valid())
    low, high = (
        _ticks(single(moved.column(name)), null) for name, null in ((MOVED_FROM, _LEAST), (MOVED_TO, _GREATEST))
    )
    grouped = moved.select(list(natural_key)).append_column("row", pa.array(np.arange(moved.num_rows)))
    groups = grouped.group_by(list(natural_key), use_threads=False).aggregate([("row", "list")])
    lists = single(groups.column("row_list"))
    rows = np.asarray(lists.flatten()).astype(np.int64)
    member = np.repeat(np.arange(groups.num_rows), np.asarray(lists.value_lengths()).astype(np.int64))
    order = np.lexsort((low[rows], member))
    member, low, high = member[order], low[rows[order]], high[rows[order]]
    reach = _running_greatest(member, high)
    begins = np.ones(len(member), dtype=np.bool_)
    begins[1:] = (member[1:] != member[:-1]) | (low[1:] > reach[:-1])
    heads = np.flatnonzero(begins)
    tails = np.append(heads[1:], len(member)) - 1
    starts = np.searchsorted(member[heads], np.arange(groups.num_rows + 1))
    return MovedRanges(groups.select(list(natural_key)), starts, low[heads], reach[tails] if len(member) else high)


def _running_greatest(member: NDArray[np.int64], high: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the greatest end so far among the ranges of the same member."""
    ranks, position = np.unique(high, return_inverse=True)
    running = np.maximum.accumulate(member * (len(ranks) + 1) + position)
    return ranks[running - member * (len(ranks) + 1)] if len(member) else high


def _ticks(column: pa.Array, null: int) -> NDArray[np.int64]:
    """Return dates or timestamps in microseconds; a date is its midnight."""
    ticks = ticks_of(to_instants(column, pa.timestamp("us", getattr(column.type, "tz", None)), "time"))
    return np.where(np.asarray(column.is_null()), null, ticks) if column.null_count else ticks


@dataclass(frozen=True)
class FindFacts:
    """Finds facts in data files. Picklable; called with ids of files, yields facts as `candidates` returns them.

    Parameters
    ----------
    path
        Path of the fact table.
    files
        Data files by id.
    lookup
        Lookup of the role, with an event time.
    ranges
        Ranges to look for.
    schema
        Columns of the facts to return.
    stored
        Columns of the data files.
    """

    path: str
    files: Mapping[int, LiveFile]
    lookup: AsOfLookup
    ranges: MovedRanges
    schema: pa.Schema
    stored: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the facts of the files that are in a range."""
        for batch in batches:
            for each in batch.column(0).to_pylist():
                yield from self._of_file(each)

    def _of_file(self, each: int) -> Iterator[pa.RecordBatch]:
        assert self.lookup.event_time is not None
        names = [*self.lookup.stream_columns, self.lookup.event_time, *old_columns(self.lookup)]
        read = pa.schema([self.stored.field(name) for name in dict.fromkeys(names)])
        for positions, rows in _blocks(read_live_file(self.path, self.files[each], read)):
            at = _ticks(rows.column(self.lookup.event_time), _LEAST)
            keys = self.lookup.dimension.conform_key([rows.column(name) for name in self.lookup.stream_columns])
            found = self.ranges.among([key.values for key in keys], at)
            for first in range(0, len(found), _OUT_ROWS):
                part = found[first : first + _OUT_ROWS]
                yield self._facts(each, positions[part], rows.take(pa.array(part)))

    def _facts(self, each: int, positions: NDArray[np.int64], rows: pa.RecordBatch) -> pa.RecordBatch:
        assert self.lookup.event_time is not None
        columns = {TIME: rows.column(self.lookup.event_time), FILE_ID: pa.repeat(each, len(positions))}
        columns |= {ROW: pa.array(positions), **{name: rows.column(name) for name in self.lookup.stream_columns}}
        columns |= {OLD + name: rows.column(name) for name in old_columns(self.lookup)}
        ordered = [columns[field.name].cast(field.type) for field in self.schema]
        return pa.RecordBatch.from_arrays(ordered, schema=self.schema)


def _blocks(
    parts: Iterable[tuple[NDArray[np.int64], pa.RecordBatch]],
) -> Iterator[tuple[NDArray[np.int64], pa.RecordBatch]]:
    """Yield the rows of batches in larger ones."""
    held: list[tuple[NDArray[np.int64], pa.RecordBatch]] = []
    for part in parts:
        held.append(part)
        if sum(len(positions) for positions, _ in held) >= _BLOCK_ROWS:
            yield _joined(held)
            held = []
    if held:
        yield _joined(held)


def _joined(parts: list[tuple[NDArray[np.int64], pa.RecordBatch]]) -> tuple[NDArray[np.int64], pa.RecordBatch]:
    rows = pa.Table.from_batches([batch for _, batch in parts])
    columns = [single(column) for column in rows.columns]
    return np.concatenate([positions for positions, _ in parts]), pa.RecordBatch.from_arrays(
        columns, schema=rows.schema
    )


def found_facts(
    spark: SparkSession,
    lookup: AsOfLookup,
    path: str,
    files: Mapping[int, LiveFile],
    stored: pa.Schema,
    moved: DataFrame,
) -> DataFrame | None:
    """Return the facts in the ranges that moved, as `candidates` does with places.

    Parameters
    ----------
    spark
        The session.
    lookup
        Lookup of the role, as the pipeline file declares it.
    path, files, stored
        Path of the fact table, its data files by id, and the columns of these.
    moved
        Rows of the table of moved facts.

    Returns
    -------
    DataFrame or None
        None if Spark has to find the facts: the lookup has no event time, one of its columns is not in the data files,
        or the ranges are too many for the memory of each task.
    """
    names = [*lookup.stream_columns, *old_columns(lookup)]
    if lookup.event_time is None or not {lookup.event_time, *names} <= set(stored.names):
        return None
    rows = moved_ranges(lookup, moved)
    if rows.limit(_MOST_RANGES + 1).count() > _MOST_RANGES:
        return None
    ranges = merged_ranges(lookup.dimension.natural_key, _keyed(lookup, rows.toArrow()))
    task = FindFacts(path, files, lookup, ranges, _fact_schema(lookup, stored), stored)
    parts = min(len(files), _TASKS_OF_A_CORE * spark.sparkContext.defaultParallelism)
    ids = spark.createDataFrame([(each,) for each in files], spark_schema(_IDS)).repartition(parts)
    return ids.mapInArrow(task, spark_schema(task.schema))


def _keyed(lookup: AsOfLookup, ranges: pa.Table) -> pa.Table:
    """Return ranges with the names and types of the natural key."""
    key = lookup.dimension.key_schema
    columns = [ranges.column(place).cast(field.type) for place, field in enumerate(key)]
    bounds = [ranges.column(name) for name in (MOVED_FROM, MOVED_TO)]
    return pa.table([*columns, *bounds], names=[*key.names, MOVED_FROM, MOVED_TO])


def _fact_schema(lookup: AsOfLookup, stored: pa.Schema) -> pa.Schema:
    """Return the columns of facts that are found."""
    assert lookup.event_time is not None
    fields = [pa.field(TIME, stored.field(lookup.event_time).type)]
    fields += [stored.field(name) for name in lookup.stream_columns]
    fields += [pa.field(OLD + name, stored.field(name).type) for name in old_columns(lookup)]
    return pa.schema([*fields, pa.field(FILE_ID, pa.int64()), pa.field(ROW, pa.int64())])
