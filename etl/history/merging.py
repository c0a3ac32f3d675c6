"""Merge of stored entries and new changes: the winning change for each member and time.

Of the changes of a member and time, the greatest sequence wins. With equal sequences, an upsert wins over a delete; of
two upserts, the row with the smaller attributes wins, compared in the column order of the dimension, nulls last. This
is a total order, so the winner of a set does not depend on the arrival order.

With partial changes, each register (attribute, spelling, delete flag) has its own winner: the greatest sequence among
the changes of its member and time that give it, then the smaller value, nulls last. `carrying` completes the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.history.carrying import Registers
from headrace.etl.history.changes import change_schema
from headrace.etl.history.declaration import AT, SEQUENCE
from headrace.etl.history.instants import ticks_of
from headrace.etl.history.values import differ_from_previous, order_of, single
from headrace.etl.ranking import rank_rows, sort_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.etl.history.declaration import History

__all__ = ["REPLAYED", "SUPERSEDED", "WON", "Merged", "as_changes", "merge"]

WON: Final = 0
REPLAYED: Final = 1
SUPERSEDED: Final = 2


@dataclass(frozen=True)
class Merged:
    """The winning changes of all affected members, by member and time.

    Parameters
    ----------
    columns
        Columns of `change_schema` by name.
    starts
        True for the first row of each member.
    at
        Time of each row in ticks of the instant type.
    old
        Position of the stored entry with the row's member and time; -1 if absent.
    placeholder
        Position of the inferred entry, for the first row of an inferred member; -1 for other rows.
    change
        Position of the winning change; -1 if the stored entry won. With partial changes, several may win a register
        each; this is one of them.
    status : int8[changes]
        Status of each change: WON, REPLAYED, or SUPERSEDED.
    row : int64[changes]
        Row of each change's member and time.
    own
        Columns of entries that record what the changes of a row's member and time gave, by name.
    """

    columns: dict[str, pa.Array]
    starts: NDArray[np.bool_]
    at: NDArray[np.int64]
    old: NDArray[np.int64]
    placeholder: NDArray[np.int64]
    change: NDArray[np.int64]
    status: NDArray[np.int8]
    row: NDArray[np.int64]
    own: dict[str, pa.Array] = field(default_factory=dict)


def as_changes(history: History, entries: pa.Table) -> pa.Table:
    """Return the recorded changes of stored entries in the layout of changes."""
    deleted = single(entries.column(history.is_deleted))
    columns = []
    for column_of in change_schema(history):
        column = single(entries.column(history.recorded.get(column_of.name, column_of.name)))
        if column_of.name in history.versioned and history.partial is None:
            column = pc.if_else(deleted, pa.scalar(None, column.type), column)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=change_schema(history))


def merge(history: History, entries: pa.Table, changes: pa.Table) -> Merged:
    """Merge changes with the entries of the members that they name.

    Parameters
    ----------
    history
        The declaration.
    entries
        All stored entries of the affected members, in any order.
    changes
        Changes in the layout of `change_schema`.
    """
    inferred = np.asarray(single(entries.column(history.dimension.inferred_flag)), dtype=np.bool_)
    stored, waiting = np.flatnonzero(~inferred), np.flatnonzero(inferred)
    rows = pa.concat_tables([as_changes(history, entries.take(pa.array(stored))), changes]).combine_chunks()
    ranks, waiting_ranks = _member_ranks(history, rows, entries.take(pa.array(waiting)))
    origin = np.concatenate([stored, -1 - np.arange(changes.num_rows)])
    if history.partial is not None:
        return _merge_registers(history, rows, ranks, origin, (waiting, waiting_ranks))
    ordered = _Ordered(history, rows, ranks)
    origin = origin[ordered.order]
    winners = ordered.winners
    group = ordered.group
    old = np.full(len(winners), -1, dtype=np.int64)
    old[group[origin >= 0]] = origin[origin >= 0]
    status = np.full(changes.num_rows, SUPERSEDED, dtype=np.int8)
    new = origin < 0
    status[-1 - origin[new & ordered.replays]] = REPLAYED
    won = origin[winners]
    status[-1 - won[won < 0]] = WON
    row = np.empty(changes.num_rows, dtype=np.int64)
    row[-1 - origin[new]] = group[new]
    member = ranks[ordered.order][winners]
    columns = {name: ordered.column(name, winners) for name in rows.column_names}
    return Merged(
        columns=columns,
        starts=np.diff(member, prepend=-1) != 0,
        at=ordered.at[winners],
        old=old,
        placeholder=_placed(member, waiting_ranks, waiting),
        change=np.where(won < 0, -1 - won, -1),
        status=status,
        row=row,
        own={own: columns[name] for name, own in history.recorded.items()},
    )


def _merge_registers(
    history: History,
    rows: pa.Table,
    ranks: NDArray[np.int64],
    origin: NDArray[np.int64],
    inferred: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> Merged:
    """Merge rows register by register.

    Parameters
    ----------
    history
        The declaration.
    rows
        Stored entries, then changes, in the layout of `change_schema`.
    ranks
        Rank of the member of each row.
    origin
        Position of the stored entry, or -1 minus the position of the change, of each row.
    inferred
        Positions and ranks of inferred members.
    """
    registers = Registers(history, rows, ranks, origin < 0)
    new = origin < 0
    old = np.full(len(registers.first), -1, dtype=np.int64)
    old[registers.group[~new]] = origin[~new]
    change = np.full(len(registers.first), -1, dtype=np.int64)
    won = new & registers.wins
    change[registers.group[won]] = -1 - origin[won]
    status = np.full(int(new.sum()), SUPERSEDED, dtype=np.int8)
    status[-1 - origin[new & registers.replays]] = REPLAYED
    status[-1 - origin[won]] = WON
    row = np.empty(len(status), dtype=np.int64)
    row[-1 - origin[new]] = registers.group[new]
    columns, own = registers.columns()
    return Merged(
        columns=columns,
        starts=registers.starts,
        at=registers.at,
        old=old,
        placeholder=_placed(ranks[registers.first], inferred[1], inferred[0]),
        change=change,
        status=status,
        row=row,
        own=own,
    )


def _member_ranks(history: History, rows: pa.Table, waiting: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ranks of members in key order, for rows and for inferred members."""
    names = history.dimension.natural_key
    columns = [pa.concat_arrays([single(rows.column(name)), single(waiting.column(name))]) for name in names]
    ranks, _ = rank_rows(columns)
    return ranks[: rows.num_rows], ranks[rows.num_rows :]


