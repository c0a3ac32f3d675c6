"""Tuples that arrive at a fixed rate, and the longest wait for a result."""

import time

from benchmarks.peers._tally import Tally

__all__ = ["arrive"]

PIECE_SECONDS = 0.01  # tuples arrive a hundred times a second
MOST = 1_000_000  # maximum batch of an engine without its own queue
PENDING = 250_000  # maximum tuples queued in an operator; the others wait outside, because memory is limited


class _Arrivals:
    """Tuples of a stream at a steady rate. A piece arrives when its last tuple does.

    Attributes
    ----------
    most
        Tuples that arrive within the deadline.
    """

    def __init__(self, stream, rate, deadline):
        self.most = int(rate * deadline)
        self._stream = stream
        self._piece = max(1, int(rate * PIECE_SECONDS))
        self._first = stream.at
        self._taken = 0
        self._seconds = self._piece / rate
        self._began = time.monotonic()

    @property
    def next(self):
        """Arrival time of the next piece."""
        return self._began + (self._taken + 1) * self._seconds

    def take(self, most):
        """Return arrived tuples, from one piece up to about `most`, and the arrival time of the last tuple."""
        came = int((time.monotonic() - self._began) / self._seconds) - self._taken
        pieces = max(1, min(came, most // self._piece))
        self._taken += pieces
        return self._stream.take(pieces * self._piece), self.next - self._seconds

    def waiting(self, held):
        """Return the number of arrived tuples without a result; `held` of them were taken."""
        came = int((time.monotonic() - self._began) / self._seconds) - self._taken
        return held + came * self._piece

    def arrived(self, number):
        """Return the arrival time of the tuple with this number."""
        return self._began + ((number - self._first) // self._piece + 1) * self._seconds


def arrive(joiner, stream, rate, deadline, warm, seconds):
    """Let tuples arrive for `warm` and then `seconds` seconds; return the measurements, and the tally of the results.

    The longest wait is that of any tuple with a result that came out after the first `warm` seconds. A contestant is
    stopped once more tuples wait than arrive within the deadline, because one of them is late then.
    """
    arrivals, longest, tally = _Arrivals(stream, rate, deadline), 0.0, Tally()
    fits, end = True, time.monotonic() + warm + seconds
    while fits and time.monotonic() < end:
        for result in _next_results(joiner, arrivals):
            now, numbers = time.monotonic(), result["number"].to_numpy()
            if now > end - seconds and len(numbers):
                longest = max(longest, now - arrivals.arrived(int(numbers.min())))
            tally += Tally.of_batch(result)
        fits = arrivals.waiting(joiner.held) <= arrivals.most
    return {"rate": rate, "longest_wait": longest, "fits": fits}, tally


def _next_results(joiner, arrivals):
    """Wait for the next arrival or due time, and yield the results."""
    queues = hasattr(joiner, "ticked")
    due, now = joiner.due, time.monotonic()
    if due is not None and due <= now:
        output = joiner.ticked(now)
    elif arrivals.next <= now:
        output = joiner.arriving(*arrivals.take(1 if queues else MOST))
    else:
        time.sleep(min(arrivals.next, due or arrivals.next) - now)
        return
    room = PENDING if queues else 0
    while (result := next(output, None)) is not None:
        yield result
        while room > 0 and arrivals.next <= time.monotonic():
            batch, at = arrivals.take(1)
            room -= len(batch)
            output = joiner.arriving(batch, at)
