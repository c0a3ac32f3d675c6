"""Local times as instants: the offset of a time zone at each of many local times, by Python's `zoneinfo`.

The offsets are asked for once for each day; days on which clocks change are divided into hours, minutes and seconds.
"""

from __future__ import annotations

import functools
from datetime import datetime, timedelta
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["local_offsets"]

_SPANS = (86_400, 3_600, 60, 1)
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - a local time
_LAST = int((datetime(9999, 12, 31, 23, 59, 59) - _EPOCH).total_seconds())  # noqa: DTZ001 - as above


def local_offsets(seconds: NDArray[np.int64], zone: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the seconds east of UTC at local times.

    Parameters
    ----------
    seconds
        Local times in seconds since 1970, within the years 1 to 9999.
    zone
        Name of the time zone.

    Returns
    -------
    tuple
        Offsets before and after a change of clocks (PEP 495's fold 0 and 1). They differ where the local time occurs
        twice (the first one is greater) or not at all (the first one is smaller).
    """
    before = np.zeros(len(seconds), dtype=np.int64)
    after = np.zeros(len(seconds), dtype=np.int64)
    if zone == "UTC" or not len(seconds):
        return before, after
    rows = np.arange(len(seconds))
    for span in _SPANS:
        buckets, inverse = _distinct(seconds[rows] // span)
        found = np.array([_offsets(zone, span, int(bucket)) for bucket in buckets], dtype=np.int64)[inverse]
        known = found[:, 2] == 1
        before[rows[known]] = found[known, 0]
        after[rows[known]] = found[known, 1]
        rows = rows[~known]
        if not rows.size:
            break
    return before, after


def _distinct(buckets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct values, and the place of each value among them; without a sort where they lie close."""
    least = int(buckets.min())
    extent = int(buckets.max()) - least + 1
    if extent > 4 * len(buckets) + 1024:
        return np.unique(buckets, return_inverse=True)
    there = np.zeros(extent, dtype=np.bool_)
    there[buckets - least] = True
    places = np.cumsum(there) - 1
    return np.flatnonzero(there) + least, places[buckets - least]


@functools.lru_cache(maxsize=1 << 16)
def _offsets(zone: str, span: int, bucket: int) -> tuple[int, int, int]:
    """Return both offsets of a span of local time, and whether they hold for all of it."""
    found = {_offset(zone, min(bucket * span + part, _LAST)) for part in (0, span // 2, span - 1)}
    return (*next(iter(found)), int(len(found) == 1))


def _offset(zone: str, second: int) -> tuple[int, int]:
    local = (_EPOCH + timedelta(seconds=second)).replace(tzinfo=ZoneInfo(zone))
    pair = (local.utcoffset(), local.replace(fold=1).utcoffset())
    return int((pair[0] or timedelta()).total_seconds()), int((pair[1] or timedelta()).total_seconds())
