"""MeshJoin, for comparison: a stream joined by a cyclic scan of the relation (section V of the SSIJ paper).

In: batches of a stream. Out: results after one cycle. `operator` joins, `chunks` reads the relation, `window` is the
multimap of waiting tuples and `columns` their values, `split` divides the memory between pages and tuples.
"""
