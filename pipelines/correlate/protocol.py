"""The protocol of a batch of a correlation: an order of steps in which a replay after a crash changes nothing.

1. The batch starts from the manifest of the batch before, which the results name.
2. Spark computes it: tasks write new runs, results and rejected rows into files that nothing names yet.
3. A new manifest names the runs. It follows the one that the batch started from.
4. The results are loaded, directly or through the steps of the pipeline (`headrace.pipelines.correlate.delivery`). The
   note of the facts names the manifest, so their commit marks the batch as loaded, with its state. It fails if another
   run has loaded the batch.
5. Rejected rows are committed, from the note of the facts.

A run that ends before step 4 leaves files that no manifest of a loaded batch names, and the next run removes them. If
it ends later, the next run completes the batch from the note.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from headrace.pipelines.batch.error_rows import ERROR_SCHEMA, Origin
from headrace.pipelines.batch.read_step import ReadStep, record_format
from headrace.pipelines.catalog import BatchRecord
from headrace.pipelines.config.column_types import arrow_schema
from headrace.pipelines.config.join_plan import LEFT, RIGHT
from headrace.pipelines.correlate.delivery import Delivery, Direct, Joined, Stepped, files_of, steps_problem
from headrace.pipelines.correlate.manifests import Manifest, ManifestRef, StateFolder
from headrace.pipelines.correlate.runs import RunRef
from headrace.pipelines.correlate.tasks import SOURCE, JoinTask, ReadTask, SourceRead
from headrace.pipelines.delta.data_files import DataFile, FileSpec
from headrace.pipelines.delta.tables import DeltaHandle
from headrace.pipelines.errors import (
    BatchError,
    ConservationError,
    DeltaTableError,
    PipelineFileError,
    StateDamagedError,
)
from headrace.pipelines.hooks import Step
from headrace.pipelines.source.identity import application
from headrace.pipelines.source.pieces import piece_rows
from headrace.storage.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.pipelines.batch.protocol import BatchProtocol
    from headrace.pipelines.batch.resolutions import RetryOf
    from headrace.pipelines.catalog import Catalog
    from headrace.pipelines.config.correlation import CorrelationConfig
    from headrace.pipelines.config.join_plan import JoinPlan
    from headrace.pipelines.correlate.engines import Engine
    from headrace.pipelines.correlate.ledgers import SourceLedgers
    from headrace.pipelines.source.discovery import FoundFile

__all__ = ["CorrelationProtocol", "state_folder"]


def state_folder(config: CorrelationConfig, stream: str) -> StateFolder:
    """Return the state folder of a pipeline, with the identity of its stream."""
    return StateFolder(config.state_path, stream, config.name, _remedy(config))


def _remedy(config: CorrelationConfig) -> str:
    return (
        f"restore the folder {config.state_path} from a backup of the last batch; or, to begin again with all files, "
        f"remove {config.sink.path}, {config.errors_path}, {config.checkpoint} and this folder"
    )


class CorrelationProtocol:
    """Runs the batches of a correlation.

    Parameters
    ----------
    engine
        Runs the stages of a batch.
    config, plan
        Configuration of the pipeline, and the plan of its joins.
    catalog, run
        Run catalog that receives the batch records, and the id of this run.
    stream
        Identity of the stream.
    ledgers
        Ledgers of the batches, and of the files of each source.
    steps
        Protocol of the steps that results go through; None if results are the facts.
    holds
        Function called before each write. It raises an error if this run may no longer write.
    hook
        Function called with the name of each step. Tests use it to inject failures.
    clock
        Function that returns seconds since 1970.
    """

    def __init__(
        self,
        engine: Engine,
        config: CorrelationConfig,
        plan: JoinPlan,
        catalog: Catalog,
        run: str,
        stream: str,
        *,
        ledgers: SourceLedgers,
        steps: BatchProtocol | None,
        holds: Callable[[], None],
        hook: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._config = config
        self._plan = plan
        self._run = run
        self._stream = stream
        self._ledgers = ledgers
        self._holds = holds
        self._hook = hook
        self._clock = clock
        self._facts = DeltaHandle(config.sink.path)
        self._errors = DeltaHandle(config.errors_path)
        self._remedy = _remedy(config)
        self._state = state_folder(config, stream)
        self._shards = config.correlate.shards or engine.cores
        self._known: Manifest | None = None
        self._is_clean = False
        after, schema = config.steps(), plan.schema
        self._stepped = None if steps is None else Stepped(steps, after, schema, stream)
        self._delivery: Delivery = self._stepped or Direct(
            self._facts, self._errors, schema, after, catalog, run, stream, holds=holds, hook=hook
        )

    # State before a batch

    @property
    def _manifest(self) -> Manifest:
        """State after the last loaded batch.

        Raises
        ------
        StateDamagedError
            If the state is damaged or missing.
        PipelineFileError
            If the sources or conditions changed.
        """
        if self._known is None:
            last, definition = self._ledgers.last_loaded(), self._plan.definition()
            found = Manifest.first(definition) if last is None else self._state.read(ManifestRef(*last), definition)
            self._require_lateness(found)
            self._known = found
        return self._known

    def clean(self) -> None:
        """Remove files that are not part of the state after the last loaded batch, which is marked as loaded.

        Raises
        ------
        LedgerError
            If the ledger of a source does not have that batch.
        """
        if not self._is_clean:
            self._holds()
            self._ledgers.require(self._manifest.files)
            self._state.clean(self._manifest)
            self._is_clean = True

    def _require_lateness(self, manifest: Manifest) -> None:
        """Refuse to go on without watermarks: rows that were late could meet a state that lacks their matches."""
        if manifest.watermarks and self._config.correlate.lateness is None:
            raise PipelineFileError(
                f"batch {manifest.batch} dropped state by correlate.lateness, which the pipeline file no longer has; "
                "give it again, as long as you like, since a watermark never goes back"
            )

    def loaded(self) -> int | None:
        """Return the number of the last batch in the table of results, or None."""
        self._facts.latest()
        return self._facts.transaction(application(self._stream, "facts"))

    def finish(self, number: int, stream: str, attempt: str | None = None) -> BatchRecord | None:
        """Complete a batch whose results are committed, if its run ended early; return None if they are not.

        Raises
        ------
        BatchError
            If another attempt loaded the batch.
        DeltaTableError
            If the log no longer has the commit.
        PipelineFileError
            If the batch was loaded with steps, and the pipeline file has none now, or the other way round.
        """
        assert stream == self._stream
        loaded = self.loaded()
        if loaded is None or loaded < number:
            return None
        notes = self._facts.commit_notes(application(self._stream, "facts"), number)
        if not notes:
            raise DeltaTableError(
                f"{self._facts.path} holds batch {number} of stream {self._stream}, but its log no longer has the "
                "commit that names its state; restore the log from a backup"
            )
        note = notes[-1]
        if note["attempt"] != attempt:
            raise BatchError(
                f"{self._facts.path} holds batch {number} of stream {self._stream} from another run, which used a copy "
                "of this checkpoint; restore the newer checkpoint"
            )
        problem = steps_problem(number, note, has_steps=self._stepped is not None)
        if problem:
            raise PipelineFileError(problem)
        manifest = self._state.read(ManifestRef(number, note["attempt"], note["manifest"]), self._plan.definition())
        record = self._delivery.finish(number, note)
        self._settle(manifest)
        self._require_lateness(manifest)
        return record

    # A batch

    def run_batch(
        self, given: Any, number: int, stream: str, attempt: str, retry: RetryOf | None = None
    ) -> BatchRecord:
        """Load a batch.

        Parameters
        ----------
        given
            Files of each source by its name; for a retry, the frame of the rejected results.
        number, stream, attempt
            Number of the batch, identity of the stream, and id of the attempt.
        retry
            Rejected results that the batch loads again, or None.

        Raises
        ------
        BatchError
            If Spark failed, or another run loaded the batch.
        StateDamagedError
            If the state is damaged.
        """
        assert stream == self._stream
        began = self._clock()
        if retry is not None:
            return self._retried(given, number, attempt, began, retry)
        specs = {"facts": self._delivery.files(), "errors": self._error_files()}
        work = _Batch(number, attempt, began, specs, tuple(given))
        self._hook("before join")
        notes = self._computed(given, work)
        self._hook(Step("after join", f"batch {number}: writing tables"))
        result = _Result.of(notes, self._plan, self._shards)
        manifest = self._next_manifest(result, work)
        record = self._delivery.load(self._joined(manifest, work, result))
        self._settle(manifest)
        return record

    def _retried(self, records: Any, number: int, attempt: str, began: float, retry: RetryOf) -> BatchRecord:
        """Load rejected results again: a batch that leaves the state as it is."""
        if self._stepped is None:
            raise PipelineFileError(
                "the rows to retry are results that a step rejected, but the pipeline file has no steps now; give it "
                "the steps again, or dismiss the rows"
            )
        self.clean()  # a retry that was interrupted has left a manifest with the same name
        before = self._manifest
        manifest = before.after(number, attempt, before.runs, before.newest, before.watermarks)
        work = _Batch(number, attempt, began, {})
        record = self._stepped.retry(records, self._joined(manifest, work, None), retry)
        self._settle(manifest)
        return record

    def _joined(self, manifest: Manifest, work: _Batch, result: _Result | None) -> Joined:
        """Write the manifest of a batch, and return what its delivery must know; a retry has no result of a join."""
        self._holds()
        self._state.write(manifest)
        self._hook("after manifest")
        found = _Result() if result is None else result

        def completed(record: BatchRecord) -> BatchRecord:
            return record if result is None else self._completed(record, result, manifest)

        return Joined(
            work.number,
            work.attempt,
            work.began,
            manifest.digest(),
            tuple(found.facts),
            tuple(found.errors),
            lambda: self._record(found, manifest, work),
            completed,
        )

    def _settle(self, manifest: Manifest) -> None:
        """Go on from the state after a batch that was loaded."""
        self._known = manifest
        self._is_clean = False

    # Computation

    def _computed(self, files: Mapping[str, Sequence[FoundFile]], work: _Batch) -> list[dict[str, Any]]:
        """Compute a batch, and return the notes of its tasks."""
        pieces = [
            {SOURCE: name, **row}
            for name, each in files.items()
            for row in piece_rows(self._config.sources[name], each, self._engine.cores)
        ]
        with self._state.shown(str(uuid.uuid4())) as shown:
            joins = [self._join_task(stage, work, str(shown)) for stage in range(len(self._plan.stages))]
            notes = self._engine.run(pieces, self._read_task(work), joins)
        failures = sorted(note["failure"] for note in notes if "failure" in note)
        if failures:
            raise StateDamagedError(failures[0])
        return notes

    def _read_task(self, work: _Batch) -> ReadTask:
        sources = {name: self._source_read(name, work) for name in self._config.sources}
        return ReadTask(sources, self._plan.stages, self._shards, self._config.join_memory, work.specs["errors"])

    def _source_read(self, name: str, work: _Batch) -> SourceRead:
        source = self._config.sources[name]
        stage, side = self._plan.place(name)
        form = record_format(source)
        loaded_at = datetime.fromtimestamp(work.began, UTC)
        origin = Origin(self._config.name, self._stream, work.number, loaded_at, source.path, form)
        columns = arrow_schema(source.columns)
        names = tuple(f"{name}.{column}" for column in columns.names)
        mark = self._manifest.watermarks.get(name)
        return SourceRead(ReadStep(form, columns, source=name), names, stage, side, origin, self._time_of(side), mark)

    def _time_of(self, side: int) -> str | None:
        """Return the column with the time of an input's rows, if the state is bounded."""
        if self._config.correlate.lateness is None:
            return None
        return self._plan.stages[0].time_band().columns[side].partition(".")[2]

    def _join_task(self, stage: int, work: _Batch, shown: str) -> JoinTask:
        expired, band = self._expired()
        return JoinTask(
            self._plan.stages,
            stage,
            self._shards,
            self._config.join_memory,
            tuple(run for run in self._manifest.runs if run.stage == stage),
            work.number,
            work.attempt,
            self._manifest.recent,
            self._config.state_path,
            self._remedy,
            shown,
            work.specs["facts"],
            self._plan.order,
            expired,
            band,
        )

    def _expired(self) -> tuple[tuple[int | None, int | None], int]:
        """Return the key words below which rows of each input match no row that is still to come."""
        if self._config.correlate.lateness is None:
            return (None, None), 0
        band = self._plan.stages[0].time_band()
        sources = [self._plan.first, self._plan.stages[0].source]
        words: list[int | None] = []
        for side in (LEFT, RIGHT):
            mark = self._manifest.watermarks.get(sources[1 - side])
            words.append(None if mark is None else self._plan.stages[0].time_word(side, mark - band.within))
        return (words[LEFT], words[RIGHT]), band.at

    # State

    def _next_manifest(self, result: _Result, work: _Batch) -> Manifest:
        before = self._manifest
        kept = [run for run in before.runs if not result.dropped(run, self._shards)]
        newest = dict(before.newest)
        for name, ticks in result.newest.items():
            newest[name] = max(ticks, newest.get(name, ticks))
        marks = dict(before.watermarks)
        if self._config.correlate.lateness is not None:
            band = self._plan.stages[0].time_band()
            late = band.ticks(self._config.correlate.lateness)
            reached = {name: band.clamped(ticks - late) for name, ticks in newest.items()}
            marks = {name: max(ticks, marks.get(name, ticks)) for name, ticks in reached.items()}
        return before.after(work.number, work.attempt, (*kept, *result.added), newest, marks, work.sources)

    def _error_files(self) -> FileSpec:
        return files_of(self._errors, ERROR_SCHEMA)

    # Record

    def _record(self, result: _Result, manifest: Manifest, work: _Batch) -> BatchRecord:
        seconds = self._clock() - work.began
        deadline = self._config.deadline
        late = deadline is not None and seconds > parse_duration(deadline)
        return BatchRecord(
            run=self._run,
            stream=self._stream,
            batch=work.number,
            started=work.began,
            seconds=seconds,
            rows_in=result.rows_in,
            loaded=result.loaded,
            dropped=0,
            routed=0,
            rejected=result.rejected,
            new_members=0,
            hit_ratio=0.0,
            pages_wanted=0,
            pages_read=0,
            seeks=0,
            deadline_misses=result.loaded if late else 0,
            detail=result.detail(manifest),
        )

    @staticmethod
    def _completed(record: BatchRecord, result: _Result, manifest: Manifest) -> BatchRecord:
        """Return the record of the steps with the counts of the join."""
        own = result.detail(manifest)
        detail = {**record.detail, **own, "joins": record.detail["joins"], "chain": own["joins"]}
        rejected = record.rejected + result.rejected
        return replace(record, rows_in=result.rows_in, rejected=rejected, detail={**detail, "results": result.loaded})


