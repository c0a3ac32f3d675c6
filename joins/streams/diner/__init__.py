"""DINER, the double index nested-loops reactive join of two streams (Bornea and others, TKDE 22(8), 2010, section 3).

In: two streams and conditions between them, equalities or bands. Out: results while tuples arrive, more of them while
both inputs are blocked, and the rest at the end.

| paper | here |
|---|---|
| arriving phase, algorithm 1 | `operator` |
| flushing policy, algorithm 2 | `flushing`, `_kernels` |
| regions and their statistics, algorithm 3 | `regions` |
| ReactiveNL, algorithm 4; cleanup, section 3.5 | `reactive` |
| Index_i, the sorted index of an input | `headrace.joins.streams.tuples.indexes.SortedIndex` |
| Disk_i, the blocks of an input | `disk` |
| ATS, DTS | arrival and departure stamps, numbers of one sequence |
| join bit | the flag `TOUCHED` of a stored tuple |
| LastLwVal, LastUpVal | `Regions.lower`, `Regions.upper` |
| LwJoins, MdJoins, UpJoins | `Regions.joins` |
| LwTups, MdTups, UpTups | read from the sorted entries, which need no counters |
| JoinedOuter, JoinedInner, CurrInner, OuterMem | `ReactiveNL.joined`, `current`, `chunk` |
| MaxOuterMem, MaxNewArr, WaitThresh | `max_outer_blocks`, `max_new_arrivals`, `wait` |

Where the paper leaves a choice:

- regions are compared by joins per tuple; of equal ones the upper goes first, then the lower (the order of algorithm 2)
- after an input has ended, the tuples of the other are flushed first (the paper's footnote 1 suggests that)
- both boundaries move after each flush of their input, also after one from the middle
- in the reactive phase the outer blocks take at most a quarter of the memory, so that a small memory keeps tuples for
  the arriving phase
- an arriving batch is probed and kept in runs between two flushes; the tuple that causes a flush has its results first

Memory: the workspace of all joins of streams, an eighth of it; buffers of two blocks for a flush; 56 bytes for each
spilled block; the tuples in memory with 13 bytes each for sorted entries (29 if keys have more than 8 bytes).
"""

from __future__ import annotations

from headrace.joins.streams.diner.operator import DINER, DINERAlgorithm

__all__ = ["DINER", "DINERAlgorithm"]
