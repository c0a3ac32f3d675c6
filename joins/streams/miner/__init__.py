"""MINER, the multiple index nested-loops reactive join of streams (Bornea and others, TKDE 22(8), 2010, section 4).

In: two or more streams, and conditions that connect them: equalities or bands, in a chain, a star, a snowflake, or with
cycles. Out: results while tuples arrive, more of them while all inputs are blocked, and the rest at the end.

| paper | here |
|---|---|
| arriving phase, section 4.1 | `operator` |
| probing sequence, LocalJoins, the selectivity factor sigma | `selectivity`, `headrace.joins.streams.base.combining` |
| areas of each join attribute, flushing from one | `headrace.joins.streams.diner.regions`, `.flushing` |
| Index of a join attribute | `headrace.joins.streams.tuples.indexes.SortedIndex` |
| reactive phase, section 4.2, and cleanup | `headrace.joins.streams.base.nested_blocks` |
| Redundant Tuple Detection | `headrace.joins.streams.base.pairs.coexisted` |

Where the paper leaves a choice:

- All arriving tuples that are probed between two flushes have one probing sequence.
- Of equal selectivity factors, which all are after a flush, the one of the first inputs goes first.
- A join attribute is a key of the join graph. All equalities between two inputs are one attribute of several columns.
- A flush zeroes the join counters of all attributes of its input and moves the boundaries of all of them, so that all
  areas are compared over the same time.
- When all inputs but one have ended, the tuples of the one that has not are flushed first: nothing that arrives can
  match them. DINER does the same (footnote 1).
- In the reactive phase the outer blocks take at most a quarter of the memory that is free at the start.

Memory: the workspace of all joins of streams; pieces of partial results; buffers for a flush; 56 bytes for each spilled
block; the tuples in memory with 13 bytes for each attribute (29 if its keys have more than 8 bytes).
"""

from __future__ import annotations

from headrace.joins.streams.miner.operator import MINER, MINERAlgorithm

__all__ = ["MINER", "MINERAlgorithm"]
