"""Versions of members as a function of their winning changes: runs of equal state, their bounds, and their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.etl.history.declaration import AT, SEQUENCE
from headrace.etl.history.instants import instant_of
from headrace.etl.history.values import differ_from_previous, pick, single

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.etl.history.declaration import History
    from headrace.etl.history.merging import Merged
    from headrace.etl.surrogate import KeyAllocator

__all__ = ["Versions", "present"]


@dataclass(frozen=True)
class Versions:
    """Entries of members with the versions that they belong to, row by row as in `Merged`.

    Parameters
    ----------
    entries
        Rows of `History.entry_schema`.
    heads
        True where a version begins.
    run
        Number of the row's version among all versions.
    owners
        Rows at which stored versions began. Each has the surrogate key of its version.
    claimed
        Owner whose surrogate key each version keeps; -1 if the key is new.
    last_of_run, last_of_member
        Last row of each row's version and of its member.
    """

    entries: pa.Table
    heads: NDArray[np.bool_]
    run: NDArray[np.int64]
    owners: NDArray[np.int64]
    claimed: NDArray[np.int64]
    last_of_run: NDArray[np.int64]
    last_of_member: NDArray[np.int64]

    @property
    def new_keys(self) -> int:
        """Number of surrogate keys that were allocated."""
        return int((self.claimed < 0).sum())


def present(history: History, merged: Merged, stored_keys: NDArray[np.int64], allocator: KeyAllocator) -> Versions:
    """Return the versions of merged changes.

    Parameters
    ----------
    history
        The declaration.
    merged
        Winning changes.
    stored_keys
        Surrogate key of the stored entry, or inferred member, at each row; 0 if absent. A version keeps the key whose
        first row it contains, the first of them if there are several.
    allocator
        Allocator of keys for new versions, in the order of natural key and time.
    """
    rows = _Rows(history, merged)
    owners = _owners(stored_keys, rows.member)
    claimed = _first_in(rows.run, owners, rows.runs)
    surrogate = np.where(claimed < 0, 0, stored_keys[np.maximum(claimed, 0)]) if len(claimed) else claimed
    surrogate[claimed < 0] = allocator.allocate(int((claimed < 0).sum()))
    shown = rows.shown()
    shown[history.dimension.surrogate_key] = pa.array(surrogate[rows.run])
    schema = history.entry_schema
    entries = pa.Table.from_arrays([shown[field.name].cast(field.type) for field in schema], schema=schema)
    return Versions(entries, rows.heads, rows.run, owners, claimed, rows.last_of_run, rows.last_of_member)


def _owners(stored_keys: NDArray[np.int64], member: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first row of each stored surrogate key. The stored rows of a key are consecutive within a member."""
    stored = np.flatnonzero(stored_keys)
    first = np.ones(len(stored), dtype=np.bool_)
    keys, members = stored_keys[stored], member[stored]
    first[1:] = (keys[1:] != keys[:-1]) | (members[1:] != members[:-1])
    return stored[first]


def _first_in(run: NDArray[np.int64], rows: NDArray[np.int64], runs: int) -> NDArray[np.int64]:
    """Return the first of some ascending rows in each run, or -1."""
    found = np.full(runs, -1, dtype=np.int64)
    found[run[rows[::-1]]] = rows[::-1]
    return found


class _Rows:
    """Source positions of the columns of versions."""

    def __init__(self, history: History, merged: Merged) -> None:
        self._history = history
        self._merged = merged
        count = len(merged.at)
        self._deleted = np.asarray(merged.columns[history.is_deleted], dtype=np.bool_)
        self.member = np.cumsum(merged.starts) - 1
        self.heads = merged.starts | _differ(self._deleted) | self._state_differs(count)
        self.run = np.cumsum(self.heads) - 1
        self.runs = int(self.run[-1]) + 1 if count else 0
        self._first_of_run = np.flatnonzero(self.heads)
        self.last_of_run = np.append(self._first_of_run[1:], count)[self.run] - 1
        self._first_of_member = np.flatnonzero(merged.starts)
        self.last_of_member = np.append(self._first_of_member[1:], count)[self.member] - 1

    def _state_differs(self, count: int) -> NDArray[np.bool_]:
        columns = [self._merged.columns[name] for name in self._history.versioned]
        return differ_from_previous(columns, count) & ~self._deleted

    def _last_present(self) -> NDArray[np.int64]:
        """Return for each row the last row of its member up to it that is not a delete, or -1."""
        rows = np.arange(len(self._deleted))
        last = np.maximum.accumulate(np.where(self._deleted, -1, rows))
        return np.where(last < self._first_of_member[self.member], -1, last)

    def _first_present(self) -> NDArray[np.int64]:
        """Return for each row the first row of its member that is not a delete, or -1."""
        return _first_in(self.member, np.flatnonzero(~self._deleted), len(self._first_of_member))[self.member]

    def shown(self) -> dict[str, pa.Array]:
        """Return all columns of entries except the surrogate key."""
        history, columns = self._history, self._merged.columns
        shown = {name: columns[name] for name in (*history.dimension.natural_key, AT, SEQUENCE, history.is_deleted)}
        source = self._sources()
        for name in history.dimension.attributes.names:
            shown[name] = pick(columns[name], source[history.type_of(name)])
        first = self._first_of_member[self.member]
        shown |= {name: pick(columns[name], first) for name in history.spelled.values()}
        return shown | self._merged.own | self._bounds()

    def _sources(self) -> dict[str, NDArray[np.int64]]:
        """Return for each attribute type the row that a version takes the value from, or -1."""
        first_of_run = self._first_of_run[self.run]
        if self._history.partial is not None:  # each row has the values that it carries, also if it is deleted
            whole = {"1": self.last_of_member, "1 current": self.last_of_run, "2": first_of_run}
            return {**whole, "audit": first_of_run}
        last = self._last_present()
        return {
            "0": self._first_present(),
            "1": last[self.last_of_member],
            "1 current": last[self.last_of_run],
            "2": last,
            "audit": first_of_run,
        }

    def _bounds(self) -> dict[str, pa.Array]:
        history, at = self._history, single(self._merged.columns[AT])
        following = self.last_of_run + 1
        current = self.last_of_run == self.last_of_member
        to = pick(at, np.where(current, -1, following))
        if history.end is not None:
            end = pa.array([instant_of(history.end, at.type)]).cast(
                pa.int32() if at.type == pa.date32() else pa.int64()
            )
            to = to.fill_null(end.view(at.type)[0])
        version = self.run - self.run[self._first_of_member[self.member]] + 1
        assert history.dimension.inferred_flag is not None
        return {
            history.valid_from: pick(at, self._first_of_run[self.run]),
            history.valid_to: to,
            history.is_current: pa.array(current),
            history.version: pa.array(version),
            history.dimension.inferred_flag: pa.array(np.zeros(len(version), dtype=np.bool_)),
        }


def _differ(values: NDArray[np.bool_]) -> NDArray[np.bool_]:
    differs = np.zeros(len(values), dtype=np.bool_)
    differs[1:] = values[1:] != values[:-1]
    return differs
