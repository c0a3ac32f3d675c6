"""Tuples that arrive by the clock, and how long the slowest one waits for its result."""

import time

from benchmarks.peers._tally import Tally

__all__ = ["arrive"]

PIECE_SECONDS = 0.01  # tuples arrive a hundred times a second
MOST = 1_000_000  # tuples that an engine without a queue of its own takes at once
HOPELESS = 2.0  # seconds of tuples that have come and not been taken


class _Arrivals:
    """Tuples of a stream at a steady rate. A piece has come when the last of its tuples has."""

    def __init__(self, stream, rate):
        self._stream = stream
        self._piece = max(1, int(rate * PIECE_SECONDS))
        self._first = stream.at
        self._taken = 0
        self._seconds = self._piece / rate
        self._began = time.monotonic()

    @property
    def next(self):
        """When the next piece comes."""
        return self._began + (self._taken + 1) * self._seconds

    def take(self, most):
        """Return tuples that have come, at least a piece and at most about so many, and when the last of them came."""
        came = int((time.monotonic() - self._began) / self._seconds) - self._taken
        pieces = max(1, min(came, most // self._piece))
        self._taken += pieces
        return self._stream.take(pieces * self._piece), self.next - self._seconds

    def came(self, number):
        """Return when the tuple with this number came."""
        return self._began + ((number - self._first) // self._piece + 1) * self._seconds


def arrive(joiner, stream, rate, warm, seconds):
    """Let tuples arrive for `warm` and then `seconds` seconds; return what was seen, and the tally of the results.

    The longest wait is that of any tuple with a result that came out after the first `warm` seconds. A contestant that
    falls behind by `HOPELESS` seconds is stopped.
    """
    arrivals, longest, tally = _Arrivals(stream, rate), 0.0, Tally()
    queues = hasattr(joiner, "ticked")
    began = time.monotonic()
    fits = True
    while fits and (now := time.monotonic()) < began + warm + seconds:
        due = joiner.due
        if arrivals.next > now and (due is None or due > now):
            time.sleep(max(0.0, min(arrivals.next, due or arrivals.next) - now))
            continue
        ticks = queues and due is not None and due <= now
        output = joiner.ticked(now) if ticks else joiner.arriving(*arrivals.take(1 if queues else MOST))
        while (result := next(output, None)) is not None:
            now, numbers = time.monotonic(), result["number"].to_numpy()
            if now > began + warm and len(numbers):
                longest = max(longest, now - arrivals.came(int(numbers.min())))
            tally += Tally.of_batch(result)
            while queues and arrivals.next <= time.monotonic():
                output = joiner.arriving(*arrivals.take(1))
        fits = time.monotonic() - arrivals.next < HOPELESS
    return {"rate": rate, "longest_wait": longest, "fits": fits}, tally
