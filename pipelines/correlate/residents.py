"""Rows that a worker keeps in memory from batch to batch, so that a join does not read its state again.

They are a copy of the state as of a batch. The next task of the same shard in this worker reads what came in since, if
the batch is one of those that the manifest follows; otherwise it reads everything. A task that fails leaves no rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.joins.streams.hashing.kept_rows import KeptRows
from headrace.pipelines.config.join_plan import LEFT, RIGHT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

    from headrace.pipelines.correlate.shard_join import ShardJoin, ShardPlan

__all__ = ["forget_residents", "resident_results"]

_MOST: Final = 2
_SHARE: Final = 2
_INDEX_BYTES: Final = 24


@dataclass
class _Resident:
    """Rows of a shard as of a batch."""

    rows: KeptRows
    batch: int
    attempt: str


_residents: dict[tuple[str, int, int, int], _Resident] = {}


def forget_residents() -> None:
    """Drop all rows that this process keeps."""
    _residents.clear()


def resident_results(
    folder: str, plan: ShardPlan, join: ShardJoin, recent: Mapping[int, str]
) -> Iterator[pa.RecordBatch] | None:
    """Return the results of the new rows of a shard, if all of its rows fit into memory; None if they do not.

    Parameters
    ----------
    folder
        State folder.
    plan, join
        Plan of the task, and its join, which has written its new rows.
    recent
        Attempts that loaded the latest batches.
    """
    if any(least is not None for least in plan.expired):
        return None
    key = (folder, plan.number, plan.shard, plan.shards)
    found = _residents.pop(key, None)
    if found is None or not _continues(found, plan, recent):
        found = _Resident(_empty(plan), -1, "")
    kept = found.rows
    if not _likely(plan, join, kept) or not all(
        kept.keep(side, batch) for side in (LEFT, RIGHT) for batch in join.old_rows(side, found.batch)
    ):
        return None
    before = kept.count(RIGHT)
    if not all(kept.keep(side, batch) for side in (LEFT, RIGHT) for batch in join.new_rows(side)):
        return None
    return _results(key, plan, join, kept, before)


def _continues(found: _Resident, plan: ShardPlan, recent: Mapping[int, str]) -> bool:
    """Return whether the rows are those of a batch that the manifest follows, and later ones are in runs of their own.

    Runs are merged over several batches when they are old, and when the number of shards changes.
    """
    return recent.get(found.batch) == found.attempt and not any(
        ref.first <= found.batch < ref.last for ref in plan.runs
    )


def _results(
    key: tuple[str, int, int, int], plan: ShardPlan, join: ShardJoin, kept: KeptRows, before: int
) -> Iterator[pa.RecordBatch]:
    for batch in join.new_rows(RIGHT):
        yield from kept.probe(RIGHT, batch)
    if before:
        for batch in join.new_rows(LEFT):
            yield from kept.probe(LEFT, batch, before)
    while len(_residents) >= _most(plan):
        _residents.pop(next(iter(_residents)))
    _residents[key] = _Resident(kept, plan.batch, plan.attempt)


def _most(plan: ShardPlan) -> int:
    """Return how many shards one worker keeps in memory."""
    return min(_MOST, plan.shards)


def _empty(plan: ShardPlan) -> KeptRows:
    inputs = {"left": plan.stage.inputs[LEFT], "right": plan.stage.inputs[RIGHT]}
    return KeptRows(inputs, plan.stage.named_conditions, plan.memory // _SHARE // _most(plan))


def _likely(plan: ShardPlan, join: ShardJoin, kept: KeptRows) -> bool:
    """Return whether the rows fit by their number, so that they are not read in vain."""
    needed = 0
    for side in (LEFT, RIGHT):
        runs = [ref for ref in plan.runs if ref.side == side and plan.whole(ref)]
        rows = sum(ref.rows for ref in runs) + join.rows_new[side]
        needed += rows * (kept.layouts[side].stride + _INDEX_BYTES)
        if kept.layouts[side].heap >= 0:
            needed += sum(ref.nbytes for ref in runs)
    return needed <= kept.budget.limit
