"""Surrogate key replacement: looks up stream columns in a dimension and adds the member's surrogate key.

`resolve` runs a `Lookup` through any join operator over the dimension's
clustered table, `new_members` reads from its result the members that were inferred.

Each row passes these rules in order:

1. A natural key with a null (or NaN) goes to the unknown member, -1, under any policy: it identifies no member. A
   lookup may name another special member, or reject such rows (`Lookup.null_key`).
2. A key that is in the dimension is matched.
3. The lookup's policy applies to a key that is not in the dimension.
   - ``infer``: the key becomes a new member. A value that cannot be a key (out of the key type's range, or longer than
     `MAX_KEY_BYTES`) is rejected instead.
   - ``unknown``: the row goes to the unknown member.
   - ``reject``: the row is rejected and keeps the cause.
   - ``fail``: the run fails after the input is read, with an error that names the first missing keys.

New surrogate keys depend only on the set of new keys: the distinct new keys of the input, in key order,
get ``base + 1 + rank * shards + shard``. The same input, in any order and any batches, gives the same keys. Rows
that wait for their key are held in memory until the input ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.dimension import UNKNOWN_KEY, with_spellings
from headrace.etl.errors import ConservationError, DeclarationError, DimensionError, MissingMembersError
from headrace.etl.inputs import check_names, of_one_schema
from headrace.etl.lookup import Lookup, Policy
from headrace.etl.outcomes import Outcome
from headrace.etl.ranking import key_text, rank_rows, sort_rows
from headrace.etl.special import Special, member_of
from headrace.storage.format import as_array, is_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["MAX_KEY_BYTES", "JoinOperator", "KeyAllocator", "key_bytes", "new_members", "resolve"]

MAX_KEY_BYTES: Final = 1024
_NAMED: Final = 10
_SHOWN: Final = 80
_GREATEST: Final = 2**63 - 1


class JoinOperator(Protocol):
    """Interface of a join operator: a left join, fed in batches. `flush` returns all pending results."""

    def push(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Push a batch of the stream and return the results that are ready."""

    def flush(self) -> Iterable[pa.RecordBatch]:
        """Return the results of all rows pushed so far."""


