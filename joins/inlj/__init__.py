"""Index nested loops, for comparison: `operator`, and the buffer `pool` that a database would have."""
