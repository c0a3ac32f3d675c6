"""What an experiment found: rows, a plot, and the paper's claims beside our figures."""

from dataclasses import dataclass, field

from benchmarks._measure import print_table, write_csv

__all__ = ["Axes", "Check", "Outcome", "write_outcome", "write_summary"]

COLOURS = ("#0b5fa5", "#d1731f", "#3d8f4f", "#8a4fa3", "#7a7a7a", "#b3273c", "#2a9d9d")
MARKERS = "osD^vx+"


@dataclass(frozen=True)
class Check:
    """A claim of the paper, what we found, and whether it holds here."""

    claim: str
    ours: str
    holds: bool


@dataclass(frozen=True)
class Axes:
    """How rows are plotted: the columns, what is written at the axes, and which are logarithmic."""

    x: str
    y: str
    xlabel: str
    ylabel: str = "tuples per second"
    xlog: bool = False
    ylog: bool = False


@dataclass(frozen=True)
class Outcome:
    """All that an experiment leaves. Rows with the same `line` are a line of the plot."""

    name: str
    title: str
    axes: Axes
    rows: list
    checks: list = field(default_factory=list)

    def value(self, line, x, y=None):
        """Return the value of a line at a place."""
        return next(row[y or self.axes.y] for row in self.rows if row["line"] == line and row[self.axes.x] == x)

    def values(self, line, y=None):
        """Return the values of a line in order."""
        return [row[y or self.axes.y] for row in self.rows if row["line"] == line]


def write_outcome(outcome, folder):
    """Print an outcome, and write its table and its plot."""
    head = list(dict.fromkeys(name for row in outcome.rows for name in row))
    print_table(head, [[row.get(name, "") for name in head] for row in outcome.rows])
    for check in outcome.checks:
        print(f"{'holds' if check.holds else 'DIFFERS'}: {check.claim} -- {check.ours}")
    write_csv(folder / f"{outcome.name}.csv", outcome.rows)
    _plot(outcome, folder / f"{outcome.name}.svg")


def _plot(outcome, path):
    import matplotlib as mpl  # noqa: PLC0415 - only where something is drawn
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    mpl.rcParams.update({"svg.hashsalt": "headrace", "svg.fonttype": "none", "font.size": 9})
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    axis = figure.subplots()
    for number, line in enumerate(dict.fromkeys(row["line"] for row in outcome.rows)):
        points = [(row[outcome.axes.x], row[outcome.axes.y]) for row in outcome.rows if row["line"] == line]
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 4}
        axis.plot(*zip(*points, strict=True), label=line, linewidth=1.4, **style)
    axes = outcome.axes
    axis.set(xlabel=axes.xlabel, ylabel=axes.ylabel, title=outcome.title)
    axis.set(xscale="log" if axes.xlog else "linear", yscale="log" if axes.ylog else "linear")
    if not axes.ylog:
        axis.set_ylim(bottom=0)
    axis.grid(visible=True, alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    print(f"wrote {path}")


def write_summary(outcomes, path):
    """Write the claims of all outcomes, our figures and the verdicts as a table in Markdown."""
    lines = ["| | the paper | here | verdict |", "|---|---|---|---|"]
    for outcome in outcomes:
        for number, check in enumerate(outcome.checks):
            name = f"[{outcome.name}](figures/{outcome.name}.svg)" if number == 0 else ""
            lines.append(f"| {name} | {check.claim} | {check.ours} | {'holds' if check.holds else 'differs'} |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {path}")
