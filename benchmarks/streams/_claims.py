"""Verdicts on claims about joins of streams, computed from measured rows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """A claim, whether it holds, and the figures that decide."""

    claim: str
    holds: bool
    figures: str

    def __str__(self):
        return f"{'holds' if self.holds else 'DOES NOT HOLD'}: {self.claim} ({self.figures})"
