"""Snapshots: files that have all members as of a time, and the changes that they stand for.

A snapshot is compared with the dimension as of its time. A row that says what the dimension says is no change. Other
rows are changes from that time on, and members that the snapshot lacks are deleted from that time on, or left, by
choice. Members that facts introduced and whose record has not arrived are left in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.history.changes import take_in
from headrace.etl.history.declaration import AT
from headrace.etl.history.instants import ticks_of, to_instants
from headrace.etl.history.merging import as_changes
from headrace.etl.history.values import differ_from_previous, rows_differ, single
from headrace.etl.ranking import occurs_in, rank_rows
from headrace.pipelines.config.column_types import type_name
from headrace.pipelines.errors import SnapshotOptionsError
from headrace.pipelines.replica.rows import of_shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from headrace.etl.history import History

__all__ = ["Snapshot", "snapshot_history"]

_TIME: Final = "_snapshot_time"
_ORDER: Final = "_snapshot_sequence"
_OPERATION: Final = "_snapshot_operation"
_UPSERT: Final = "U"
_DELETE: Final = "D"
_HELD_ROWS: Final = 1 << 18


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of a dimension.

    Parameters
    ----------
    at
        Time of the snapshot, in the type of the effective time.
    sequence
        Sequence of its changes, in the declared type; None if the history has no sequence.
    missing
        What happens to members that the snapshot lacks: ``delete`` or ``keep``.
    """

    at: pa.Scalar
    sequence: pa.Scalar | None
    missing: Literal["delete", "keep"]

    @classmethod
    def of(cls, history: History, at: str, sequence: str | None, missing: Literal["delete", "keep"]) -> Snapshot:
        """Return a snapshot from the texts of its time and its sequence.

        Raises
        ------
        SnapshotOptionsError
            If a text has no value of its type, or the sequence is missing or not declared.
        """
        if (history.sequence is None) != (sequence is None):
            what = (
                "history has no sequence; leave out --sequence"
                if history.sequence is None
                else f"changes have the sequence {history.sequence!r}, so those of a snapshot need one; add --sequence "
                "with a value that is greater than those of earlier changes"
            )
            raise SnapshotOptionsError(f"dimension {history.dimension.name!r}: its {what}")
        order = None if sequence is None else _scalar(sequence, history.sequence_type, "sequence")
        return cls(_scalar(at, history.effective_type, "time"), order, missing)

    def changes(self, history: History, rows: pa.Table) -> pa.Table:
        """Return snapshot rows as changes of `snapshot_history`."""
        return self._timed(history, rows, _UPSERT)

    def differing(self, history: History, changes: pa.Table, entries: pa.Table) -> NDArray[np.bool_]:
        """Return which changes differ from what the dimension says at the time of the snapshot.

        Parameters
        ----------
        history
            Declaration of `snapshot_history`.
        changes
            Changes of `changes`.
        entries
            Stored entries of the members that they name.
        """
        intake = take_in(history, changes)
        known = as_changes(history, _newest(history, entries, self._instant(history)))
        ranks, distinct = rank_rows(_keys(history, [known, intake.rows]))
        place = np.full(distinct, -1, dtype=np.int64)
        place[ranks[: known.num_rows]] = np.arange(known.num_rows)
        stored = place[ranks[known.num_rows :]]
        differs = np.ones(changes.num_rows, dtype=np.bool_)
        there = np.flatnonzero(stored >= 0)
        given = [name for name in history.dimension.attributes.names if name in changes.column_names]
        names = [name for name in given if history.type_of(name) != "audit"]
        names.append(history.is_deleted)
        one = [single(intake.rows.column(name)).take(pa.array(there)) for name in names]
        other = [single(known.column(name)).take(pa.array(stored[there])) for name in names]
        differs[intake.position[there]] = rows_differ(one, other, len(there))
        return differs

    def deletes(
        self, history: History, named: pa.Table, entries: Iterable[pa.RecordBatch], shards: int, shard: int
    ) -> pa.Table:
        """Return the deletes of members that the snapshot lacks.

        Parameters
        ----------
        history
            Declaration of `snapshot_history`.
        named
            Natural keys that the snapshot has, each once.
        entries
            All entries of a replica, in the order of their key.
        shards, shard
            Number of shards, and the shard whose members are looked for.
        """
        keys, instant = history.dimension.key_schema, self._instant(history)
        missing = [keys.empty_table()]
        for held in _newest_of_each(history, entries, instant):
            rows = of_shard(held, keys, shards, shard).select(keys.names)
            missing.append(rows.filter(pa.array(~occurs_in(rows, [named.cast(rows.schema)]))).cast(keys))
        gone = pa.concat_tables(missing)
        empty = {field.name: pa.nulls(gone.num_rows, field.type) for field in history.dimension.attributes}
        whole = pa.table([*gone.columns, *empty.values()], names=[*keys.names, *empty])
        return self._timed(history, whole, _DELETE)

    def _timed(self, history: History, rows: pa.Table, operation: str) -> pa.Table:
        added: dict[str, Any] = {_TIME: self.at, _OPERATION: pa.scalar(operation)}
        if self.sequence is not None:
            added[_ORDER] = self.sequence
        wanted = [*history.dimension.natural_key, *history.dimension.attributes.names]
        wanted = [name for name in wanted if name in rows.column_names]
        others = [name for name in rows.column_names if name not in wanted]
        columns = {name: rows.column(name) for name in (*wanted, *others)}
        columns |= {name: pa.repeat(value, rows.num_rows) for name, value in added.items()}
        return pa.table(columns)

    def _instant(self, history: History) -> pa.Scalar:
        return to_instants(pa.array([self.at.as_py()], self.at.type), history.instant_type, _TIME)[0]


