"""How many stream tuples SSIJ lets come together before a phase begins (the paper's IB_thresh and SB_thresh)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.joins.ssij import _piece_kernels
from headrace.joins.ssij.stream_buffer import PIECE_NBYTES

if TYPE_CHECKING:
    from headrace.joins.memory import Component
    from headrace.joins.ssij.store import Store
    from headrace.storage.read import DeviceModel

__all__ = ["Thresholds"]

_INPUT, _STREAM, _STREAM_TIGHT = 250_000, 1_000_000, 400_000  # of the paper's table II
_TIGHT = 0.02
_WAITING_SECONDS = 0.25e-6  # what it costs a tuple to wait: it is copied twice, and its row comes from a cold page
_PHASE_SECONDS = 1e-3  # what a join phase costs beside its reads
_NOT_BUFFERS: tuple[Component, ...] = (
    "index",
    "workspace",
    "read_buffer",
    "statistics",
    "records",
    "whole",
    "filter",
)
_INPUT_SHARE = 8
_STREAM_SHARE = 3


class Thresholds:
    """Those that were given, or else those of the paper's table II, or what a share of the memory holds.

    Parameters
    ----------
    store
        Whose memory it is.
    device
        What reads cost.
    input_threshold, stream_threshold
        As given to the operator.
    """

    def __init__(
        self, store: Store, device: DeviceModel, input_threshold: int | None, stream_threshold: int | None
    ) -> None:
        self._store = store
        self._device = device
        self._input = input_threshold
        self._stream = stream_threshold

    def online(self, row_nbytes: float) -> int:
        """Return how many tuples of this size start an online phase."""
        if self._input is not None:
            return self._input
        return max(1, min(_INPUT, int(self._free // _INPUT_SHARE / row_nbytes)))

    def join(self, row_nbytes: float) -> int:
        """Return how many waiting tuples of this size start a join phase."""
        if self._stream is not None:
            return self._stream
        snapshot = self._store.snapshot
        relation = len(snapshot.leaf_pages) * snapshot.page_size
        most = _STREAM_TIGHT if self._store.budget.limit < _TIGHT * relation else _STREAM
        return max(1, min(most, int(self._free // _STREAM_SHARE / (row_nbytes + PIECE_NBYTES))))

    def caching_pays(self) -> bool:
        """Return whether a join phase is worth its reads because all pages that it reads can stay in the cache.

        Nobody knows how many tuples will ask for these pages, so this is the ski rental problem: tuples wait until
        their waiting has cost as much as the reads, and both together never cost twice what knowing would have.
        """
        stream, snapshot = self._store.stream, self._store.snapshot
        if self._stream is not None or stream.pages * snapshot.page_size > self._free:
            return False
        waiting = _WAITING_SECONDS * stream.rows - _PHASE_SECONDS
        return waiting >= self._device.cost(1, stream.pages) and waiting >= self._reading_seconds()

    def waiting_pays(self, nbytes: int) -> bool:
        """Return whether more tuples should wait for the join phase, at the expense of so many bytes of cached pages.

        Tuples that wait together share the reads, so more of them pay until reading costs less than the waiting
        itself. A page is worth its frame only if more tuples joined with it since the last join phase than could wait
        in its place.
        """
        stream, snapshot = self._store.stream, self._store.snapshot
        if self._stream is not None or not nbytes or self._reading_seconds() < _WAITING_SECONDS * stream.rows:
            return False
        in_a_frame = snapshot.page_size * stream.rows // max(1, stream.tuple_nbytes + stream.index_nbytes)
        return self._store.coldest(nbytes) < in_a_frame

    def _reading_seconds(self) -> float:
        """Return what reading the wanted pages costs by the cheapest plan, were there no longest read."""
        store, device = self._store, self._device
        wanted = store.stream.demand
        seconds = _piece_kernels.reading_cost(
            wanted, store.disk_order, store.snapshot.leaf_pages, device.seek, device.transfer
        )
        return float(seconds)

    @property
    def _free(self) -> int:
        """Bytes of the memory that are not index, workspace or the like."""
        budget = self._store.budget
        return budget.limit - sum(map(budget.held, _NOT_BUFFERS))
