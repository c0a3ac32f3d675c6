"""`in_lanes`: the items of independent tasks, computed by a few threads, in an order that only the tasks decide."""

from __future__ import annotations

import itertools
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

__all__ = ["in_lanes", "most_lanes"]

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

    A lane works on a task until its end, then takes the next one. Items come from the lanes in turn. While the caller
    uses an item, each lane computes its next one, but no more, so there are never more than ``lanes + 1`` items.

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
        running: deque[tuple[int, Generator[Item, None, None], Future[object]]] = deque()

        def start(count: int) -> None:
            for number, task in itertools.islice(waiting, count):
                items = task()
                running.append((number, items, pool.submit(next, items, _END)))

        try:
            start(lanes)
            while running:
                number, items, future = running.popleft()
                item = future.result()
                if item is _END:
                    ended(number)
                    start(1)
                    continue
                running.append((number, items, pool.submit(next, items, _END)))
                yield cast("Item", item)
        finally:
            wait([future for _, _, future in running])
            for _, items, _ in running:
                items.close()
