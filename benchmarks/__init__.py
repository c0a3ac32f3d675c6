"""Measurements of Headrace beside what a user would pick instead. Run with `python -m benchmarks`."""
