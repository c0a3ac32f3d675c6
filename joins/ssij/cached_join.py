"""The tuples of a join phase whose pages all stay: they are looked up in the cache, by all threads, when all are there.

Elsewhere tuples have to meet each block of pages while it is in the read buffer, one block after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.joins._input_buffer import Placed
from headrace.joins.predicates import BoundEquality

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from headrace.joins.ssij.direct_lookup import DirectLookup
    from headrace.joins.ssij.read_ahead import Block
    from headrace.joins.ssij.state import SSIJState
    from headrace.joins.ssij.stream_buffer import Chunk

__all__ = ["CachedJoin"]


class CachedJoin:
    """Joins nothing before the last page of the phase is cached. None may leave before the last tuple is joined.

    Parameters
    ----------
    state
        Of the operator.
    lookup
        Of the relation, whose keys are unique: each tuple waits for one leaf.
    chunks
        Of waiting tuples.
    """

    def __init__(self, state: SSIJState, lookup: DirectLookup, chunks: list[Chunk]) -> None:
        self._state = state
        self._lookup = lookup
        self._chunks = chunks

    def add(self, block: Block) -> Iterator[pa.RecordBatch]:
        """Wait for the other blocks."""
        del block
        return iter(())

    def settle(self) -> None:
        """Nobody reads from a block."""

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Join all tuples."""
        workers = self._state.workers
        for piece in self._pieces():
            parts = piece.parts(workers.share(len(piece.rows)))
            for part, results in zip(parts, workers.stream(self._join, parts), strict=True):
                self._state.completed(part.arrival, len(part.rows))
                yield from results

    def _pieces(self) -> Iterator[Placed]:
        """Yield the tuples, as many at a time as there is room to work on."""
        for chunk in self._chunks:
            row_nbytes = chunk.tuple_nbytes / len(chunk.rows)
            most = self._state.store.rows_at_once(row_nbytes + self._state.emitter.row_bytes(row_nbytes))
            piece = Placed(chunk.rows, chunk.arrival, chunk.first)
            yield from piece.parts(-(-len(chunk.rows) // most))

    def _join(self, part: Placed) -> list[pa.RecordBatch]:
        """Join some tuples. Changes nothing, so that threads may do it at once."""
        state, cache = self._state, self._state.store.cache
        assert isinstance(state.bound, BoundEquality)
        found = self._lookup.probe(cache.buffer, state.bound.words(part.rows), cache.frame_of(part.leaf), state.outer)
        return list(state.emitter.emit_found(part.rows, found.source, found.columns))
