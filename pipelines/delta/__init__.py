"""Delta tables: the supported features, reads without Spark, and commits.

In: a table path and Parquet files. Out: versions. `commits` writes log entries that apply at exactly the next version.
"""

__all__: list[str] = []
