"""The join operators that a Python worker keeps between batches, each over a snapshot of one replica.

Operators live as long as the worker, and only save time: a new worker opens the replicas again. Each operator has a
fixed share of the pipeline's memory, because any task may need any replica.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headrace.pipelines.replica.catch_up import Reached, ReplicaSpec, catch_up, discard

if TYPE_CHECKING:
    from headrace.joins import SSIJ
    from headrace.storage import Table

__all__ = ["Joiner", "Serving", "close", "serve"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Joiner:
    """Join of one lookup, or of the duplicate search, with its replicas.

    Parameters
    ----------
    role
        Name of the join, unique in a pipeline.
    replica
        Replica to join with.
    version, base
        Delta version V to join at, and the highest surrogate key at V.
    on, columns
        Arguments `on` and `columns` of the operator.
    memory
        Memory of the operator in bytes.
    deadline
        Maximum seconds that a tuple waits in the operator; None for no limit.
    nearest
        For an as-of join: stream column, key column, and direction of `headrace.joins.AsOf`; `on` then has the columns
        that must be equal. None for an equality join.
    """

    role: str
    replica: ReplicaSpec
    version: int
    base: int
    on: tuple[tuple[str, str], ...]
    columns: tuple[str, ...]
    memory: int
    deadline: float | None
    nearest: tuple[str, str, Literal["backward", "forward"]] | None = None


@dataclass
class _Kept:
    """An operator that outlives a batch, with its table and the version that its snapshot matches exactly, if any."""

    operator: SSIJ
    table: Table
    inode: int
    version: int | None

    def close(self) -> None:
        """Free the operator's memory and close its table."""
        self.operator.close()
        self.table.close()


@dataclass(frozen=True)
class Serving:
    """An operator that is ready for a batch.

    Parameters
    ----------
    operator
        Left join operator over the replica.
    visible_to
        Highest surrogate key that the batch may see; None if the replica is exactly at V.
    reached
        Result of the catch-up; None if the operator was already open.
    """

    operator: SSIJ
    visible_to: int | None
    reached: Reached | None


_KEPT: dict[tuple[Any, ...], _Kept] = {}
_OWNER: list[str] = []


def serve(joiner: Joiner, shard: int, owner: str, fingerprint: str) -> Serving:
    """Return an operator over a shard's replica at the joiner's version.

    Parameters
    ----------
    joiner
        Join to serve.
    shard
        Number of the shard.
    owner
        Id of the run. Operators of other runs are closed first, so that a single memory budget applies.
    fingerprint
        Fingerprint of the stream's schema, which the operator depends on.
    """
    _make_room(owner)
    place = joiner.replica.place(shard)
    key = (joiner.role, place, joiner.on, joiner.nearest, joiner.columns, joiner.memory, fingerprint)
    kept = _KEPT.get(key)
    if kept is not None and kept.version == joiner.version and _inode(joiner, shard) == kept.inode:
        return Serving(kept.operator, None, None)
    return catch_up(
        joiner.replica, shard, joiner.version, joiner.base, lambda reached: _open(joiner, key, kept, reached)
    )


def close(joiner: Joiner, shard: int, *, damaged: bool = False) -> None:
    """Close all operators over a replica after one stopped in the middle of a batch; discard a damaged replica."""
    place = joiner.replica.place(shard)
    for key in [key for key in _KEPT if key[1] == place]:
        kept = _KEPT.pop(key)
        kept.close()
        if damaged:
            discard(joiner.replica, shard, kept.inode)


def _open(joiner: Joiner, key: tuple[Any, ...], kept: _Kept | None, reached: Reached) -> Serving:
    """Take a snapshot of a locked replica that has been caught up."""
    inode = reached.file.stat().st_ino
    if kept is not None and kept.inode == inode:
        kept.operator.refresh().drain()
    else:
        if kept is not None:
            _KEPT.pop(key).close()
        kept = _new(joiner, reached, inode)
        _KEPT[key] = kept
    kept.version = joiner.version if reached.exact else None
    return Serving(kept.operator, None if reached.exact else joiner.base, reached)


def _new(joiner: Joiner, reached: Reached, inode: int) -> _Kept:
    from headrace.joins import SSIJ, AsOf  # noqa: PLC0415 - numba comes in with the first join
    from headrace.storage import Table  # noqa: PLC0415 - as above

    equal = list(joiner.on)
    if joiner.nearest is not None:
        stream, column, direction = joiner.nearest

    table = Table.open(reached.file)
    try:
        operator = SSIJ(
            table,
            on=equal if joiner.nearest is None else AsOf(stream, column, equal, direction),
            how="left",
            memory=joiner.memory,
            deadline=joiner.deadline,
            columns=list(joiner.columns),
        )
    except BaseException:
        table.close()
        raise
    return _Kept(operator, table, inode, None)


def _make_room(owner: str) -> None:
    if owner not in _OWNER:
        for kept in _KEPT.values():
            kept.close()
        _KEPT.clear()
        _OWNER[:] = [owner]


def _inode(joiner: Joiner, shard: int) -> int | None:
    try:
        return (joiner.replica.place(shard) / "table.headrace").stat().st_ino
    except OSError:
        return None
