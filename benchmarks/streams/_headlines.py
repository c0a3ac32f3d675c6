"""The main results of the papers beside those here, as a table at the head of the document.

Each is a claim about the rows of one figure; its facts have the reason of the verdict, as text, under `why`.
"""

import math
from dataclasses import dataclass

from benchmarks.experiments._claims import Claim, grows, listed
from benchmarks.experiments._results import Rows
from benchmarks.experiments._settings import NEAR
from benchmarks.streams._claims import BOUND, DINER, HMJ, PAPER, RPJ, compared, room
from benchmarks.streams.delays import EACH, PAPER_AHEAD, PAPER_BUFFER, by_other
from benchmarks.streams.many_inputs import MINER, MJOIN, PAPER_STAR, star_ratios
from benchmarks.streams.real_data import TABLE_4

__all__ = ["HEADLINES", "Headline", "headlines"]

PAPER_BUFFERS = {RPJ: (40_000, 6_548, 6_016, 3_422, 2_719), HMJ: (1_443, 423, 2_939, 8_269, 7_144)}  # most, by delay
PAPER_EACH = 100_000  # tuples of each stream
PAPER_SHIFTING = 3
ORDER = 10  # times as much or as little is of the same order
POINTS = 15


@dataclass(frozen=True)
class Headline:
    """A main result: the figure whose rows decide it, what the paper has, and the claim."""

    figure: str
    paper: str
    claim: Claim

    def row(self, rows):
        """Return its row of the table."""
        found = self.claim.judge(rows)
        why = self.claim.facts(rows)["why"]
        return f"| {found.statement} | {self.paper} | {found.measured} | **{found.verdict}** | {why} |"


def headlines(figures, results):
    """Return the table of the main results.

    Parameters
    ----------
    figures
        Figures by name.
    results
        Rows of each figure that was measured, by name.
    """
    lines = ["| result | paper | here | verdict | why |", "|---|---|---|---|---|"]
    lines += [
        headline.row(Rows(figures[headline.figure].axes, results[headline.figure]))
        for headline in HEADLINES
        if headline.figure in results
    ]
    return "\n".join(lines)


def _delayed(rows):
    facts = by_other(rows)
    possible = {other: [100 / max(share, 1e-9) for share in rows.values(other)] for other in PAPER_AHEAD}
    told = " and ".join(f"{listed(some, '.1f')} times {other}'s" for other, some in possible.items())
    return facts | {"why": f"with all results online it would have {told}, by delay; {facts['reactive']}"}


def _shifting(rows):
    return compared(rows) | {"why": room(rows).removeprefix("; ") + ", by shift"}


def _buffers(rows):
    most = {name: rows.values(name, "buffer") for name in (DINER, RPJ, HMJ)}
    factors = {
        other: [a / b for a, b in zip(most[other], papers, strict=True)] for other, papers in PAPER_BUFFERS.items()
    }
    every = [factor for some in factors.values() for factor in some]
    alike = [1 / ORDER <= factor <= ORDER for factor in every]
    told = "; ".join(f"{other} {listed(some, '.2f')}" for other, some in factors.items())
    return {
        "told": "; ".join(f"{name} {listed(values)}" for name, values in most.items()),
        "diner": max(most[DINER]), "alike": sum(alike), "all": len(alike),
        "why": f"{told} times the paper's, by delay; the streams have {100 * EACH / PAPER_EACH:.0f} % "
        "of its tuples; only DINER looks at the input buffer after each block",
    }  # fmt: skip


def _table_4(rows):
    ours, papers, bound = rows.values(DINER), rows.values(PAPER), rows.values(BOUND)
    apart = [a - b for a, b in zip(ours, papers, strict=True)]
    return {
        "ours": listed(ours), "most": max(map(abs, apart)), "grows": grows(ours),
        "why": f"{listed(apart, '+.0f')} points from the paper; no policy has more than {listed(bound)} % with these "
        "data, which are made: the paper's are not public",
    }  # fmt: skip


def _star(rows):
    facts = star_ratios(rows)
    return facts | {
        "order": abs(math.log(max(facts["ratios"][0], 1e-9) / PAPER_STAR, ORDER)) <= 1,
        "why": f"with the least memory MINER has {rows.values(MINER)[0]:.1f} % of the results online and MJoin "
        f"{rows.values(MJOIN)[0]:.1f} %; MJoin takes its victims at random",
    }


HEADLINES = (
    Headline(
        "delays", f"up to {PAPER_AHEAD[RPJ]} x RPJ where that fits in memory, up to {PAPER_AHEAD[HMJ]} x HMJ",
        Claim("DINER, results online with delays", _delayed,
              lambda f: f["rpj"] >= NEAR * PAPER_AHEAD[RPJ] and f["most_hmj"] >= NEAR * PAPER_AHEAD[HMJ],
              "RPJ: {rpj_told}; at any delay at most {most_rpj:.2f} x RPJ and {most_hmj:.2f} x HMJ, at least "
              "{least:.2f} x",
              partly=lambda f: f["least"] >= 1),
    ),
    Headline(
        "shifting", f"up to {PAPER_SHIFTING} x RPJ and HMJ, more the faster they shift",
        Claim("DINER, results online with means that shift", _shifting,
              lambda f: f["most"] >= NEAR * PAPER_SHIFTING and f["least"] >= 1,
              "up to {most_rpj:.2f} x RPJ and {most_hmj:.2f} x HMJ, never below {least:.2f} x",
              partly=lambda f: f["least"] >= 1),
    ),
    Headline(
        "input_buffer",
        f"DINER at most {PAPER_BUFFER:,} tuples; "
        + "; ".join(f"{name} {listed(some)} with delays of 10 to 50 %" for name, some in PAPER_BUFFERS.items()),
        Claim("Input buffer with delays: the same order", _buffers,
              lambda f: NEAR * f["diner"] <= PAPER_BUFFER and f["alike"] == f["all"],
              f"{{told}}; {{alike}} of {{all}} maxima of RPJ and HMJ are within {ORDER} times the paper's",
              partly=lambda f: NEAR * f["diner"] <= PAPER_BUFFER),
    ),
    *(
        Headline(
            data.lower(), f"{listed(shares)} %",
            Claim(f"DINER, share of results online with 5, 10, 15, 20 % of the input as memory, {data}: the same shape",
                  _table_4, lambda f: f["grows"] and f["most"] <= POINTS,
                  f"{{ours}} %: growing, and at most {POINTS} points apart, would be the same shape",
                  partly=lambda f: f["grows"]),
        )
        for data, shares in TABLE_4.items()
    ),
    Headline(
        "star", f"{PAPER_STAR} x",
        Claim("MINER against MJoin, simple star, least memory: the same order", _star, lambda f: f["order"],
              "{told} x with 5, 10, 15, 20 % of the input as memory", partly=lambda f: f["ratios"][0] >= 1),
    ),
)  # fmt: skip
