"""`SymmetricHash`: the symmetric hash join of two streams (Wilschut and Apers; Hong and Stonebraker), all in memory.

Arriving phase: each arriving tuple probes the tuples of the other input in memory, then is kept with those of its own.
There is no reactive phase; the cleanup phase only adds tuples without a match, if the join type asks for them. When the
tuples exceed the memory, the join fails and says so. Once an input has ended, tuples of the other are no longer kept.

Bands use sorted entries in the place of hash chains.

Memory: the tuples of both inputs, 12 to 16 bytes for each in the hash chains, and the workspace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.streams.base.operator import HOWS, StreamsAlgorithm, StreamsJoin, StreamsParameters
from headrace.joins.streams.base.pairs import Pairing
from headrace.joins.streams.tuples.layout import MATCHED
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pyarrow as pa

    from headrace.joins.streams.tuples.conditions import Conditions
    from headrace.joins.streams.tuples.rows import Rows

__all__ = ["SymmetricHash"]

_TWO = 2


class SymmetricHash(StreamsJoin["SymmetricHashAlgorithm"]):
    """Symmetric hash join of two streams in memory.

    Parameters
    ----------
    inputs
        Schema of each of the two inputs, by name.
    on
        Conditions, see `headrace.joins.streams.Conditions`.
    how
        ``"inner"``, ``"left"``, ``"right"`` or ``"full"``. Tuples without a match come when their input's partner has
        ended, at the latest from `finish`.
    memory
        Limit on everything that the operator holds, as bytes or as text such as ``"64MiB"``.
    clock
        Returns the time in seconds; by default the system's.

    Raises
    ------
    JoinInputError
        If a parameter cannot be used.
    StreamSchemaError
        If an input lacks a column, or has it twice.
    KeyInputError
        If two columns of a condition have types that never match.
    MemoryBudgetError
        If the memory is not enough: when the operator is made, or later by `push`.

    Examples
    --------
    >>> import pyarrow as pa
    >>> orders, payments = pa.record_batch({"id": [1, 2]}), pa.record_batch({"order": [2], "paid": [9.5]})
    >>> join = SymmetricHash({"o": orders.schema, "p": payments.schema}, on=[("o.id", "p.order")], memory="1MiB")
    >>> join.push(orders, side="o").drain()
    0
    >>> join.push(payments, side="p").to_table().to_pylist()
    [{'id': 2, 'order': 2, 'paid': 9.5}]
    >>> join.finish().drain()
    0
    """

    def __init__(
        self,
        inputs: Mapping[str, pa.Schema],
        on: Conditions,
        how: str = "inner",
        memory: int | str = "64MiB",
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(
            SymmetricHashAlgorithm(StreamsParameters.check(inputs, on, how, memory, hows=HOWS, clock=clock))
        )


class SymmetricHashAlgorithm(StreamsAlgorithm):
    """Algorithm of `SymmetricHash`."""

    def __init__(self, parameters: StreamsParameters) -> None:
        super().__init__(parameters)
        self.require_two_inputs("a symmetric hash join")
        self._pairing = Pairing(self.graph.edges)
        self.stores = self._pairing.stores(self.layouts, self.budget)

    def _arrive(self, side: int, rows: Rows) -> Iterator[pa.RecordBatch]:
        yield from self.join_in_memory(self._pairing, side, rows, np.arange(len(rows), dtype=np.int64))
        if not self.ended[1 - side]:
            self._keep(side, rows)
        elif self.preserved(side):
            yield from self.unmatched(side, rows, np.flatnonzero((rows.flags & MATCHED) == 0))

    def _keep(self, side: int, rows: Rows) -> None:
        store = self.stores[side]
        if store.fitting(rows, 0) < len(rows):
            raise MemoryBudgetError.of(
                f"{self.rows_in_memory:,} tuples fill the memory of {format_size(self.budget.limit)}, and a symmetric "
                "hash join holds all of them",
                otherwise="use an operator that spills, such as DINER",
            )
        store.insert(rows)

    def _ended(self, side: int) -> Iterator[pa.RecordBatch]:
        """Yield the other input's tuples without a match, and drop its tuples: nothing can match them any more."""
        store = self.stores[1 - side]
        if self.preserved(1 - side):
            yield from self.alone(1 - side, store)
        store.free()

    def _cleanup(self) -> Iterator[pa.RecordBatch]:
        return iter(())
