"""When the phases of SSIJ start.

They start at thresholds (the paper's IB_thresh and SB_thresh), or early enough for deadlines (section IV-F).
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.ssij.memory.stream_buffer import LEAF_RUN_NBYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.joins.deadlines import Deadlines
    from headrace.joins.memory import Component
    from headrace.joins.ssij.cost import PhaseEstimate
    from headrace.joins.ssij.memory.store import Store
    from headrace.storage.read import DeviceModel

__all__ = ["Schedule", "Thresholds"]


_INPUT, _STREAM, _STREAM_TIGHT = 250_000, 1_000_000, 400_000  # from the paper's table II
_TIGHT = 0.02
_WAITING_SECONDS = 0.25e-6  # cost of a tuple's waiting: it is copied twice, and its row comes from a cold page
_STEP_SECONDS = 0.12e-6  # of processor time that a tuple takes in a step; reads that take less are hidden behind it
_SERVED = 2  # times the tuples that wait at a time: a round of a continuous join phase serves about as many
_LEAST_READING = 1 / 8  # of the cost of waiting: reads that cost less need not be shared by more tuples
_PHASE_SECONDS = 1e-3  # cost of a join phase beside its reads
_NOT_BUFFERS: tuple[Component, ...] = (
    "index",
    "workspace",
    "read_buffer",
    "statistics",
    "records",
    "rows",
    "filter",
)
_INPUT_SHARE, _INPUT_SHARE_CONTINUOUS = 8, 32  # tuples that wait elsewhere share reads
_STREAM_SHARE = 3


class Thresholds:
    """Numbers of tuples that start a phase.

    They are given, or else those of the paper's table II, or what a share of the memory holds.

    Parameters
    ----------
    store
        Memory of the operator.
    device
        Costs of reads.
    input_threshold, stream_threshold
        Thresholds as given to the operator.
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
        share = _INPUT_SHARE_CONTINUOUS if self._store.stream.divides else _INPUT_SHARE
        return max(1, min(_INPUT, int(self._free // share / row_nbytes)))

    def join(self, row_nbytes: float) -> int:
        """Return how many waiting tuples of this size start a join phase."""
        if self._stream is not None:
            return self._stream
        snapshot = self._store.snapshot
        relation = snapshot.leaves * snapshot.page_size
        most = _STREAM_TIGHT if self._store.budget.limit < _TIGHT * relation else _STREAM
        return max(1, min(most, int(self._free // _STREAM_SHARE / (row_nbytes + LEAF_RUN_NBYTES))))

    def caching_pays(self) -> bool:
        """Return whether a join phase pays for its reads because all pages that it reads can stay in the cache.

        How many tuples will ask for these pages is unknown, so this is the ski rental problem: tuples wait until their
        waiting has cost as much as the reads, and both together never cost more than twice the optimum.
        """
        stream, snapshot = self._store.stream, self._store.snapshot
        if self._stream is not None or stream.pages * snapshot.page_size > self._free:
            return False
        waiting = _WAITING_SECONDS * stream.rows - _PHASE_SECONDS
        return waiting >= self._device.cost(1, stream.pages) and waiting >= self.reading_seconds()

    def scan_pays(self, tuples: int, row_nbytes: float) -> bool:
        """Return whether a join phase would start, and read about all pages, if so many more tuples waited.

        Parameters
        ----------
        tuples
            Tuples beside those that wait.
        row_nbytes
            Their size.
        """
        rows, snapshot = self._store.stream.rows + tuples, self._store.snapshot
        if self._stream is not None or rows < snapshot.leaves:
            return False
        waiting = _WAITING_SECONDS * rows - _PHASE_SECONDS
        return rows >= self.join(row_nbytes) or waiting >= self._device.cost(1, snapshot.extent)

    def sharing_pays(self) -> bool:
        """Return whether a join phase is to be continuous, so that about twice as many tuples share its reads.

        It is if its reads take longer than the processor takes for the tuples meanwhile: fewer reads save nothing else.
        """
        stream, snapshot = self._store.stream, self._store.snapshot
        if self._stream is not None or stream.spans or stream.pages * snapshot.page_size <= self._free:
            return False
        return self.reading_seconds() >= _STEP_SECONDS * stream.rows

    def waiting_pays(self, nbytes: int) -> bool:
        """Return whether more tuples should wait for the join phase, at the expense of `nbytes` bytes of cached pages.

        A join phase for n tuples costs ``reading + n * waiting`` seconds. In the frame of a page, `more` tuples could
        wait, and all of them would share the reads: that saves ``reading * more / n``. If the page stays, as many
        tuples as its utility need not wait: that saves ``utility * (reading / n + waiting)``. The utility is the number
        of tuples that joined with the page since the last join phase. A continuous join phase serves 2 n tuples.
        """
        stream = self._store.stream
        reading, waiting = self.reading_seconds(), _WAITING_SECONDS * stream.rows
        if self._stream is not None or not nbytes or reading < _LEAST_READING * waiting:
            return False
        more = self._store.snapshot.page_size * stream.rows / max(1, stream.tuple_nbytes + stream.index_nbytes)
        served = _SERVED if stream.divides else 1
        return self._store.least_utility(nbytes) * (reading / served + waiting) < more * reading

    def reading_seconds(self) -> float:
        """Return the cost of reading the wanted pages by the cheapest plan with reads of any length."""
        return self._store.reading_seconds(self._device)

    @property
    def _free(self) -> int:
        """Bytes of the memory that are available for pages and tuples."""
        budget = self._store.budget
        return budget.limit - sum(map(budget.held, _NOT_BUFFERS))


_PHASE_SHARE = 1 / 3  # of the smallest allowance: a longer join phase admits all arrivals ahead of it
_RESERVE_SHARE = 1 / 32  # of the smallest allowance: a join phase may take so much longer than was estimated
_FIRST_RESERVE_SHARE = 1 / 2  # the first one: kernels are loaded in it, and what tuples cost beside reads is unknown
_IDLE_PHASE_SHARE = 1 / 2  # where nothing arrived during the phases before
_STEP_SHARE, _STEP_SHARE_MOST = 1 / 64, 1 / 16  # of the smallest allowance: a step of a join phase
_PUSHES = 4  # in sequence during join phases, with no call in between that only has a step taken: a stream is pulled
_STEP_SETTLED = 4  # a step takes at least so many times as long as settling it does
_LOOK_UP_SHARE = 1 / 32  # of its allowance: a tuple is looked up then at the latest while a join phase runs
_MORE_PAGES = 1 / 32  # share of the wanted pages: with more, the cost of reading them is computed again
_DETOUR_SHARE = 1 / 4  # of a join phase: the most that reads out of turn may take

_SPANS = 8
_IDLE_SHARE = 0.25  # share of a phase: had tuples arrived meanwhile, some would have waited longer


class _RecentMaximum:
    """Greatest non-negative number noted recently: in the last few join phases and between them."""

    def __init__(self) -> None:
        self._spans = deque([0.0], maxlen=_SPANS)

    @property
    def value(self) -> float:
        """The greatest number, or 0."""
        return max(self._spans)

    @property
    def known(self) -> bool:
        """Whether the record is complete."""
        return len(self._spans) == _SPANS

    def note(self, value: float) -> None:
        """Note a number."""
        self._spans[-1] = max(self._spans[-1], value)

    def next(self) -> None:
        """Start another interval. The oldest one is forgotten."""
        self._spans.append(0.0)


class Schedule:
    """When phases start, and how far they go before arrivals are taken in.

    A join phase has to start early enough to end before the earliest due time. Three things count beside the duration
    that the paper's cost model gives and a reserve, a part of the smallest allowance, since the duration is estimated.

    Tuples that arrive while a phase runs and miss their leaf wait for that phase and for the next one. So phases may
    take a third of the smallest allowance. If one would take longer, it starts at once and is *eager*: phases follow
    each other without pauses and admit all arrivals ahead of the head, so a tuple waits for one round only, which may
    take all of the allowance. A third and not a half, because the first eager phase takes in arrivals that its estimate
    did not know of, while its tuples have waited before.

    The stream may be backpressured: then it stands still during a phase, which may take nearly all of the allowance. A
    stream that is pulled is: if the phase stopped for it, it would only fill the memory with tuples that are late.

    The tuples of a batch, which arrive together, should wait for the same phase: it starts when all have been looked
    up, so the time of a batch is allowed for.

    Parameters
    ----------
    deadlines
        How long tuples may wait.
    store
        Memory with the buffers.
    thresholds
        Numbers of tuples that wait together.
    estimate
        Duration of a join phase.
    read_seconds
        Seconds of the longest read.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        store: Store,
        thresholds: Thresholds,
        estimate: PhaseEstimate,
        read_seconds: float,
    ) -> None:
        self._deadlines = deadlines
        self._store = store
        self._thresholds = thresholds
        self._estimate = estimate
        self.read_seconds = read_seconds
        self._behind = _RecentMaximum()
        self._phase = _RecentMaximum()
        self._look_up = _RecentMaximum()
        self._began = 0.0
        self._latest = 0.0
        self._stepped = -math.inf
        self._steps_alone = 0
        self._settled = 0.0
        self._running_since: float | None = None
        self._pulled = 0
        self._known = (0, 0.0)

    def batch_begins(self, arrived: float, now: float, online: float) -> None:
        """Note the start of a batch.

        Parameters
        ----------
        arrived, now
            Time of its arrival, and current time.
        online
            Seconds that online phases have taken so far.
        """
        behind = now - arrived
        if self._running_since is not None:
            self._pulled = self._pulled + 1 if arrived >= self._stepped else 0
            if not self._is_pulled:
                behind = max(behind, now - self._running_since)
        self._behind.note(behind)
        self._latest = arrived
        self._steps_alone = 0
        self._began = online

    def batch_ends_soon(self, online: float) -> bool:
        """Return whether to look up the rest of the batch before the next phase: it takes no longer than usual."""
        return online - self._began <= self._look_up.value

    def batch_ends(self, online: float) -> None:
        """Note the end of a batch."""
        self._look_up.note(online - self._began)

    def phase_begins(self, now: float) -> None:
        """Note the start of a join phase."""
        self._running_since = now

    def step_is_asked_for(self) -> None:
        """Note that the caller has work done without pushing a batch."""
        if self._running_since is not None:
            self._pulled = 0

    def step_ends(self, now: float, settled: float) -> None:
        """Note the end of a step of a join phase, and the seconds in which its tuples left the buffer."""
        self._stepped, self._settled = now, settled
        self._steps_alone = min(self._steps_alone + 1, _SPANS)

    def others_first(self, now: float) -> bool:
        """Return whether to take in more batches before the next step of a join phase.

        A caller whose batches arrived during the last step pushes them one after the other. They share the next step,
        and are not held up by one for each.
        """
        return self._deadlines.any and now - self._stepped < max(self.read_seconds, _STEP_SHARE * self._tightest)

    def phase_ends(self, seconds: float) -> None:
        """Note the end of a join phase and the seconds that its steps took."""
        self._running_since = None
        self._known = (0, 0.0)
        self._phase.note(seconds)
        for recent in (self._behind, self._phase, self._look_up):
            recent.next()

    def due(self, row_nbytes: float) -> float | None:
        """Return the latest time for the next work: a step of the running join phase, or the start of a phase.

        The paper leaves tuples of the input buffer out of a join phase if they do not expire during it; they would wait
        for two phases. So all take part, and until they have been looked up each counts as one more page. If they are
        too many to wait together, there will be several join phases in sequence.
        """
        if not self._deadlines.any:
            return None
        if self._running_since is not None:
            return self._running_since
        earliest = min(self._store.input.due, self._store.stream.due)
        if math.isinf(earliest):
            return None
        seconds = self._seconds_of_all(row_nbytes)
        if self._backpressured:
            return max(earliest - seconds - self._look_up.value, earliest - self._tightest)
        if self._in_a_hurry(seconds):
            return min(self._latest, earliest)
        reserve = _RESERVE_SHARE if self._estimate.measured else _FIRST_RESERVE_SHARE
        return earliest - seconds - reserve * self._tightest

    def eager(self, row_nbytes: float) -> bool:
        """Return whether the join phase that starts now is to admit all arrivals ahead of the head."""
        return self._deadlines.any and not self._backpressured and self._in_a_hurry(self._seconds_of_all(row_nbytes))

    def step_seconds(self) -> float:
        """Return how long a step of a join phase may take before arrivals are taken in.

        It is longer if nothing arrived between the last steps, and ends with the phase if the stream is backpressured.
        """
        if math.isinf(self._tightest) or self._backpressured:
            return math.inf
        seconds = max(_STEP_SHARE * 2**self._steps_alone * self._tightest, _STEP_SETTLED * self._settled)
        return max(self.read_seconds, min(seconds, _STEP_SHARE_MOST * self._tightest))

    def look_up_now(self, now: float) -> bool:
        """Return whether to look up the input buffer while a join phase runs, so that its tuples can join it."""
        return self._store.input.soon(_LOOK_UP_SHARE) <= now

    def urgent(self, now: float, row_nbytes: float) -> NDArray[np.int32]:
        """Return the leaves to read out of turn, in disk order, because tuples are due before a join phase can end.

        Only deadlines of single tuples differ so much that reads out of turn help; there are none if they are so many
        that a join phase takes about as long.
        """
        store = self._store
        if self._deadlines.column is None or math.isinf(store.stream.due) or store.stream.spans:
            return np.empty(0, dtype=np.int32)
        seconds = self._seconds_of_all(row_nbytes)
        leaves = store.stream.leaves_due(now + seconds + self.step_seconds())
        few = self._estimate.seconds(len(leaves)) <= _DETOUR_SHARE * seconds
        if not few or len(leaves) == store.stream.pages:
            return leaves[:0]
        return leaves[np.argsort(store.snapshot.pointers(leaves)[0])]

    def _in_a_hurry(self, seconds: float) -> bool:
        """Return whether a phase of this duration, or one like those before, takes too long to wait for two of them.

        The phases before count because an eager phase takes longer than the tuples that wait at its start let expect.
        As long as there were too few, a scan of the relation stands for them, unless nothing arrived during them.
        """
        if self._idle:
            return seconds > _IDLE_PHASE_SHARE * self._tightest
        before = self._phase.value if self._phase.known else self._estimate.scan
        return max(seconds, before) > _PHASE_SHARE * self._tightest

    @property
    def _tightest(self) -> float:
        return min(self._store.input.tightest, self._store.stream.tightest)

    def _seconds_of_all(self, row_nbytes: float) -> float:
        """Return the duration of the join phases for all tuples, if each of the input buffer wants one more page."""
        store = self._store
        most = min(self._thresholds.join(row_nbytes), store.tuples_at_most(row_nbytes))
        together = max(most, store.stream.rows)
        phases = -(-(store.stream.rows + store.input.rows) // together)
        pages = min(store.stream.pages + store.input.rows, store.snapshot.leaves)
        return phases * self._estimate.seconds(pages, self._reading_seconds())

    def _reading_seconds(self) -> float:
        """Return the cost of reading the wanted pages; computed again if their number has changed enough."""
        wanted, (pages, seconds) = self._store.stream.pages, self._known
        if not pages <= wanted <= pages + _MORE_PAGES * pages:
            seconds = self._thresholds.reading_seconds()
            self._known = (wanted, seconds)
        return seconds

    @property
    def _is_pulled(self) -> bool:
        """Whether the caller only pushes while a join phase runs, each time what arrives between two steps.

        Nothing would have arrived if the phase had not stopped.
        """
        return self._pulled >= _PUSHES

    @property
    def _backpressured(self) -> bool:
        """Whether the stream is pulled, or nothing has arrived during recent join phases."""
        return self._is_pulled or (self._phase.known and self._idle)

    @property
    def _idle(self) -> bool:
        """Whether nothing has arrived during the join phases so far, or during the recent ones."""
        return self._behind.value < _IDLE_SHARE * self._phase.value
