"""The tables that a correlation writes: checked before anything is written, then created if they do not exist."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.pipelines.batch.error_rows import ERROR_SCHEMA
from headrace.pipelines.batch.preparation import ANOTHER, another_table, described_table, require_columns
from headrace.pipelines.delta.support import Role, Use, Way, refuse_twins, require_support
from headrace.pipelines.delta.tables import create_table, has_table
from headrace.pipelines.errors import DeltaTableError

if TYPE_CHECKING:
    import pyarrow as pa

    from headrace.pipelines.config.correlation import CorrelationConfig
    from headrace.pipelines.config.join_plan import JoinPlan

__all__ = ["check_sinks", "create_sinks"]


def check_sinks(config: CorrelationConfig, plan: JoinPlan) -> None:
    """Check the tables that exist. This function writes nothing.

    Raises
    ------
    DeltaTableError
        If a table cannot receive the rows.
    """
    refuse_twins(plan.schema.names, "the results")
    for role, label, path, schema in _tables(config, plan):
        table = described_table(path)
        if table is None:
            continue
        require_columns(table, label, schema, another_table(config) if role is Role.FACTS else ANOTHER)
        if require_support(table, Use(role, label, path, frozenset(schema.names))) is not Way.FILES:
            raise DeltaTableError(
                f"{label}, the Delta table {path}, has constraints, generated columns or other features for which "
                "Spark must write its files, which `correlate` does not support; name another table, and load this one "
                "from it"
            )
    if not config.has_steps:
        _check_partitions(config)


def create_sinks(config: CorrelationConfig, plan: JoinPlan) -> None:
    """Create the tables that do not exist yet."""
    for role, _, path, schema in _tables(config, plan):
        if not has_table(path):
            create_table(path, schema, tuple(config.sink.partition_by) if role is Role.FACTS else ())


def _tables(config: CorrelationConfig, plan: JoinPlan) -> list[tuple[Role, str, str, pa.Schema]]:
    """Return the tables that tasks of the join write; behind steps, the facts are a matter of the steps."""
    errors = (Role.ERRORS, "the error table", config.errors_path, ERROR_SCHEMA)
    return (
        [errors] if config.has_steps else [(Role.FACTS, "the table of results", config.sink.path, plan.schema), errors]
    )


def _check_partitions(config: CorrelationConfig) -> None:
    table, declared = described_table(config.sink.path), tuple(config.sink.partition_by)
    if table is not None and declared and declared != table.partition_columns:
        there = ", ".join(table.partition_columns)
        raise DeltaTableError(
            f"sink.partition_by is {', '.join(declared)}, but the Delta table {table.path} is "
            f"{'partitioned by ' + there if there else 'not partitioned'}; write partition_by: [{there}]"
            f"{another_table(config)}"
        )
