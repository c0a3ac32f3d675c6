"""As-of lookups: a fact gets the version that was valid at its event time.

Most facts are newer than the current version of their member. So a fact is first joined by unique key with a replica of
the current versions, whose rows have `valid_from`. Only an older fact is joined with the table of entries, by `AsOf` on
(natural key, time). This second join is skipped if the current version is the first version.

Each row passes these rules in order:

1. A null event time uses `null_time`.
2. `headrace.etl.surrogate.resolve` resolves the natural key; its rules apply to null, unfit, and missing keys.
3. The version that is valid at the event time is found: the current one (outcome `matched`) or an older one (`late`).
4. An event time before the member's first version is handled by `before_first`. An inferred member covers all times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.dimension import Dimension
from headrace.etl.errors import ConservationError, DeclarationError
from headrace.etl.history.declaration import AT
from headrace.etl.history.inferring import bounds_of_all_times, special_versions
from headrace.etl.history.instants import to_instants
from headrace.etl.inputs import check_names, of_one_schema
from headrace.etl.lookup import Lookup, Policy
from headrace.etl.outcomes import Outcome
from headrace.etl.special import Special, SpecialMembers, check_target, member_of
from headrace.etl.surrogate import resolve

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.etl.history.declaration import History
    from headrace.etl.surrogate import JoinOperator, KeyAllocator
    from headrace.joins import AsOf

__all__ = ["AsOfLookup", "Operators", "current_dimension", "resolve_as_of"]

FIRST: Final = "first"
CURRENT: Final = "current"


def current_dimension(history: History) -> Dimension:
    """Return the dimension of current versions: one row per member, with all other columns as attributes."""
    dimension = history.dimension
    apart = {dimension.surrogate_key, dimension.inferred_flag}
    columns = [column for column in history.version_schema if column.name not in apart]
    return Dimension(
        dimension.name,
        dimension.natural_key,
        dimension.surrogate_key,
        pa.schema(columns),
        dimension.rules,
        dimension.inferred_flag,
        special=_special_of_versions(history, [column.name for column in columns]),
    )


def _special_of_versions(history: History, names: Iterable[str]) -> SpecialMembers:
    """Return the special members with the values of their versions: declared attributes, and bounds of all times."""
    kept = [name for name in names if name not in history.dimension.natural_key]
    rows = special_versions(history).select(kept).to_pylist()
    return SpecialMembers(**{member.text: row for member, row in zip(history.special.present, rows, strict=True)})


@dataclass(frozen=True)
class AsOfLookup:
    """One role of a dimension with history in a stream of facts.

    Parameters
    ----------
    history
        Dimension with history.
    role, on, policy, null_key, unfit_key
        Parameters of `headrace.etl.Lookup`.
    event_time
        Stream column with the time of the fact; None to look up the current version.
    carry
        Columns of the version to add to the fact, as ``<role>_<column>``: attributes, `valid_from`, and so on.
    before_first
        Target of facts that are older than the first version of their member: ``"first"`` (that version),
        ``"unknown"``, ``"not_applicable"``, ``"invalid"`` or ``"reject"``.
    null_time
        Target of facts without event time: ``"current"`` (the current version), or a special member or ``"reject"`` as
        for `before_first`.

    Raises
    ------
    DeclarationError
        If the lookup is not valid, or names a special member that the dimension does not have.

    Examples
    --------
    >>> from headrace.etl.history import History
    >>> customer = Dimension("customer", ("id",), "customer_key", pa.schema({"id": pa.int64(), "city": pa.string()}))
    >>> lookup = AsOfLookup(History(customer), "buyer", {"customer_id": "id"}, "ordered_at", carry=("city",))
    >>> lookup.added_schema().names
    ['buyer_key', 'buyer_city', '_buyer_outcome', '_buyer_reason']
    """

    history: History
    role: str
    on: dict[str, str]
    event_time: str | None = None
    policy: Policy | str = Policy.UNKNOWN
    carry: str | tuple[str, ...] = ()
    before_first: str = FIRST
    null_time: str = "unknown"
    null_key: str = "unknown"
    unfit_key: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "carry", (self.carry,) if isinstance(self.carry, str) else tuple(self.carry))
        where = f"lookup {self.role!r}"
        twice = next((name for name in self.carry if self.carry.count(name) > 1), None)
        if twice is not None:
            raise DeclarationError(f"{where} carries {twice!r} twice; carry each column once")
        targets = [(self.null_key, ""), (self.before_first, FIRST), (self.null_time, CURRENT)]
        targets += [(self.unfit_key, "")] if self.unfit_key is not None else []
        present = self.history.special.present
        for target, also in targets:
            if target == also:
                continue
            check_target(target, where, also)
            member = member_of(target)
            if member is not None and member not in present:
                raise DeclarationError(
                    f"{where}: dimension {self.history.dimension.name!r} has no member {target!r}; declare it in "
                    "`History.special`"
                )
        object.__setattr__(self, "policy", self.current.policy)
        spelled = [name for name in self.carry if name in self.history.spelled.values()]
        if spelled and self.policy is Policy.INFER:
            raise DeclarationError(
                f"{where} infers members and carries {spelled[0]!r}, which is not known before all facts are; leave it "
                "out of `carry`, or use another policy"
            )

    @cached_property
    def current(self) -> Lookup:
        """Lookup of the current version. It carries the columns that show whether the fact is older."""
        return Lookup(
            current_dimension(self.history),
            self.role,
            self.on,
            self.policy,
            tuple(dict.fromkeys([*self.carry, self.history.valid_from, self.history.version])),
            self.null_key,
            self.unfit_key,
        )

    @property
    def dimension(self) -> Dimension:
        """Base dimension of the history."""
        return self.history.dimension

    @property
    def stream_columns(self) -> tuple[str, ...]:
        """Stream columns in natural key order."""
        return self.current.stream_columns

    @property
    def key_column(self) -> str:
        """Name of the column with the surrogate key."""
        return self.current.key_column

    @property
    def outcome_column(self) -> str:
        """Name of the column with this lookup's outcome for each row."""
        return self.current.outcome_column

    @property
    def reason_column(self) -> str:
        """Name of the column with the reason for a rejection by this lookup, null otherwise."""
        return self.current.reason_column

    @property
    def time_column(self) -> str:
        """Name of a temporary column: the event time as an instant of the history."""
        return f"_{self.role}_time"

    @property
    def entry_columns(self) -> list[str]:
        """Argument `columns` of operators over the table of entries."""
        return [self.history.dimension.surrogate_key, *self.carry]

    def entry_on(self, *, backward: bool = True) -> AsOf:
        """Return the argument `on` of operators over the table of entries, which are left joins."""
        from headrace.joins import AsOf  # noqa: PLC0415 - numba comes in with the first join

        return AsOf(self.time_column, AT, self.current.operator_on, "backward" if backward else "forward")

    def added_schema(self) -> pa.Schema:
        """Return the columns that `resolve_as_of` appends to the stream."""
        added = self.current.added_schema()
        kept = [self.key_column, *(f"{self.role}_{name}" for name in self.carry), *added.names[-2:]]
        return pa.schema([added.field(name) for name in kept])

    def check(self, stream: pa.Schema) -> None:
        """Raise unless this lookup can run over a stream; see `Lookup.check`."""
        if self.event_time is not None:
            check_names(stream.names, [self.event_time], f"lookup {self.role!r}: the stream", DeclarationError)
        if self.time_column in stream.names:
            raise DeclarationError(f"lookup {self.role!r} adds a column {self.time_column!r}; rename the stream's")
        if self.event_time is not None:
            empty = pa.nulls(0, stream.field(self.event_time).type)
            to_instants(empty, self.history.instant_type, self.event_time)
        self.current.check(stream)


