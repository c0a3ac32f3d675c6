"""Bulk loads: a table file written from a source in key order.

In: a source of rows and the layout of the table. Out: a table file under its final name, or no file.
"""

from headrace.storage.load.build import BuildOptions, build_table

__all__ = ["BuildOptions", "build_table"]
