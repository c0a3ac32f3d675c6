"""Index nested loops, for comparison: what a database does with a stream (figure 9 of the SSIJ paper).

In: batches of a stream. Out: their results at once. `operator` looks tuples up in the order of arrival; `pool` is the
buffer pool that a database would have.
"""