@dataclass(frozen=True)
class Operators:
    """The join operators of a lookup. All are left joins.

    Parameters
    ----------
    current
        Operator over the replica of current versions, with ``on=lookup.current.operator_on`` and
        ``columns=lookup.current.operator_columns``.
    backward
        Operator over the table of entries, with ``on=lookup.entry_on()`` and ``columns=lookup.entry_columns``.
    forward
        Same as `backward`, with ``on=lookup.entry_on(backward=False)``. Required only for ``before_first="first"``.
    """

    current: JoinOperator
    backward: JoinOperator | None = None
    forward: JoinOperator | None = None


def resolve_as_of(
    lookup: AsOfLookup,
    operators: Operators,
    batches: Iterable[pa.RecordBatch],
    allocator: KeyAllocator | None = None,
    *,
    visible_to: int | None = None,
    own: Sequence[tuple[int, int]] = (),
) -> Iterator[pa.RecordBatch]:
    """Replace natural keys with the surrogate keys of the versions that were valid at the facts' times.

    Parameters
    ----------
    lookup
        Declaration of the role, its columns, and its policies.
    operators
        Joins over the tables of the dimension, which must be at the same version.
    batches
        Batches of the stream. For an inferring lookup: exactly the rows of the allocator's shard.
    allocator
        Allocator of surrogate keys, required only for the policy ``infer``.
    visible_to, own
        Greatest visible surrogate key, and ranges of surrogate keys from an earlier attempt; see
        `headrace.etl.surrogate.resolve`.

    Yields
    ------
    RecordBatch
        The stream's columns and `AsOfLookup.added_schema`, in no particular row order; every row exactly once.

    Raises
    ------
    DeclarationError, KeyInputError, MissingMembersError
        As for `headrace.etl.surrogate.resolve`.
    """
    return _AsOf(lookup, operators, allocator, visible_to, own).run(batches)


