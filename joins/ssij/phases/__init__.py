"""Phases of SSIJ: what it does with a slice of a batch, and with the tuples that wait.

In: slices of stream batches, and the context that all phases share. Out: result batches, and tuples in the stream
buffer. The record-tier phase looks at a slice first; then comes the online phase that suits predicate and keys
(`row_tier`, `direct`, `nearest`, or `online` for all others; `base` is what they share). The join phase (`join`) reads
the pages that tuples wait for (`read_ahead`) and joins them in the order of the read plan (`pair_batches`).
"""
