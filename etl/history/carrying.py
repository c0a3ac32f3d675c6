"""Partial changes: the winner of each register, and the values that are carried from the state as of a change's time.

A *register* is a column that a change may or may not give: an attribute, the spelling of a key, the delete flag. Of the
changes of a member and time that give it, one wins: the greatest sequence, then the smallest value, nulls last. Per
register, that is a maximum in a total order, so merging is commutative, associative, and idempotent, as for full rows.
An entry records the winners with their sequences, and null for registers that no change of its time gave. Carried
values are not recorded: every merge computes them again from the previous entries of the member. So a change that
arrives late reaches all later entries that carry its values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.etl.history.declaration import AT, SEQUENCE
from headrace.etl.history.instants import ticks_of
from headrace.etl.history.values import differ, differ_from_previous, order_of, pick, single
from headrace.etl.ranking import sort_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.etl.history.declaration import History

__all__ = ["Registers"]


class Registers:
    """Rows merged by member and time, register by register.

    Parameters
    ----------
    history
        Declaration with `partial`.
    rows
        Stored entries and changes in the layout of `change_schema`.
    ranks
        Rank of the member of each row.
    is_change
        True for rows that are changes. Of a stored entry and a change with equal sequence and value, the entry wins.

    Attributes
    ----------
    group
        Number of each row's member and time, in order.
    first
        A row of each group.
    at
        Time of each group in ticks.
    starts
        True for the first group of each member.
    wins
        True for rows that win a register.
    replays
        True for rows that win no register, and whose registers are all held with the same sequence and value.
    """

    def __init__(
        self, history: History, rows: pa.Table, ranks: NDArray[np.int64], is_change: NDArray[np.bool_]
    ) -> None:
        self._history = history
        self._rows = rows
        at = ticks_of(single(rows.column(AT)))
        order = np.lexsort((at, ranks))
        begins = _differ(ranks[order]) | _differ(at[order])
        self.group = np.empty(len(order), dtype=np.int64)
        self.group[order] = np.cumsum(begins) - 1
        self.first = order[begins]
        self.at = at[self.first]
        self.starts = _differ(ranks[self.first])
        self.wins = np.zeros(len(order), dtype=np.bool_)
        self.replays = np.ones(len(order), dtype=np.bool_)
        self._winners = {name: self._settle(name, is_change) for name in history.given}
        self.replays &= ~self.wins

    def _settle(self, name: str, is_change: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the row that wins a register in each group, or -1, and mark the rows that win and that lose."""
        given = single(self._rows.column(self._history.given[name]))
        candidates = np.flatnonzero(np.asarray(given.is_valid()))
        winner = np.full(len(self.first), -1, dtype=np.int64)
        if not len(candidates):
            return winner
        values = single(self._rows.column(name)).take(pa.array(candidates))
        sequence = order_of(given.take(pa.array(candidates)))
        group = self.group[candidates]
        order = np.lexsort((is_change[candidates], sequence, group))
        if not (_differ(group[order]) | _differ(sequence[order])).all():
            order = np.lexsort((is_change[candidates], _rank(values), -sequence, group))
        else:
            order = np.lexsort((-sequence, group))
        heads = order[_differ(group[order])]
        winner[group[heads]] = candidates[heads]
        self.wins[candidates[heads]] = True
        head_of = np.empty(len(self.first), dtype=np.int64)
        head_of[group[heads]] = heads
        best = head_of[group]
        lost = (sequence != sequence[best]) | differ(values, values.take(pa.array(best)))
        self.replays[candidates[lost]] = False
        return winner

    def columns(self) -> tuple[dict[str, pa.Array], dict[str, pa.Array]]:
        """Return the columns of `change_schema`, with carried values, and the columns that record what was given."""
        history, first = self._history, pa.array(self.first)
        columns = {name: single(self._rows.column(name)).take(first) for name in history.entry_key}
        columns[SEQUENCE] = self._greatest_sequence()
        own = {}
        for name, winner in self._winners.items():
            values, given = (single(self._rows.column(column)) for column in (name, history.given[name]))
            own[history.recorded[name]] = pick(values, winner)
            own[history.given[name]] = pick(given, winner)
            columns[name] = pick(values, winner[self._carried_from(winner)])
        columns[history.is_deleted] = columns[history.is_deleted].fill_null(fill_value=False)
        return columns, own

    def _carried_from(self, winner: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each group the last group of its member up to it with a winner, or itself without one."""
        groups = np.arange(len(winner))
        begin = np.maximum.accumulate(np.where(self.starts, groups, 0))
        last = np.maximum.accumulate(np.where(winner >= 0, groups, -1))
        return np.where(last < begin, groups, last)

    def _greatest_sequence(self) -> pa.Array:
        sequence = single(self._rows.column(SEQUENCE))
        order = np.lexsort((-order_of(sequence), self.group))
        return sequence.take(pa.array(order[_differ(self.group[order])]))


def _rank(values: pa.Array) -> NDArray[np.int64]:
    """Return the dense rank of each value, nulls last."""
    order = sort_rows([values])
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.cumsum(differ_from_previous([values.take(pa.array(order))], len(order)))
    return ranks


def _differ(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    differs = np.ones(len(values), dtype=np.bool_)
    differs[1:] = values[1:] != values[:-1]
    return differs
