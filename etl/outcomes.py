"""The outcome of every row, and the row counts that show that none disappeared.

Each lookup gives a row an outcome (column `_<role>_outcome`); the row's outcome is the most severe of them.
Knows nothing of how a lookup is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.errors import ConservationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["OUTCOMES", "Outcome", "OutcomeCounts", "most_severe", "outcome_text"]


class Outcome(StrEnum):
    """What became of a row, or of one lookup of a row; in order of severity, the mildest first."""

    MATCHED = "matched"
    INFERRED = "inferred"
    UNKNOWN = "unknown"
    LATE = "late"
    DUPLICATE = "duplicate"
    REJECTED = "rejected"

    @property
    def severity(self) -> int:
        """Position in the order in which outcomes take precedence: rejected over duplicate over late and so on."""
        return OUTCOMES.index(self)


OUTCOMES: Final = tuple(Outcome)
_NAMES: Final = pa.array([str(outcome) for outcome in OUTCOMES])


def outcome_text(severity: NDArray[np.integer]) -> pa.StringArray:
    """Return the names of outcomes given by severity."""
    return _NAMES.take(pa.array(severity))


def most_severe(columns: Sequence[pa.Array], rows: int) -> NDArray[np.int8]:
    """Return the severity of each row's most severe outcome.

    Parameters
    ----------
    columns
        Outcome names, a column for each lookup; none gives `matched` for every row.
    rows
        The number of rows.
    """
    severity = np.zeros(rows, dtype=np.int8)
    for column in columns:
        codes = pc.index_in(column, value_set=_NAMES)
        if codes.null_count:
            raise ConservationError(f"not an outcome: {column.filter(pc.is_null(codes))[0]}")
        np.maximum(severity, np.asarray(codes, dtype=np.int8), out=severity)
    return severity


@dataclass(frozen=True)
class OutcomeCounts:
    """Row counts of one input: where its rows went, by row and by lookup.

    Parameters
    ----------
    rows_in
        Rows that arrived.
    loaded, dropped, routed, rejected
        Rows that went to the facts, to nothing (duplicates), to the table of duplicates and to the error table.
    rows
        Rows by the row's outcome. A duplicate that is only flagged counts as duplicate and as loaded.
    lookups
        Number of rows by outcome of the lookup, for each role.

    Examples
    --------
    >>> counts = OutcomeCounts(rows_in=3, loaded=2, rejected=1)
    >>> counts.check() is counts
    True
    """

    rows_in: int = 0
    loaded: int = 0
    dropped: int = 0
    routed: int = 0
    rejected: int = 0
    rows: Mapping[Outcome, int] = field(default_factory=dict)
    lookups: Mapping[str, Mapping[Outcome, int]] = field(default_factory=dict)

    def check(self) -> OutcomeCounts:
        """Return self if the counts reconcile.

        Raises
        ------
        ConservationError
            If rows in are not rows loaded, dropped, routed and rejected, or a tally by outcome misses rows.
        """
        out = self.loaded + self.dropped + self.routed + self.rejected
        if self.rows_in != out:
            raise ConservationError(
                f"{self.rows_in} rows came in, but {out} went out: {self.loaded} loaded, {self.dropped} dropped and "
                f"{self.routed} routed as duplicates, {self.rejected} rejected; do not use this load"
            )
        tallies = {"row": self.rows, **self.lookups} if self.rows else dict(self.lookups)
        for name, tally in tallies.items():
            if sum(tally.values()) != self.rows_in:
                raise ConservationError(f"{self.rows_in} rows came in, but {name} outcomes add up to {dict(tally)}")
        return self

    def __add__(self, other: OutcomeCounts) -> OutcomeCounts:
        roles = list(dict.fromkeys([*self.lookups, *other.lookups]))
        return OutcomeCounts(
            rows_in=self.rows_in + other.rows_in,
            loaded=self.loaded + other.loaded,
            dropped=self.dropped + other.dropped,
            routed=self.routed + other.routed,
            rejected=self.rejected + other.rejected,
            rows=_add(self.rows, other.rows),
            lookups={role: _add(self.lookups.get(role, {}), other.lookups.get(role, {})) for role in roles},
        )

    def as_dict(self) -> dict[str, object]:
        """Return plain numbers, ready for JSON."""
        return {
            "rows_in": self.rows_in,
            "loaded": self.loaded,
            "dropped": self.dropped,
            "routed": self.routed,
            "rejected": self.rejected,
            "rows": {str(outcome): count for outcome, count in self.rows.items()},
            "lookups": {
                role: {str(outcome): count for outcome, count in tally.items()} for role, tally in self.lookups.items()
            },
        }


def tally(column: pa.Array | pa.ChunkedArray) -> dict[Outcome, int]:
    """Return how often each outcome occurs in a column of outcome names; absent ones are left out."""
    counted = {Outcome(item["values"]): item["counts"] for item in pc.value_counts(column).to_pylist()}
    return {outcome: counted[outcome] for outcome in OUTCOMES if outcome in counted}


def _add(left: Mapping[Outcome, int], right: Mapping[Outcome, int]) -> dict[Outcome, int]:
    total = {outcome: left.get(outcome, 0) + right.get(outcome, 0) for outcome in OUTCOMES}
    return {outcome: count for outcome, count in total.items() if count}


def add_all(counts: Iterable[OutcomeCounts]) -> OutcomeCounts:
    """Return the sum of several counts; all zero if there are none."""
    return sum(counts, start=OutcomeCounts())
