"""The stream of a pipeline: files that arrive in a folder, as the first frame of a batch.

Every record arrives: one that does not fit the schema keeps its text in `_malformed` and is rejected later.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from headrace.pipelines.column_types import nearest, spark_ddl
from headrace.pipelines.delta_tables import folder_exists
from headrace.pipelines.errors import PipelineFileError
from headrace.pipelines.frame import FILE, MALFORMED, NOTE, STATE, State
from headrace.pipelines.spark_columns import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headrace.pipelines.config import SourceConfig, TriggerConfig

__all__ = ["check_source", "open_stream", "option_text"]

_TEXT_FORMATS = ("csv", "json")
_OWN_OPTIONS = (
    "mode",
    "columnNameOfCorruptRecord",
    "enforceSchema",
    "maxFilesPerTrigger",
    "pathGlobFilter",
    "timeZone",
)


def open_stream(spark: SparkSession, source: SourceConfig, trigger: TriggerConfig) -> DataFrame:
    """Return a source that was checked, as a streaming frame with the columns of `pipelines.frame.source_schema`."""
    from pyspark.sql import functions as sf  # noqa: PLC0415 - pyspark is heavy

    broken = source.format in _TEXT_FORMATS
    ddl = spark_ddl(source.columns) + (f", `{MALFORMED}` string" if broken else "")
    reader = spark.readStream.format(source.format).schema(ddl)
    for name, value in _options(source, trigger).items():
        reader = reader.option(name, value)
    malformed = sf.col(MALFORMED) if broken else sf.lit(None).cast("string").alias(MALFORMED)
    state = sf.when(sf.col(MALFORMED).isNotNull(), int(State.MALFORMED)).otherwise(int(State.OPEN))
    stream = reader.load(source.path)
    columns = [sf.col(quoted(name)) for name in source.columns]
    framed = stream.select(*columns, sf.col("_metadata.file_path").alias(FILE), malformed)
    return framed.select("*", state.cast("byte").alias(STATE), sf.lit(None).cast("string").alias(NOTE))


def check_source(source: SourceConfig) -> None:
    """Refuse a source that cannot be read, before anything else is done.

    Raises
    ------
    PipelineFileError
        If the folder is not there or cannot be read, or an option belongs to Headrace.
    """
    taken = [name for name in source.options if name.lower() in {own.lower() for own in _OWN_OPTIONS}]
    if taken:
        raise PipelineFileError(
            f"source.options.{taken[0]}: Headrace sets this option itself{nearest(taken[0], ['files', 'time_zone'])}; "
            "leave it out (`files`, `time_zone` and `trigger.max_files` are fields of their own)"
        )
    if not folder_exists(source.path):
        raise PipelineFileError(f"source.path: there is no folder {source.path}; create it, or correct the path")
    if "://" not in source.path and not os.access(source.path, os.R_OK | os.X_OK):
        raise PipelineFileError(f"source.path: the folder {source.path} may not be read; change its permissions")


def _options(source: SourceConfig, trigger: TriggerConfig) -> dict[str, str]:
    options = {name: option_text(value) for name, value in source.options.items()}
    options["maxFilesPerTrigger"] = str(trigger.max_files)
    if source.files is not None:
        options["pathGlobFilter"] = source.files
    if source.format in _TEXT_FORMATS:
        options |= {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": MALFORMED, "timeZone": source.time_zone}
    if source.format == "csv":
        options = {"header": "true", **options, "enforceSchema": "false"}
    return options


def option_text(value: str | float) -> str:
    """Return an option as Spark writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
