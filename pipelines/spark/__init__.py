"""Spark support: the session and its jars, the columns of the frames between stages, and readable Spark errors.

In: `SparkSettings`. Out: a session with Delta's jars. This package does not depend on pipelines or batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.pipelines._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.pipelines.spark.jars import jars_are_cached
    from headrace.pipelines.spark.sessions import SparkSettings, session, spark_log, stop

__all__ = ["SparkSettings", "jars_are_cached", "session", "spark_log", "stop"]

__getattr__ = lazy_exports(
    __name__,
    {
        "jars": ("jars_are_cached",),
        "sessions": ("SparkSettings", "session", "spark_log", "stop"),
    },
)
