"""The join operators that a Python worker keeps between batches, each over a snapshot of one replica.

Operators live as long as the worker, and only save time: a new worker opens the replicas again. Each operator has a
fixed share of the pipeline's memory, because any task may need any replica.

An operator also serves versions after that of its snapshot, as long as batches only added members since, see
`headrace.pipelines.replica.recent`. As-of operators over all versions need not even know these members: a fact is older
than the current version of its member only if the member has several.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa

from headrace.pipelines.delta.commits import member_files
from headrace.pipelines.replica.catch_up import Reached, ReplicaSpec, catch_up, discard, replica_file
from headrace.pipelines.replica.recent import JoinWithRecent, Recent, members_of
from headrace.pipelines.replica.rows import MemberRows
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from headrace.joins import SSIJ
    from headrace.storage import Table

__all__ = ["Joiner", "Serving", "close", "serve"]

_LOG = logging.getLogger(__name__)
_ROUNDED: Final = 64  # bytes that divisions of the memory may lose
_RECENT_SHARE: Final = 32  # of the memory, for members that were added since the operator's snapshot


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
    whole_memory
        Memory of all joins of a worker in bytes, of which this is a share.
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
    whole_memory: int
    deadline: float | None
    nearest: tuple[str, str, Literal["backward", "forward"]] | None = None

    @property
    def recent_memory(self) -> int:
        """Bytes of the memory for members that the replica does not have yet; the operator has the rest."""
        holds = self.nearest is None and isinstance(self.replica.rows, MemberRows)
        return self.memory // _RECENT_SHARE if holds else 0


@dataclass
class _Kept:
    """An operator that outlives a batch, with its table.

    Parameters
    ----------
    operator, table, inode
        The operator, its table, and the file of the table.
    version
        Version that the snapshot and the recent members match exactly, if any.
    recent
        Members that were added since the snapshot.
    """

    operator: SSIJ
    table: Table
    inode: int
    version: int | None = None
    recent: Recent | None = None

    def join(self, joiner: Joiner) -> SSIJ | JoinWithRecent:
        """Return the operator, which knows the recent members."""
        if self.recent is None or not len(self.recent.keys):
            return self.operator
        return JoinWithRecent(self.operator, self.recent, joiner.on, joiner.columns)

    def follow(self, joiner: Joiner, shard: int) -> int | None:
        """Serve the joiner's version, if batches only added members since and there is room for them.

        Returns
        -------
        int or None
            Number of members that were added to those in memory; None if the replica has to catch up.
        """
        if self.version is None or self.version > joiner.version:
            return None
        files = member_files(joiner.replica.path, self.version + 1, joiner.version)
        if files is None:
            return None
        added = 0
        if joiner.nearest is None:
            rows = members_of(joiner.replica, shard, joiner.version, files)
            if rows is None:
                return None
            recent = Recent.of(
                rows if self.recent is None else pa.concat_tables([self.recent.rows, rows]), joiner.replica.rows.key
            )
            if recent.nbytes > joiner.recent_memory:
                return None
            self.recent, added = recent, rows.num_rows
        self.version = joiner.version
        return added

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

    operator: SSIJ | JoinWithRecent
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
    if kept is not None and _inode(joiner, shard) == kept.inode:
        began = time.monotonic()
        if kept.version == joiner.version:
            return Serving(kept.join(joiner), None, None)
        if (added := kept.follow(joiner, shard)) is not None:
            reached = Reached(
                replica_file(place), exact=True, action="followed", rows=added, seconds=time.monotonic() - began
            )
            return Serving(kept.join(joiner), None, reached)
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
    kept.version, kept.recent = joiner.version if reached.exact else None, None
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
            memory=joiner.memory - joiner.recent_memory,
            deadline=joiner.deadline,
            columns=list(joiner.columns),
        )
    except MemoryBudgetError as error:
        table.close()
        raise _too_small(joiner, error) from error
    except BaseException:
        table.close()
        raise
    return _Kept(operator, table, inode)


def _too_small(joiner: Joiner, error: MemoryBudgetError) -> MemoryBudgetError:
    """Return the error that names the memory of the pipeline with which this join has enough."""
    share = joiner.memory - joiner.recent_memory
    if error.least is None:
        return error
    enough = (error.least + _ROUNDED) * joiner.whole_memory // max(1, share) + _ROUNDED
    return MemoryBudgetError(
        f"the join {joiner.role!r} needs at least {format_size(error.least)} and has {format_size(share)} of the "
        f"pipeline's `memory` of {format_size(joiner.whole_memory)}; set that to {-(-enough // 1024)}KiB or more"
    )


def _make_room(owner: str) -> None:
    if owner not in _OWNER:
        for kept in _KEPT.values():
            kept.close()
        _KEPT.clear()
        _OWNER[:] = [owner]


def _inode(joiner: Joiner, shard: int) -> int | None:
    try:
        return replica_file(joiner.replica.place(shard)).stat().st_ino
    except OSError:
        return None