@dataclass(frozen=True)
class KeyAllocator:
    """Allocates surrogate keys to the new members of one shard. Different shards never allocate the same key.

    Parameters
    ----------
    base
        Greatest surrogate key in the dimension version that the input was joined with.
    shards
        Number of shards that infer members concurrently.
    shard
        Number of this shard, from 0.

    Examples
    --------
    >>> KeyAllocator(base=100, shards=4, shard=2).allocate(3).tolist()
    [103, 107, 111]
    """

    base: int
    shards: int = 1
    shard: int = 0

    def __post_init__(self) -> None:
        numbers = self.base, self.shards, self.shard
        if not all(isinstance(number, Integral) for number in numbers):
            raise DeclarationError(f"base, shards and shard of a KeyAllocator are whole numbers, not {numbers}")
        if self.base < 0 or not 0 <= self.shard < self.shards:
            raise DeclarationError(f"no such shard: {self.shard} of {self.shards} above key {self.base}")

    def allocate(self, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the surrogate keys of this shard's first `count` new keys in key order.

        Raises
        ------
        DimensionError
            If the keys exceed the range of 64-bit integers.
        """
        if self.base + count * self.shards > _GREATEST:
            raise DimensionError(
                f"there are no {count} surrogate keys left above {self.base}; renumber the dimension's members"
            )
        return self.base + 1 + np.arange(count, dtype=np.int64) * self.shards + self.shard


def resolve(
    lookup: Lookup,
    operator: JoinOperator,
    batches: Iterable[pa.RecordBatch],
    allocator: KeyAllocator | None = None,
    *,
    visible_to: int | None = None,
    own: Sequence[tuple[int, int]] = (),
) -> Iterator[pa.RecordBatch]:
    """Replace natural keys with surrogate keys.

    Parameters
    ----------
    lookup
        Declaration of the role, its columns, and its policy.
    operator
        Left join over the dimension's clustered table, created with ``on=lookup.operator_on`` and
        ``columns=lookup.operator_columns``. It is flushed but not finished, so the next input can use it.
    batches
        Batches of the stream. For an inferring lookup: exactly the rows of the allocator's shard.
    allocator
        Allocator of surrogate keys, required only for the policy ``infer``.
    visible_to
        Greatest surrogate key that counts as present in the dimension. Needed if the table may be ahead of the version
        that the input is joined with; members with greater keys are treated as absent.
    own
        Ranges (above, up to) of surrogate keys that an earlier attempt at this input gave to its new members. A row
        that finds one of these members is inferred, as in that attempt, not matched.

    Yields
    ------
    RecordBatch
        The stream's columns and `Lookup.added_schema`, in no particular row order; every row exactly once.

    Raises
    ------
    DeclarationError
        If a column is missing or already exists, or an inferring lookup has no allocator.
    KeyInputError
        If a column can never equal its key.
    StreamSchemaError
        If a batch is not a record batch, has another schema than the first, or a column that Arrow cannot take rows
        from.
    MissingMembersError
        For the policy ``fail``, after the input has been read.
    """
    if lookup.policy is Policy.INFER and allocator is None:
        raise DeclarationError(f"lookup {lookup.role!r} infers members, so it needs a KeyAllocator")
    return _Resolution(lookup, operator, allocator, visible_to, own).run(batches)


class _Resolution:
    """State of one input in one lookup."""

    def __init__(
        self,
        lookup: Lookup,
        operator: JoinOperator,
        allocator: KeyAllocator | None,
        visible_to: int | None,
        own: Sequence[tuple[int, int]],
    ) -> None:
        self._lookup = lookup
        self._operator = operator
        self._allocator = allocator
        self._visible_to = visible_to
        self._own = own
        self._keys = len(lookup.dimension.natural_key)
        self._waiting: list[pa.RecordBatch] = []
        self._missing = _MissingKeys(lookup)
        self._balance = 0

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first = True
        for batch in of_one_schema(batches):
            if first:
                self._lookup.check(batch.schema)
                first = False
            self._balance += batch.num_rows
            yield from self._counted(self._push(batch))
        yield from self._counted(self._joined(self._operator.flush()))
        self._missing.refuse()
        yield from self._counted(self._inferred())
        if self._balance:
            raise ConservationError(
                f"lookup {self._lookup.role!r} lost {self._balance} rows (negative: gained); natural keys of dimension "
                f"{self._lookup.dimension.name!r} must be unique and the operator a left join"
            )

    def _counted(self, outputs: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for output in outputs:
            self._balance -= output.num_rows
            yield output

    def _push(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Push the rows with a usable key through the join; yield the other rows."""
        lookup = self._lookup
        columns = [batch.column(name) for name in lookup.stream_columns]
        conformed = lookup.dimension.conform_key(columns)
        null = np.logical_or.reduce([key.null for key in conformed])
        unfit = np.logical_or.reduce([key.unfit for key in conformed]) & ~null
        if null.any():
            yield self._sent(_rows(batch, null), lookup.null_key, "the key is null")
        if unfit.any() and lookup.unfit_key is not None:
            yield self._sent(_rows(batch, unfit), lookup.unfit_key, "no value of the key's type")
        elif unfit.any():
            named = [_rows_of(column, unfit) for column in columns]
            yield from self._without_member(_rows(batch, unfit), named, fit=False)
        usable = ~(null | unfit)
        if usable.any():
            names = [*batch.schema.names, *(name for name, _ in lookup.operator_on)]
            keyed = pa.RecordBatch.from_arrays([*batch.columns, *(key.values for key in conformed)], names=names)
            yield from self._joined(self._operator.push(_rows(keyed, usable)))

    def _joined(self, outputs: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Split the join's output into rows with a member and rows without one."""
        for output in outputs:
            width = output.num_columns - self._keys - len(self._lookup.operator_columns)
            surrogate = output.column(width + self._keys)
            absent = np.asarray(surrogate.is_null())
            if self._visible_to is not None:
                absent = absent | np.asarray(pc.fill_null(pc.greater(surrogate, self._visible_to), fill_value=False))
            if not absent.all():
                yield from self._found(_rows(output, ~absent), width)
            if absent.any():
                yield from self._absent(_rows(output, absent).select(list(range(width + self._keys))), width)

    def _found(self, output: pa.RecordBatch, width: int) -> Iterator[pa.RecordBatch]:
        """Yield rows with a member; a row with a member that this input added is inferred."""
        surrogate = np.asarray(output.column(width + self._keys))
        inferred = np.zeros(len(surrogate), dtype=bool)
        for above, up_to in self._own:
            inferred |= (surrogate > above) & (surrogate <= up_to)
        for outcome, wanted in ((Outcome.MATCHED, ~inferred), (Outcome.INFERRED, inferred)):
            if wanted.any():
                rows = _rows(output, wanted)
                yield self._added(rows.select(list(range(width))), outcome, rows.columns[width + self._keys :])

    def _absent(self, keyed: pa.RecordBatch, width: int) -> Iterator[pa.RecordBatch]:
        """Process rows whose key has no member; the key columns follow the `width` columns of the stream."""
        if self._lookup.policy is not Policy.INFER:
            stream = keyed.select(list(range(width)))
            yield from self._without_member(stream, keyed.columns[width:], fit=True)
            return
        too_long = key_bytes(keyed.columns[width:]) > MAX_KEY_BYTES
        if too_long.any():
            yield self._rejected(
                _rows(keyed, too_long).select(list(range(width))), f"longer than {MAX_KEY_BYTES} bytes"
            )
        if not too_long.all():
            self._waiting.append(_rows(keyed, ~too_long))

    def _without_member(self, stream: pa.RecordBatch, keys: list[pa.Array], *, fit: bool) -> Iterator[pa.RecordBatch]:
        """Apply the policy to rows whose member can be neither found nor inferred."""
        if self._lookup.policy is Policy.UNKNOWN:
            yield self._special(stream, Special.UNKNOWN)
        elif self._lookup.policy is Policy.FAIL:
            self._missing.note(keys, fit=fit)
        else:
            yield self._rejected(stream, "not in the dimension" if fit else "no value of the key's type")

    def _inferred(self) -> Iterator[pa.RecordBatch]:
        """Assign keys to the new members once all are known, and yield the waiting rows."""
        if not self._waiting:
            return
        assert self._allocator is not None
        waiting = pa.Table.from_batches(self._waiting)
        width = waiting.num_columns - self._keys
        ranks, distinct = rank_rows(waiting.columns[width:])
        surrogate = pa.array(self._allocator.allocate(distinct)[ranks])
        position = 0
        for batch in self._waiting:
            keys = surrogate.slice(position, batch.num_rows)
            position += batch.num_rows
            yield self._added(batch.select(list(range(width))), Outcome.INFERRED, [keys])
        self._waiting.clear()

    def _sent(self, stream: pa.RecordBatch, target: str, reason: str) -> pa.RecordBatch:
        """Send rows to a special member, or reject them."""
        member = member_of(target)
        if member is None:
            return self._rejected(stream, reason)
        return self._special(stream, member)

    def _special(self, stream: pa.RecordBatch, member: Special) -> pa.RecordBatch:
        """Send rows to a special member, whose declared attributes they carry."""
        dimension, rows = self._lookup.dimension, stream.num_rows
        values = dimension.special.values(member) or {}
        carried = [
            _repeat(values.get(name), dimension.attributes.field(name).type, rows) for name in self._lookup.carry
        ]
        return self._added(stream, Outcome.UNKNOWN, [_repeat(int(member), pa.int64(), rows), *carried])

    def _rejected(self, stream: pa.RecordBatch, reason: str) -> pa.RecordBatch:
        return self._added(stream, Outcome.REJECTED, [_repeat(UNKNOWN_KEY, pa.int64(), stream.num_rows)], reason)

    def _added(
        self, stream: pa.RecordBatch, outcome: Outcome, columns: list[pa.Array], reason: str | None = None
    ) -> pa.RecordBatch:
        """Append surrogate key, carried attributes (null without a member), outcome, and reason."""
        added = self._lookup.added_schema()
        rows = stream.num_rows
        carried = columns[1:] or [pa.nulls(rows, added.field(1 + i).type) for i in range(len(self._lookup.carry))]
        noted = [_repeat(str(outcome), pa.string(), rows), _repeat(reason, pa.string(), rows)]
        schema = pa.schema([*stream.schema, *added], metadata=stream.schema.metadata)
        return pa.RecordBatch.from_arrays([*stream.columns, columns[0], *carried, *noted], schema=schema)


class _MissingKeys:
    """The first missing keys of a lookup with the policy `fail`, in key order; unfit keys come last."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._rows = 0
        self._first: dict[bool, pa.Table] = {}

    def note(self, keys: list[pa.Array], *, fit: bool) -> None:
        """Keep the smallest keys so far."""
        self._rows += len(keys[0])
        named = pa.table(dict(zip(self._lookup.stream_columns, keys if fit else [key_text(keys)], strict=fit)))
        known = pa.concat_tables([self._first[fit], named]) if fit in self._first else named
        distinct = known.group_by(known.column_names).aggregate([])
        self._first[fit] = distinct.take(pa.array(sort_rows(distinct.columns)[:_NAMED]))

    def refuse(self) -> None:
        """Raise if any key is missing."""
        if not self._rows:
            return
        lookup = self._lookup
        texts = [text for fit in (True, False) if fit in self._first for text in key_text(self._first[fit].columns)]
        named = "; ".join(str(text)[:_SHOWN] for text in texts[:_NAMED])
        raise MissingMembersError(
            f"lookup {lookup.role!r}: {self._rows} rows name members that are not in dimension "
            f"{lookup.dimension.name!r}; the first keys ({', '.join(lookup.stream_columns)}): "
            f"{named}; add them to the dimension, or give the lookup the policy infer, "
            "unknown or reject"
        )


def new_members(
    lookup: Lookup, batches: Iterable[pa.RecordBatch], base: int = 0, order: Sequence[str] = ()
) -> pa.Table:
    """Return the members that `resolve` numbered, as rows of the dimension's table in key order.

    Parameters
    ----------
    lookup
        Lookup that was resolved.
    batches
        All or part of the output of `resolve`. Other columns may have been dropped or added since.
    base
        Base of the allocator. Members with keys up to the base are already in the dimension.
    order
        Columns of the output; the least row by them gives a member its spelling, if the dimension keeps spellings.

    Raises
    ------
    DeclarationError
        If the batches lack a column, or have one twice.
    StreamSchemaError
        If a batch is not a record batch, or has another schema than the first.
    """
    natural = lookup.dimension.natural_key
    columns = [lookup.key_column, *lookup.stream_columns, *order]
    batches = list(of_one_schema(batches))
    for batch in batches[:1]:
        where = f"lookup {lookup.role!r}: the output of `resolve`"
        check_names(batch.schema.names, [*columns, lookup.outcome_column], where, DeclarationError)
    wanted = str(Outcome.INFERRED)
    inferred = [
        batch.filter(pc.equal(batch.column(lookup.outcome_column), wanted)).select(columns) for batch in batches
    ]
    if not inferred:
        return lookup.dimension.table_schema.empty_table()
    whole = pa.Table.from_batches(inferred)
    table = pa.Table.from_arrays([as_array(column) for column in whole.columns], names=whole.column_names)
    table = table.filter(pc.greater(table.column(0), base))
    if order:
        table = table.sort_by([(name, "ascending") for name in order])
    surrogate, first = np.unique(np.asarray(table.column(0)), return_index=True)
    members = table.take(pa.array(first))
    keys = lookup.dimension.conform_key([members.column(name) for name in lookup.stream_columns])
    named = pa.table({name: key.values for name, key in zip(natural, keys, strict=True)})
    rows = lookup.dimension.members(named, surrogate, inferred=True)
    spelled = pa.table(
        {name: members.column(column) for name, column in zip(natural, lookup.stream_columns, strict=True)}
    )
    return with_spellings(lookup.dimension, rows, spelled)


def _rows(batch: pa.RecordBatch, wanted: NDArray[np.bool_]) -> pa.RecordBatch:
    """Return the selected rows, or the batch itself if all rows are selected."""
    return batch if wanted.all() else batch.filter(pa.array(wanted))


def _rows_of(column: pa.Array, wanted: NDArray[np.bool_]) -> pa.Array:
    return column.filter(pa.array(wanted))


def _repeat(value: Any, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), rows)


def key_bytes(columns: list[pa.Array]) -> NDArray[np.int64]:
    """Return the number of text and binary bytes in each key."""
    total = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        if is_bytes(column.type):
            total += np.asarray(pc.fill_null(pc.binary_length(column), 0))
    return total
