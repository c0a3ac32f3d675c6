"""Dimensions with history as Delta tables: the layout of a version's row, and of the entries that it holds.

In: rows of the Delta table. Out: entries as `headrace.etl.history` computes with them, and the way back.
"""

__all__: list[str] = []
