"""Ranges of facts whose version changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.etl.history.declaration import AT
from headrace.etl.history.values import pick, single

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.etl.history.declaration import History
    from headrace.etl.history.merging import Merged
    from headrace.etl.history.versions import Versions

__all__ = ["moved_ranges", "moved_schema"]


def moved_schema(history: History) -> pa.Schema:
    """Return the columns of ranges of moved facts."""
    bounds = [pa.field(name, history.instant_type) for name in ("moved_from", "moved_to")]
    return pa.schema([*history.dimension.key_schema, *bounds, pa.field("cause", pa.string())])


def moved_ranges(
    history: History,
    merged: Merged,
    versions: Versions,
    stored_keys: NDArray[np.int64],
    inferred: NDArray[np.bool_],
) -> pa.Table:
    """Return the ranges in which a member's surrogate key, or the existence of a version, has changed.

    Facts before the first version of a member count as facts of the first version. But a range that becomes part of
    the history counts as changed, because a policy may depend on it.

    Parameters
    ----------
    history
        The declaration.
    merged, versions
        Winning changes and their versions.
    stored_keys
        Surrogate key of the stored entry, or inferred member, at each row; 0 if absent.
    inferred
        Mask that is true at the first row of each inferred member.
    """
    rows = _Segments(merged, stored_keys, inferred)
    now = np.asarray(single(versions.entries.column(history.dimension.surrogate_key)))
    key_moved = rows.known & (rows.before != now)
    covered = rows.known & ~rows.covered
    # Each member has a segment before its first row. It has the number of that row but sorts before it.
    first = np.flatnonzero(merged.starts)
    order = np.argsort(np.concatenate([2 * first, 2 * np.arange(len(now)) + 1]), kind="stable")
    moved = np.concatenate([key_moved[first] | inferred[first], key_moved | covered])[order]
    row = np.concatenate([first, np.arange(len(now))])[order]
    is_before = np.concatenate([np.ones(len(first), np.bool_), np.zeros(len(now), np.bool_)])[order]
    cause = np.concatenate([np.where(key_moved[first], 0, 2), np.where(key_moved, 0, 1)])[order]
    begins = moved & (is_before | ~np.concatenate([[False], moved[:-1]]))
    begins |= moved & np.concatenate([[True], cause[1:] != cause[:-1]]) if len(moved) else moved
    return _ranges(history, merged, row, is_before, moved, begins, cause)


class _Segments:
    """The previous state from each row's time to the next row's time."""

    def __init__(self, merged: Merged, stored_keys: NDArray[np.int64], inferred: NDArray[np.bool_]) -> None:
        position = np.arange(len(stored_keys))
        first = np.flatnonzero(merged.starts)
        member = np.cumsum(merged.starts) - 1
        stored = stored_keys != 0
        last = np.maximum.accumulate(np.where(stored, position, -1))
        self.covered = last >= first[member]
        following = np.minimum.accumulate(np.where(stored, position, len(position))[::-1])[::-1]
        ends = np.append(first[1:], len(position))
        self.known = self.covered | (following < ends[member])
        source = np.where(self.covered, last, np.minimum(following, len(position) - 1))
        self.before = np.where(self.known, stored_keys[source], 0) if len(position) else stored_keys
        del inferred


def _ranges(
    history: History,
    merged: Merged,
    row: NDArray[np.int64],
    is_before: NDArray[np.bool_],
    moved: NDArray[np.bool_],
    begins: NDArray[np.bool_],
    cause: NDArray[np.int64],
) -> pa.Table:
    at = single(merged.columns[AT])
    starts = np.flatnonzero(begins)
    segments = len(row)
    # A range ends where the next segment is not moved, belongs to another member, or begins another range.
    closes = np.ones(segments, dtype=np.bool_)
    closes[:-1] = ~moved[1:] | begins[1:]
    ends = np.flatnonzero(closes & moved)
    following = ends + 1
    open_end = (following >= segments) | is_before[np.minimum(following, segments - 1)] if segments else closes
    to = np.where(open_end, -1, row[np.minimum(following, segments - 1)]) if segments else ends
    columns = {name: pick(merged.columns[name], row[starts]) for name in history.dimension.natural_key}
    columns["moved_from"] = pick(at, np.where(is_before[starts], -1, row[starts]))
    columns["moved_to"] = pick(at, to)
    columns["cause"] = pa.array(["version", "covered", "completed"]).take(pa.array(cause[starts]))
    return pa.table(columns).cast(moved_schema(history))
