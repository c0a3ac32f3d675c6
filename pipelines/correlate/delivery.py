"""What becomes of the results of a join: they are the facts, or go through the steps of the pipeline to the facts.

Without steps, tasks write results as files of the table. With steps, they write them into the folder of the state, and
the batch protocol of ordinary pipelines reads them from there, as it reads the files of a source. In both cases the
commit of the facts marks the batch as loaded; its note names the manifest, and the files of rejected rows that follow.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headrace.pipelines.batch.state import Upstream
from headrace.pipelines.correlate.manifests import RESULTS
from headrace.pipelines.delta.commits import Commit, commit_exactly, commit_files
from headrace.pipelines.delta.data_files import DataFile, FileSpec
from headrace.pipelines.delta.tables import registered_streams
from headrace.pipelines.errors import BatchError, SourceFileError, TableMovedError
from headrace.pipelines.source.discovery import FoundFile, examine
from headrace.pipelines.source.identity import application, source_of
from headrace.pipelines.source.pieces import piece_frame
from headrace.pipelines.spark.failures import explained

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pyarrow as pa

    from headrace.pipelines.batch.protocol import BatchProtocol
    from headrace.pipelines.batch.resolutions import RetryOf
    from headrace.pipelines.catalog import BatchRecord, Catalog
    from headrace.pipelines.config.model import PipelineConfig
    from headrace.pipelines.delta.tables import DeltaHandle

__all__ = ["Delivery", "Direct", "Joined", "Stepped", "steps_problem"]


@dataclass(frozen=True)
class Joined:
    """A batch that was joined.

    Parameters
    ----------
    number, attempt, began
        Number of the batch, id of the attempt, and start in seconds since 1970.
    manifest
        Digest of the manifest of the state after the batch.
    results, rejected
        Files of the results, and of the rows that the join rejected.
    record
        Function that returns the record of the batch as far as it goes: each result was loaded.
    completed
        Function that adds the counts of the join to a record of the steps.
    """

    number: int
    attempt: str
    began: float
    manifest: str
    results: tuple[DataFile, ...]
    rejected: tuple[DataFile, ...]
    record: Callable[[], BatchRecord]
    completed: Callable[[BatchRecord], BatchRecord]


class Delivery(Protocol):
    """Loads the results of batches."""

    def files(self) -> FileSpec:
        """Return the files that tasks write results to."""

    def load(self, joined: Joined) -> BatchRecord:
        """Load the results of a batch, and return its record.

        Raises
        ------
        BatchError
            If another run loaded the batch.
        """

    def finish(self, number: int, note: Mapping[str, Any]) -> BatchRecord:
        """Complete a batch from the note of its facts, and return its record as the run catalog has it."""


class Direct:
    """The results are the facts.

    Parameters
    ----------
    facts, errors
        Tables of results and of rejected rows.
    schema
        Columns of the results.
    config
        The pipeline, see `CorrelationConfig.steps`.
    catalog, run, stream
        Run catalog, id of this run, and identity of the stream.
    holds, hook
        See `headrace.pipelines.batch.protocol.BatchProtocol`.
    """

    def __init__(
        self,
        facts: DeltaHandle,
        errors: DeltaHandle,
        schema: pa.Schema,
        config: PipelineConfig,
        catalog: Catalog,
        run: str,
        stream: str,
        *,
        holds: Callable[[], None],
        hook: Callable[[str], None],
    ) -> None:
        self._facts = facts
        self._errors = errors
        self._schema = schema
        self._config = config
        self._catalog = catalog
        self._run = run
        self._stream = stream
        self._holds = holds
        self._hook = hook

    def files(self) -> FileSpec:  # noqa: D102 - as in the protocol
        return files_of(self._facts, self._schema)

    def load(self, joined: Joined) -> BatchRecord:  # noqa: D102 - as in the protocol
        note = {
            "attempt": joined.attempt,
            "manifest": joined.manifest,
            "record": {name: value for name, value in asdict(joined.record()).items() if name != "detail"},
            "errors": [asdict(file) for file in joined.rejected],
        }
        self._commit(joined.results, Commit(application(self._stream, "facts"), joined.number, note))
        self._hook("after facts")
        self._follow_up(joined.number, note)
        record = joined.record()
        self._catalog.record_batch(record)
        self._hook("after record")
        return record

    def finish(self, number: int, note: Mapping[str, Any]) -> BatchRecord:  # noqa: D102 - as in the protocol
        from headrace.pipelines.catalog import BatchRecord  # noqa: PLC0415 - SQLAlchemy comes in here

        self._follow_up(number, note)
        record = BatchRecord(**{**note["record"], "run": self._run, "detail": {"recovered": True}})
        self._catalog.record_batch(record)
        return record

    def _commit(self, files: tuple[DataFile, ...], commit: Commit) -> None:
        """Commit the results, and register the stream if the table does not have it yet."""
        self._hook("before facts")
        self._holds()
        path, name, source = self._facts.path, self._config.name, source_of(self._config)
        with explained(f"the commit to {path}"):
            while True:
                version = self._facts.latest().version
                done = self._facts.transaction(commit.application)
                if done is not None and done >= commit.transaction:
                    raise self._loaded_elsewhere(commit)
                streams = registered_streams(self._facts, name, self._stream, source)
                if not streams:
                    if not commit_files(path, self._facts.table, files, commit, final=False):
                        raise self._loaded_elsewhere(commit)
                    return
                try:
                    registered = Commit(commit.application, commit.transaction, commit.note, streams)
                    commit_exactly(path, self._facts.table, version, files, registered)
                except TableMovedError:
                    continue
                return

    def _loaded_elsewhere(self, commit: Commit) -> BatchError:
        return BatchError(
            f"another run has just loaded batch {commit.transaction} of this stream into {self._facts.path}; it uses "
            "the same checkpoint or a copy of it. Nothing was loaded here; stop one of the two and run again"
        )

    def _follow_up(self, number: int, note: Mapping[str, Any]) -> None:
        """Commit the rejected rows that the note of the results names, unless this was already done."""
        if note["errors"]:
            self._hook("before errors")
            self._holds()
            files = [DataFile(**file) for file in note["errors"]]
            commit_files(
                self._errors.path, self._errors.table, files, Commit(application(self._stream, "errors"), number)
            )
            self._hook("after errors")


class Stepped:
    """Results go through the steps of the pipeline.

    Parameters
    ----------
    protocol
        Protocol that runs the steps.
    config
        The pipeline, see `CorrelationConfig.steps`.
    schema
        Columns of the results.
    stream
        Identity of the stream.
    """

    def __init__(self, protocol: BatchProtocol, config: PipelineConfig, schema: pa.Schema, stream: str) -> None:
        self._protocol = protocol
        self._config = config
        self._schema = schema
        self._stream = stream

    def files(self) -> FileSpec:  # noqa: D102 - as in the protocol
        return FileSpec(self._config.source.path, self._schema, subfolder=RESULTS)

    def load(self, joined: Joined) -> BatchRecord:  # noqa: D102 - as in the protocol
        from pyspark.sql import SparkSession  # noqa: PLC0415 - pyspark is heavy

        files = [self._found(file) for file in joined.results]
        pieces = piece_frame(SparkSession.active(), self._config.source, files, skippable=False)
        upstream = Upstream(joined.began, {"manifest": joined.manifest}, joined.rejected, joined.completed)
        return self._protocol.run_batch(pieces, joined.number, self._stream, joined.attempt, upstream=upstream)

    def retry(self, records: Any, joined: Joined, retry: RetryOf) -> BatchRecord:
        """Load rejected results again, given the frame of their records."""
        upstream = Upstream(joined.began, {"manifest": joined.manifest}, completed=joined.completed)
        return self._protocol.run_batch(records, joined.number, self._stream, joined.attempt, retry, upstream)

    def finish(self, number: int, note: Mapping[str, Any]) -> BatchRecord:  # noqa: D102 - as in the protocol
        record = self._protocol.finish(number, self._stream, note["attempt"])
        assert record is not None, "the facts hold the batch"
        return record

    def _found(self, file: DataFile) -> FoundFile:
        found = examine(self._config.source.path, file.path)
        if found is None or found.size != file.size:
            raise SourceFileError(
                f"{self._config.source.path}/{file.path}, which a task has just written, is not there as it was "
                "written; the folder must be one that all hosts share. Nothing was loaded; run again"
            )
        return found


def steps_problem(number: int, note: Mapping[str, Any], *, has_steps: bool) -> str:
    """Return why a pipeline file cannot complete a batch with the note of its facts; an empty text if it can."""
    stepped = "pending" in note
    if stepped == has_steps:
        return ""
    remedy = (
        "give the pipeline file the steps that it had then"
        if stepped
        else "remove `transform`, `lookups` and `duplicates` from the pipeline file"
    )
    return (
        f"batch {number} was loaded {'through' if stepped else 'without'} steps, and its run ended before the batch "
        f"was complete; {remedy}, and run it once; change the steps afterwards"
    )


def files_of(table: DeltaHandle, schema: pa.Schema) -> FileSpec:
    """Return the files of a table at its newest version, which must take plain files."""
    table.latest()
    table.require_form()
    return FileSpec(table.path, schema, tuple(table.table.metadata().partition_columns))
