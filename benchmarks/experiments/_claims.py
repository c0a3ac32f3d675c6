"""Claims about measured rows: a statement, what it is judged by, and the words for each verdict.

A claim computes facts from the rows of a figure; its verdict and every figure in its words come from these facts. The
document has no other source of verdicts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.experiments._results import Rows

__all__ = ["Claim", "Finding", "Verdict", "grows", "listed", "percent", "ratios"]

Facts = dict[str, Any]


class Verdict(StrEnum):
    """Whether a claim is true of the rows."""

    HOLDS = "holds"
    PARTLY = "holds in part"
    FAILS = "does not hold"


@dataclass(frozen=True)
class Finding:
    """Verdict on a claim, and the sentence that supports it."""

    statement: str
    verdict: Verdict
    measured: str


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, or of this document, that the rows of a figure decide.

    Attributes
    ----------
    statement
        The claim in one sentence.
    facts
        Computes from the rows what the claim is judged by.
    holds
        Whether the claim is true, given the facts.
    words
        Sentence that states the facts, with the names of facts in braces.
    partly
        Whether the claim is true of a part, asked if `holds` is false.
    otherwise
        Sentences that replace `words` for some verdicts, or follow them if they begin with ``+``.
    needs
        Line without which the claim says nothing, as of a contestant that runs on the simulated disk only.
    reason
        Claim of ours that says why this one does not hold here, or only in part, and is judged by measurements, too.
    """

    statement: str
    facts: Callable[[Rows], Facts]
    holds: Callable[[Facts], bool]
    words: str
    partly: Callable[[Facts], bool] = lambda _: False
    otherwise: Mapping[Verdict, str] = field(default_factory=dict)
    needs: str | None = None
    reason: Claim | None = None

    def applies(self, rows: Rows) -> bool:
        """Return whether the rows can decide the claim."""
        return self.needs is None or self.needs in rows.lines

    def judge(self, rows: Rows) -> Finding:
        """Return the verdict on the rows and its words."""
        facts = self.facts(rows)
        verdict = Verdict.HOLDS if self.holds(facts) else Verdict.PARTLY if self.partly(facts) else Verdict.FAILS
        special = self.otherwise.get(verdict, "+")
        words = self.words + special[1:] if special.startswith("+") else special
        return Finding(self.statement, verdict, words.format(**facts))


def ratios(rows: Rows, line: str, other: str) -> list[float]:
    """Return how many times the values of `other` the values of `line` are, place by place."""
    return [a / b for a, b in zip(rows.values(line), rows.values(other), strict=True)]


def grows(values: Sequence[float], tolerance: float = 1.0) -> bool:
    """Return whether no value is below the one before by more than the tolerance, and the last is above the first."""
    return all(b * tolerance >= a for a, b in pairwise(values)) and values[-1] > tolerance * values[0]


def listed(values: Sequence[float], spec: str = ",.0f") -> str:
    """Return the values in one format, separated by commas."""
    return ", ".join(format(value, spec) for value in values)


def percent(value: float) -> str:
    """Return a share as a percentage."""
    return f"{100 * value:.0f} %"
