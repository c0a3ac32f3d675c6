"""`in_lanes`: the items of independent tasks, computed by a few threads, in an order that only the tasks decide."""

from __future__ import annotations

import itertools
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Semaphore
from typing import TYPE_CHECKING, Generic, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

__all__ = ["AHEAD", "in_lanes", "most_lanes"]

AHEAD = 3
"""Items that each lane has computed or is computing while the caller uses another one."""
_MOST = 4
_END = object()

Item = TypeVar("Item")


def most_lanes() -> int:
    """Return how many threads this process should use for work on tuples: as many as it has processors, up to 4."""
    return min(_MOST, len(os.sched_getaffinity(0)))


def in_lanes(
    tasks: Sequence[Callable[[], Generator[Item, None, None]]], lanes: int, ended: Callable[[int], None]
) -> Iterator[Item]:
    """Yield the items of all tasks.

    A lane works on a task until its end, then takes the next one. Items come from the lanes in turn. A lane computes at
    most `AHEAD` items ahead, so there are never more than ``AHEAD * lanes + 1``.

    Parameters
    ----------
    tasks
        Functions that return generators of items. They run on threads, one item at a time.
    lanes
        Number of threads; with 1 the caller's thread does the work.
    ended
        Called by the caller's thread with the number of each task that has ended.
    """
    if lanes == 1:
        for number, task in enumerate(tasks):
            yield from task()
            ended(number)
        return
    with ThreadPoolExecutor(lanes, thread_name_prefix="headrace-join") as pool:
        waiting = enumerate(tasks)
        running: deque[tuple[int, _Lane[Item]]] = deque()

        def start(count: int) -> None:
            for number, task in itertools.islice(waiting, count):
                running.append((number, lane := _Lane(task())))
                pool.submit(lane.run)

        try:
            start(lanes)
            while running:
                number, lane = running.popleft()
                item = lane.take()
                if item is _END:
                    ended(number)
                    start(1)
                    continue
                running.append((number, lane))
                yield cast("Item", item)
        finally:
            for _, lane in running:
                lane.stop()


class _Lane(Generic[Item]):
    """Items of a task, computed ahead.

    Parameters
    ----------
    items
        The task's items.
    """

    def __init__(self, items: Generator[Item, None, None]) -> None:
        self._items = items
        self._room = Semaphore(AHEAD - 1)
        self._ready: SimpleQueue[tuple[object, BaseException | None]] = SimpleQueue()
        self._stopped = False

    def run(self) -> None:
        """Compute items until the end, or until `stop`."""
        try:
            for item in self._items:
                self._ready.put((item, None))
                self._room.acquire()
                if self._stopped:
                    return
            self._ready.put((_END, None))
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            self._ready.put((_END, error))
        finally:
            self._items.close()

    def take(self) -> object:
        """Return the next item, or `_END`; raise what the task raised."""
        item, error = self._ready.get()
        if error is not None:
            raise error
        self._room.release()
        return item

    def stop(self) -> None:
        """Let `run` end after the item that it is computing."""
        self._stopped = True
        self._room.release()
