"""Experiments with joins of streams, each a module with `TITLE`, `Settings`, `QUICK` and `run`; see `run.py`."""