def snapshot_history(history: History) -> History:
    """Return the declaration with the columns of changes that snapshots have; what is stored stays the same."""
    order = None if history.sequence is None else _ORDER
    return replace(
        history, effective=_TIME, sequence=order, operation=_OPERATION, upserts=(_UPSERT,), deletes=(_DELETE,)
    )


def _scalar(text: str, kind: pa.DataType, what: str) -> pa.Scalar:
    try:
        return pa.scalar(text).cast(kind)
    except pa.ArrowException as error:
        option = {"time": "--snapshot", "sequence": "--sequence"}[what]
        raise SnapshotOptionsError(
            f"{option} {text!r}: the {what} of the snapshot is no {type_name(kind)}: {error}"
        ) from error


def _keys(history: History, parts: list[pa.Table]) -> list[pa.Array]:
    names = list(history.dimension.natural_key)
    return [single(column) for column in pa.concat_tables([part.select(names) for part in parts]).columns]


def _newest(history: History, entries: pa.Table, instant: pa.Scalar) -> pa.Table:
    """Return the entry of each member that counts at an instant; inferred members have none."""
    counts = pc.and_not(pc.less_equal(entries.column(AT), instant), entries.column(_flag(history)))
    entries = entries.filter(counts)
    if not entries.num_rows:
        return entries
    ranks, _ = rank_rows([single(entries.column(name)) for name in history.dimension.natural_key])
    order = np.lexsort((ticks_of(single(entries.column(AT))), ranks))
    last = np.flatnonzero(np.append(np.diff(ranks[order]) != 0, [True]))
    return entries.take(pa.array(order[last]))


def _newest_of_each(history: History, batches: Iterable[pa.RecordBatch], instant: pa.Scalar) -> Iterator[pa.Table]:
    """Yield the entries that count at an instant and are not deletes, some members at a time.

    A member's entries may be in two batches, so the last member of each piece waits for the next one.
    """
    held: list[pa.Table] = []
    rows = 0
    for batch in batches:
        held.append(pa.Table.from_batches([batch]).cast(history.entry_schema))
        rows += batch.num_rows
        if rows >= _HELD_ROWS:
            whole = pa.concat_tables(held)
            start = _last_member(history, whole)
            yield _present(history, whole.slice(0, start), instant)
            held = [whole.slice(start)]
            rows = held[0].num_rows
    if held:
        yield _present(history, pa.concat_tables(held), instant)


def _last_member(history: History, entries: pa.Table) -> int:
    """Return the position of the first entry of the last member."""
    keys = [single(entries.column(name)) for name in history.dimension.natural_key]
    return int(np.flatnonzero(differ_from_previous(keys, entries.num_rows))[-1])


def _present(history: History, entries: pa.Table, instant: pa.Scalar) -> pa.Table:
    newest = _newest(history, entries, instant)
    return newest.filter(pc.invert(newest.column(history.is_deleted)))


def _flag(history: History) -> str:
    flag = history.dimension.inferred_flag
    assert flag is not None
    return flag
