"""Writes docs/experiments.md and its plots from the results. Measures nothing, and has no verdict of its own."""

import string
from collections import Counter
from pathlib import Path

from benchmarks.experiments._claims import Verdict
from benchmarks.experiments._relations import (
    INPUT_THRESHOLD,
    MAX_SCAN,
    STREAM_THRESHOLD,
    STREAM_THRESHOLD_TIGHT,
    TUPLES_PER_PAGE,
)
from benchmarks.experiments._results import RESULTS, Rows, load_run, plot
from benchmarks.experiments._settings import MESH_BEST, MESH_PAPER, MESH_READ, NEAR, NOW, PAPER, Settings
from benchmarks.experiments._world import Costs

__all__ = ["DOCUMENT", "document", "write_document"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "experiments.md"
TEMPLATE = Path(__file__).with_name("template.md")
OURS = "(Ours) "


def write_document(figures, results=RESULTS, path=DOCUMENT):
    """Write the document and draw the plots."""
    figures = list(figures)
    for device in ("simulated", "real"):
        for figure in figures:
            found = load_run(results / device, figure.name)
            if found:
                plot(figure, found[0], path.parent / _plot_of(figure, device))
    path.write_text(document(figures, results), encoding="utf-8")
    print(f"wrote {path}")


def document(figures, results=RESULTS):
    """Return the text of the document for these results."""
    figures = list(figures)
    simulated, real = (_Device(device, figures, results / device) for device in ("simulated", "real"))
    costs, settings = Costs(), Settings()
    text = string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        simulated=simulated.text, simulated_counts=simulated.counts, simulated_minutes=simulated.minutes,
        real=real.text, real_counts=real.counts, real_minutes=real.minutes, real_machine=real.machine,
        real_scatter=real.scatter, real_pace=_pace(results), mesh_rate=_mesh_rate(results),
        names=", ".join(f"`{figure.name}`" for figure in figures),
        seek=f"{1e3 * costs.seek:g}", bandwidth=f"{8192 / costs.transfer / 1e6:g}", tuple=f"{1e6 * costs.tuple:g}",
        phase=f"{1e3 * costs.phase:g}", usual=_part(settings.usual().factor), dense=_part(settings.dense(1).factor),
        page=f"{settings.page_size // 1024}", per_page=TUPLES_PER_PAGE, near=f"{100 * NEAR:g}",
        input_threshold=f"{INPUT_THRESHOLD:,}", stream_threshold=f"{STREAM_THRESHOLD:,}",
        tight_threshold=f"{STREAM_THRESHOLD_TIGHT:,}", max_scan=MAX_SCAN, mesh_read=MESH_READ, paper=PAPER, now=NOW,
        mesh_paper=MESH_PAPER, mesh_best=MESH_BEST, precision=f"{100 * (2 ** (2 ** -settings.steps) - 1):.0f}",
    )  # fmt: skip
    return text.rstrip("\n") + "\n"


class _Device:
    """Section of a device: a heading, a plot, claims and figures for each experiment that was run on it."""

    def __init__(self, device, figures, folder):
        self._device, verdicts, parts, runs, scatters = device, Counter(), [], [], []
        for figure in figures:
            found = load_run(folder, figure.name)
            if found is None:
                continue
            rows, known = found
            findings = figure.judge(rows)
            verdicts.update(finding.verdict for finding in findings if not finding.statement.startswith(OURS))
            parts.append(self._section(figure, rows, findings))
            runs.append(known)
            scatters.append(Rows(figure.axes, rows).scatter)
        self.text = "\n".join(parts) if parts else "No figure has been measured."
        self.counts = _counts(verdicts)
        self.minutes = f"{sum(known['seconds'] for known in runs) / 60:.0f}"
        self.machine = "; ".join(
            dict.fromkeys(known["machine"].split(", load")[0] for known in runs if "machine" in known)
        )
        self.scatter = f"{max(scatters, default=1.0):.2f}"

    def _section(self, figure, rows, findings):
        lines = [f"### {figure.title}", "", f"![{figure.title}]({_plot_of(figure, self._device)})", ""]
        lines += [figure.method, ""] if figure.method else []
        lines += ["| claim | verdict | measured |", "|---|---|---|"]
        lines += [f"| {found.statement} | **{found.verdict}** | {found.measured} |" for found in findings]
        return "\n".join([*lines, "", *_table(Rows(figure.axes, rows)), ""])


def _pace(results):
    """Return the time of a scan on the real device as a percentage of that on the simulated disk."""
    rows, _ = load_run(results / "real", "fig16") or ([], {})
    return next((f"{100 * row['pace']:.1f} %" for row in rows if "pace" in row), "an unmeasured part")


def _mesh_rate(results):
    """Return the rate of MeshJoin as in the paper in figure 16."""
    rows, _ = load_run(results / "simulated", "fig16") or ([], {})
    return next(
        (f"{row['tuples_per_second']:,}" for row in rows if row["line"] == MESH_PAPER), "an unmeasured number of"
    )


def _counts(verdicts):
    total = sum(verdicts.values())
    told = ", ".join(f"{verdicts[verdict]} {words}" for verdict, words in (
        (Verdict.HOLDS, "hold"), (Verdict.PARTLY, "hold in part"), (Verdict.FAILS, "do not hold")))  # fmt: skip
    return f"Of {total} claims of the paper {told}."


def _plot_of(figure, device):
    folder = "figures" if device == "simulated" else f"figures/{device}"
    return f"{folder}/{figure.name}.svg"


def _part(factor):
    return f"1/{1 / factor:g}"


def _table(rows):
    """Return the values of the plot, a line a column, in Markdown."""
    axes = rows.axes
    places = sorted({row[axes.x] for row in rows.rows}, key=_order(rows))
    head = [axes.xlabel, *rows.lines]
    out = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for place in places:
        cells = [next((row[axes.y] for row in rows.of(line) if row[axes.x] == place), None) for line in rows.lines]
        out.append(f"| {' | '.join([_cell(place, 'g'), *(_cell(cell, ',') for cell in cells)])} |")
    return out


def _order(rows):
    """Return the sort key of places: by number, or names in the order in which they came."""
    names = list(dict.fromkeys(row[rows.axes.x] for row in rows.rows))
    return names.index if isinstance(names[0], str) else float


def _cell(value, spec):
    if value is None:
        return ""
    return value if isinstance(value, str) else format(value, ",.10g" if spec == "g" else spec)
