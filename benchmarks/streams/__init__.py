"""The papers' experiments with joins of streams, on a simulated clock: `python -m benchmarks streams [NAME ...]`.

Arrivals and disk accesses move the clock, nothing else does, so the same command always gives the same figures. The
modules without an underscore that have `FIGURES` hold the figures, with their claims; `document` writes
docs/experiments-streams.md from the results.
"""
