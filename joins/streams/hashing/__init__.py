"""Joins of streams by hash tables, which spill by partition of the key, or do not spill.

In: tuples as they arrive. Out: their results, and partitions in spill files that are joined at the end.

- `symmetric_hash`: all in memory
- `xjoin`, `rpj`, `pr_join`, `double_pipelined_hash`: two inputs, on `partitions`; they differ in what they flush, and
  when they join it
- `estimates`: estimates of an aggregate from the first results of `pr_join`
- `kept_rows`: the arriving phase in separate steps, for an owner that has tuples elsewhere too
- `mjoin`: any number of inputs that share one key
"""
