"""Work on parts of a whole, the steps of one part beside those of the next. Knows nothing of what is done."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

__all__ = ["ahead"]

_Part = TypeVar("_Part")


def ahead(parts: Sequence[_Part], *steps: Callable[[_Part, Any], Any]) -> Iterator[tuple[_Part, Any]]:
    """Yield each part with what is made of it in steps, each of which takes what the one before made of the same part.

    While a part is worked on the next ones are prepared, by a thread for each step.
    """
    if len(parts) < 2:  # noqa: PLR2004 - nothing to do ahead
        for part in parts:
            yield part, functools.reduce(lambda made, step: step(part, made), steps, None)
        return
    waiting: deque[tuple[_Part, Future[Any] | None]] = deque()
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="headrace-ahead")) for _ in steps]
        for part in parts:
            made: Future[Any] | None = None
            for pool, step in zip(pools, steps, strict=True):
                made = pool.submit(_follow, made, step, part)
            waiting.append((part, made))
            if len(waiting) > len(steps):
                yield _waited(*waiting.popleft())
        while waiting:
            yield _waited(*waiting.popleft())


def _follow(before: Future[Any] | None, step: Callable[[_Part, Any], Any], part: _Part) -> Any:
    return step(part, None if before is None else before.result())


def _waited(part: _Part, made: Future[Any] | None) -> tuple[_Part, Any]:
    return part, None if made is None else made.result()
