"""Spark support: the session and its jars, the columns of the frames between stages, and readable Spark errors.

In: `SparkSettings`. Out: a session with Delta's jars. This package does not depend on pipelines or batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.pipelines._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.pipelines.spark.columns import quoted, spark_schema
    from headrace.pipelines.spark.failures import cause_of, explained
    from headrace.pipelines.spark.frame import (
        FILE,
        MALFORMED,
        MALFORMED_TYPE,
        NOTE,
        PIECES,
        RECORD_NUMBER,
        REJECTED,
        ROUTED,
        SHARD,
        STATE,
        ShardRule,
        State,
        channel_row,
        conform,
        member_column,
        source_schema,
        with_state,
    )
    from headrace.pipelines.spark.jars import cache_folder, jars_are_cached
    from headrace.pipelines.spark.sessions import SparkSettings, session, spark_log, stop

__all__ = [
    "FILE",
    "MALFORMED",
    "MALFORMED_TYPE",
    "NOTE",
    "PIECES",
    "RECORD_NUMBER",
    "REJECTED",
    "ROUTED",
    "SHARD",
    "STATE",
    "ShardRule",
    "SparkSettings",
    "State",
    "cache_folder",
    "cause_of",
    "channel_row",
    "conform",
    "explained",
    "jars_are_cached",
    "member_column",
    "quoted",
    "session",
    "source_schema",
    "spark_log",
    "spark_schema",
    "stop",
    "with_state",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "columns": ("quoted", "spark_schema"),
        "failures": ("cause_of", "explained"),
        "frame": (
            "FILE",
            "MALFORMED",
            "MALFORMED_TYPE",
            "NOTE",
            "PIECES",
            "RECORD_NUMBER",
            "REJECTED",
            "ROUTED",
            "SHARD",
            "STATE",
            "ShardRule",
            "State",
            "channel_row",
            "conform",
            "member_column",
            "source_schema",
            "with_state",
        ),
        "jars": ("cache_folder", "jars_are_cached"),
        "sessions": ("SparkSettings", "session", "spark_log", "stop"),
    },
)
