"""Joins of streams with streams: operators, and the base that all of them share.

In: record batches of two or more streams, pushed as they arrive, and conditions between their columns. Out: result
batches, as early as possible, and complete after `finish`.

Rooms, each of which imports only those before it: `tuples`, `base`, and the operators: `hashing`, `merging`, `diner`,
`miner` (which uses the phases of `diner`), `punctuated`. `catalog` makes an operator by its name, and `arrivals` pushes
stored streams into it.

How an operator is built
------------------------
An operator is a small module with a handle, derived from `StreamsJoin`, whose constructor checks parameters with
`StreamsParameters.check`, and an algorithm, derived from `StreamsAlgorithm`; `hashing.symmetric_hash` is the shortest
example. The base turns arriving batches into slices of stored tuples (`Rows`) that fit into the workspace, drops tuples
without a key, counts, keeps the clock, and runs the phases. The algorithm implements

- `_arrive(side, rows)`: join tuples that arrived with what is in memory, and keep them (arriving phase)
- `_react()`: return one smallest unit of work as a generator of results, or None if there is none (reactive phase); the
  base calls it while all inputs are blocked for longer than `wait`: once by `tick`, repeatedly by `idle`
- `_ended(side)`: one input has arrived completely
- `_cleanup()`: yield everything that is left; all inputs have arrived
- `rows_in_memory`

and uses

- `tuples.conditions.JoinGraph` (`self.graph`): inputs are numbers in the order of their names; `edges` compare a key of
  one input with a key of another. Key words are uint64 whose order is the order of the keys, so sorting by
  `rows.key_words(key)` sorts by key
- `tuples.rows.Rows`: tuples side by side with arrival and departure stamps, key words and flags; `take(index)` copies
  some
- `tuples.store.TupleStore`: the tuples of one input in memory with a hash index or a sorted index for each key.
  `fitting` says how many more fit, `insert` adds, `remove(slots, departure)` returns tuples for a block and frees their
  memory
- `base.pairs.Pairing`: all conditions between two inputs: `find` probes a store, `meets` filters given pairs
- `base.combining.Combiner`: combinations of tuples of any number of inputs, by a probing sequence, in bounded pieces;
  `base.nested_blocks.NestedBlocks`: nested loops over their spilled blocks, one step at a time
- `base.pairs.coexisted`: the interval technique. `self.next_stamp()` numbers departures, the base numbers arrivals; a
  tuple is in memory from its arrival to its departure, and combinations whose intervals overlap were joined while
  arriving
- `self.stamp_arrivals(rows, start)`: after each flush within `_arrive`, for the tuples that are not in memory yet
- `self.spill_file(side)` with `base.blocks`: spilled blocks of tuples (`write_block`, `read_block`), and
  `SpillReserve`, a part of the budget for the buffers of a flush, which begins when no other memory is left
- `base.spool.Spool`: buffers of tuples on their way to disk, for each input and partition; `base.block_join.BlockJoin`
  joins such blocks, and `base.lanes.in_lanes` several partitions at a time
- `self.require(nbytes, purpose)`: refuse a memory that is too small when the operator is made
- `self.results.batches([(rows, positions), ...])`: result batches, one entry for each input in order
- `self.budget`: memory. Stores charge themselves; charge the component ``spill`` for blocks in memory, and
  ``statistics`` for what a flushing policy keeps. The workspace, an eighth of the memory, is charged once by the base
  for the slice that is being taken in and the result batch in progress

Everything is deterministic: times and arrivals are arguments, and nothing depends on hashes of Python or on the pace of
threads. Put the operator into `OPERATORS` of ``tests/joins/streams/conftest.py``, and the whole suite applies to it. A
line in `catalog.ALGORITHMS` and a row in the table of docs/streams.md make it available to `headrace correlate`.
"""

from __future__ import annotations

from headrace.joins.streams.base.operator import StreamsAlgorithm, StreamsJoin, StreamsParameters
from headrace.joins.streams.base.stats import StreamsStats
from headrace.joins.streams.diner import DINER
from headrace.joins.streams.hashing.double_pipelined_hash import DoublePipelinedHash
from headrace.joins.streams.hashing.estimates import Coverage, Estimate
from headrace.joins.streams.hashing.mjoin import MJoin
from headrace.joins.streams.hashing.pr_join import PRJoin
from headrace.joins.streams.hashing.rpj import RPJ
from headrace.joins.streams.hashing.symmetric_hash import SymmetricHash
from headrace.joins.streams.hashing.xjoin import XJoin
from headrace.joins.streams.merging.hash_merge import HashMerge
from headrace.joins.streams.merging.progressive_merge import ProgressiveMerge
from headrace.joins.streams.miner import MINER
from headrace.joins.streams.punctuated import PunctuatedJoin
from headrace.joins.streams.tuples.conditions import Conditions, JoinGraph, Near

__all__ = [
    "DINER",
    "MINER",
    "RPJ",
    "Conditions",
    "Coverage",
    "DoublePipelinedHash",
    "Estimate",
    "HashMerge",
    "JoinGraph",
    "MJoin",
    "Near",
    "PRJoin",
    "ProgressiveMerge",
    "PunctuatedJoin",
    "StreamsAlgorithm",
    "StreamsJoin",
    "StreamsParameters",
    "StreamsStats",
    "SymmetricHash",
    "XJoin",
]
