"""Writes docs/experiments-streams.md and its plots from the results. It measures and judges nothing itself."""

import string
from collections import Counter
from pathlib import Path

from benchmarks.experiments._results import load_run, plot
from benchmarks.experiments._settings import NEAR
from benchmarks.experiments.document import OURS, counts, section
from benchmarks.streams._data import TUPLE
from benchmarks.streams._headlines import headlines
from benchmarks.streams._world import FAN_IN, GROUP, Settings
from benchmarks.streams.punctuated import WATCHED, Units
from benchmarks.streams.punctuated import Settings as News

__all__ = ["DOCUMENT", "RESULTS", "document", "write_document"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "experiments-streams.md"
TEMPLATE = Path(__file__).with_name("template.md")
RESULTS = Path(__file__).with_name("results")
PLOTS = "figures/streams"


def write_document(figures, results=RESULTS, path=DOCUMENT):
    """Write the document and draw the plots."""
    figures = list(figures)
    for figure in figures:
        found = load_run(results, figure.name)
        if found:
            plot(figure, found[0], path.parent / PLOTS / f"{figure.name}.svg")
    path.write_text(document(figures, results), encoding="utf-8")
    print(f"wrote {path}")


def document(figures, results=RESULTS):
    """Return the text of the document for these results."""
    figures, verdicts, parts, seconds, missing, measured = list(figures), Counter(), [], 0, [], {}
    for figure in figures:
        found = load_run(results, figure.name)
        if found is None:
            missing.append(f"`{figure.name}`")
            continue
        rows, known = found
        measured[figure.name] = rows
        findings = figure.judge(rows)
        verdicts.update(finding.verdict for finding in findings if not finding.statement.startswith(OURS))
        parts.append(section(figure, rows, findings, f"{PLOTS}/{figure.name}.svg"))
        seconds += known["seconds"]
    settings, units = Settings(), Units()
    text = string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        names=", ".join(f"`{figure.name}`" for figure in figures), minutes=f"{seconds / 60:.0f}",
        headlines=headlines({figure.name: figure for figure in figures}, measured),
        counts=counts(verdicts), missing=", ".join(missing) or "none",
        results="\n\n".join(parts), near=f"{100 * NEAR:g}", tuple=TUPLE, fan_in=FAN_IN,
        group=GROUP, news=f"{News.news:,}", reads=News.reads_per_news, watched=WATCHED,
        between=f"{1e3 * settings.between:g}", seek=f"{1e3 * settings.seek:g}", append=f"{1e3 * settings.append:g}",
        rate=f"{settings.rate / 1e6:g}", wait=f"{1e3 * settings.wait:g}", arrivals=f"{settings.max_new_arrivals:,}",
        take=f"{units.take:g}", compare=f"{units.compare:g}", insert=f"{units.insert:g}", output=f"{units.output:g}",
        punctuation=f"{units.punctuation:g}", test=f"{units.test:g}", buckets=units.buckets,
    )  # fmt: skip
    return text.rstrip("\n") + "\n"
