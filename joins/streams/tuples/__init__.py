"""Tuples of streams: conditions between them, how they are stored, and how they are found in memory.

In: schemas, conditions as users state them, Arrow batches. Out: tuples that an operator keeps, finds by key, and turns
back into Arrow columns.

- `conditions`, `keys`: the join graph, and the words that keys are compared by
- `layout`, `rows`: records of fixed width with arrival and departure stamps
- `store`, `indexes`, `arena`: the tuples of one input in memory, with an index for each key
- `results`: result rows, in batches of a bounded size
"""
