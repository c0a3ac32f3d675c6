"""Figures and the rows that their runs leave, as files and as plots."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.experiments._claims import Claim, Finding

__all__ = ["DEVICES", "RESULTS", "Axes", "Figure", "Rows", "load_run", "plot", "save_run"]

RESULTS = Path(__file__).with_name("results")
DEVICES = ("simulated", "real")
COLORS = ("#0b5fa5", "#d1731f", "#3d8f4f", "#8a4fa3", "#7a7a7a", "#b3273c", "#2a9d9d")
MARKERS = "osD^vx+"

Row = dict[str, Any]


@dataclass(frozen=True)
class Axes:
    """Columns that a plot shows, labels of its axes, and which axes are logarithmic."""

    x: str
    y: str
    xlabel: str
    ylabel: str = "tuples per second"
    xlog: bool = False
    ylog: bool = False


@dataclass(frozen=True)
class Rows:
    """Rows of a figure. Rows with the same `line` are a line of its plot.

    Attributes
    ----------
    axes
        Columns that `values` takes by default.
    rows
        Measured values, as dicts.
    """

    axes: Axes
    rows: list[Row]

    @property
    def lines(self) -> list[str]:
        """Names of the lines in order."""
        return list(dict.fromkeys(row["line"] for row in self.rows))

    def of(self, line: str) -> list[Row]:
        """Return the rows of a line in order."""
        return [row for row in self.rows if row["line"] == line]

    def values(self, line: str, column: str | None = None) -> list[Any]:
        """Return the values of a line in order."""
        return [row[column or self.axes.y] for row in self.of(line)]

    def value(self, line: str, x: Any, column: str | None = None) -> Any:
        """Return the value of a line at a place."""
        return next(row[column or self.axes.y] for row in self.of(line) if row[self.axes.x] == x)

    @property
    def scatter(self) -> float:
        """Median over the rows of how many times the slowest of equal trials the fastest was; 1 without trials."""
        spreads = [row["highest"] / row["lowest"] for row in self.rows if row.get("lowest")]
        return statistics.median(spreads) if spreads else 1.0


@dataclass(frozen=True)
class Figure:
    """A figure or table of the paper, or one of our own: how it is measured, plotted and judged.

    Attributes
    ----------
    name, title
        Name in commands and files, and heading.
    axes
        Axes of the plot.
    run
        Measures, given the world and the settings, and returns the rows.
    claims
        Claims that the rows decide.
    method
        How it was measured, where the paper leaves it open or the figure differs from the others.
    """

    name: str
    title: str
    axes: Axes
    run: Callable[..., list[Row]]
    claims: tuple[Claim, ...]
    method: str = ""

    def judge(self, rows: list[Row]) -> list[Finding]:
        """Return the verdict on each claim that the rows can decide."""
        data = Rows(self.axes, rows)
        return [claim.judge(data) for claim in self.claims if claim.applies(data)]


def save_run(folder: Path, name: str, rows: list[Row], run: Row) -> None:
    """Write the rows of a figure, one a line, and when and for how long it ran."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    (folder / f"{name}.json").write_text(f'{{"run": {json.dumps(run)},\n "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def load_run(folder: Path, name: str) -> tuple[list[Row], Row] | None:
    """Return the rows of a figure and what is known of the run; None if it was not run."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["rows"], content["run"]


def plot(figure: Figure, rows: list[Row], path: Path) -> None:
    """Draw the lines of a figure."""
    import matplotlib as mpl  # noqa: PLC0415 - only where something is drawn
    from matplotlib.figure import Figure as Canvas  # noqa: PLC0415 - as above

    mpl.rcParams.update({"svg.hashsalt": "headrace", "svg.fonttype": "none", "font.size": 9})
    canvas, axes, data = Canvas(figsize=(5.2, 3.4), layout="constrained"), figure.axes, Rows(figure.axes, rows)
    axis = canvas.subplots()
    for number, line in enumerate(data.lines):
        points = [(row[axes.x], row[axes.y]) for row in data.of(line) if _drawn(row.get(axes.y))]
        style = {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 4}
        axis.plot(*zip(*points, strict=True), label=line, linewidth=1.4, **style)
    axis.set(xlabel=axes.xlabel, ylabel=axes.ylabel, title=figure.title)
    axis.set(xscale="log" if axes.xlog else "linear", yscale="log" if axes.ylog else "linear")
    if not axes.ylog:
        axis.set_ylim(bottom=0)
    axis.grid(visible=True, alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, metadata={"Date": None})


def _drawn(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