@dataclass(frozen=True)
class _Batch:
    """A batch that is loaded: number, attempt, start, files of its tables, and sources of which it has files."""

    number: int
    attempt: str
    began: float
    specs: Mapping[str, FileSpec]
    sources: tuple[str, ...] = ()


@dataclass
class _Result:
    """What the notes of a batch's tasks say, reconciled."""

    sources: dict[str, dict[str, int]] = field(default_factory=dict)
    joins: list[dict[str, Any]] = field(default_factory=list)
    newest: dict[str, int] = field(default_factory=dict)
    added: list[RunRef] = field(default_factory=list)
    gone: dict[str, set[int]] = field(default_factory=dict)
    facts: list[DataFile] = field(default_factory=list)
    errors: list[DataFile] = field(default_factory=list)

    @classmethod
    def of(cls, notes: Sequence[Mapping[str, Any]], plan: JoinPlan, shards: int) -> _Result:
        """Return the sums of the notes.

        Raises
        ------
        ConservationError
            If rows are missing on their way between tasks, or in the files.
        """
        result = cls()
        for note in notes:
            for part, files in note.get("files", {}).items():
                getattr(result, part).extend(DataFile(**file) for file in files)
            for name, counts in note.get("read", {}).items():
                result._add_source(name, counts)
            if "stage" in note:
                result._add_join(note)
        result._reconcile(plan, shards)
        return result

    @property
    def rows_in(self) -> int:
        """Number of rows that were read."""
        return sum(each["rows"] for each in self.sources.values())

    @property
    def rejected(self) -> int:
        """Number of rows that were rejected, late ones included."""
        return sum(each["malformed"] + each["late"] for each in self.sources.values())

    @property
    def loaded(self) -> int:
        """Number of results."""
        return int(self.joins[-1]["results"])

    def dropped(self, run: RunRef, shards: int) -> bool:
        """Return whether a run of the state is no longer needed.

        Raises
        ------
        ConservationError
            If only some of the shards whose rows it holds dropped it.
        """
        by = self.gone.get(run.file, set())
        if not by:
            return False
        owners = set(range(run.low * shards >> 32, ((run.high - 1) * shards >> 32) + 1))
        if by != owners:
            raise ConservationError(
                f"shards {sorted(by)} replaced {run.file}, but shards {sorted(owners)} have rows there: a defect of "
                "Headrace"
            )
        return True

    def detail(self, manifest: Manifest) -> dict[str, Any]:
        """Return the counts of sources and joins, and the size of the state after the batch."""
        return {"sources": self.sources, "joins": self.joins, "state": manifest.size()}

    def _add_source(self, name: str, counts: Mapping[str, Any]) -> None:
        total = self.sources.setdefault(name, {})
        for field_name, value in counts.items():
            if field_name != "newest":
                total[field_name] = total.get(field_name, 0) + value
        if counts["newest"] is not None:
            self.newest[name] = max(counts["newest"], self.newest.get(name, counts["newest"]))

    def _add_join(self, note: Mapping[str, Any]) -> None:
        while len(self.joins) <= note["stage"]:
            self.joins.append({"shards": 0, "received": [0, 0], "results": 0, "sent": 0, "keyless": 0, "resident": 0,
                               "slowest_seconds": 0.0})  # fmt: skip
        join = self.joins[note["stage"]]
        join["shards"] += 1
        join["received"] = [join["received"][side] + note["received"][side] for side in (LEFT, RIGHT)]
        for name in ("results", "sent", "keyless"):
            join[name] += note.get(name, 0)
        join["resident"] += int(note["resident"])
        join["slowest_seconds"] = max(join["slowest_seconds"], note["seconds"])
        self.added += [RunRef.of(run) for run in note["added"]]
        for file in note["gone"]:
            self.gone.setdefault(file, set()).add(note["shard"])

    def _reconcile(self, plan: JoinPlan, shards: int) -> None:
        problems = []
        for name, each in self.sources.items():
            if each["rows"] != each["malformed"] + each["late"] + each["keyless"] + each["sent"]:
                problems.append(f"source {name!r}: {each}")
        if len(self.joins) != len(plan.stages) or any(join["shards"] != shards for join in self.joins):
            problems.append(f"joins: {self.joins}")
        else:
            problems += self._moved(plan)
        if (
            sum(file.rows for file in self.facts) != self.loaded
            or sum(file.rows for file in self.errors) != self.rejected
        ):
            problems.append(f"files: {self.loaded} results and {self.rejected} rejected rows")
        if problems:
            raise ConservationError(f"the counts of a batch differ: {'; '.join(problems)}: a defect of Headrace")

    def _moved(self, plan: JoinPlan) -> list[str]:
        """Return the inputs of joins that did not get exactly the rows that were sent to them."""
        sent = [[0, 0] for _ in plan.stages]
        for name, each in self.sources.items():
            stage, side = plan.place(name)
            sent[stage][side] += each["sent"]
        for number, join in enumerate(self.joins[:-1]):
            sent[number + 1][LEFT] += join["sent"]
            if join["sent"] + join["keyless"] != join["results"]:
                return [f"join {number + 1}: {join}"]
        return [
            f"join {number + 1} got {join['received']} of {sent[number]} rows"
            for number, join in enumerate(self.joins)
            if join["received"] != sent[number]
        ]
