"""Spark and Delta around the joins: pipeline files, sessions, replicas, the commit protocol, the run catalog.

Names are loaded when they are first used, so that importing the package costs nothing.
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
