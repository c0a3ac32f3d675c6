"""Numbers by leaf: an array with one for each leaf of the table, or a `LeafMap` that holds a few leaves only.

Compiled code reads both with `value_at`, and numpy code with `values_at`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numba import njit, types
from numba.extending import overload

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["LeafMap", "LeafNumbers", "value_at", "values_at"]


class LeafMap(NamedTuple):
    """Numbers of a few leaves.

    Attributes
    ----------
    leaves : int32[n]
        Leaf ordinals, ascending.
    values : int32[n]
        Number of each.
    missing
        Number of all other leaves.
    """

    leaves: NDArray[np.int32]
    values: NDArray[np.int32]
    missing: int


LeafNumbers: TypeAlias = "NDArray[np.int32] | LeafMap"


@njit(cache=True, nogil=True)
def _value_in_map(leaves: NDArray[np.int32], values: NDArray[np.int32], missing: int, leaf: int) -> int:
    low = 0
    high = len(leaves)
    while low < high:
        middle = (low + high) >> 1
        if leaves[middle] < leaf:
            low = middle + 1
        else:
            high = middle
    if low < len(leaves) and leaves[low] == leaf:
        return int(values[low])
    return int(missing)


def value_at(numbers: LeafNumbers, leaf: int) -> int:
    """Return the number of a leaf. Compiled code calls this; the type of `numbers` decides how it is found."""
    if isinstance(numbers, LeafMap):
        return _value_in_map(numbers.leaves, numbers.values, numbers.missing, leaf)
    return int(numbers[leaf])


@overload(value_at, inline="always", strict=False)  # annotations differ
def _compiled_value_at(numbers: Any, leaf: Any) -> Callable[[Any, Any], Any]:
    del leaf
    if isinstance(numbers, types.Array):
        return lambda numbers, leaf: numbers[leaf]
    return lambda numbers, leaf: _value_in_map(numbers.leaves, numbers.values, numbers.missing, leaf)


def values_at(numbers: LeafNumbers, leaves: NDArray[np.integer]) -> NDArray[np.int32]:
    """Return the numbers of leaves, in any order."""
    if not isinstance(numbers, LeafMap):
        return numbers[leaves]
    if not len(numbers.leaves):
        return np.full(len(leaves), numbers.missing, dtype=np.int32)
    place = np.searchsorted(numbers.leaves, leaves)
    place[place == len(numbers.leaves)] = 0
    found = numbers.values[place]
    found[numbers.leaves[place] != leaves] = numbers.missing
    return found
