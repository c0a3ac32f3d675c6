"""`apply_changes`: computes the entries to store, the outcome of each change, and the ranges of moved facts.

Inputs and outputs are arrays. `store` keeps the result in clustered tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.history.changes import take_in
from headrace.etl.history.declaration import AT
from headrace.etl.history.merging import REPLAYED, WON, Merged, merge
from headrace.etl.history.moves import moved_ranges
from headrace.etl.history.values import differ, pick, rows_differ, single
from headrace.etl.history.versions import Versions, present
from headrace.etl.ranking import key_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.etl.history.declaration import History
    from headrace.etl.surrogate import KeyAllocator

__all__ = ["Applied", "ChangeOutcome", "apply_changes"]


class ChangeOutcome(StrEnum):
    """Outcome of a change."""

    ADDED = "added"
    COMPLETED = "completed"
    VERSIONED = "versioned"
    DELETED = "deleted"
    UPDATED = "updated"
    UNCHANGED = "unchanged"
    REPLAYED = "replayed"
    SUPERSEDED = "superseded"
    ROUTED = "routed"
    REJECTED = "rejected"


_OUTCOMES: Final = tuple(ChangeOutcome)
_NAMES: Final = pa.array([str(outcome) for outcome in _OUTCOMES])
_CODE: Final = {outcome: code for code, outcome in enumerate(_OUTCOMES)}


@dataclass(frozen=True)
class Applied:
    """Result of applying changes to the entries of the affected members.

    Parameters
    ----------
    upserts
        Entries to store (`History.entry_schema`): new entries and entries whose values changed.
    deletes
        Keys of entries to remove: the entries of inferred members that were completed.
    inserted
        New versions (`History.version_schema`).
    updated
        Versions that keep their surrogate key and whose values changed.
    retired
        Stored versions that no longer exist, because a correction made them equal to the previous version. Their
        surrogate keys are never allocated again.
    outcomes
        One row per change: `outcome`, `cause` (null unless routed, rejected, or superseded), and `late`, whether the
        table had a change of the member with a later time.
    moved
        Ranges of facts whose version changed: natural key, `moved_from`, `moved_to` (half-open, null for no bound), and
        `cause`. Facts of new members are not included.
    new_keys
        Number of surrogate keys that were allocated.
    """

    upserts: pa.Table
    deletes: pa.Table
    inserted: pa.Table
    updated: pa.Table
    retired: pa.Table
    outcomes: pa.Table
    moved: pa.Table
    new_keys: int

    @property
    def counts(self) -> dict[ChangeOutcome, int]:
        """Number of changes by outcome."""
        counted = {ChangeOutcome(item["values"]): int(item["counts"]) for item in self._tallied()}
        return {outcome: counted[outcome] for outcome in ChangeOutcome if outcome in counted}

    def _tallied(self) -> list[dict[str, Any]]:
        tallied: list[dict[str, Any]] = pc.value_counts(self.outcomes.column("outcome")).to_pylist()
        return tallied


def apply_changes(
    history: History, entries: pa.Table, changes: pa.Table | pa.RecordBatch, allocator: KeyAllocator
) -> Applied:
    """Apply changes to the members that they name.

    Parameters
    ----------
    history
        Declaration of the dimension with history.
    entries
        All stored entries of the members that the changes name, in any order (`History.entry_schema`). Entries of
        other members are allowed and stay unchanged.
    changes
        Changes in any order, with the natural key, all attributes, and the columns that the declaration names.
    allocator
        Allocator of surrogate keys for new versions.

    Raises
    ------
    DeclarationError
        If a column is missing or has an unsuitable type.
    KeyInputError
        If a column can never equal its key.
    """
    intake = take_in(history, changes)
    merged = merge(history, entries, intake.rows)
    stored = _Stored(history, entries, merged)
    versions = present(history, merged, stored.keys, allocator)
    outcome, late = _outcomes(history, merged, versions, stored)
    routed = _routed_causes(history, merged, versions)
    return Applied(
        **_differences(history, merged, versions, stored),
        outcomes=_reported(intake.causes, intake.position, merged, outcome, late, routed),
        moved=moved_ranges(history, merged, versions, stored.keys, stored.inferred),
        new_keys=versions.new_keys,
    )


class _Stored:
    """The stored entry at each row of the merged changes."""

    def __init__(self, history: History, entries: pa.Table, merged: Merged) -> None:
        self.entries = entries
        self.position = np.where(merged.old >= 0, merged.old, merged.placeholder)
        self.inferred = merged.placeholder >= 0
        key = single(entries.column(history.dimension.surrogate_key))
        self.keys = np.asarray(pick(key, self.position).fill_null(0)).astype(np.int64)

    def rows(self, names: Sequence[str], positions: NDArray[np.int64]) -> list[pa.Array]:
        """Return columns of the entries at positions; null where negative."""
        return [pick(single(self.entries.column(name)), positions) for name in names]


def _differences(history: History, merged: Merged, versions: Versions, stored: _Stored) -> dict[str, pa.Table]:
    """Return the differences from the stored entries and versions."""
    entries, shown = versions.entries, history.version_schema.names
    there = np.flatnonzero(merged.old >= 0)
    changed = merged.old < 0
    changed[there] = _differs(entries, there, stored, merged.old[there], entries.column_names)
    heads = np.flatnonzero(versions.heads)
    kept, new = heads[versions.claimed >= 0], heads[versions.claimed < 0]
    before = stored.position[versions.claimed[versions.claimed >= 0]]
    updated = kept[_differs(entries, kept, stored, before, shown)]
    gone = np.setdiff1d(versions.owners, versions.claimed, assume_unique=True)
    placeholders = merged.placeholder[merged.placeholder >= 0]
    return {
        "upserts": _taken(entries, np.flatnonzero(changed)),
        "deletes": _taken(stored.entries.select(list(history.entry_key)), placeholders),
        "inserted": _taken(entries.select(shown), new),
        "updated": _taken(entries.select(shown), updated),
        "retired": _taken(stored.entries.select(shown), stored.position[gone]),
    }


def _differs(
    entries: pa.Table, rows: NDArray[np.int64], stored: _Stored, positions: NDArray[np.int64], names: Sequence[str]
) -> NDArray[np.bool_]:
    """Return where entries differ in some columns from the stored entries at positions."""
    now = [single(entries.column(name)).take(pa.array(rows)) for name in names]
    return rows_differ(now, stored.rows(names, positions), len(rows))


def _taken(table: pa.Table, rows: NDArray[np.int64]) -> pa.Table:
    """Return rows of a table, column by column, because `Table.take` is slower."""
    columns = [single(column).take(pa.array(rows)) for column in table.columns]
    return pa.Table.from_arrays(columns, schema=table.schema)


def _outcomes(
    history: History, merged: Merged, versions: Versions, stored: _Stored
) -> tuple[NDArray[np.int8], NDArray[np.bool_]]:
    """Return outcome and lateness of the winning change at each row; undefined where a stored entry won."""
    known, newest = _members_before(merged, stored)
    late = merged.at < newest
    deleted = np.asarray(merged.columns[history.is_deleted], dtype=np.bool_)
    corrected = _corrected(history, merged, versions, stored)
    begins = versions.heads & ~_was_head(history, merged, stored)
    first = merged.starts & ~known
    chosen = np.select(
        [
            _deviates(history, merged, versions),
            deleted & versions.heads & (begins | corrected),
            first & ~deleted,
            (merged.placeholder >= 0) & ~deleted,
            begins & (versions.claimed[versions.run] < 0),
            begins | corrected | _overwrites(history, merged, versions),
        ],
        [
            _CODE[outcome]
            for outcome in (
                ChangeOutcome.ROUTED,
                ChangeOutcome.DELETED,
                ChangeOutcome.ADDED,
                ChangeOutcome.COMPLETED,
                ChangeOutcome.VERSIONED,
                ChangeOutcome.UPDATED,
            )
        ],
        _CODE[ChangeOutcome.UNCHANGED],
    )
    return chosen.astype(np.int8), late


def _members_before(merged: Merged, stored: _Stored) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return for each row whether its member was stored, and the time of the member's last entry."""
    member = np.cumsum(merged.starts) - 1
    known = np.zeros(int(member[-1]) + 1 if len(member) else 0, dtype=np.bool_)
    known[member[stored.position >= 0]] = True
    newest = np.full(len(known), np.iinfo(np.int64).min)
    entries = merged.old >= 0
    newest[member[entries]] = merged.at[entries]  # ascending within a member, so the last assignment remains
    return known[member], newest[member]


