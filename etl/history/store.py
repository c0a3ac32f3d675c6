"""`HistoryDimension`: a dimension with history in two clustered tables of one folder.

`entries.table` holds the entries, in the order of natural key and time, and is authoritative: one commit of it is a
complete `apply_changes`. `current.table` is a replica of the current versions, one row per member, which serves
most facts. It records the transaction of the entries that it reflects. If it is behind, because a process was killed
between the two commits, lookups use only the entries, and the next change rebuilds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.errors import DeclarationError, DimensionError
from headrace.etl.history.applying import Applied, apply_changes
from headrace.etl.history.as_of import AsOfLookup, Operators, current_dimension, resolve_as_of
from headrace.etl.history.cascading import Reference, cascade, children_of, parents_of
from headrace.etl.history.checking import violations
from headrace.etl.history.declaration import AT, History
from headrace.etl.history.inferring import inferred_members, special_versions
from headrace.etl.history.stored import named_members, stored_entries, time_limits
from headrace.etl.lookup import Policy
from headrace.etl.surrogate import KeyAllocator
from headrace.joins import SSIJ, AsOf
from headrace.storage import Table
from headrace.storage.errors import TableExistsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType


__all__ = ["Follow", "HistoryDimension", "NewestEntry", "begins", "resolved"]

_ENTRIES: Final = "entries.table"
_CURRENT: Final = "current.table"
_DECLARATION: Final = "declaration.json"
_LOCK: Final = "lock"
_KEYS: Final = "headrace.history.keys"
_FOLLOWED: Final = "headrace.history.entries"
_WAIT: Final = 60.0


@dataclass(frozen=True)
class Follow:
    """Parent dimension whose new versions give its children new versions, and the parents that may have new ones.

    Parameters
    ----------
    reference
        Reference from the children to the parent.
    parent
        The parent dimension, with all its changes applied.
    changed
        Table with the natural keys of the parents that may have changed since the last cascade, such as their changes.
    sequence
        Sequence of the changes that the cascade causes, such as the number of the load. Each load has a greater one;
        repeating a load with the same one has no effect.
    audit
        Values of audit attributes for versions that only the cascade opens.
    """

    reference: Reference
    parent: HistoryDimension
    changed: pa.Table | pa.RecordBatch
    sequence: Any
    audit: dict[str, Any] = field(default_factory=dict)


class HistoryDimension:
    """A dimension with history on local disk, for pyarrow batches.

    Open a dimension with `HistoryDimension.open`, or create one with `HistoryDimension.create`.

    Examples
    --------
    >>> import datetime as dt, tempfile
    >>> from headrace.etl import Dimension
    >>> columns = pa.schema({"id": pa.int64(), "city": pa.string()})
    >>> customer = Dimension("customer", ("id",), "customer_key", columns)
    >>> history = History(customer, effective="since", effective_type=pa.date32())
    >>> folder = tempfile.TemporaryDirectory()
    >>> with HistoryDimension.create(folder.name + "/customer", history) as customers:
    ...     days = [dt.date(2024, 1, 1), dt.date(2024, 3, 1)]
    ...     _ = customers.apply_changes(pa.table({"id": [7, 7], "city": ["Oslo", "Bergen"], "since": days}))
    ...     orders = pa.table({"customer": [7], "day": [dt.date(2024, 2, 1)]})
    ...     found = customers.as_of(orders, on={"customer": "id"}, event_time="day", carry="city")
    >>> found.select(["customer_key", "customer_city"]).to_pylist()
    [{'customer_key': 1, 'customer_city': 'Oslo'}]
    >>> folder.cleanup()
    """

    def __init__(self, folder: Path, history: History, memory: int | str, options: dict[str, Any]) -> None:
        self.history = history
        self._folder = folder
        self._memory = memory
        self._options = options
        self._entries = Table.open(folder / _ENTRIES)
        self._current = Table.open(folder / _CURRENT)

    @classmethod
    def create(
        cls, folder: str | os.PathLike[str], history: History, *, memory: int | str = "64MiB", **options: Any
    ) -> Self:
        """Create an empty dimension and open it.

        Parameters
        ----------
        folder
            Folder to create.
        history
            The declaration.
        memory
            Memory budget of each join that a lookup or change runs.
        options
            Options of `headrace.storage.Table.build`, such as `page_size`.

        Raises
        ------
        TableExistsError
            If the folder already contains a dimension.
        """
        place = Path(folder)
        if (place / _DECLARATION).exists():
            raise TableExistsError(f"{place} holds a dimension already; open it, or choose another folder")
        place.mkdir(parents=True, exist_ok=True)
        empty, key = history.entry_schema.empty_table(), list(history.entry_key)
        with Table.build(place / _ENTRIES, empty, key, unique=True, overwrite=True, **options) as entries:
            txid = entries.snapshot().txid
        _build_current(place, history, [], txid, **options)
        _declare(place, history)
        return cls(place, history, memory, options)

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], history: History, *, memory: int | str = "64MiB", **options: Any
    ) -> Self:
        """Open a dimension; see `create` for the parameters.

        Raises
        ------
        DimensionError
            If the folder contains no dimension, or a dimension with a different declaration.
        """
        place = Path(folder)
        try:
            stored = json.loads((place / _DECLARATION).read_text())
        except FileNotFoundError:
            raise DimensionError(f"{place} holds no dimension with history; make one with `create`") from None
        described = _described(history)
        differing = [name for name in {**described, **stored} if stored.get(name) != described.get(name)]
        if differing:
            raise DimensionError(
                f"{place}: the dimension was made with another declaration of {', '.join(differing)}; "
                "open it with the same one, or make a new one and apply all changes to it"
            )
        return cls(place, history, memory, options)

    def close(self) -> None:
        """Close the tables."""
        self._entries.close()
        self._current.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def refresh(self) -> None:
        """Advance to the latest commit of other processes."""
        self._entries.refresh()
        self._current.refresh()
        if self._is_behind:  # another process may have rebuilt it
            self._current.close()
            self._current = Table.open(self._folder / _CURRENT)

    # Changes

    def apply_changes(self, changes: pa.Table | pa.RecordBatch, *, follow: Follow | None = None) -> Applied:
        """Apply changes of members in one atomic, durable commit.

        Parameters
        ----------
        changes
            Changes in any order; see `headrace.etl.history.apply_changes`. Repeating the same changes has no effect.
        follow
            Parent dimension whose new versions give its children in this dimension new versions. Their changes follow
            `changes` in the result.
        """
        with self._writing():
            if follow is not None:
                changes = self._cascaded(changes, follow)
            touched = self._entries_for(named_members(self.history, changes))
            applied = apply_changes(self.history, touched, changes, KeyAllocator(self.greatest_key))
            self._commit(applied.upserts, applied.deletes, applied.new_keys)
        return applied

    def _cascaded(self, changes: pa.Table | pa.RecordBatch, follow: Follow) -> pa.Table:
        """Return changes with those that the versions of a parent dimension cause."""
        reference, parent = follow.reference, follow.parent
        if reference.child != self.history or reference.parent != parent.history:
            raise DeclarationError(
                f"the reference leads from {reference.child.dimension.name!r} to {reference.parent.dimension.name!r}; "
                "declare it with the histories of these two dimensions"
            )
        wanted = named_members(parent.history, follow.changed)
        children = children_of(reference, self._entries.scan(), wanted)
        named = pa.concat_tables([named_members(self.history, changes), children])
        touched = self._entries_for(named.group_by(named.column_names).aggregate([]))
        parents = parent.versions_of(parents_of(reference, touched, changes))
        return cascade(reference, touched, changes, parents, sequence=follow.sequence, audit=follow.audit)

    def ensure(self, keys: pa.Table | pa.RecordBatch) -> pa.Table:
        """Return the surrogate keys of the current versions of members; missing members are inferred.

        Parameters
        ----------
        keys
            Natural keys, with the columns of the natural key.

        Returns
        -------
        pyarrow.Table
            The keys in input order, with the columns of `lookup`.
        """
        return self.lookup(keys, {name: name for name in self.history.dimension.natural_key}, policy=Policy.INFER)

    def _commit(self, upserts: pa.Table, deletes: pa.Table, new_keys: int) -> None:
        if not (upserts.num_rows or deletes.num_rows):
            return
        app = (_KEYS, self.greatest_key + new_keys) if new_keys else None
        before = self._entries.snapshot().txid
        self._entries.apply(upserts, deletes if deletes.num_rows else None, app=app, wait=_WAIT)
        self._follow(upserts, before)

    def _follow(self, upserts: pa.Table, before: int) -> None:
        """Update the replica of current versions to the newest commit of the entries."""
        history, txid = self.history, self._entries.snapshot().txid
        if self._current.app_version(_FOLLOWED) != before:
            self._rebuild()
            return
        rows = upserts.filter(pc.and_(upserts.column(history.is_current), begins(history, upserts)))
        self._current.apply(rows.select(self._current.schema.names), app=(_FOLLOWED, txid), wait=_WAIT)

    def _rebuild(self) -> None:
        self._current.close()
        entries = self._entries
        batches = (
            batch.filter(pc.and_(batch.column(self.history.is_current), begins(self.history, batch)))
            for batch in entries.scan()
        )
        _build_current(self._folder, self.history, batches, entries.snapshot().txid, **self._options)
        self._current = Table.open(self._folder / _CURRENT)

    # Lookups

    def lookup(
        self,
        facts: pa.Table | pa.RecordBatch,
        on: dict[str, str],
        *,
        role: str | None = None,
        policy: Policy | str = Policy.UNKNOWN,
        carry: str | tuple[str, ...] = (),
        **targets: Any,
    ) -> pa.Table:
        """Return facts with the surrogate keys of current versions; see `as_of`."""
        return self.as_of(facts, on, role=role, policy=policy, carry=carry, **targets)

    def as_of(
        self,
        facts: pa.Table | pa.RecordBatch,
        on: dict[str, str],
        event_time: str | None = None,
        *,
        role: str | None = None,
        policy: Policy | str = Policy.UNKNOWN,
        carry: str | tuple[str, ...] = (),
        **targets: Any,
    ) -> pa.Table:
        """Return facts with the surrogate keys of the versions that were valid at their times.

        Parameters
        ----------
        facts
            Facts to look up.
        on
            Natural key column for each column of the facts: ``{"customer_id": "id"}``.
        event_time
            Column with the time of the fact; None for the current version.
        role
            Name of the role; by default, the name of the dimension. The key column is ``<role>_key``.
        policy
            Policy for missing keys: ``"infer"`` (adds them in one commit), ``"unknown"``,
            ``"reject"`` or ``"fail"``.
        carry
            Columns of the version to add to the facts.
        targets
            Targets `before_first`, `null_time`, `null_key`, and `unfit_key`; see `AsOfLookup`.

        Returns
        -------
        pyarrow.Table
            The facts in input order, with the columns of `AsOfLookup.added_schema`.
        """
        declared = AsOfLookup(
            self.history,
            role or self.history.dimension.name,
            on,
            event_time,
            policy,
            carry,
            **targets,
        )
        if declared.policy != Policy.INFER:
            return self._resolved(declared, facts)
        with self._writing():
            base = self.greatest_key
            found = self._resolved(declared, facts, KeyAllocator(base))
            added = inferred_members(self.history, declared.current, found.to_batches(), base)
            self._commit(added, added.slice(0, 0), added.num_rows)
        return found

    def _resolved(
        self, declared: AsOfLookup, facts: pa.Table | pa.RecordBatch, allocator: KeyAllocator | None = None
    ) -> pa.Table:
        with self._operators(declared) as operators:
            return resolved(declared, operators, facts, allocator)

    # Contents

    @property
    def greatest_key(self) -> int:
        """The greatest surrogate key ever allocated."""
        return self._entries.app_version(_KEYS) or 0

    def versions(self, *, special: bool = True) -> pa.Table:
        """Return all versions in the order of natural key and time, the special members first."""
        names = self.history.version_schema.names
        heads = [batch.filter(begins(self.history, batch)).select(names) for batch in self._entries.scan()]
        stored = pa.Table.from_batches(heads, self._stored_versions)
        members = special_versions(self.history) if special else self.history.version_schema.empty_table()
        return pa.concat_tables([members, stored.cast(self.history.version_schema)])

    @property
    def _stored_versions(self) -> pa.Schema:
        return pa.schema([self._entries.schema.field(name) for name in self.history.version_schema.names])

    def versions_of(self, keys: pa.Table | pa.RecordBatch) -> pa.Table:
        """Return all versions of some members.

        Parameters
        ----------
        keys
            Table with the columns of the natural key; other columns and repeated keys do not matter.
        """
        entries = self._entries_for(named_members(self.history, keys))
        return entries.filter(begins(self.history, entries)).select(self.history.version_schema.names)

    def inferred(self) -> pa.Table:
        """Return the inferred members: facts introduced them, and their record has not arrived."""
        versions = self.versions(special=False)
        return versions.filter(versions.column(self.history.dimension.inferred_flag))

    def check(self) -> tuple[str, ...]:
        """Return the violations in the dimension; empty if it is valid. Reads the whole dimension into memory."""
        with self._writing():
            pass  # updates the replica
        entries = pa.Table.from_batches(self._entries.scan(), self._entries.schema)
        current = pa.Table.from_batches(self._current.scan(), self._current.schema)
        damage = [
            f"{table.path}: {text}" for table in (self._entries, self._current) for text in table.check().violations
        ]
        return (*map(str, damage), *violations(self.history, entries, current, self.greatest_key))

    # Joins

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the folder's lock at the newest commit, and update the replica if it is behind."""
        with (self._folder / _LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.refresh()
            if self._is_behind:
                self._rebuild()
            yield

    @property
    def _is_behind(self) -> bool:
        return self._current.app_version(_FOLLOWED) != self._entries.snapshot().txid

    @contextlib.contextmanager
    def _operators(self, lookup: AsOfLookup) -> Iterator[Operators]:
        """Open the joins of a lookup."""
        with contextlib.ExitStack() as stack:
            current = stack.enter_context(self._current_operator(lookup))
            if lookup.event_time is None:
                yield Operators(current)
                return
            yield Operators(current, *(stack.enter_context(self._over_entries(lookup, back)) for back in (True, False)))

    def _current_operator(self, lookup: AsOfLookup) -> Any:
        on, columns = lookup.current.operator_on, lookup.current.operator_columns
        if self._is_behind:
            return NewestEntry(self._entries, on, columns, self.history.instant_type, self._memory)
        return SSIJ(self._current, on=on, how="left", columns=columns, memory=self._memory)

    def _over_entries(self, lookup: AsOfLookup, backward: bool) -> SSIJ:
        on = lookup.entry_on(backward=backward)
        return SSIJ(self._entries, on=on, how="left", columns=lookup.entry_columns, memory=self._memory)

    def _entries_for(self, members: pa.Table) -> pa.Table:
        """Return all entries of members, given by distinct normalized keys."""
        return stored_entries(self.history, self._entries, members, self._memory)


class NewestEntry:
    """Replaces the replica of current versions while it is behind: finds the newest entry of each member."""

    _FAR: Final = "_far"

    def __init__(
        self, entries: Table, on: list[tuple[str, str]], columns: list[str], kind: pa.DataType, memory: int | str
    ) -> None:
        self._kind = kind
        self._added = len(columns)
        predicate = AsOf(self._FAR, AT, on)
        self._join = SSIJ(entries, on=predicate, how="left", columns=columns, memory=memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._join.close()

    def push(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Push a batch of the stream and return the results that are ready."""
        far = time_limits(self._kind, batch.num_rows)[1]
        return self._without_far(self._join.push(batch.append_column(self._FAR, far)))

    def flush(self) -> Iterator[pa.RecordBatch]:
        """Return the results of all rows pushed so far."""
        return self._without_far(self._join.flush())

    def _without_far(self, results: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for result in results:
            far = result.num_columns - self._added - 1
            yield result.select([column for column in range(result.num_columns) if column != far])


def resolved(
    declared: AsOfLookup,
    operators: Operators,
    facts: pa.Table | pa.RecordBatch,
    allocator: KeyAllocator | None = None,
) -> pa.Table:
    """Return facts in input order with the columns that a lookup adds.

    Parameters
    ----------
    declared, operators
        The lookup, and its open joins.
    facts
        The facts.
    allocator
        Allocator of surrogate keys for inferred members; None if the lookup infers none.
    """
    position = "_position"
    table = facts if isinstance(facts, pa.Table) else pa.Table.from_batches([facts])
    if position in table.column_names:
        raise DeclarationError(f"lookup {declared.role!r} adds a column {position!r}; rename that of the facts")
    declared.check(table.schema)
    # A join does not keep flags of columns without nulls, so the results of several joins would differ in them.
    table = table.cast(pa.schema([column.with_nullable(nullable=True) for column in table.schema]))
    table = table.append_column(position, pa.array(np.arange(table.num_rows)))
    found = list(resolve_as_of(declared, operators, table.combine_chunks().to_batches(), allocator))
    schema = pa.schema([*table.schema, *declared.added_schema()])
    if not found:
        return schema.empty_table().drop_columns([position])
    result = pa.Table.from_batches(found, schema)
    order = np.argsort(np.asarray(result.column(position)))
    return result.take(pa.array(order)).drop_columns([position])


def begins(history: History, entries: pa.Table | pa.RecordBatch) -> Any:
    """Return which entries begin a version."""
    return pc.equal(entries.column(AT), entries.column(history.valid_from))


def _build_current(
    folder: Path, history: History, batches: Iterable[pa.RecordBatch], txid: int, **options: Any
) -> None:
    dimension = current_dimension(history)
    names = dimension.table_schema.names
    selected = (batch.select(names) for batch in batches)
    columns = [column.with_nullable(column.name not in dimension.natural_key) for column in dimension.table_schema]
    reader = pa.RecordBatchReader.from_batches(
        pa.schema(columns), (_as(batch, pa.schema(columns)) for batch in selected)
    )
    key = list(dimension.natural_key)
    Table.build(folder / _CURRENT, reader, key, unique=True, app=(_FOLLOWED, txid), overwrite=True, **options).close()


def _as(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def _declare(folder: Path, history: History) -> None:
    """Write the declaration atomically, which makes the folder a dimension."""
    draft = folder / f"{_DECLARATION}.new"
    with draft.open("w") as file:
        file.write(json.dumps(_described(history), indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / _DECLARATION)


def _described(history: History) -> dict[str, str]:
    """Return the declaration as text by field, for comparison."""
    dimension = history.dimension
    described = {each.name: repr(getattr(history, each.name)) for each in fields(history) if each.name != "special"}
    del described["dimension"]
    if history.partial is None:  # dimensions of earlier versions do not declare it
        del described["partial"]
    columns = {column.name: str(column.type) for column in dimension.schema}
    rules = {name: repr(dimension.rule(name)) for name in dimension.natural_key}
    return described | {
        "natural_key": repr(dimension.natural_key),
        "surrogate_key": dimension.surrogate_key,
        "inferred_flag": repr(dimension.inferred_flag),
        "schema": repr(columns),
        "rules": repr(rules),
    }
