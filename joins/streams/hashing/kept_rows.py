"""`KeptRows`: tuples of two inputs that their owner keeps, drops, and probes with other tuples, within a memory.

This is the arriving phase of a symmetric hash join in two separate steps, for an owner that has tuples elsewhere too:
`keep` adds tuples of an input, `probe` joins other tuples with those of the opposite input. An owner that keeps all
tuples of both inputs probes with each new batch; one that cannot keeps those of one input, part by part, and probes
with all of the other.

Memory: as for `headrace.joins.streams.SymmetricHash`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.streams.base.operator import StreamsAlgorithm, StreamsParameters
from headrace.joins.streams.base.pairs import Pairing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

    from headrace.joins.streams.tuples.conditions import Conditions
    from headrace.joins.streams.tuples.rows import Rows

__all__ = ["KeptRows"]


class KeptRows(StreamsAlgorithm):
    """Tuples of two inputs in memory.

    Parameters
    ----------
    inputs
        Schema of each of the two inputs, by name.
    on
        Conditions, see `headrace.joins.streams.Conditions`.
    memory
        Limit on everything that is held, as bytes or as text such as ``"64MiB"``.

    Raises
    ------
    JoinInputError, StreamSchemaError, KeyInputError
        If inputs or conditions cannot be used.
    MemoryBudgetError
        If the memory is not enough.

    Examples
    --------
    >>> import pyarrow as pa
    >>> orders, payments = pa.record_batch({"id": [1, 2]}), pa.record_batch({"order": [2], "paid": [9.5]})
    >>> rows = KeptRows({"o": orders.schema, "p": payments.schema}, [("o.id", "p.order")], "1MiB")
    >>> rows.keep(0, orders)
    True
    >>> [batch.to_pylist() for batch in rows.probe(1, payments)]
    [[{'id': 2, 'order': 2, 'paid': 9.5}]]
    """

    def __init__(self, inputs: Mapping[str, pa.Schema], on: Conditions, memory: int | str) -> None:
        super().__init__(StreamsParameters.check(inputs, on, "inner", memory))
        self.require_two_inputs("a join of kept rows")
        self._pairing = Pairing(self.graph.edges)
        self.stores = self._pairing.stores(self.layouts, self.budget)

    def count(self, side: int) -> int:
        """Return the number of tuples of an input."""
        return len(self.stores[side])

    def keep(self, side: int, batch: pa.RecordBatch) -> bool:
        """Keep the tuples of a batch: all of them that have keys, or none if they do not fit into the memory.

        Parameters
        ----------
        side
            Input.
        batch
            Tuples in the schema of the input.

        Returns
        -------
        bool
            Whether they fit.

        Raises
        ------
        MemoryBudgetError
            If a single tuple does not fit into the workspace.
        """
        store = self.stores[side]
        before = len(store)
        for rows in self._encoded(side, batch):
            if store.fitting(rows, 0) < len(rows):
                store.drop(np.arange(before, len(store), dtype=np.int64))
                return False
            store.insert(rows)
        return True

    def probe(self, side: int, batch: pa.RecordBatch, before: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the results of the tuples of a batch with the kept tuples of the other input.

        Parameters
        ----------
        side
            Input of the batch.
        batch
            Tuples in the schema of the input.
        before
            Only the tuples that were kept first, so many of them; None for all. Nothing may have been dropped since.

        Raises
        ------
        MemoryBudgetError
            If a single tuple does not fit into the workspace.
        """
        other = self.stores[1 - side]
        for rows in self._encoded(side, batch):
            every = np.arange(len(rows), dtype=np.int64)
            for positions, slots in self._pairing.find(other, side, rows, every, self.pair_limit):
                chosen = slice(None) if before is None else slots < before
                sources = [(rows, positions[chosen]), (other.rows, slots[chosen])]
                yield from self.results.batches(sources if side == 0 else sources[::-1])

    def free(self, side: int) -> None:
        """Drop all tuples of an input."""
        self.stores[side].free()

    def _encoded(self, side: int, batch: pa.RecordBatch) -> Iterator[Rows]:
        """Yield the tuples of a batch that have all keys, in slices that fit into the workspace."""
        start = 0
        while start < len(batch):
            part = self._slice(batch, start, side)
            start += len(part)
            rows, valid = self.encoders[side].encode(part)
            yield rows if valid is None or valid.all() else rows.take(np.flatnonzero(valid))

    def _arrive(self, side: int, rows: Rows) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError(f"the owner probes with input {side} and keeps its {len(rows)} tuples itself")

    def _cleanup(self) -> Iterator[pa.RecordBatch]:
        return iter(())
