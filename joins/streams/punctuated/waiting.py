"""`WaitingPool`: tuples that arrived and wait (section 5.1), and which input has its turn (section 4.1).

The paper's operator retrieves tuples from queues. An operator that is pushed to has the queues within: waiting tuples
are those that it has taken and not joined yet. They count as tuples that have not arrived.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.streams.tuples.rows import Rows

__all__ = ["WaitingPool"]


class WaitingPool:
    """Tuples that wait, in the order of arrival, and the turns of the inputs.

    Parameters
    ----------
    budget
        Budget to charge, as the component ``input_buffer``.
    limit
        Most bytes of waiting tuples.
    order
        Inputs by priority, the one that is preferred first.
    quota
        For each input, most tuples that are retrieved from it in sequence.
    clustered
        Inputs whose turn lasts until the end of a cluster (section 5.4).
    key
        Position of the shared key.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        limit: int,
        order: Sequence[int],
        quota: Sequence[int],
        clustered: frozenset[int],
        key: int,
    ) -> None:
        self._budget, self.limit = budget, limit
        self._order, self._quota, self._clustered, self._key = order, quota, clustered, key
        self._queues: list[deque[Rows]] = [deque() for _ in order]
        self._retrieved = [0] * len(order)
        self.nbytes = 0

    def waiting(self, side: int) -> int:
        """Return how many tuples of an input wait."""
        return sum(map(len, self._queues[side]))

    def __len__(self) -> int:
        return sum(map(self.waiting, range(len(self._queues))))

    def add(self, side: int, rows: Rows) -> None:
        """Add tuples that arrived."""
        self._charge(rows.nbytes)
        self._queues[side].append(rows)

    def turn(self, *, blocked: bool) -> int | None:
        """Return the input to retrieve from; None if all should wait for tuples of the preferred input.

        The preferred input is retrieved from whenever it has tuples and its quota is not used up. The others wait until
        they have a substream of a whole quota, or until no tuples come.

        Parameters
        ----------
        blocked
            Whether no tuples come, so that no input should wait.
        """
        ready = [
            side
            for side in self._order
            if self._queues[side] and (blocked or side == self._order[0] or self.waiting(side) >= self._quota[side])
        ]
        if not ready:
            return None
        within = [side for side in ready if self._retrieved[side] < self._quota[side]]
        if not within:
            self._retrieved = [0] * len(self._retrieved)
            within = ready
        return within[0]

    def retrieve(self, side: int) -> Iterator[Rows]:
        """Yield the tuples of an input's turn, which are charged until the next ones are asked for."""
        left, last = self._quota[side] - self._retrieved[side], None
        while self._queues[side]:
            rows = self._queues[side].popleft()
            count, words = min(left, len(rows)), rows.key_words(self._key)
            if side in self._clustered:
                last = words[count - 1] if count else last
                count += 0 if last is None else _leading(words[count:] == last)
            yield from self._split(side, rows, count)
            left = max(left - count, 0)
            self._retrieved[side] += count
            if count < len(rows) or (left == 0 and side not in self._clustered):
                break
        if self._retrieved[side] >= self._quota[side]:  # the others begin a new turn
            self._retrieved = [n if at == side else 0 for at, n in enumerate(self._retrieved)]

    def drain(self, side: int) -> Iterator[Rows]:
        """Yield all waiting tuples of an input."""
        while self._queues[side]:
            rows = self._queues[side].popleft()
            yield from self._split(side, rows, len(rows))

    def draw(self, side: int, chosen: Callable[[Rows], NDArray[np.bool_]]) -> Iterator[Rows]:
        """Yield chosen tuples of an input; the others go on waiting in their order (section 4.2)."""
        for _ in range(len(self._queues[side])):
            rows = self._queues[side].popleft()
            keep = chosen(rows)
            left = rows if not keep.any() else rows.take(np.flatnonzero(~keep))
            if len(left):
                self._queues[side].append(left)
            self._charge((left.nbytes if len(left) else 0) - rows.nbytes)
            if keep.any():
                yield rows.take(np.flatnonzero(keep))

    def _split(self, side: int, rows: Rows, count: int) -> Iterator[Rows]:
        """Yield the first tuples; put the others back."""
        if count == 0:
            self._queues[side].appendleft(rows)
            return
        if count < len(rows):
            left = rows.take(np.arange(count, len(rows)))
            self._queues[side].appendleft(left)
            self._charge(left.nbytes - rows.nbytes)
            yield rows.take(np.arange(count))
            return
        yield rows
        self._charge(-rows.nbytes)

    def _charge(self, nbytes: int) -> None:
        if nbytes > 0:
            self._budget.charge("input_buffer", nbytes)
        else:
            self._budget.release("input_buffer", -nbytes)
        self.nbytes += nbytes


def _leading(flags: NDArray[np.bool_]) -> int:
    """Return how many flags at the beginning are set."""
    return len(flags) if flags.all() else int(np.argmin(flags))
