"""Joins of streams with streams on a simulated clock: `python -m benchmarks streams CASE ...`.

Arrivals and disk accesses move the clock, nothing else does, so the same command always gives the same figures. Each
case is a module with a function ``run(quick)`` that returns a `Report`; `run` lists them in `CASES`.
"""
