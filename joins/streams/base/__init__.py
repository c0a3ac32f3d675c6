"""Base of the joins of streams: the calls and phases of an operator, and the work that several operators share.

In: batches as they arrive, and tuples in stores. Out: result batches, and blocks of tuples in spill files.

- `operator`, `stats`: the handle that the user holds, the algorithm behind it, and its counters
- `pairs`, `combining`: all conditions between two inputs, and combinations of tuples of any number of inputs
- `blocks`: spilled blocks of tuples, and the memory to write and read them
- `spool`: tuples on their way to disk, collected by partition
- `block_join`, `nested_blocks`: joins of spilled blocks of two inputs, and of any number
- `lanes`: independent work in threads, with results in a fixed order
"""