def _was_head(history: History, merged: Merged, stored: _Stored) -> NDArray[np.bool_]:
    """Return where a stored version began at the same time."""
    at, begun = stored.rows([AT, history.valid_from], merged.old)
    return np.asarray(pc.fill_null(pc.equal(at, begun), fill_value=False), dtype=np.bool_)


def _corrected(history: History, merged: Merged, versions: Versions, stored: _Stored) -> NDArray[np.bool_]:
    """Return where a change differs from the stored entry of its time, and its version shows the difference."""
    names = [*history.dimension.attributes.names, history.is_deleted]
    own = [history.recorded.get(name, name) for name in names]
    rows = np.flatnonzero((merged.old >= 0) & (merged.change >= 0))
    corrected = np.zeros(len(merged.at), dtype=np.bool_)
    corrected[rows] = _differs(versions.entries, rows, stored, merged.old[rows], names)
    corrected[rows] &= _differs(versions.entries, rows, stored, merged.old[rows], own)
    return corrected


def _overwrites(history: History, merged: Merged, versions: Versions) -> NDArray[np.bool_]:
    """Return where a row changes an attribute of type 1 from the previous row, and no later row hides the change."""
    rows = len(merged.at)
    position = np.arange(rows)
    before = np.where(merged.starts, -1, position - 1)
    overwrites = np.zeros(rows, dtype=np.bool_)
    for names, last in ((history.type_1, versions.last_of_member), (history.type_1_current, versions.last_of_run)):
        columns = [merged.columns[name] for name in names]
        differs = rows_differ(columns, [pick(column, before) for column in columns], rows)
        overwrites |= differs & (position == last)
    return overwrites & ~merged.starts


