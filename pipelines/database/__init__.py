"""Extraction of a table or view of a source database to Parquet files that all other commands read.

In: the URL of a database, the name of a table or view. Out: Parquet files with exactly the values of the rows. Contains
the URL and its secrets, one consistent reading, the Arrow type and the check of each column, and the folder of the
files. Knows nothing about pipelines, Spark and Delta.
"""

from headrace.pipelines.database.extraction import ROWS_PER_FILE, ExtractResult, extract
from headrace.pipelines.database.source import require_no_secrets

__all__ = ["ROWS_PER_FILE", "ExtractResult", "extract", "require_no_secrets"]