def _placed(
    member: NDArray[np.int64], waiting_ranks: NDArray[np.int64], waiting: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the position of the inferred entry, for the first row of each inferred member."""
    placed = np.full(len(member), -1, dtype=np.int64)
    if len(waiting):
        at = np.searchsorted(member, waiting_ranks)
        met = (at < len(member)) & (member[np.minimum(at, len(member) - 1)] == waiting_ranks) if len(member) else at < 0
        placed[at[met]] = waiting[met]
    return placed


class _Ordered:
    """Rows in the order of member, time, sequence and tie rule."""

    def __init__(self, history: History, rows: pa.Table, ranks: NDArray[np.int64]) -> None:
        self._rows = rows
        at = ticks_of(single(rows.column(AT)))
        sequence = order_of(single(rows.column(SEQUENCE)))
        self.order = np.lexsort((sequence, at, ranks))
        content = [name for name in rows.column_names if name not in {*history.entry_key, SEQUENCE}]
        self._break_ties(content, [ranks, at, sequence])
        self.at = at[self.order]
        starts = _differ(ranks[self.order]) | _differ(self.at)
        self.group = np.cumsum(starts) - 1
        first_of_equals = starts | ~self.replays
        last = np.append(np.flatnonzero(starts)[1:], len(starts)) - 1 if len(starts) else np.empty(0, dtype=np.int64)
        # The first of equal rows at the end of a group represents all of them: the stored entry, if present.
        leading = np.maximum.accumulate(np.where(first_of_equals, np.arange(len(starts)), 0))
        self.winners = leading[last]

    def _break_ties(self, content: Sequence[str], order: list[NDArray[np.int64]]) -> None:
        """Order rows of one member, time, and sequence by content, and mark rows that repeat the previous row."""
        tied = ~np.logical_or.reduce([_differ(part[self.order]) for part in order])
        self.replays = tied & ~self._content_differs(content, tied)
        unequal = tied & ~self.replays
        if not unequal.any():
            return
        group = np.cumsum(~tied) - 1
        mixed = np.flatnonzero(np.isin(group, group[unequal]))
        rows = self.order[mixed]
        columns = [self._rows.column(name).take(pa.array(rows)) for name in content]
        sorting = sort_rows([pa.array(-group[mixed]), *columns, pa.array(-np.arange(len(mixed)))])[::-1]
        self.order[mixed] = rows[sorting]
        self.replays = tied & ~self._content_differs(content, tied)

    def _content_differs(self, content: Sequence[str], tied: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return where tied rows differ from the previous row; undefined for other rows."""
        at = np.flatnonzero(tied)
        differs = np.ones(len(tied), dtype=np.bool_)
        if len(at):
            both = self.order[np.ravel(np.column_stack([at - 1, at]))]
            columns = [single(self._rows.column(name)).take(pa.array(both)) for name in content]
            differs[at] = differ_from_previous(columns, len(both))[1::2]
        return differs

    def column(self, name: str, positions: NDArray[np.int64]) -> pa.Array:
        """Return the values of a column at positions of the sorted order."""
        return single(self._rows.column(name)).take(pa.array(self.order[positions]))


def _differ(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    differs = np.ones(len(values), dtype=np.bool_)
    differs[1:] = values[1:] != values[:-1]
    return differs
