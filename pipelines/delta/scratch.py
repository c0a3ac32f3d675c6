"""DuckDB files on the local disk for queries over whole tables, in bounded memory."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from duckdb import DuckDBPyConnection

__all__ = ["load_rows", "scratch_database"]

_MEMORY: Final = "512MB"


@contextmanager
def scratch_database(file: Path) -> Iterator[DuckDBPyConnection]:
    """Open a new DuckDB file, whose folder the caller removes.

    Parameters
    ----------
    file
        Path of the file.
    """
    import duckdb  # noqa: PLC0415 - heavy

    with duckdb.connect(str(file)) as connection:
        connection.execute(f"SET memory_limit = '{_MEMORY}'; SET enable_progress_bar = false; SET TimeZone = 'UTC'")
        yield connection


def load_rows(
    connection: DuckDBPyConnection, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch] = ()
) -> None:
    """Create or replace a table with the rows of batches.

    Parameters
    ----------
    connection
        Connection of `scratch_database`.
    name
        Name of the table; not from a user.
    schema, batches
        Columns and rows.
    """
    given: Any = pa.RecordBatchReader.from_batches(schema, batches)
    connection.register("given", given)
    connection.execute(f"CREATE OR REPLACE TABLE {name} AS FROM given")
    connection.unregister("given")
