"""A few threads for work on parts of a batch: kernels release the interpreter's lock."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Workers"]

_LEAST_ROWS = 16_384  # fewer are done before a thread has woken up
_MOST = 4

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """Threads that are started when they are first needed.

    Parameters
    ----------
    threads
        How many; by default those that this process may run at once, four at most.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = min(_MOST, len(os.sched_getaffinity(0))) if threads is None else threads
        self._pool: ThreadPoolExecutor | None = None

    def share(self, rows: int) -> int:
        """Return into how many parts so many rows are worth dividing."""
        return max(1, min(self._threads, rows // _LEAST_ROWS))

    def map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Return the results for all items, in order. The first error is raised once all have ended.

        The caller's thread works too: two threads woken by one that then waits tend to be put on one processor.
        """
        if len(items) <= 1:
            return [work(item) for item in items]
        futures = [self._threads_at_hand().submit(work, item) for item in items[1:]]
        try:
            try:
                first = work(items[0])
            finally:
                wait(futures)
            results = [future.result() for future in futures]
        finally:
            futures.clear()  # an error refers to this frame: without its future it is no reference cycle
        return [first, *results]

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def stream(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yield the results for all items, in order, while other threads work on those that are left.

        The caller's thread takes the first item that is left, the others take the last one, until they meet.
        """
        left, done = deque(enumerate(items)), dict[int, Result]()

        def work_backwards() -> None:
            while (last := _taken(left.pop)) is not None:
                done[last[0]] = work(last[1])

        helpers = range(min(self._threads, len(items)) - 1)
        futures = [self._threads_at_hand().submit(work_backwards) for _ in helpers]
        try:
            while (first := _taken(left.popleft)) is not None:
                yield work(first[1])
        finally:
            left.clear()
            wait(futures)
        for future in futures:
            future.result()
        for at in sorted(done):
            yield done[at]

    @property
    def several(self) -> bool:
        """Whether there is a thread beside the caller's that work can be given to."""
        return self._threads > 1

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        """Have work done by a thread; return what waits for its end, and raises its error.

        Without a thread to spare the work is done when it is waited for.
        """
        return self._threads_at_hand().submit(work).result if self.several else work

    def _threads_at_hand(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="headrace-join")
        return self._pool


def _taken(take: Callable[[], Item]) -> Item | None:
    """Return what is taken from an end of a queue, None if it is empty."""
    try:
        return take()
    except IndexError:
        return None
