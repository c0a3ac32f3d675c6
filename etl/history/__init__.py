"""Dimensions with history: versions of members that do not depend on the arrival order of changes.

Input: changes of members, in any order and any batches. Output: versions whose intervals cover the time from a member's
first change on, without gaps or overlaps; for facts, the surrogate key of the version that was valid at their time.

What is stored
--------------
A change names a member, has a start of validity (its *time*) and a *sequence*, and is a full row or a delete. Of
the changes of a member with the same time, one wins: the greatest sequence, or the first by the tie rule
of `merging`. That is a total order over changes, so the winners of a set are maxima, one for each member and time, and
merging two sets of winners is commutative, associative, and idempotent. Arrival order, batches, and replays have no
effect.

Each winner is stored as an *entry*, **even if it changes nothing**. Example: take x from day 1 on, x again from
day 5 on, and then a late y from day 3 on: the member is x, y, x. Without the entry of day 5 it would be x, y. For the
same reason, an entry stores the values of its own change in addition to the values of its version, for attributes of
type 0 and 1: a delete of the same time may replace the last change, and then the previous change decides.

A losing change is not stored. No later arrival can make it win.

What is shown
-------------
The entries of a member, by time, fall into runs of equal state: deleted or not, and equal in all attributes of type 2
(null equals null, NaN equals NaN). A run is a *version*. It is valid from its first entry to the first of the next run.

========= ==========================================================================
attribute source of its value in a version
========= ==========================================================================
type 0    the member's first entry that is not a delete
type 1    the member's last entry that is not a delete
1 current the version's last entry
type 2    any of the version's entries; they are equal
audit     the version's first entry
========= ==========================================================================

A deleted version shows the attributes of types 1 current and 2 of the previous version, or null without one.

Surrogate keys
--------------
A version that contains the first entry of a stored version keeps the surrogate key of that version (the first of them
if there are several); other versions get new keys. So a corrected version, or a version that begins earlier, keeps its
key, and so does the first part of a split version. An inferred member is an entry without a change; the member's first
changes replace it and keep its key. A version disappears if a correction makes it equal to its predecessor. Its key is
*retired*: it is never allocated again.

The implementation is vectorized; it does not loop over rows.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.etl.history.applying import Applied, ChangeOutcome, apply_changes
from headrace.etl.history.as_of import AsOfLookup, Operators, current_dimension, resolve_as_of
from headrace.etl.history.cascading import Reference, cascade
from headrace.etl.history.checking import violations
from headrace.etl.history.declaration import AttributeType, History
from headrace.etl.history.inferring import inferred_entries, inferred_members, special_versions
from headrace.etl.history.snapshots import snapshot_changes
from headrace.etl.special import Special, SpecialMembers

if TYPE_CHECKING:
    from headrace.etl.history.store import Follow, HistoryDimension

__all__ = [
    "Applied",
    "AsOfLookup",
    "AttributeType",
    "ChangeOutcome",
    "Follow",
    "History",
    "HistoryDimension",
    "Operators",
    "Reference",
    "Special",
    "SpecialMembers",
    "apply_changes",
    "cascade",
    "current_dimension",
    "inferred_entries",
    "inferred_members",
    "resolve_as_of",
    "snapshot_changes",
    "special_versions",
    "violations",
]


def __getattr__(name: str) -> Any:
    if name in {"Follow", "HistoryDimension"}:  # the tables import numba
        return getattr(import_module("headrace.etl.history.store"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
