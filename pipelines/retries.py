"""Retries rejected rows: their original records go through the present pipeline, as batches of the stream.

A retry is loaded exactly once, like any batch: the commit of its facts decides, and its note names the resolutions that
follow. A retry that was interrupted is completed by the next run or retry of the pipeline.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.pipelines.config.model import PipelineConfig, load_pipeline
from headrace.pipelines.rejects.retries import open_rows, retry_batches
from headrace.pipelines.runner import RunResult, opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace.pipelines.catalog import BatchRecord
    from headrace.pipelines.rejects.rows import Selection
    from headrace.pipelines.spark.sessions import SparkSettings

__all__ = ["RetryResult", "retry"]


@dataclass(frozen=True)
class RetryResult:
    """Result of a retry.

    Parameters
    ----------
    selected
        Number of open rows that the selection named.
    run
        Result of the run that retried them. Its batches include one that an earlier run had not completed.
    """

    selected: int
    run: RunResult


def retry(
    pipeline: str | Path | PipelineConfig,
    selection: Selection,
    *,
    spark: SparkSettings | None = None,
    on_batch: Callable[[BatchRecord], None] | None = None,
    hook: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.time,
) -> RetryResult:
    """Load the open rejected rows of a selection again.

    Rows that are rejected again stay open with the new cause.

    Parameters
    ----------
    pipeline
        Path of the pipeline file, or the `PipelineConfig` that `load_pipeline` returned.
    selection
        Rows to retry. Rows that are not open are left out.
    spark, on_batch, hook, clock
        As in `headrace.pipelines.runner.run`.

    Raises
    ------
    RejectedRowsError
        If the selection names a row that is not there.
    HeadraceError
        As in `headrace.pipelines.runner.run`.
    """
    config = pipeline if isinstance(pipeline, PipelineConfig) else load_pipeline(pipeline)
    open_rows(config, selection)  # refuses a row that is not there, before Spark starts
    selected = 0
    with opened(config, "retry", spark=spark, on_batch=on_batch, hook=hook, clock=clock) as run:

        def work() -> None:
            nonlocal selected
            run.loop.resume()
            rows = open_rows(run.config, selection)
            selected = rows.num_rows
            for batch in retry_batches(rows):
                if run.stop.asked:
                    return
                run.loop.retry(batch)

        result = run.to_the_end(work)
    return RetryResult(selected, result)
