"""Retries rejected rows: their original records go through the present pipeline, as batches of the stream.

A retry is loaded exactly once, like any batch: the commit of its facts decides, and its note names the resolutions that
follow. A retry that was interrupted is completed by the next run or retry of the pipeline.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.pipelines.config.correlation import load_any
from headrace.pipelines.config.model import PipelineConfig
from headrace.pipelines.correlate.manifests import RESULTS
from headrace.pipelines.errors import RejectedRowsError
from headrace.pipelines.rejects.retries import check_headings, open_rows, retry_batches
from headrace.pipelines.runner import RunResult, opened
from headrace.pipelines.spark.frame import FILE

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from headrace.pipelines.catalog import BatchRecord
    from headrace.pipelines.config.correlation import CorrelationConfig
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
    pipeline: str | Path | PipelineConfig | CorrelationConfig,
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
        Path of the pipeline file, or the configuration that `load_any` returned.
    selection
        Rows to retry. Rows that are not open are left out.
    spark, on_batch, hook, clock
        As in `headrace.pipelines.runner.run`.

    Raises
    ------
    RejectedRowsError
        If the selection names a row that is not there, a row of a file whose columns the source does not declare any
        more, or a record of a pipeline with several sources that never became a result. No row was changed.
    HeadraceError
        As in `headrace.pipelines.runner.run`.
    """
    config = load_any(pipeline) if isinstance(pipeline, str | Path) else pipeline
    _selected(config, selection)  # refuses rows before Spark starts
    check_headings(config if isinstance(config, PipelineConfig) else config.steps(), selection)
    selected = 0
    with opened(config, "retry", spark=spark, on_batch=on_batch, hook=hook, clock=clock) as run:

        def work() -> None:
            nonlocal selected
            run.loop.resume()
            rows = _selected(config, selection)
            selected = rows.num_rows
            for batch in retry_batches(rows):
                if run.stop.asked:
                    return
                run.loop.retry(batch)

        result = run.to_the_end(work)
    return RetryResult(selected, result)


def _selected(config: PipelineConfig | CorrelationConfig, selection: Selection) -> pa.Table:
    """Return the open rows of a selection, all of which can be retried."""
    if isinstance(config, PipelineConfig):
        return open_rows(config, selection)
    rows = open_rows(config.steps(), selection)
    records = [file for file in rows.column(FILE).to_pylist() if not file.startswith(f"{RESULTS}/")]
    if records:
        raise RejectedRowsError(
            f"{len(records)} of the selected rows are records of sources, such as one of {records[0]}, which cannot be "
            "retried: they have not met the rows of the other sources, some of which a later batch may have dropped. "
            "Deliver corrected records in a new file and dismiss these; results that a step rejected can be retried, "
            "select them by ID or with --rule"
        )
    return rows
