"""Rates of a stream: the rate at which tuples are completed, and the greatest rate of arrivals that is sustained.

The paper raises the rate of arrivals until the memory overflows. For a stream whose character does not change that is
the rate at which tuples are completed, which takes one run (`service_rate`). Where peaks matter, because the popular
keys change or because there are deadlines, tuples arrive by the clock (`arrive`), and `greatest` searches for the rate.
"""

import math
from dataclasses import dataclass
from itertools import cycle

from headrace.joins.stats import SSIJStats

__all__ = ["Arrived", "Served", "arrive", "closed_loop", "closed_loop_rate", "greatest", "service_rate"]


@dataclass(frozen=True)
class Served:
    """Tuples a second, and what was counted meanwhile."""

    rate: float
    hit_ratio: float
    pages_read: int
    reads: int
    tuples: int
    phases: int

    def row(self):
        return {
            "tuples_per_second": round(self.rate),
            "hit_ratio": round(self.hit_ratio, 4),
            "tuples": self.tuples,
            "pages_read": self.pages_read,
            "reads": self.reads,
            **({"phases": self.phases} if self.phases else {}),
        }


def service_rate(run, batches, *, warm, most, phases=4, tuples=0):
    """Push batches, over and over, and return the rate at which tuples are completed once the operator is warm.

    Parameters
    ----------
    run
        A fresh operator; it is finished afterwards.
    batches
        The stream.
    warm, most
        Tuples that are not counted, and that are pushed at most.
    phases, tuples
        Join phases that are enough if they have completed so many tuples: in little memory phases are small, and
        differ. Rates are taken between ends of phases, where as many tuples wait as at the beginning. An operator
        without phases is measured over as many tuples as it took to complete the first ones.
    """
    marks, pushed = [(run.clock(), run.operator.stats)], 0
    for batch in cycle(batches):
        run.operator.push(batch).drain()
        pushed += len(batch)
        mark = (run.clock(), run.operator.stats)
        if pushed <= warm:
            marks = [mark]
        elif _settled(marks[-1][1], mark[1]):
            marks.append(mark)
        if pushed >= most or _enough(marks, warm, phases, tuples):
            break
    run.operator.finish().drain()
    if len(marks) < 3:
        marks = [marks[0], (run.clock(), run.operator.stats)]
    run.close()
    first = 1 if len(marks) > 2 else 0  # the mark at the end of the warming is within a phase
    return _served(marks[first], marks[-1])


def _settled(before, now):
    return now.join_phases > before.join_phases if isinstance(now, SSIJStats) else now.rows_done > before.rows_done


def _enough(marks, warm, phases, tuples):
    last = marks[-1][1]
    if isinstance(last, SSIJStats):
        return len(marks) > phases + 1 and last.rows_done - marks[1][1].rows_done >= tuples
    return len(marks) > 3 and last.rows_in >= 2 * max(marks[1][1].rows_in, warm)


def _served(first, last):
    (began, before), (ended, after) = first, last
    counted = after - before
    rate = counted.rows_done / max(ended - began, 1e-9)
    phases = counted.join_phases if isinstance(counted, SSIJStats) else 0
    return Served(rate, counted.hit_ratio, counted.pages_read, counted.seeks, counted.rows_done, phases)


@dataclass(frozen=True)
class Arrived:
    """What happened when tuples arrived by the clock."""

    overflowed: bool
    longest_wait: float
    deadline_misses: int
    hit_ratio: float
    done_at: float
    pages_wanted: int
    tuples_a_phase: float

    @property
    def fits(self):
        return not (self.overflowed or self.deadline_misses)


class _Arrivals:
    """Batches that have not arrived yet, each with the time of its arrival."""

    def __init__(self, batches, times):
        self._pieces = iter(zip(times, batches, strict=True))
        self.next = next(self._pieces, None)
        self.taken = 0

    def take(self):
        self.taken += 1
        piece, self.next = self.next, next(self._pieces, None)
        return piece


def arrive(run, batches, times, judged_from=0):
    """Let batches arrive at their times, whatever the operator is doing, and return whether it could keep up.

    The memory overflows when tuples that have arrived do not fit beside those that wait, even after all pages that
    can be evicted have been. Waits count once `judged_from` batches have arrived: before, the cache is cold and the
    operator has not measured the disk.
    """
    operator, clock = run.operator, run.clock
    begin = clock()
    arrivals = _Arrivals(batches, times)
    overflowed, before = False, operator.stats
    while arrivals.next is not None and not overflowed:
        if arrivals.taken < judged_from:
            operator.algorithm.waits.longest, before = 0.0, operator.stats
        moment = begin + arrivals.next[0]
        if operator.due is not None and operator.due < moment:
            clock.wait_until(operator.due)
            output = operator.tick(clock())
        else:
            clock.wait_until(moment)
            output = operator.push(arrivals.take()[1], at=moment)
        overflowed = _work(operator, clock, output, arrivals, begin)
    _finish(operator, clock, overflowed)
    stats = operator.stats
    run.close()
    counted = stats - before
    a_phase = counted.rows_done / max(1, counted.join_phases)
    return Arrived(
        overflowed, stats.longest_wait, counted.deadline_misses, counted.hit_ratio, clock() - begin,
        counted.pages_wanted, a_phase,
    )  # fmt: skip


def _work(operator, clock, output, arrivals, begin):
    """Consume results; push what arrives meanwhile. Return whether the memory overflowed."""
    while next(output, None) is not None:
        while arrivals.next is not None and begin + arrivals.next[0] <= clock():
            time, batch = arrivals.take()
            output = operator.push(batch, at=begin + time)
            if operator.store.overdrawn:
                return True
    return False


def _finish(operator, clock, overflowed):
    """Complete what waits when it is due, so that the end of the stream is no relief."""
    while not overflowed and operator.due is not None:
        clock.wait_until(operator.due)
        operator.tick(clock()).drain()
    if not overflowed:
        operator.finish().drain()


def closed_loop_rate(run, batches):
    """Push each batch when the one before is done, from a cold start to the end, and return the rate of completion."""
    return closed_loop(run, batches)[0]


def closed_loop(run, batches):
    """Push each batch when the one before is done, and return the rate of completion and the final statistics."""
    begin = run.clock()
    for batch in batches:
        run.operator.push(batch).drain()
    run.operator.finish().drain()
    seconds, stats = run.clock() - begin, run.operator.stats
    run.close()
    return sum(map(len, batches)) / seconds, stats


def greatest(fits, guess, steps, most=math.inf):
    """Return the greatest value for which `fits` holds, between 2 ** -20 of the guess and `most`; 0 if there is none.

    The value is bracketed by doubling or halving the guess, then the bracket is halved `steps` times on a logarithmic
    scale. So the result is at most a factor of ``2 ** (2 ** -steps)`` too low.
    """
    low, high, value = 0.0, math.inf, min(guess, most)
    while low == 0.0 or high == math.inf:
        if fits(value):
            low = value
            if value >= most:
                return most
        else:
            high = value
            if value < guess / 2**20:
                return 0.0
        value = min(2 * value, most) if low else value / 2
    for _ in range(steps):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
