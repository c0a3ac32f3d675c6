"""Integration of the joins with Spark and Delta: pipeline files, sessions, replicas, commit protocol, run catalog.

Names are imported on first use, so importing the package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.pipelines.catalog import BatchRecord, Catalog, RunRecord
    from headrace.pipelines.config.model import PipelineConfig, load_pipeline
    from headrace.pipelines.runner import RunResult, run
    from headrace.pipelines.spark.sessions import SparkSettings, session

__all__ = [
    "BatchRecord",
    "Catalog",
    "PipelineConfig",
    "RunRecord",
    "RunResult",
    "SparkSettings",
    "load_pipeline",
    "run",
    "session",
]

_HOMES = {
    "BatchRecord": "headrace.pipelines.catalog",
    "Catalog": "headrace.pipelines.catalog",
    "PipelineConfig": "headrace.pipelines.config.model",
    "RunRecord": "headrace.pipelines.catalog",
    "RunResult": "headrace.pipelines.runner",
    "SparkSettings": "headrace.pipelines.spark.sessions",
    "load_pipeline": "headrace.pipelines.config.model",
    "run": "headrace.pipelines.runner",
    "session": "headrace.pipelines.spark.sessions",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
