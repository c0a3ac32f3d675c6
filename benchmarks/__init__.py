"""Measurements of Headrace and of the alternatives that a user would consider. Run with `python -m benchmarks`."""
