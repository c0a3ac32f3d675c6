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
from benchmarks.experiments._results import DEVICES, RESULTS, Rows, load_run, plot
from benchmarks.experiments._settings import MESH_BEST, MESH_PAPER, MESH_READ, NEAR, NOW, PAPER, Settings
from benchmarks.experiments._world import Costs

__all__ = ["DOCUMENT", "OURS", "counts", "document", "section", "write_document"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "experiments.md"
TEMPLATE = Path(__file__).with_name("template.md")
OURS = "(Ours) "
WIDEST = 6  # columns of a table


def write_document(figures, results=RESULTS, path=DOCUMENT):
    """Write the document and draw the plots."""
    figures = list(figures)
    for device in DEVICES:
        for figure in figures:
            found = load_run(results / device, figure.name)
            if found:
                plot(figure, found[0], path.parent / _plot_of(figure, device))
    path.write_text(document(figures, results), encoding="utf-8")
    print(f"wrote {path}")


def document(figures, results=RESULTS):
    """Return the text of the document for these results."""
    figures = list(figures)
    simulated, real = (_Device(device, figures, results / device) for device in DEVICES)
    costs, settings = Costs(), Settings()
    text = string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        simulated=simulated.text, simulated_counts=simulated.counts, simulated_minutes=simulated.minutes,
        real=_real(real, results), mesh_rate=_mesh_rate(results),
        names=", ".join(f"`{figure.name}`" for figure in figures),
        seek=f"{1e3 * costs.seek:g}", bandwidth=f"{8192 / costs.transfer / 1e6:g}", tuple=f"{1e6 * costs.tuple:g}",
        phase=f"{1e3 * costs.phase:g}", usual=_part(settings.usual().factor), dense=_part(settings.dense(1).factor),
        page=f"{settings.page_size // 1024}", per_page=TUPLES_PER_PAGE, near=f"{100 * NEAR:g}",
        input_threshold=f"{INPUT_THRESHOLD:,}", stream_threshold=f"{STREAM_THRESHOLD:,}",
        tight_threshold=f"{STREAM_THRESHOLD_TIGHT:,}", max_scan=MAX_SCAN, mesh_read=MESH_READ, paper=PAPER, now=NOW,
        mesh_paper=MESH_PAPER, mesh_best=MESH_BEST, precision=f"{100 * (2 ** (2 ** -settings.steps) - 1):.0f}",
    )  # fmt: skip
    return text.rstrip("\n") + "\n"


def _real(device, results):
    """Return the section of the real device, which says so if nothing was measured there."""
    if not device.figures:
        return "These results have no figures of a real device; `--device real` measures them."
    return (
        f"{device.machine}. Each rate is the median of three trials. Comparisons allow for the scatter of their\n"
        "figure: the median over its rows of the fastest trial divided by the slowest, at most "
        f"{device.scatter}.\n{_pace(results)}Figures measured: {device.figures}, in {device.minutes} minutes. "
        f"{device.counts}\n\n{device.text}"
    )


class _Device:
    """Section of a device: a heading, a plot, claims and values for each figure that was measured on it."""

    def __init__(self, device, figures, folder):
        verdicts, parts, runs, scatters = Counter(), [], [], []
        for figure in figures:
            found = load_run(folder, figure.name)
            if found is None:
                continue
            rows, known = found
            findings = figure.judge(rows)
            verdicts.update(finding.verdict for finding in findings if not finding.statement.startswith(OURS))
            parts.append(section(figure, rows, findings, _plot_of(figure, device)))
            runs.append(known)
            scatters.append(Rows(figure.axes, rows).scatter)
        self.text, self.figures = "\n\n".join(parts), len(parts)
        self.counts = counts(verdicts)
        self.minutes = f"{sum(known['seconds'] for known in runs) / 60:.0f}"
        self.machine = "; ".join(
            dict.fromkeys(known["machine"].split(", load")[0] for known in runs if "machine" in known)
        )
        self.scatter = f"{max(scatters, default=1.0):.2f}"


def section(figure, rows, findings, drawn):
    """Return the section of a figure: a heading, the plot in the file `drawn`, its claims, and its values."""
    lines = [f"### {figure.title}", "", f"![{figure.title}]({drawn})", ""]
    lines += [figure.method, ""] if figure.method else []
    lines += ["| claim | verdict | measured |", "|---|---|---|"]
    lines += [f"| {found.statement} | **{found.verdict}** | {found.measured} |" for found in findings]
    return "\n".join([*lines, "", *_table(Rows(figure.axes, rows))])


def _pace(results):
    """Return a sentence on the time of a scan on the real device, or nothing if figure 16 was not measured there."""
    rows, _ = load_run(results / "real", "fig16") or ([], {})
    paces = (100 * row["pace"] for row in rows if "pace" in row)
    return next((f"A scan takes {pace:.1f} % of its time on the simulated disk. " for pace in paces), "")


def _mesh_rate(results):
    """Return the rate of MeshJoin as in the paper in figure 16."""
    rows, _ = load_run(results / "simulated", "fig16") or ([], {})
    return next(
        (f"{row['tuples_per_second']:,}" for row in rows if row["line"] == MESH_PAPER), "an unmeasured number of"
    )


def counts(verdicts):
    """Return the sentence that tells how many claims hold."""
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
    """Return the values of the plot in Markdown: a line a column, or a line a row if there are many."""
    axes = rows.axes
    places = sorted({row[axes.x] for row in rows.rows}, key=_order(rows))
    found = {(row["line"], row[axes.x]): _cell(row[axes.y], ",") for row in rows.rows}
    named = [_cell(place, "g") for place in places]
    if len(rows.lines) > WIDEST:
        return _grid(
            [axes.xlabel, *named], [[line, *(found.get((line, at), "") for at in places)] for line in rows.lines]
        )
    cells = [
        [name, *(found.get((line, at), "") for line in rows.lines)] for name, at in zip(named, places, strict=True)
    ]
    return _grid([axes.xlabel, *rows.lines], cells)


def _grid(head, cells):
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]


def _order(rows):
    """Return the sort key of places: by number, or names in the order in which they came."""
    names = list(dict.fromkeys(row[rows.axes.x] for row in rows.rows))
    return names.index if isinstance(names[0], str) else float


def _cell(value, spec):
    if value is None:
        return "-"
    return value if isinstance(value, str) else format(value, ",.10g" if spec == "g" else spec)
