"""Dimensions with history: versions of members that do not depend on the order in which changes arrive.

In: changes of members, in any order, cut into any batches. Out: versions whose intervals cover the time from a member's
first change on, without gap or overlap; for facts, the surrogate key of the version that was valid at their time.

What is stored
--------------
A change names a member, says from when it is valid (its *time*), has a *sequence*, and is a full row or a delete. Of
the changes of a member with the same time, one wins: the one with the greatest sequence, or the first by the tie rule
of `merging`. That is a total order over changes, so the winners of a set are maxima, one for each member and time, and
merging two sets of winners is commutative, associative and idempotent. Order of arrival, batches and replays cannot
matter.

Each winner is stored as an *entry*, **even if it changes nothing**. This is needed. Take x from day 1 on, x again from
day 5 on, and then a late y from day 3 on: the member is x, y, x. Without the entry of day 5 it would be x, y. For the
same reason an entry keeps what its change said beside what its version shows, for attributes of type 0 and 1: the last
change may be replaced by a delete of the same time, and then the one before it decides.

A change that lost is not stored. Nothing that arrives later can make it win.

What is shown
-------------
The entries of a member, by time, fall into runs of equal state: deleted or not, and equal in all attributes of type 2
(null equals null, NaN equals NaN). A run is a *version*. It is valid from its first entry to the first of the next run.

========= ==========================================================================
attribute its value in a version is that of
========= ==========================================================================
type 0    the member's first entry that is no delete
type 1    the member's last entry that is no delete
1 current the version's last entry
type 2    any of the version's entries; they are equal
audit     the version's first entry
========= ==========================================================================

A deleted version shows the attributes of types 1 current and 2 of the version before it, null if there is none.

Surrogate keys
--------------
A version that contains the first entry of a stored version keeps the surrogate key of that one (the first of them if
there are several); other versions get new keys. So a correction of a version, or a version that begins earlier, keeps
its key, and so does the first part of a version that is split. An inferred member is an entry without change; the first
changes of the member take its place and its key. A version may also disappear, if a correction makes it equal to its
predecessor. Its key is *retired*: never given out again.

Nothing here loops over rows.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.etl.history.applying import Applied, ChangeOutcome, apply_changes
from headrace.etl.history.as_of import AsOfLookup, Operators, current_dimension, resolve_as_of
from headrace.etl.history.checking import violations
from headrace.etl.history.declaration import AttributeType, History
from headrace.etl.history.inferring import inferred_entries, inferred_members, special_versions
from headrace.etl.special import Special, SpecialMembers

if TYPE_CHECKING:
    from headrace.etl.history.store import HistoryDimension

__all__ = [
    "Applied",
    "AsOfLookup",
    "AttributeType",
    "ChangeOutcome",
    "History",
    "HistoryDimension",
    "Operators",
    "Special",
    "SpecialMembers",
    "apply_changes",
    "current_dimension",
    "inferred_entries",
    "inferred_members",
    "resolve_as_of",
    "special_versions",
    "violations",
]


def __getattr__(name: str) -> Any:
    if name == "HistoryDimension":  # numba comes in with the tables
        return import_module("headrace.etl.history.store").HistoryDimension
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
