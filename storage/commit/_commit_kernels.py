"""Compiled merging of sorted keys, and placing of pages in free space. Arrays in, arrays out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from headrace.storage.format._key_kernels import KeyParts, compare_keys

if TYPE_CHECKING:
    from headrace.storage.format.arrays import Bytes, Flags, Int64s

__all__ = ["find_sorted", "merge_order", "shortest_stretch", "take_near", "take_onward", "touched_leaves"]


@njit(cache=True, nogil=True)
def find_sorted(keys: KeyParts, among: KeyParts, wide: bool) -> Int64s:
    """Return where each key is `among` others, or -1. Both ascend; among the others each is there once."""
    found = np.full(len(keys.prefix), -1, dtype=np.int64)
    j = 0
    for i in range(len(found)):
        while j < len(among.prefix):
            order = compare_keys(keys, i, among, j, wide)
            if order <= 0:
                if order == 0:
                    found[i] = j
                break
            j += 1
    return found


@njit(cache=True, nogil=True)
def merge_order(old: KeyParts, keep: Flags, new: KeyParts, wide: bool) -> Int64s:
    """Return the order in which kept old rows and new rows ascend, as positions in old rows followed by new ones.

    Both ascend by themselves; of equal keys the old rows come first.
    """
    olds, news = len(old.prefix), len(new.prefix)
    order = np.empty(keep.sum() + news, dtype=np.int64)
    i = j = 0
    for at in range(len(order)):
        while i < olds and not keep[i]:
            i += 1
        if j == news or (i < olds and compare_keys(old, i, new, j, wide) <= 0):
            order[at] = i
            i += 1
        else:
            order[at] = olds + j
            j += 1
    return order


@njit(cache=True, nogil=True)
def take_near(free: Bytes, hints: Int64s, reach: int, pages: Int64s) -> int:
    """Take for each hint the nearest free page at most `reach` away and clear it in `free`; -1 if there is none.

    Returns how many hints have none.
    """
    far = 0
    for i in range(len(hints)):
        pages[i] = -1
        for distance in range(reach + 1):
            after = hints[i] + distance
            if after < len(free) and free[after] != 0:
                pages[i] = after
                break
            before = hints[i] - distance
            if 0 <= before < len(free) and free[before] != 0:
                pages[i] = before
                break
        if pages[i] >= 0:
            free[pages[i]] = 0
        else:
            far += 1
    return far


@njit(cache=True, nogil=True)
def take_onward(free: Bytes, start: int, pages: Int64s) -> int:
    """Take the first free pages from `start` on and clear them in `free`; return how many there are."""
    found = 0
    for page in range(start, len(free)):
        if found == len(pages):
            break
        if free[page] != 0:
            free[page] = 0
            pages[found] = page
            found += 1
    return found


@njit(cache=True, nogil=True)
def shortest_stretch(free: Bytes, count: int) -> tuple[int, int]:
    """Return start and length of the first shortest stretch with `count` free pages, at least 1; 0, 0 if none has."""
    best = 0
    length = 0
    inside = 0
    start = 0
    for page in range(len(free)):
        inside += free[page]
        while inside > count or (inside == count and free[start] == 0):
            inside -= free[start]
            start += 1
        if inside == count and (length == 0 or page + 1 - start < length):
            best = start
            length = page + 1 - start
    return best, length


@njit(cache=True, nogil=True)
def touched_leaves(first: Int64s, last: Int64s, leaf: Int64s, count: int) -> tuple[Int64s, Flags]:
    """Return the leaves in the ranges `first` to `last` and in `leaf`, ascending, and which lie with the next in one.

    All three ascend, and there are `count` leaves.
    """
    room = len(leaf)
    for i in range(len(first)):
        room += last[i] - first[i] + 1
    leaves = np.empty(min(room, count), dtype=np.int64)
    joined = np.zeros(min(room, count), dtype=np.bool_)
    found = 0
    i = 0
    j = 0
    while i < len(first) or j < len(leaf):
        if j == len(leaf) or (i < len(first) and first[i] <= leaf[j]):
            start = first[i]
            stop = last[i]
            i += 1
        else:
            start = leaf[j]
            stop = leaf[j]
            j += 1
        for at in range(start, stop + 1):
            if found == 0 or leaves[found - 1] < at:
                leaves[found] = at
                found += 1
            if at < stop and leaves[found - 1] == at:
                joined[found - 1] = True
    return leaves[:found], joined[:found]
