"""Delta tables: the supported features, reads without Spark, and commits.

In: a table path and Parquet files. Out: versions. `commits` writes log entries that apply at exactly the next version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.pipelines._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.pipelines.delta.commits import Commit, append, append_exactly, commit_exactly, commit_files
    from headrace.pipelines.delta.constraints import broken, constraint_columns
    from headrace.pipelines.delta.data_files import DataFile, FileSpec, FileWriter
    from headrace.pipelines.delta.reads import physical_name, plain_schema, scan_table
    from headrace.pipelines.delta.support import (
        Described,
        Role,
        Use,
        describe,
        refuse_float_keys,
        refuse_twins,
        require_support,
        takes_files,
    )
    from headrace.pipelines.delta.tables import (
        CHANGE_TYPE,
        COMMIT_VERSION,
        GREATEST_KEY,
        DeltaHandle,
        create_dimension,
        create_table,
        has_table,
        open_table,
        read_changes,
        read_rows,
        registered_streams,
        remember_greatest_key,
        stream_registry,
    )

__all__ = [
    "CHANGE_TYPE",
    "COMMIT_VERSION",
    "GREATEST_KEY",
    "Commit",
    "DataFile",
    "DeltaHandle",
    "Described",
    "FileSpec",
    "FileWriter",
    "Role",
    "Use",
    "append",
    "append_exactly",
    "broken",
    "commit_exactly",
    "commit_files",
    "constraint_columns",
    "create_dimension",
    "create_table",
    "describe",
    "has_table",
    "open_table",
    "physical_name",
    "plain_schema",
    "read_changes",
    "read_rows",
    "refuse_float_keys",
    "refuse_twins",
    "registered_streams",
    "remember_greatest_key",
    "require_support",
    "scan_table",
    "stream_registry",
    "takes_files",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "commits": ("Commit", "append", "append_exactly", "commit_exactly", "commit_files"),
        "constraints": ("broken", "constraint_columns"),
        "data_files": ("DataFile", "FileSpec", "FileWriter"),
        "reads": ("physical_name", "plain_schema", "scan_table"),
        "support": (
            "Described",
            "Role",
            "Use",
            "describe",
            "refuse_float_keys",
            "refuse_twins",
            "require_support",
            "takes_files",
        ),
        "tables": (
            "CHANGE_TYPE",
            "COMMIT_VERSION",
            "DeltaHandle",
            "GREATEST_KEY",
            "create_dimension",
            "create_table",
            "has_table",
            "open_table",
            "read_changes",
            "read_rows",
            "registered_streams",
            "remember_greatest_key",
            "stream_registry",
        ),
    },
)