def _deviates(history: History, merged: Merged, versions: Versions) -> NDArray[np.bool_]:
    """Return where a change's value of a type 0 attribute differs from the member's value."""
    shown = [single(versions.entries.column(name)) for name in history.type_0]
    came = [merged.columns[name] for name in history.type_0]
    deleted = np.asarray(merged.columns[history.is_deleted], dtype=np.bool_)
    return rows_differ(shown, came, len(merged.at)) & ~deleted


def _routed_causes(history: History, merged: Merged, versions: Versions) -> tuple[NDArray[np.int64], pa.Array]:
    """Return the deviating rows, and the attributes with the values that they keep."""
    rows = np.flatnonzero(_deviates(history, merged, versions))
    texts = []
    for name in history.type_0:
        shown = single(versions.entries.column(name)).take(pa.array(rows))
        came = merged.columns[name].take(pa.array(rows))
        parts = [pc.cast(key_text([column]), pa.string()) for column in (shown, came)]
        text = pc.binary_join_element_wise(f"{name!r} stays ", parts[0], ", came as ", parts[1], "")
        texts.append(pc.if_else(pa.array(differ(shown, came)), text, pa.scalar(None, pa.string())))
    if not texts:
        return rows, pa.array([], pa.string())
    return rows, pc.binary_join_element_wise(*texts, "; ", null_handling="skip")


def _reported(
    causes: pa.Array,
    position: NDArray[np.int64],
    merged: Merged,
    outcome: NDArray[np.int8],
    late: NDArray[np.bool_],
    routed: tuple[NDArray[np.int64], pa.Array],
) -> pa.Table:
    """Return outcome, cause, and lateness of the changes in input order."""
    code = np.full(len(causes), _CODE[ChangeOutcome.REJECTED], dtype=np.int8)
    won = merged.status == WON
    lost = np.where(merged.status == REPLAYED, _CODE[ChangeOutcome.REPLAYED], _CODE[ChangeOutcome.SUPERSEDED])
    code[position] = np.where(won, outcome[merged.row], lost)
    is_late = np.zeros(len(causes), dtype=np.bool_)
    is_late[position] = won & late[merged.row]
    rows, texts = routed
    cause_at = np.full(len(causes), -1, dtype=np.int64)
    mine = merged.change[rows] >= 0
    cause_at[position[merged.change[rows[mine]]]] = np.flatnonzero(mine)
    cause = pc.coalesce(causes, pick(texts, cause_at))
    superseded = pa.array(code == _CODE[ChangeOutcome.SUPERSEDED])
    cause = pc.if_else(superseded, "a change of the same time has a greater sequence", cause)
    return pa.table({"outcome": _NAMES.take(pa.array(code)), "cause": cause, "late": pa.array(is_late)})