class _AsOf:
    """State of one input in one lookup."""

    def __init__(
        self,
        lookup: AsOfLookup,
        operators: Operators,
        allocator: KeyAllocator | None,
        visible_to: int | None,
        own: Sequence[tuple[int, int]],
    ) -> None:
        self._lookup = lookup
        self._operators = operators
        self._allocator = allocator
        self._visible_to = visible_to
        self._own = own
        self._settled: list[pa.RecordBatch] = []
        self._stream = 0
        self._balance = 0

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = resolve(
            self._lookup.current,
            self._operators.current,
            self._timed(of_one_schema(batches)),
            self._allocator,
            visible_to=self._visible_to,
            own=self._own,
        )
        for batch in found:
            yield from self._counted(self._by_time(batch))
        yield from self._counted(self._older(_flush(self._operators.backward)))
        yield from self._counted(self._first(_flush(self._operators.forward)))
        yield from self._counted([])
        if self._balance:
            raise ConservationError(f"lookup {self._lookup.role!r} lost {self._balance} rows (negative: gained)")

    def _counted(self, outputs: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for output in outputs:
            self._balance -= output.num_rows
            yield output
        while self._settled:
            output = self._settled.pop()
            self._balance -= output.num_rows
            yield output

    def _timed(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Append the event time as an instant, and apply the policy to rows without an event time."""
        lookup, schema = self._lookup, None
        for batch in batches:
            if batch.schema != schema:
                lookup.check(batch.schema)
                schema = batch.schema
                self._stream = len(schema)
            self._balance += batch.num_rows
            time = self._time(batch)
            timed = batch.append_column(lookup.time_column, time)
            if lookup.event_time is not None and lookup.null_time != CURRENT and time.null_count:
                null = np.asarray(time.is_null())
                self._settle(_rows(timed, null), lookup.null_time, "the event time is null")
                timed = _rows(timed, ~null)
            if timed.num_rows:
                yield timed

    def _time(self, batch: pa.RecordBatch) -> pa.Array:
        lookup = self._lookup
        if lookup.event_time is None:
            return pa.nulls(batch.num_rows, lookup.history.instant_type)
        return to_instants(batch.column(lookup.event_time), lookup.history.instant_type, lookup.event_time)

    def _by_time(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield completed rows, and join older rows with the table of entries."""
        lookup, history = self._lookup, self._lookup.history
        batch = self._with_bounds(batch)
        begun = batch.column(f"{lookup.role}_{history.valid_from}")
        matched = pc.equal(batch.column(lookup.current.outcome_column), str(Outcome.MATCHED))
        earlier = pc.and_(matched, pc.fill_null(pc.less(batch.column(lookup.time_column), begun), fill_value=False))
        first = pc.fill_null(pc.equal(batch.column(f"{lookup.role}_{history.version}"), 1), fill_value=False)
        before = np.asarray(pc.and_(earlier, first))
        older = np.asarray(pc.and_not(earlier, first))
        done = ~(before | older)
        if done.any():
            yield self._plain(_rows(batch, done))
        if before.any():
            yield from self._before_first(_rows(batch, before))
        if older.any():
            yield from self._ask_entries(_rows(batch, older))

    def _with_bounds(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows whose inferred members carry the bounds that the members have in the dimension."""
        lookup = self._lookup
        inferred = pc.equal(batch.column(lookup.outcome_column), str(Outcome.INFERRED))
        if not pc.any(inferred, min_count=0).as_py():
            return batch
        found = batch.column(f"{lookup.role}_{lookup.history.version}").is_valid()  # by an earlier attempt
        added = pc.and_not(inferred, found)
        for name, column in bounds_of_all_times(lookup.history, 1, inferred=True).items():
            position = batch.schema.get_field_index(f"{lookup.role}_{name}")
            if position >= 0 and name in lookup.carry:
                filled = pc.if_else(added, column[0], batch.column(position))
                batch = batch.set_column(position, batch.schema.field(position), filled)
        return batch

    def _before_first(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield rows whose current version is the first version and begins after their event time."""
        if self._lookup.before_first == FIRST:
            yield self._plain(_with_outcome(batch, self._lookup.current.outcome_column, Outcome.LATE))
        else:
            self._settle(batch, self._lookup.before_first, "before the first version")

    def _ask_entries(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        backward = self._operators.backward
        if backward is None:
            raise DeclarationError(
                f"lookup {self._lookup.role!r} meets facts older than the current version; give it "
                "an operator over the table of entries"
            )
        yield from self._older(backward.push(self._keyed(batch)))

    def _keyed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return stream columns, time, and normalized key."""
        lookup = self._lookup.current
        keys = lookup.dimension.conform_key([batch.column(name) for name in lookup.stream_columns])
        stream = batch.select(list(range(self._stream + 1)))
        names = [*stream.schema.names, *(name for name, _ in lookup.operator_on)]
        return pa.RecordBatch.from_arrays([*stream.columns, *(key.values for key in keys)], names=names)

    def _older(self, outputs: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Split the result of the entry join into rows with an older version and rows before the first version."""
        for output in outputs:
            width = self._width(output)
            absent = np.asarray(output.column(width).is_null())
            if not absent.all():
                yield self._found(_rows(output, ~absent))
            if absent.any():
                yield from self._before_all(_rows(output, absent).select(list(range(width))))

    def _before_all(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        if self._lookup.before_first != FIRST:
            self._settle(batch, self._lookup.before_first, "before the first version")
            return
        if self._operators.forward is None:
            raise DeclarationError(f"lookup {self._lookup.role!r} looks for first versions; give it a forward operator")
        yield from self._first(self._operators.forward.push(batch))

    def _first(self, outputs: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for output in outputs:
            if output.column(self._width(output)).null_count:
                raise ConservationError(
                    f"lookup {self._lookup.role!r}: a member is in the replica of current versions, but not in the "
                    "table of entries; they are of different versions"
                )
            yield self._found(output)

    def _width(self, output: pa.RecordBatch) -> int:
        return output.num_columns - len(self._lookup.entry_columns)

    def _found(self, output: pa.RecordBatch) -> pa.RecordBatch:
        return self._added(output, output.columns[self._width(output) :], Outcome.LATE)

    def _settle(self, batch: pa.RecordBatch, target: str, reason: str) -> None:
        """Send rows to a special member, or reject them."""
        member = member_of(target)
        outcome = Outcome.REJECTED if member is None else Outcome.UNKNOWN
        key = pa.repeat(pa.scalar(int(member or Special.UNKNOWN), pa.int64()), batch.num_rows)
        columns = [key] if member is None else [key, *self._carried_of(member, batch.num_rows)]
        self._settled.append(self._added(batch, columns, outcome, reason if member is None else None))

    def _carried_of(self, member: Special, rows: int) -> list[pa.Array]:
        """Return the carried columns of a special member."""
        dimension = self._lookup.current.dimension
        values = dimension.special.values(member) or {}
        attributes = dimension.attributes
        return [
            pa.repeat(pa.scalar(values.get(name), attributes.field(name).type), rows) for name in self._lookup.carry
        ]

    def _plain(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Drop the temporary columns."""
        stream = batch.schema.names[: self._stream]
        return batch.select([*stream, *self._lookup.added_schema().names])

    def _added(
        self, batch: pa.RecordBatch, columns: Sequence[pa.Array], outcome: Outcome, reason: str | None = None
    ) -> pa.RecordBatch:
        """Return the stream's columns with surrogate key, carried columns (null if not given), outcome, and reason."""
        added, rows = self._lookup.added_schema(), batch.num_rows
        carried = list(columns[1:]) or [pa.nulls(rows, field.type) for field in list(added)[1:-2]]
        noted = [pa.repeat(pa.scalar(text, pa.string()), rows) for text in (str(outcome), reason)]
        stream = list(batch.schema)[: self._stream]
        return pa.RecordBatch.from_arrays(
            [*batch.columns[: self._stream], columns[0], *carried, *noted], schema=pa.schema([*stream, *added])
        )


def _flush(operator: JoinOperator | None) -> Iterable[pa.RecordBatch]:
    return () if operator is None else operator.flush()


def _rows(batch: pa.RecordBatch, wanted: NDArray[np.bool_]) -> pa.RecordBatch:
    return batch if wanted.all() else batch.filter(pa.array(wanted))


def _with_outcome(batch: pa.RecordBatch, column: str, outcome: Outcome) -> pa.RecordBatch:
    position = batch.schema.get_field_index(column)
    text = pa.repeat(pa.scalar(str(outcome), pa.string()), batch.num_rows)
    return batch.set_column(position, batch.schema.field(position), text)
