"""Integration of the joins with Spark and Delta: pipeline files, sessions, replicas, commit protocol, run catalog.

Names are imported on first use, so importing the package is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.pipelines._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.pipelines.catalog import BatchRecord, Catalog, RunRecord
    from headrace.pipelines.config.model import PipelineConfig, load_pipeline
    from headrace.pipelines.database.extraction import ExtractResult, extract
    from headrace.pipelines.retries import RetryResult, retry
    from headrace.pipelines.runner import RunResult, run
    from headrace.pipelines.spark.sessions import SparkSettings, session

__all__ = [
    "BatchRecord",
    "Catalog",
    "ExtractResult",
    "PipelineConfig",
    "RetryResult",
    "RunRecord",
    "RunResult",
    "SparkSettings",
    "extract",
    "load_pipeline",
    "retry",
    "run",
    "session",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "catalog": ("BatchRecord", "Catalog", "RunRecord"),
        "config.model": ("PipelineConfig", "load_pipeline"),
        "database.extraction": ("ExtractResult", "extract"),
        "retries": ("RetryResult", "retry"),
        "runner": ("RunResult", "run"),
        "spark.sessions": ("SparkSettings", "session"),
    },
)
