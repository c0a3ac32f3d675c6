"""How many stream tuples SSIJ lets come together before a phase begins (the paper's IB_thresh and SB_thresh)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from joins._stream_buffer import PIECE_NBYTES

if TYPE_CHECKING:
    from joins._store import Store
    from joins.memory import Component
    from storage.device import DeviceModel

__all__ = ["Thresholds"]

_INPUT, _STREAM, _STREAM_TIGHT = 250_000, 1_000_000, 400_000  # of the paper's table II
_TIGHT = 0.02
_WAITING_SECONDS = 0.25e-6  # what it costs a tuple to wait: it is copied twice, and its row comes from a cold page
_NOT_BUFFERS: tuple[Component, ...] = ("index", "workspace", "read_buffer", "statistics", "records", "filter")
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

    def waiting_pays(self, nbytes: int) -> bool:
        """Return whether more tuples should wait for the join phase, at the expense of so many bytes of cached pages.

        Tuples that wait together share the reads, so more of them pay until reading costs less than the waiting
        itself. A page is worth its frame only if more tuples joined with it since the last join phase than could wait
        in its place.
        """
        stream, snapshot, device = self._store.stream, self._store.snapshot, self._device
        one_by_one, scan = device.seek + device.transfer, device.transfer * len(snapshot.leaf_pages)
        reading = min(stream.pages * one_by_one, scan)
        if self._stream is not None or not nbytes or reading < _WAITING_SECONDS * stream.rows:
            return False
        in_a_frame = snapshot.page_size * stream.rows // max(1, stream.tuple_nbytes + stream.index_nbytes)
        return self._store.coldest(nbytes) < in_a_frame

    @property
    def _free(self) -> int:
        """Bytes of the memory that are not index, workspace or the like."""
        budget = self._store.budget
        return budget.limit - sum(map(budget.held, _NOT_BUFFERS))
