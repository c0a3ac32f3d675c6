"""The outcome of every row, and row counts that prove that no row was lost.

Each lookup gives a row an outcome (column `_<role>_outcome`); the row's outcome is the most severe of them.
Independent of the implementation of lookups.
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
    """Outcome of a row or of one of its lookups, in ascending order of severity."""

    MATCHED = "matched"
    INFERRED = "inferred"
    UNKNOWN = "unknown"
    LATE = "late"
    FILTERED = "filtered"
    DUPLICATE = "duplicate"
    REJECTED = "rejected"

    @property
    def severity(self) -> int:
        """Rank of the outcome. The higher rank takes precedence: rejected over duplicate over late, and so on."""
        return OUTCOMES.index(self)


OUTCOMES: Final = tuple(Outcome)
_NAMES: Final = pa.array([str(outcome) for outcome in OUTCOMES])


def outcome_text(severity: NDArray[np.integer]) -> pa.StringArray:
    """Convert severities to outcome names."""
    return _NAMES.take(pa.array(severity))


def most_severe(columns: Sequence[pa.Array], rows: int) -> NDArray[np.int8]:
    """Return the severity of each row's most severe outcome.

    Parameters
    ----------
    columns
        Outcome names, one column per lookup. Without columns, every row is `matched`.
    rows
        Number of rows.
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
    """Row counts of one input by destination, by row outcome, and by lookup outcome.

    Parameters
    ----------
    rows_in
        Number of input rows.
    loaded, dropped, routed, rejected, filtered
        Number of rows loaded as facts, dropped as duplicates, routed to the duplicates table, sent to the error table,
        and removed by a condition of the pipeline.
    rows
        Number of rows by row outcome. A flagged duplicate counts as duplicate and as loaded.
    lookups
        Number of rows by lookup outcome, for each role.

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
    filtered: int = 0
    rows: Mapping[Outcome, int] = field(default_factory=dict)
    lookups: Mapping[str, Mapping[Outcome, int]] = field(default_factory=dict)

    def check(self) -> OutcomeCounts:
        """Return self if the counts reconcile.

        Raises
        ------
        ConservationError
            If the input rows do not equal the rows loaded, dropped, routed, rejected, and filtered, or a tally does not
            add up.
        """
        out = self.loaded + self.dropped + self.routed + self.rejected + self.filtered
        if self.rows_in != out:
            raise ConservationError(
                f"{self.rows_in} rows came in, but {out} went out: {self.loaded} loaded, {self.dropped} dropped and "
                f"{self.routed} routed as duplicates, {self.rejected} rejected, {self.filtered} filtered; do not use "
                "this load"
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
            filtered=self.filtered + other.filtered,
            rows=_add(self.rows, other.rows),
            lookups={role: _add(self.lookups.get(role, {}), other.lookups.get(role, {})) for role in roles},
        )

    def as_dict(self) -> dict[str, object]:
        """Return the counts as plain numbers, ready for JSON."""
        return {
            "rows_in": self.rows_in,
            "loaded": self.loaded,
            "dropped": self.dropped,
            "routed": self.routed,
            "rejected": self.rejected,
            "filtered": self.filtered,
            "rows": {str(outcome): count for outcome, count in self.rows.items()},
            "lookups": {
                role: {str(outcome): count for outcome, count in tally.items()} for role, tally in self.lookups.items()
            },
        }


def tally(column: pa.Array | pa.ChunkedArray) -> dict[Outcome, int]:
    """Count each outcome in a column of outcome names; outcomes that do not occur are omitted."""
    counted = {Outcome(item["values"]): item["counts"] for item in pc.value_counts(column).to_pylist()}
    return {outcome: counted[outcome] for outcome in OUTCOMES if outcome in counted}


def _add(left: Mapping[Outcome, int], right: Mapping[Outcome, int]) -> dict[Outcome, int]:
    total = {outcome: left.get(outcome, 0) + right.get(outcome, 0) for outcome in OUTCOMES}
    return {outcome: count for outcome, count in total.items() if count}


def add_all(counts: Iterable[OutcomeCounts]) -> OutcomeCounts:
    """Return the sum of several counts; zero for an empty input."""
    return sum(counts, start=OutcomeCounts())
