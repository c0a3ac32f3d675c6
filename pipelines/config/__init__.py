"""Pipeline files: from the text of a file to a checked `PipelineConfig`.

In: a path. Out: the model, or an error that lists each problem with its line and its remedy. The package also holds the
column types that users write, and the record format that a source declares. It does not read data or start Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.pipelines._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.pipelines.config.column_types import arrow_schema, type_name
    from headrace.pipelines.config.correlation import CorrelationConfig, load_any, load_steps
    from headrace.pipelines.config.model import PipelineConfig, SourceConfig, load_pipeline
    from headrace.pipelines.config.source_format import for_other_files, record_format

__all__ = [
    "CorrelationConfig",
    "PipelineConfig",
    "SourceConfig",
    "arrow_schema",
    "for_other_files",
    "load_any",
    "load_pipeline",
    "load_steps",
    "record_format",
    "type_name",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "column_types": ("arrow_schema", "type_name"),
        "correlation": ("CorrelationConfig", "load_any", "load_steps"),
        "model": ("PipelineConfig", "SourceConfig", "load_pipeline"),
        "source_format": ("for_other_files", "record_format"),
    },
)
