"""DuckDB in memory, quiet: it would draw its progress on standard output."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import duckdb

__all__ = ["connect", "quoted"]


def connect(config: Mapping[str, str] | None = None) -> duckdb.DuckDBPyConnection:
    """Return a new connection that prints nothing."""
    import duckdb  # noqa: PLC0415 - loaded only for what does not fit in memory, and for CSV

    connection = duckdb.connect(":memory:", config=dict(config or {}))
    connection.execute("SET enable_progress_bar = false")
    return connection


def quoted(name: str) -> str:
    """Return a column's name as SQL takes it."""
    return '"' + name.replace('"', '""') + '"'
