"""Dimensions with history against Spark's joins and Delta's MERGE: `python -m benchmarks history [CASE ...]`."""
