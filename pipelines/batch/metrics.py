"""What a batch counted: the notes of its tasks added up, the books checked, and the record for the run catalog."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.etl import Outcome, OutcomeCounts
from headrace.pipelines.catalog import BatchRecord
from headrace.pipelines.errors import ConservationError, PolicyViolationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["BatchCounts", "check_books", "first_failure", "summarise"]

_JOIN_SUMS = (
    "rows_in",
    "rows_done",
    "rows_cached",
    "pages_wanted",
    "pages_read",
    "seeks",
    "deadline_misses",
    "new_members",
    "replica_rows",
    "replica_seconds",
    "read_seconds",
    "busy_seconds",
)


@dataclass(frozen=True)
class BatchCounts:
    """The sums over a batch's tasks.

    Parameters
    ----------
    rows_in
        Rows that came to the first stage, counted there.
    books
        Where rows went, counted at the last stage; records that do not fit the schema are among its rejected ones.
    joins
        For each role, sums of what its operators counted, and what its replicas did.
    slowest
        For each stage, the longest task and the mean one, in seconds, and the rows of the largest task and the mean.
    workers
        Host and process of each Python worker that took part.
    """

    rows_in: int
    books: OutcomeCounts
    joins: Mapping[str, Mapping[str, Any]]
    slowest: Sequence[Mapping[str, float]] = field(default_factory=tuple)
    workers: Sequence[str] = ()

    def total(self, name: str) -> int:
        """Return a sum over all joins."""
        return int(sum(join.get(name, 0) for join in self.joins.values()))


def first_failure(notes: Iterable[Mapping[str, Any]]) -> None:
    """Raise if a task noted that its lookup must not go on.

    Raises
    ------
    PolicyViolationError
        With the message of the first such task, by stage and shard.
    """
    failed = sorted((note["stage"], note["shard"], note["failure"]) for note in notes if "failure" in note)
    if failed:
        raise PolicyViolationError(f"{failed[0][2]}; nothing of the batch has been written")


def summarise(notes: Sequence[Mapping[str, Any]]) -> BatchCounts:
    """Return the sums of the notes of all tasks of a batch."""
    books = OutcomeCounts()
    malformed = 0
    joins: dict[str, dict[str, Any]] = {}
    for note in notes:
        if "books" in note:
            books += _books(note["books"])
            malformed += note["malformed"]
        for join in note["joins"]:
            _add(joins.setdefault(join["role"], {"outcomes": {}, "replicas": {}}), join)
    books += OutcomeCounts(
        rows_in=malformed, rejected=malformed, rows={Outcome.REJECTED: malformed} if malformed else {}
    )
    return BatchCounts(
        rows_in=sum(note["rows"] for note in notes if note["stage"] == 0),
        books=books,
        joins=joins,
        slowest=_slowest(notes),
        workers=sorted({note["worker"] for note in notes}),
    )


def check_books(counts: BatchCounts, written: Mapping[str, int | None]) -> None:
    """Compare what came in with what the tasks counted, and with what Spark wrote.

    Parameters
    ----------
    counts
        The sums of the tasks.
    written
        Rows that Delta's commits say were written, by `facts`, `errors` and `duplicates`; None where it is not known.

    Raises
    ------
    ConservationError
        If they differ.
    """
    books = counts.books
    out = books.loaded + books.dropped + books.routed + books.rejected
    if counts.rows_in != out or books.rows_in != out:
        raise ConservationError(
            f"{counts.rows_in} rows came in, {books.rows_in} reached the last stage, but {books.loaded} were loaded, "
            f"{books.dropped} dropped, {books.routed} routed and {books.rejected} rejected: a defect of Headrace"
        )
    expected = {"facts": books.loaded, "errors": books.rejected, "duplicates": books.routed}
    for table, rows in written.items():
        if rows is not None and rows != expected[table]:
            raise ConservationError(
                f"{expected[table]} rows were to be written to {table}, but its commit has {rows}; do not use it"
            )


def record_of(
    counts: BatchCounts, *, run: str, stream: str, batch: int, started: float, seconds: float, late: bool, detail: Any
) -> BatchRecord:
    """Return the catalog's record of a batch; all its facts are deadline misses when it took too long as a whole."""
    done = counts.total("rows_done")
    return BatchRecord(
        run=run,
        stream=stream,
        batch=batch,
        started=started,
        seconds=seconds,
        rows_in=counts.rows_in,
        loaded=counts.books.loaded,
        dropped=counts.books.dropped,
        routed=counts.books.routed,
        rejected=counts.books.rejected,
        new_members=counts.total("new_members"),
        hit_ratio=counts.total("rows_cached") / done if done else 0.0,
        pages_wanted=counts.total("pages_wanted"),
        pages_read=counts.total("pages_read"),
        seeks=counts.total("seeks"),
        deadline_misses=counts.books.loaded if late else counts.total("deadline_misses"),
        detail=detail,
    )


def _books(value: Mapping[str, Any]) -> OutcomeCounts:
    return OutcomeCounts(
        **{name: value[name] for name in ("rows_in", "loaded", "dropped", "routed", "rejected")},
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
    """Return how uneven each stage's tasks were."""
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
