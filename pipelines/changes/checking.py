"""Check of a dimension with history: every version must follow from the changes that its entries record.

Rows are divided by member into files on the local disk, so that memory is bounded, and checked one part after another:
versions are computed again from the recorded changes, rows must be what their entries say, and replicas of this host
must have the same entries. Surrogate keys are divided by value and must be unique. Nothing is changed.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl import KeyAllocator
from headrace.etl.history import apply_changes, special_versions
from headrace.etl.history.values import single
from headrace.etl.ranking import key_text, rank_rows
from headrace.etl.sharding import shard_of
from headrace.pipelines.catalog import Catalog
from headrace.pipelines.changes.applying import leases_of
from headrace.pipelines.changes.engines import local_files
from headrace.pipelines.changes.fact_checking import RESTATE, fact_findings
from headrace.pipelines.changes.parents import Cascade, followed_stream, parent_tables
from headrace.pipelines.changes.protocol import CHANGES
from headrace.pipelines.changes.repairing import (
    RowRepair,
    no_changes,
    repaired_rows,
    repaired_special_members,
    rows_differ_in,
)
from headrace.pipelines.changes.targets import check_table
from headrace.pipelines.config.history import history_of
from headrace.pipelines.delta.reads import scan_table
from headrace.pipelines.delta.scratch import scratch_database
from headrace.pipelines.delta.tables import GREATEST_KEY, DeltaHandle
from headrace.pipelines.dimension.check import Finding, Repair, Repaired
from headrace.pipelines.errors import TableMovedError
from headrace.pipelines.history.layout import delta_schema, entries_of, version_rows
from headrace.pipelines.lease import Leases
from headrace.pipelines.replica.catch_up import ReplicaSpec, replica_folder
from headrace.pipelines.replica.checking import rebuild, replica_differences
from headrace.pipelines.replica.entry_rows import EntryRows
from headrace.pipelines.replica.version_rows import current_rows
from headrace.pipelines.replica.version_rows import version_rows as versions_of
from headrace.pipelines.source.identity import application
from headrace.storage.units import parse_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from duckdb import DuckDBPyConnection
    from numpy.typing import NDArray

    from headrace.etl.history import History
    from headrace.pipelines.config.model import PipelineConfig
    from headrace.pipelines.replica.checking import ReplicaDifference

__all__ = ["check_history", "repair_history"]

_PART_ROWS: Final = 1 << 18
_EXAMPLES: Final = 10
_ATTEMPTS: Final = 10
_SAY: Final = "rows are what their entries say"
_FOLLOW: Final = "versions follow from the recorded changes"
_REPLICAS: Final = "replicas have the rows of the table"
_REPEAT: Final = "members repeat the columns of their parents' versions"
_UNIQUE: Final = "surrogate keys are unique"
_POSITIVE: Final = "surrogate keys are positive, or those of special members"
_SPECIAL: Final = "special members are those that are declared"
_PROPERTY: Final = f"the property {GREATEST_KEY} is not less than the greatest key"
_RESTORE: Final = "restore the table to a version that was sound (RESTORE), and apply the later changes again"
_DECIDE: Final = "if the versions are right, apply the member's changes again; if not, " + _RESTORE
_FIXES: Final = {
    _FOLLOW: "write the flags, numbers and ends of current versions as the entries say",
    _SPECIAL: "add missing special members, and give others the declared values",
    _PROPERTY: "set the property to the greatest key",
    _REPLICAS: "build the replicas again",
}
_ACTIONS: Final = {
    _REPEAT: "apply a change of each such parent again with a greater sequence; or " + _RESTORE,
    _SAY: _DECIDE,
    _FOLLOW: _DECIDE,
    _UNIQUE: _RESTORE + "; facts cannot tell which version they mean",
    _POSITIVE: _RESTORE,
    _SPECIAL: "keep one row of each special member, and remove those that are not declared",
}


def check_history(config: PipelineConfig, name: str) -> list[Finding]:
    """Return the rules that a dimension with history violates, and facts that a policy leaves (`Finding.allowed`).

    Raises
    ------
    PipelineFileError, DeltaTableError
        If the dimension has no history or no table, or the table does not have the declared columns.
    """
    with _checking(config, name) as check:
        return check.findings()


def repair_history(
    config: PipelineConfig, name: str, *, dry_run: bool = False, clock: Callable[[], float] = time.time
) -> Repaired:
    """Fix what `check_history` finds and no decision is needed for, in one commit, and return the rest.

    Parameters
    ----------
    config, name
        Configuration of the pipeline, and name of the dimension in it.
    dry_run
        Whether nothing is changed.
    clock
        Function that returns seconds since 1970.

    Raises
    ------
    PipelineFileError, DeltaTableError
        If the dimension has no history or no table, or the table does not have the declared columns.
    LeaseHeldError
        If another run applies changes to the dimension.
    TableMovedError
        If other writers committed first on every attempt. Nothing was changed.
    """
    assert config.catalog is not None
    if dry_run:
        return _repaired(config, name, dry_run=True)
    with Catalog(config.catalog, clock) as catalog, Leases(catalog, leases_of(config, name), clock=clock):
        for _ in range(_ATTEMPTS - 1):
            try:
                return _repaired(config, name, dry_run=False)
            except TableMovedError:
                continue
        return _repaired(config, name, dry_run=False)


def _repaired(config: PipelineConfig, name: str, *, dry_run: bool) -> Repaired:
    with _checking(config, name) as check:
        check.fixing = Fixing(None if dry_run else RowRepair(check.history, check.handle))
        broken = (each for each in check.findings() if not each.allowed)
        left = [Repair(each.rule, _action(each.rule), each.rows, each.examples) for each in broken]
        check.fixing.commit(check.handle)
        return Repaired(check.fixing.repairs(), tuple(left))


def _action(rule: str) -> str:
    return _ACTIONS.get(rule, RESTATE)


@contextmanager
def _checking(config: PipelineConfig, name: str) -> Iterator[_Check]:
    """Open a check, whose files are on the local disk."""
    history, path = history_of(config, name), config.dimensions[name].path
    check_table(path, history, f"dimension {name!r}")
    handle = DeltaHandle(path)
    handle.latest()
    folder = replica_folder(config.replicas)
    with local_files(folder, "the rows of the dimension while they are checked"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        place = tempfile.TemporaryDirectory(prefix="check-", dir=folder)
    with place as own:
        yield _Check(config, history, handle, Path(own))


@dataclass
class Fixing:
    """What a repair fixes: rows, a property, and replicas.

    Parameters
    ----------
    rows
        Rows to replace; None if nothing is changed.
    """

    rows: RowRepair | None
    properties: dict[str, str] = field(default_factory=dict)
    replicas: list[ReplicaDifference] = field(default_factory=list)
    _fixed: dict[str, _Broken] = field(default_factory=dict)

    def replace(self, rule: str, rows: pa.Table, before: pa.Table, after: pa.Table, named: Iterable[str]) -> pa.Table:
        """Note that rows are replaced, and return all rows afterward."""
        count = max(before.num_rows, after.num_rows)
        if not count:
            return rows
        self.add(rule, count, named)
        if self.rows is not None:
            self.rows.add(before, after)
        keys = before.column(0)
        return pa.concat_tables([rows.filter(pc.invert(pc.is_in(rows.column(0), keys.combine_chunks()))), after])

    def add(self, rule: str, count: int, named: Iterable[str]) -> None:
        """Note what is fixed."""
        self._fixed.setdefault(rule, _Broken()).add(count, named)

    def repairs(self) -> tuple[Repair, ...]:
        """Return what is fixed."""
        return tuple(Repair(rule, _FIXES[rule], fixed.rows, fixed.examples) for rule, fixed in self._fixed.items())

    def commit(self, handle: DeltaHandle) -> None:
        """Commit the rows and the property, and build replicas again."""
        if self.rows is None:
            return
        if self._fixed.keys() - {_REPLICAS}:
            self.rows.commit(handle.table.version(), self.properties)
        version = handle.latest().version
        for difference in self.replicas:
            rebuild(difference, version, handle.greatest_key(self.rows.history.dimension.surrogate_key))


@dataclass
class _Broken:
    """The rows that violate a rule so far."""

    rows: int = 0
    examples: tuple[str, ...] = ()

    def add(self, count: int, examples: Iterable[str]) -> None:
        self.rows += count
        self.examples = (*self.examples, *examples)[:_EXAMPLES]


class _Check:
    """One check, at the newest version."""

    def __init__(self, config: PipelineConfig, history: History, handle: DeltaHandle, folder: Path) -> None:
        self._config = config
        self._history = history
        self._handle = handle
        self._folder = folder
        self._version = handle.table.version()
        self._broken: dict[str, _Broken] = {}
        self.fixing: Fixing | None = None
        rows = sum(file.rows or 0 for file in handle.live.at(self._version))
        self._parts = max(1, -(-rows // _PART_ROWS))
        self._cascade = self._followed_parents()

    def _followed_parents(self) -> Cascade | None:
        """Return the parents whose newest versions the members followed; others may differ until the next apply."""
        config, found = self._config, []
        for parent in parent_tables(config, self._history.dimension.name):
            latest = parent.handle.latest()
            stream = followed_stream(parent.reference.parent.dimension.name, latest.table_id)
            if self._handle.transaction(application(stream, CHANGES)) == latest.version:
                found.append(parent.versions(config, 1, 1))
        return Cascade(tuple(found), self._version + 1) if found else None

    @property
    def history(self) -> History:
        """Declaration of the dimension."""
        return self._history

    @property
    def handle(self) -> DeltaHandle:
        """Table of the dimension."""
        return self._handle

    def findings(self) -> list[Finding]:
        """Check everything."""
        with local_files(self._folder, "the rows of the dimension while they are checked"):
            special = self._divide()
        self._check_special(self._fixed_special(special))
        for part in range(self._parts):
            self._check_rows(self._fixed_rows(self._part(part)))
        for part in range(self._parts):
            self._check_keys(part)
        self._check_property()
        found = [Finding(rule, broken.rows, broken.examples) for rule, broken in self._broken.items()]
        return [*found, *self._found_by_queries()]

    def _found_by_queries(self) -> list[Finding]:
        """Compare replicas and facts with the table, by queries of a DuckDB file."""
        with scratch_database(self._folder / "check.duckdb") as connection:
            self._check_replicas(connection)
            found = list(fact_findings(connection, self._config, self._history, self._handle.table))
        replicas = self._broken.get(_REPLICAS)
        return [*([Finding(_REPLICAS, replicas.rows, replicas.examples)] if replicas else []), *found]

    def _fixed_special(self, special: pa.Table) -> pa.Table:
        if self.fixing is None:
            return special
        before, after = repaired_special_members(self._history, special)
        named = (f"member {key}" for key in after.column(0).to_pylist())
        return self.fixing.replace(_SPECIAL, special, before, after, named)

    def _fixed_rows(self, rows: pa.Table) -> pa.Table:
        if self.fixing is None:
            return rows
        before, after = repaired_rows(self._history, rows)
        return self.fixing.replace(_FOLLOW, rows, before, after, self._named(after))

    def _divide(self) -> pa.Table:
        """Write the rows into parts by member, and their surrogate keys into parts by value; return special members."""
        history, schema = self._history, delta_schema(self._history)
        surrogate, keys = history.dimension.surrogate_key, history.dimension.key_schema
        special = [schema.empty_table()]
        with ExitStack() as stack:
            members = [self._writer(stack, f"m{part}", schema) for part in range(self._parts)]
            numbers = [
                self._writer(stack, f"k{part}", pa.schema([(surrogate, pa.int64())])) for part in range(self._parts)
            ]
            for batch in scan_table(self._handle.table, schema.names):
                whole = pa.Table.from_batches([batch]).cast(schema)
                is_special = whole.column(keys.names[0]).is_null()
                special.append(whole.filter(is_special))
                rows = whole.filter(pc.invert(is_special))
                shard = shard_of([single(rows.column(each)) for each in keys.names], keys, self._parts)
                _spread(members, rows, shard)
                number = rows.select([surrogate])
                _spread(numbers, number, np.asarray(single(number.column(0)).fill_null(0)) % self._parts)
        return pa.concat_tables(special)

    def _writer(self, stack: ExitStack, name: str, schema: pa.Schema) -> pa.ipc.RecordBatchStreamWriter:
        file = stack.enter_context(pa.OSFile(str(self._folder / name), "wb"))
        return stack.enter_context(pa.ipc.new_stream(file, schema))

    def _read(self, name: str) -> pa.Table:
        with pa.ipc.open_stream(self._folder / name) as reader:
            return reader.read_all()

    def _part(self, part: int) -> pa.Table:
        return self._read(f"m{part}").combine_chunks()

    def _check_rows(self, rows: pa.Table) -> None:
        """Compute the versions again from the changes that the entries record."""
        history = self._history
        entries = entries_of(history, rows)
        surrogate = history.dimension.surrogate_key
        self._differ(_SAY, rows, version_rows(history, entries), [surrogate])
        allocator = KeyAllocator(self._handle.greatest_key(surrogate))
        again = apply_changes(history, entries, no_changes(history), allocator)
        wrong = again.upserts
        self._add(_FOLLOW, wrong.num_rows, self._named(wrong))
        if self._cascade is not None:
            repeated = {name for each in self._cascade.parents for name in each.reference.carry}
            nothing, memory = no_changes(history, repeated=repeated), parse_memory(self._config.memory)
            missing = self._cascade.changes(history, entries, nothing, memory)
            self._add(_REPEAT, missing.num_rows, self._named(missing))

    def _check_replicas(self, connection: DuckDBPyConnection) -> None:
        """Compare the replicas on this host with the table: entries, current versions, and all versions."""
        config, history = self._config, self._history
        carried = {each for item in config.lookups if item.dimension == history.dimension.name for each in item.carry}
        memory, base = parse_memory(config.replica_memory), self._handle.greatest_key(history.dimension.surrogate_key)
        for rows in (EntryRows(history), current_rows(history, carried), versions_of(history, carried)):
            spec = ReplicaSpec(rows, self._handle.path, self._handle.latest().table_id, 1, config.replicas, memory)
            for difference in replica_differences(connection, spec, self._version, base):
                if self.fixing is None:
                    self._add(_REPLICAS, difference.rows, difference.examples)
                else:
                    self.fixing.replicas.append(difference)
                    self.fixing.add(_REPLICAS, difference.rows, difference.examples)

    def _check_keys(self, part: int) -> None:
        keys = self._read(f"k{part}").column(0)
        counts = pc.value_counts(keys)
        twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values").to_pylist()
        self._add(_UNIQUE, len(twice), (f"number {key}" for key in twice[:_EXAMPLES]))
        bad = pc.sum(pc.fill_null(pc.less(keys, 1), fill_value=True)).as_py() or 0
        self._add(_POSITIVE, bad, ())

    def _check_special(self, found: pa.Table) -> None:
        """Compare the special members with the declared ones."""
        names = self._history.version_schema.names
        wanted = special_versions(self._history)
        rule, key = _SPECIAL, self._history.dimension.surrogate_key
        self._differ(rule, found.select(names).cast(wanted.schema), wanted, [key])

    def _check_property(self) -> None:
        stored = max(
            (bound for file in self._handle.live.at(self._version) if isinstance(bound := self._bound(file), int)),
            default=0,
        )
        remembered = self._handle.remembered_key()
        if stored <= remembered:
            return
        text = f"the greatest key is {stored}, the property {remembered}"
        if self.fixing is None:
            self._add(_PROPERTY, 1, [text])
        else:
            self.fixing.add(_PROPERTY, 1, [text])
            self.fixing.properties[GREATEST_KEY] = str(stored)

    def _bound(self, file: Any) -> Any:
        return file.bounds(self._history.dimension.surrogate_key)[1]

    def _differ(self, rule: str, found: pa.Table, wanted: pa.Table, key: Sequence[str]) -> None:
        """Note the rows that are in one of two tables only, or that differ; a key identifies a row and has no nulls."""
        keys = [pa.concat_arrays([single(table.column(name)) for table in (found, wanted)]) for name in key]
        ranks, distinct = rank_rows(keys)
        left, right = ranks[: found.num_rows], ranks[found.num_rows :]
        place = np.full(distinct, -1, dtype=np.int64)
        place[right] = np.arange(len(right))
        at = place[left]
        both = np.flatnonzero(at >= 0)
        wrong = at < 0
        one, other = found.take(pa.array(both)), wanted.take(pa.array(at[both]))
        wrong[both] = rows_differ_in(one, other)
        absent = distinct - len(np.unique(left)) + len(left) - len(np.unique(left))
        self._add(rule, int(wrong.sum()) + absent, self._named(found.filter(pa.array(wrong))))

    def _add(self, rule: str, count: int, examples: Iterable[str]) -> None:
        if count:
            self._broken.setdefault(rule, _Broken()).add(count, examples)

    def _named(self, rows: pa.Table) -> Iterator[str]:
        keys = [rows.column(name).slice(0, _EXAMPLES) for name in self._history.dimension.natural_key]
        yield from dict.fromkeys(str(text) for text in key_text(keys).to_pylist())


def _spread(writers: list[Any], rows: pa.Table, part: NDArray[np.integer[Any]]) -> None:
    """Write rows to the writers of their parts."""
    order = np.argsort(part, kind="stable")
    ordered = rows.take(pa.array(order))
    starts = np.searchsorted(part[order], np.arange(len(writers) + 1))
    for number, writer in enumerate(writers):
        if starts[number + 1] > starts[number]:
            writer.write_table(ordered.slice(starts[number], starts[number + 1] - starts[number]))
