"""Items that threads make ahead of their use, given in order. Knows neither files nor pages."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from concurrent.futures import Future

__all__ = ["read_ahead"]

Item = TypeVar("Item")

_LIMIT = 16 << 20


def read_ahead(
    parts: Iterable[Callable[[], Generator[Item]]],
    size: Callable[[Item], int],
    *,
    threads: int = 1,
    limit: int = _LIMIT,
) -> Generator[Item]:
    """Give the items of all parts in order, those of the next parts made meanwhile.

    Parameters
    ----------
    parts
        Each gives its items when it is called, which a thread of its own does.
    size
        Bytes of an item.
    threads
        How many parts are worked on at once.
    limit
        Bytes at which a part waits, with one item in hand, for others to be taken; one part more than there are threads
        may hold as many.

    Examples
    --------
    >>> list(read_ahead([lambda: (i for i in [1, 2]), lambda: (i for i in [3])], lambda item: 8, threads=2))
    [1, 2, 3]
    """
    upcoming = iter(parts)
    lines: deque[_Line[Item]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="headrace-ahead") as pool:
        try:
            lines.extend(_Line(pool, part, size, limit) for part in itertools.islice(upcoming, threads + 1))
            while lines:
                yield from lines[0].items()
                lines.popleft()
                lines.extend(_Line(pool, part, size, limit) for part in itertools.islice(upcoming, 1))
        finally:
            for line in lines:
                line.close()


class _Line(Generic[Item]):
    """The items of one part, on their way from the thread that makes them to the one that takes them."""

    def __init__(
        self, pool: ThreadPoolExecutor, part: Callable[[], Generator[Item]], size: Callable[[Item], int], limit: int
    ) -> None:
        self._size = size
        self._limit = limit
        self._waiting: deque[Item] = deque()
        self._bytes = 0
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._making: Future[None] = pool.submit(self._make, part)

    def items(self) -> Iterator[Item]:
        """Give the items; what stopped the part is raised after them."""
        while self._come():
            with self._changed:
                item = self._waiting.popleft()
                self._bytes -= self._size(item)
                if 2 * self._bytes <= self._limit:  # rather seldom than by the item: to wake a thread takes long
                    self._changed.notify_all()
            yield item
        self._making.result()

    def _come(self) -> bool:
        """Wait for an item; return whether there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            return bool(self._waiting)

    def close(self) -> None:
        """Make no more items."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _make(self, part: Callable[[], Generator[Item]]) -> None:
        try:
            if self._closed:
                return
            with contextlib.closing(part()) as items:
                for item in items:
                    if not self._put(item):
                        return
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, item: Item) -> bool:
        """Add an item, when there is room; return whether more are wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes < self._limit or self._closed)
            self._waiting.append(item)
            self._bytes += self._size(item)
            self._changed.notify_all()
            return not self._closed
