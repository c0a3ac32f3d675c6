"""Check of a dimension with history: every version must follow from the changes that its entries record.

Rows are divided by member into files on the local disk, so that memory is bounded, and checked one part after another:
versions are computed again from the recorded changes, rows must be what their entries say, and replicas of this host
must have the same entries. Surrogate keys are divided by value and must be unique. Nothing is changed.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl import KeyAllocator
from headrace.etl.history import apply_changes, special_versions
from headrace.etl.history.values import rows_differ, single
from headrace.etl.ranking import key_text, rank_rows
from headrace.etl.sharding import shard_of
from headrace.pipelines.changes.sources import change_columns
from headrace.pipelines.changes.targets import check_table
from headrace.pipelines.config.history import history_of
from headrace.pipelines.delta.reads import scan_table
from headrace.pipelines.delta.tables import GREATEST_KEY, DeltaHandle
from headrace.pipelines.dimension.check import Finding, Repair
from headrace.pipelines.history.layout import delta_schema, entries_of, version_rows
from headrace.pipelines.replica.catch_up import ReplicaSpec, catch_up, replica_folder
from headrace.pipelines.replica.entry_rows import EntryRows
from headrace.pipelines.replica.rows import of_shard
from headrace.storage.units import parse_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.etl.history import History
    from headrace.pipelines.config.model import PipelineConfig
    from headrace.storage import Table

__all__ = ["check_history", "plan_history_repair"]

_PART_ROWS: Final = 1 << 18
_EXAMPLES: Final = 10
_SAY: Final = "rows are what their entries say"
_FOLLOW: Final = "versions follow from the recorded changes"
_REPLICAS: Final = "replicas have the entries of the table"
_UNIQUE: Final = "surrogate keys are unique"
_POSITIVE: Final = "surrogate keys are positive, or those of special members"
_SPECIAL: Final = "special members are those that are declared"
_PROPERTY: Final = f"the property {GREATEST_KEY} is not less than the greatest key"
_RESTORE: Final = "restore the table to a version that was sound (RESTORE), and apply the later changes again"
_ACTIONS: Final = {
    _SAY: "apply any change of the member, which writes its versions again; or " + _RESTORE,
    _FOLLOW: "apply any change of the member, which writes its versions again; or " + _RESTORE,
    _REPLICAS: "remove the replica folder; the next run builds it again",
    _UNIQUE: _RESTORE + "; facts cannot tell which version they mean",
    _POSITIVE: _RESTORE,
    _SPECIAL: "the next `headrace dimension apply` adds missing ones; correct others by hand",
    _PROPERTY: "set the property to the greatest key ever given",
}


def check_history(config: PipelineConfig, name: str) -> list[Finding]:
    """Return the rules that a dimension with history violates; an empty list if none.

    Raises
    ------
    PipelineFileError, DeltaTableError
        If the dimension has no history or no table, or the table does not have the declared columns.
    """
    history, path = history_of(config, name), config.dimensions[name].path
    check_table(path, history, f"dimension {name!r}")
    handle = DeltaHandle(path)
    latest = handle.latest()
    shards = config.dimensions[name].shards
    spec = None
    if shards is not None:
        memory = parse_memory(config.replica_memory)
        spec = ReplicaSpec(EntryRows(history), path, latest.table_id, shards, config.replicas, memory)
    folder = replica_folder(config.replicas)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix="check-", dir=folder) as place:
        return _Check(history, handle, spec, Path(place)).findings()


def plan_history_repair(config: PipelineConfig, name: str) -> list[Repair]:
    """Return the repairs of the findings of `check_history`. Nothing is changed."""
    return [
        Repair(finding.rule, _ACTIONS[finding.rule], finding.rows, finding.examples)
        for finding in check_history(config, name)
    ]


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

    def __init__(self, history: History, handle: DeltaHandle, spec: ReplicaSpec | None, folder: Path) -> None:
        self._history = history
        self._handle = handle
        self._spec = spec
        self._folder = folder
        self._version = handle.table.version()
        self._broken: dict[str, _Broken] = {}
        rows = sum(file.rows or 0 for file in handle.live.at(self._version))
        replicas = 1 if spec is None else spec.shards
        self._parts = replicas * max(1, -(-rows // (_PART_ROWS * replicas)))

    def findings(self) -> list[Finding]:
        """Check everything."""
        special = self._divide()
        self._check_special(special)
        for part in range(self._parts):
            rows = self._part(part)
            self._check_rows(rows)
            self._check_replica(part, rows)
        for part in range(self._parts):
            self._check_keys(part)
        self._check_property()
        return [Finding(rule, broken.rows, broken.examples) for rule, broken in self._broken.items()]

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
        again = apply_changes(history, entries, _no_changes(history), allocator)
        wrong = again.upserts
        self._add(_FOLLOW, wrong.num_rows, self._named(wrong))

    def _check_replica(self, part: int, rows: pa.Table) -> None:
        """Compare the entries of a replica on this host, if there is one, with those of the rows."""
        spec = self._spec
        if spec is None or not (spec.place(part % spec.shards) / "table.headrace").exists():
            return
        base = self._handle.greatest_key(self._history.dimension.surrogate_key)
        table: Table = catch_up(spec, part % spec.shards, self._version, base, lambda reached: _open(reached.file))
        with table:
            scanned = pa.Table.from_batches(table.scan(), table.schema).cast(self._history.entry_schema)
        own = of_shard(scanned, self._history.dimension.key_schema, self._parts, part)
        entries, key = entries_of(self._history, rows), self._history.entry_key
        self._differ(_REPLICAS, own, entries, key)

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
        if stored > remembered:
            text = f"the greatest key is {stored}, the property {remembered}"
            self._add(_PROPERTY, 1, [text])

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
        wrong[both] = _rows_differ(one, other)
        absent = distinct - len(np.unique(left)) + len(left) - len(np.unique(left))
        self._add(rule, int(wrong.sum()) + absent, self._named(found.filter(pa.array(wrong))))

    def _add(self, rule: str, count: int, examples: Iterable[str]) -> None:
        if count:
            self._broken.setdefault(rule, _Broken()).add(count, examples)

    def _named(self, rows: pa.Table) -> Iterator[str]:
        keys = [rows.column(name).slice(0, _EXAMPLES) for name in self._history.dimension.natural_key]
        yield from dict.fromkeys(str(text) for text in key_text(keys).to_pylist())


def _rows_differ(left: pa.Table, right: pa.Table) -> NDArray[np.bool_]:
    """Return which rows of two tables of the same length differ."""
    differs = np.zeros(left.num_rows, dtype=np.bool_)
    for field in right.schema:
        one, other = single(left.column(field.name)).cast(field.type), single(right.column(field.name))
        if not pa.types.is_list(field.type):
            differs |= rows_differ([one], [other], len(one))
            continue
        lengths = [pc.fill_null(pc.list_value_length(each), -1) for each in (one, other)]
        uneven = rows_differ([lengths[0]], [lengths[1]], len(one))
        differs |= uneven
        even = pa.array(~uneven)
        items, others = one.filter(even), other.filter(even)
        parents = np.flatnonzero(~uneven)[np.asarray(pc.list_parent_indices(items))]
        parts = [[each.flatten().field(i) for i in range(field.type.value_type.num_fields)] for each in (items, others)]
        differs[parents[rows_differ(parts[0], parts[1], len(parents))]] = True
    return differs


def _open(file: Path) -> Table:
    from headrace.storage import Table  # noqa: PLC0415 - numba comes in here

    return Table.open(file)


def _spread(writers: list[Any], rows: pa.Table, part: NDArray[np.integer[Any]]) -> None:
    """Write rows to the writers of their parts."""
    order = np.argsort(part, kind="stable")
    ordered = rows.take(pa.array(order))
    starts = np.searchsorted(part[order], np.arange(len(writers) + 1))
    for number, writer in enumerate(writers):
        if starts[number + 1] > starts[number]:
            writer.write_table(ordered.slice(starts[number], starts[number + 1] - starts[number]))


def _no_changes(history: History) -> pa.Table:
    columns = {name: kind for name, kind in change_columns(history).items() if name != history.partial}
    return pa.schema(list(columns.items())).empty_table()
