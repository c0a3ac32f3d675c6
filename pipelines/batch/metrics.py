"""Counts of a batch: the sums of its task notes, their reconciliation, and the record for the run catalog."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.etl import Outcome, OutcomeCounts
from headrace.pipelines.batch.steps import STATISTICS
from headrace.pipelines.catalog import BatchRecord
from headrace.pipelines.errors import ConservationError, PolicyViolationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["BatchCounts", "first_failure", "reconcile", "summarise"]

_JOIN_SUMS = (*STATISTICS, "new_members", "replica_rows", "replica_seconds")


@dataclass(frozen=True)
class BatchCounts:
    """Sums over the tasks of a batch.

    Parameters
    ----------
    rows_in
        Number of rows that entered the first stage.
    outcomes
        Number of rows by outcome, counted at the last stage. Rejected rows include records that do not fit the schema.
    joins
        Sums of the operator counters, and the replica catch-ups, by role.
    slowest
        Longest and mean task duration in seconds, and highest and mean number of rows, by stage.
    workers
        Host and process id of each Python worker that ran a task.
    """

    rows_in: int
    outcomes: OutcomeCounts
    joins: Mapping[str, Mapping[str, Any]]
    slowest: Sequence[Mapping[str, float]] = field(default_factory=tuple)
    workers: Sequence[str] = ()

    def total(self, name: str) -> int:
        """Return the sum of a counter over all joins."""
        return int(sum(join.get(name, 0) for join in self.joins.values()))


def first_failure(notes: Iterable[Mapping[str, Any]]) -> None:
    """Raise the first error that a task noted about a lookup that must not continue.

    Raises
    ------
    PolicyViolationError
        If a task noted such an error. The message is that of the first one by stage and shard.
    """
    failed = sorted((note["stage"], note["shard"], note["failure"]) for note in notes if "failure" in note)
    if failed:
        raise PolicyViolationError(f"{failed[0][2]}; nothing of the batch has been written")


def summarise(notes: Sequence[Mapping[str, Any]]) -> BatchCounts:
    """Return the sums of the notes of all tasks in a batch."""
    outcomes = OutcomeCounts()
    malformed = 0
    filtered = sum(note.get("filtered", 0) for note in notes)
    joins: dict[str, dict[str, Any]] = {}
    for note in notes:
        if "settled" in note:
            outcomes += _outcome_counts(note["settled"])
            malformed += note["malformed"]
        for join in note["joins"]:
            _add(joins.setdefault(join["role"], {"outcomes": {}, "replicas": {}}), join)
    outcomes += OutcomeCounts(
        rows_in=malformed, rejected=malformed, rows={Outcome.REJECTED: malformed} if malformed else {}
    )
    outcomes += OutcomeCounts(
        rows_in=filtered, filtered=filtered, rows={Outcome.FILTERED: filtered} if filtered else {}
    )
    return BatchCounts(
        rows_in=sum(note["rows"] for note in notes if note["stage"] == 0),
        outcomes=outcomes,
        joins=joins,
        slowest=_slowest(notes),
        workers=sorted({note["worker"] for note in notes}),
    )


def reconcile(counts: BatchCounts, written: Mapping[str, int | None]) -> None:
    """Compare the input row count with the counts of the tasks and with the rows that Spark wrote.

    Parameters
    ----------
    counts
        Sums over the tasks.
    written
        Rows written according to Delta's commits, for `facts`, `errors` and `duplicates`; None where unknown.

    Raises
    ------
    ConservationError
        If the counts differ.
    """
    outcomes = counts.outcomes
    out = outcomes.loaded + outcomes.dropped + outcomes.routed + outcomes.rejected + outcomes.filtered
    if counts.rows_in != out or outcomes.rows_in != out:
        raise ConservationError(
            f"{counts.rows_in} rows came in, {outcomes.rows_in} reached the last stage, but {outcomes.loaded} were "
            f"loaded, {outcomes.dropped} dropped, {outcomes.routed} routed, {outcomes.rejected} rejected and "
            f"{outcomes.filtered} filtered: a defect of Headrace"
        )
    expected = {"facts": outcomes.loaded, "errors": outcomes.rejected, "duplicates": outcomes.routed}
    for table, rows in written.items():
        if rows is not None and rows != expected[table]:
            raise ConservationError(
                f"{expected[table]} rows were to be written to {table}, but its commit has {rows}; do not use it"
            )


def record_of(
    counts: BatchCounts, *, run: str, stream: str, batch: int, started: float, seconds: float, late: bool, detail: Any
) -> BatchRecord:
    """Return the catalog record of a batch. If the batch missed its deadline, all its facts count as misses."""
    done = counts.total("rows_done")
    return BatchRecord(
        run=run,
        stream=stream,
        batch=batch,
        started=started,
        seconds=seconds,
        rows_in=counts.rows_in,
        loaded=counts.outcomes.loaded,
        dropped=counts.outcomes.dropped,
        routed=counts.outcomes.routed,
        rejected=counts.outcomes.rejected,
        new_members=counts.total("new_members"),
        hit_ratio=counts.total("rows_cached") / done if done else 0.0,
        pages_wanted=counts.total("pages_wanted"),
        pages_read=counts.total("pages_read"),
        seeks=counts.total("seeks"),
        deadline_misses=counts.outcomes.loaded if late else counts.total("deadline_misses"),
        detail=detail,
    )


def _outcome_counts(value: Mapping[str, Any]) -> OutcomeCounts:
    return OutcomeCounts(
        **{name: value[name] for name in ("rows_in", "loaded", "dropped", "routed", "rejected", "filtered")},
        rows=_outcomes(value["rows"]),
        lookups={role: _outcomes(tally) for role, tally in value["lookups"].items()},
    )


def _outcomes(tally: Mapping[str, int]) -> dict[Outcome, int]:
    return {Outcome(name): count for name, count in tally.items()}


def _add(total: dict[str, Any], join: Mapping[str, Any]) -> None:
    for name in _JOIN_SUMS:
        total[name] = total.get(name, 0) + join.get(name, 0)
    for name, count in join.get("outcomes", {}).items():
        total["outcomes"][name] = total["outcomes"].get(name, 0) + count
    total["replicas"][join["replica"]] = total["replicas"].get(join["replica"], 0) + 1


def _slowest(notes: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return the task imbalance of each stage."""
    uneven = []
    for stage in sorted({note["stage"] for note in notes}):
        tasks = [note for note in notes if note["stage"] == stage]
        seconds = [task["seconds"] for task in tasks]
        rows = [task["rows"] for task in tasks]
        uneven.append(
            {
                "stage": stage,
                "tasks": len(tasks),
                "slowest_seconds": max(seconds),
                "mean_seconds": sum(seconds) / len(seconds),
                "most_rows": max(rows),
                "mean_rows": sum(rows) / len(rows),
            }
        )
    return uneven
