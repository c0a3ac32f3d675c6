"""Spark and Delta around the joins: pipeline files, sessions, replicas, the commit protocol, the run catalog.

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.catalog import BatchRecord, Catalog, RunRecord
    from pipelines.config import PipelineConfig, load_pipeline
    from pipelines.runner import RunResult, run
    from pipelines.spark import SparkSettings, session

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
    "BatchRecord": "pipelines.catalog",
    "Catalog": "pipelines.catalog",
    "PipelineConfig": "pipelines.config",
    "RunRecord": "pipelines.catalog",
    "RunResult": "pipelines.runner",
    "SparkSettings": "pipelines.spark",
    "load_pipeline": "pipelines.config",
    "run": "pipelines.runner",
    "session": "pipelines.spark",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
