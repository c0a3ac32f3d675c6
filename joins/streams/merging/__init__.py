"""Joins of two streams by sorted runs, which are merged and joined with each other.

In: tuples as they arrive. Out: their results, and runs in spill files.

- `runs`: sorted runs, and the merging phase
- `progressive_merge`: joins and writes all tuples in memory when it is full
- `hash_merge`: joins tuples as they arrive, and writes one bucket of both inputs
"""
