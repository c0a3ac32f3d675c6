"""The loop of a run: plan a batch in the ledger, load it and mark it as loaded, until no new file or a stop request.

A crash between any two steps neither loses nor duplicates data. If a plan is pending when the loop starts, the facts
decide: a batch that they hold is completed; any other batch is planned again from the files that exist now. A batch
that retries rejected rows is run again with the rows that were planned.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from headrace.pipelines.errors import SourceFileError
from headrace.pipelines.hooks import LISTED, Step, no_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace.pipelines.catalog import BatchRecord
    from headrace.pipelines.source.feed import Feed
    from headrace.pipelines.source.ledger import RejectedRow

__all__ = ["BatchLoop", "Loader", "StopRequest"]

_LOG = logging.getLogger(__name__)
_NAMED = 5


class Loader(Protocol):
    """Interface that loads batches, implemented by `headrace.pipelines.batch.protocol.BatchProtocol`."""

    def finish(self, number: int, stream: str, attempt: str | None = None) -> BatchRecord | None:
        """Complete a batch that the facts hold, and return its record; None if they do not hold it."""

    def run_batch(self, pieces: Any, number: int, stream: str, attempt: str, retry: Any = None) -> BatchRecord:
        """Load a batch that the facts do not hold; `retry` describes the rejected rows that it retries."""


class StopRequest:
    """Request to end the loop, with the signal that caused it.

    A signal handler may set it at any time. Unlike `threading.Event`, a `SimpleQueue` accepts an item even while the
    same thread waits for it or is about to wait.

    Attributes
    ----------
    asked
        Whether the loop must end.
    signal
        Signal that requested the end, or None.
    """

    def __init__(self) -> None:
        self._wake: SimpleQueue[None] = SimpleQueue()
        self.asked = False
        self.signal: int | None = None

    def by(self, number: int | None = None) -> None:
        """Request the end of the loop after the current batch."""
        self.signal = number
        self.asked = True
        self._wake.put(None)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Request the end on SIGINT or SIGTERM within the block; a second signal has its original effect."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def note(number: int, _frame: Any) -> None:
            self.by(number)
            signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(self, seconds: float) -> None:
        """Wait for the given time, or until the end of the loop is requested."""
        with suppress(Empty):
            self._wake.get(timeout=max(0.0, seconds))


class BatchLoop:
    """Loads the new files of a feed batch by batch.

    Parameters
    ----------
    feed, loader
        Files that wait, with their ledgers, and loader of batches.
    frame_of
        Function that returns what the loader takes for a batch's files, such as the frame of their pieces.
    retry_of
        Function that returns the frame of rejected rows, and their description for the loader.
    on_batch
        Function called with the record of each batch after the batch is marked as loaded.
    before
        Function called before the files of each batch are taken, so that what it does precedes the batch.
    hook
        Function called with the name of each step. Tests use it to inject failures.
    holds
        Function that raises an error if this run may no longer write.
    clock
        Function that returns seconds, for the interval between batches.

    Attributes
    ----------
    records
        Records of the batches so far.
    """

    def __init__(
        self,
        feed: Feed,
        loader: Loader,
        frame_of: Callable[[Any], Any],
        *,
        retry_of: Callable[[Sequence[RejectedRow]], tuple[Any, Any]] | None = None,
        on_batch: Callable[[BatchRecord], None] | None = None,
        before: Callable[[], None] = lambda: None,
        hook: Callable[[str], None] = no_hook,
        holds: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holds = holds
        self._feed = feed
        self._ledger = feed.ledger
        self._loader = loader
        self._frame_of = frame_of
        self._retry_of = retry_of
        self._on_batch = on_batch
        self._before = before
        self._hook = hook
        self._clock = clock
        self.records: list[BatchRecord] = []

    def run(self, stop: StopRequest, interval: float | None = None) -> None:
        """Load the waiting files.

        Parameters
        ----------
        stop
            Request that ends the loop between two batches.
        interval
            Minimum seconds between the starts of two batches, to continue with new files until a stop is requested;
            None to end when there are no new files.

        Raises
        ------
        SourceFileError
            If a file of an unfinished batch was removed, or a file changed after it was loaded.
        """
        self.resume()
        while not stop.asked:
            began = self._clock()
            self._before()
            files = self._feed.take()
            self._hook(Step(LISTED))
            if files:
                self._load(files)
            elif interval is None:
                return
            if interval is not None:
                rest = began + interval - self._clock()
                stop.wait(max(rest, 0.0 if files else self._feed.listing_seconds))
        _LOG.info("stopped between two batches, as asked")

    def retry(self, rows: Sequence[RejectedRow]) -> None:
        """Load rejected rows again, as a batch of their own.

        If the batch fails before its facts are committed, its plan is deleted, and the rows stay as they are.
        """
        number, attempt = self._ledger.next_number(), str(uuid.uuid4())
        self._ledger.plan(number, attempt, (), rows)
        self._hook(Step("after plan", f"batch {number}: retrying {len(rows):,} rejected rows"))
        self._load_retry(number, attempt, rows)

    def resume(self) -> None:
        """Complete the pending batch if the facts hold it; otherwise retry its rejected rows, or delete its plan."""
        plan = self._ledger.pending()
        if plan is None:
            return
        record = self._loader.finish(plan.number, self._ledger.stream, plan.attempt)
        self._hook("after finish")
        if record is not None:
            _LOG.info("batch %d was loaded by a run that ended before it could note that", plan.number)
            self._mark(record)
            return
        if plan.retried:
            _LOG.info(
                "batch %d, a retry of %d rejected rows, was interrupted; it begins again",
                plan.number,
                len(plan.retried),
            )
            self._load_retry(plan.number, plan.attempt, plan.retried)
            return
        self._require_files(plan.number)
        self._feed.forget(plan.number)
        self._hook("after forget")

    def _require_files(self, number: int) -> None:
        """Raise an error if a planned file was removed."""
        gone = self._feed.missing()
        if not gone:
            return
        named = ", ".join(repr(file.name) for file in gone[:_NAMED])
        named += f" and {len(gone) - _NAMED} more" if len(gone) > _NAMED else ""
        raise SourceFileError(
            f"batch {number} has not been loaded, and some of its files are missing from {gone[0].folder}: {named}; "
            f"put them back, or continue without them: `{gone[0].skip}`"
        )

    def _load(self, files: Any) -> None:
        number, attempt = self._ledger.next_number(), str(uuid.uuid4())
        self._feed.plan(number, attempt, files)
        self._hook(Step("after plan", f"batch {number}: reading {self._feed.share(files)}"))
        with self._feed.fingerprints(files) as prints:
            record = self._loader.run_batch(self._frame_of(files), number, self._ledger.stream, attempt)
            self._hook("after batch")
            self._mark(record, prints())

    def _load_retry(self, number: int, attempt: str, rows: Sequence[RejectedRow]) -> None:
        assert self._retry_of is not None
        try:
            frame, retry = self._retry_of(rows)
            record = self._loader.run_batch(frame, number, self._ledger.stream, attempt, retry)
        except Exception:
            if self._loader.finish(number, self._ledger.stream, attempt) is None:
                self._holds()
                self._feed.forget(number)
                _LOG.warning("batch %d retried nothing; its rejected rows stay open", number)
            raise
        self._hook("after batch")
        self._mark(record)

    def _mark(self, record: BatchRecord, prints: Any = None) -> None:
        self._feed.done(record.batch, prints)
        self._hook("after done")
        self.records.append(record)
        _LOG.info(
            "batch %d: %d rows in, %d loaded, %d dropped, %d routed, %d rejected, %d new members, %.2f s",
            *(record.batch, record.rows_in, record.loaded, record.dropped, record.routed, record.rejected),
            *(record.new_members, record.seconds),
        )
        if self._on_batch is not None:
            self._on_batch(record)
