"""Changes from snapshots: a full extract of a dimension, compared with the versions that are valid at its time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.errors import DeclarationError
from headrace.etl.history.changes import take_in
from headrace.etl.history.instants import ticks_of, to_instants
from headrace.etl.history.values import differ, pick, single
from headrace.etl.ranking import key_text, rank_rows
from headrace.storage.errors import KeyInputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.etl.history.declaration import History

__all__ = ["snapshot_changes"]


def snapshot_changes(
    history: History,
    versions: pa.Table,
    snapshot: pa.Table | pa.RecordBatch,
    at: Any,
    *,
    sequence: Any = None,
    missing: Literal["delete", "keep"] = "delete",
) -> pa.Table:
    """Return the changes that lead from the state of a dimension at a time to a snapshot.

    A row that agrees with the version that is valid at the time is no change. So snapshots are applied in the order of
    their times: a change that arrives later, for a time between two snapshots, is not taken back by the second one.

    Parameters
    ----------
    history
        Declaration of the dimension.
    versions
        All versions of the dimension (`History.version_schema`).
    snapshot
        All members, with the natural key and the attributes. Rows whose key or values do not fit are among the changes,
        so that `apply_changes` rejects them with a cause.
    at
        Time of the snapshot: the changes are effective from it on.
    sequence
        Sequence of the changes; required if the declaration has a sequence.
    missing
        ``"delete"`` if members that are not in the snapshot are deleted, ``"keep"`` if they stay. Inferred members
        stay, since their record is yet to come.

    Returns
    -------
    pyarrow.Table
        Upserts in the order of the snapshot, then deletes, for `apply_changes`.

    Raises
    ------
    DeclarationError
        If the declaration has no operation for deletes, or no sequence is given.
    KeyInputError
        If the snapshot has two rows of one member.

    Examples
    --------
    >>> import datetime as dt
    >>> from headrace.etl import Dimension
    >>> from headrace.etl.history import History
    >>> customer = Dimension("customer", ("id",), "key", pa.schema({"id": pa.int64(), "city": pa.string()}))
    >>> history = History(customer, effective="since", effective_type=pa.date32(), operation="op")
    >>> none = history.version_schema.empty_table()
    >>> snapshot = pa.table({"id": [7], "city": ["Oslo"]})
    >>> snapshot_changes(history, none, snapshot, dt.date(2024, 1, 1)).to_pylist()
    [{'id': 7, 'city': 'Oslo', 'since': datetime.date(2024, 1, 1), 'op': 'I'}]
    """
    if missing == "delete" and history.operation is None:
        raise DeclarationError(
            f"dimension {history.dimension.name!r} has no `operation` that marks deletes; declare it, or say "
            'missing="keep"'
        )
    if history.sequence is not None and sequence is None:
        raise DeclarationError(f"dimension {history.dimension.name!r} orders changes by {history.sequence!r}; give it")
    upserts = _as_changes(history, snapshot, at, sequence)
    intake = take_in(history, upserts)
    valid = _valid_at(history, versions, at)
    place, unmet = _matched(history, intake.rows, valid)
    wanted = np.ones(upserts.num_rows, dtype=np.bool_)  # a rejected row is wanted, for its cause
    wanted[intake.position] = _differs(history, intake.rows, valid, place)
    changes = upserts.filter(pa.array(wanted))
    if missing == "keep":
        return changes
    gone = valid.filter(pa.array(unmet & ~_absent(history, valid)))
    return pa.concat_tables([changes, _deletes(history, gone, upserts.schema, at, sequence)])


def _as_changes(history: History, snapshot: pa.Table | pa.RecordBatch, at: Any, sequence: Any) -> pa.Table:
    names = [*history.dimension.natural_key, *history.dimension.attributes.names]
    names = [name for name in names if name in snapshot.schema.names]
    columns = {name: snapshot.column(name) for name in names}
    return pa.table(columns | _described(history, snapshot.num_rows, at, sequence, history.upserts[0]))


def _described(history: History, rows: int, at: Any, sequence: Any, operation: str) -> dict[str, pa.Array]:
    """Return the columns of changes that say when they are valid, and what they do."""
    described = {history.effective: pa.repeat(pa.scalar(at, history.effective_type), rows)}
    if history.sequence is not None:
        described[history.sequence] = pa.repeat(pa.scalar(sequence, history.sequence_type), rows)
    if history.operation is not None:
        described[history.operation] = pa.repeat(pa.scalar(operation, pa.string()), rows)
    return described


def _valid_at(history: History, versions: pa.Table, at: Any) -> pa.Table:
    """Return the versions that are valid at a time, without the special members, which have no key."""
    instant = to_instants(pa.array([at], history.effective_type), history.instant_type, history.effective)
    time = int(ticks_of(instant)[0])
    begin, end = (single(versions.column(name)) for name in (history.valid_from, history.valid_to))
    valid = (ticks_of(begin) <= time) & (np.asarray(end.is_null()) | (ticks_of(end) > time))
    for name in history.dimension.natural_key:
        valid &= np.asarray(single(versions.column(name)).is_valid())
    return versions.filter(pa.array(valid))


def _matched(history: History, rows: pa.Table, valid: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the position of the version of each row, or -1, and the versions without a row."""
    names = list(history.dimension.natural_key)
    both = [
        pa.concat_arrays([single(rows.column(n)), single(valid.column(n)).cast(rows.column(n).type)]) for n in names
    ]
    ranks, distinct = rank_rows(both)
    mine, stored = ranks[: rows.num_rows], ranks[rows.num_rows :]
    counts = np.bincount(mine, minlength=distinct)
    if (counts > 1).any():
        twice = int(np.flatnonzero(counts[mine] > 1)[0])
        key = key_text([rows.column(name).slice(twice, 1) for name in names])[0]
        raise KeyInputError(f"the snapshot has two rows of member {key} of dimension {history.dimension.name!r}")
    position = np.full(distinct, -1, dtype=np.int64)
    position[stored] = np.arange(len(stored))
    return position[mine], counts[stored] == 0


def _differs(history: History, rows: pa.Table, valid: pa.Table, place: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the rows that differ from the version at their place, in what they give and what is compared."""
    flag = history.dimension.inferred_flag
    assert flag is not None
    differs = place < 0
    for name in (history.is_deleted, flag):
        differs |= np.asarray(pick(single(valid.column(name)), place).fill_null(fill_value=True), dtype=np.bool_)
    for name in history.dimension.attributes.names:
        if history.type_of(name) == "audit":
            continue
        values = differ(single(rows.column(name)), pick(single(valid.column(name)), place))
        given = history.given.get(name)
        differs |= values if given is None else values & np.asarray(single(rows.column(given)).is_valid())
    return differs


def _absent(history: History, valid: pa.Table) -> NDArray[np.bool_]:
    """Return the versions that no snapshot deletes: deleted ones, and inferred members, whose record is yet to come."""
    flags = [single(valid.column(name)) for name in (history.is_deleted, history.dimension.inferred_flag)]
    return np.asarray(pc.or_(*flags), dtype=np.bool_)


def _deletes(history: History, gone: pa.Table, schema: pa.Schema, at: Any, sequence: Any) -> pa.Table:
    """Return deletes in a schema of changes."""
    columns = {name: gone.column(name) for name in history.dimension.natural_key}
    columns |= _described(history, gone.num_rows, at, sequence, history.deletes[0])
    given = [columns.get(field.name, pa.nulls(gone.num_rows, field.type)) for field in schema]
    return pa.table([column.cast(field.type) for column, field in zip(given, schema, strict=True)], schema=schema)
