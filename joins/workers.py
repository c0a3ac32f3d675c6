"""A few threads for work on parts of a batch. Kernels release the interpreter's lock."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Workers"]

_LEAST_ROWS = 16_384  # fewer rows are done before a thread has woken up
_MOST = 4

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """Threads that are started when they are first needed.

    Parameters
    ----------
    threads
        Number of threads; by default as many as this process may run at once, at most four.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = min(_MOST, len(os.sched_getaffinity(0))) if threads is None else threads
        self._pool: ThreadPoolExecutor | None = None

    def share(self, rows: int) -> int:
        """Return into how many parts this many rows are worth dividing."""
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
        """Yield the results for all items, in order, while other threads work on the rest.

        The caller's thread takes items from the front, the others from the back, until they meet.
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

    def begin(self, work: Callable[[Item], None], items: Sequence[Item]) -> Callable[[], None]:
        """Start work on items on other threads, from the last on. Return a function that does the rest and waits.

        So the caller's thread does something else first, and all of this itself if no other thread was free.
        """
        left = deque(items)
        helpers = range(min(self._threads, len(items)) - 1)
        futures = [self._threads_at_hand().submit(_do_all, work, left.pop) for _ in helpers]

        def finish() -> None:
            try:
                _do_all(work, left.popleft)
            finally:
                left.clear()
                late = [future for future in futures if not future.cancel()]
                futures.clear()
                wait(late)
            for future in late:
                future.result()

        return finish

    @property
    def threads(self) -> int:
        """Number of threads, with the caller's."""
        return self._threads

    @property
    def several(self) -> bool:
        """Whether there is a thread beside the caller's to give work to."""
        return self._threads > 1

    def start(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Start work on a thread. Return a function that waits for its result, or raises its error.

        Without a spare thread the work is done when that function is called.
        """
        return self._threads_at_hand().submit(work).result if self.several else work

    def _threads_at_hand(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads + 1, thread_name_prefix="headrace-join")  # one awaits reads
        return self._pool


def _do_all(work: Callable[[Item], None], take: Callable[[], Item]) -> None:
    """Work on items until none is left."""
    while (item := _taken(take)) is not None:
        work(item)


def _taken(take: Callable[[], Item]) -> Item | None:
    """Return an item from an end of a queue; None if it is empty."""
    try:
        return take()
    except IndexError:
        return None
