"""Results of a case: ratios and their targets, as a dict for JSON, on the screen, and in Markdown."""

import json
from dataclasses import asdict

import numpy as np

from benchmarks._measure import median_rate, median_ratio

__all__ = ["costs", "outcome", "summary", "write_report"]

HEAD = ["work", "memory", "SSIJ M/s", "peer", "peer M/s", "ratio", "target", "verdict"]
PAGE_NBYTES = 8192
SLOT_NBYTES = 208 / 7  # of the record tier, for a row of two words: a bucket of seven


def outcome(cell, contestants, samples, failures, trials, settings):
    """Return the results of a measurement as a dict.

    A contestant that failed has no rate, and its message is in `failures`. `trials` has the rate of each contestant
    with each of its settings, or the message of the failure; `settings` has the chosen settings.
    """
    ours = contestants[0].name
    peers = [
        {
            "peer": side.name, "target": target,
            "ratio": None if failures.keys() & {ours, side.name} else median_ratio(samples, ours, side.name),
        }
        for side, target in cell.peers
    ]  # fmt: skip
    return {
        "cell": asdict(cell),
        "contestants": [
            {
                "name": contestant.name, "idle": contestant.idle,
                "rate": None if contestant.name in failures else median_rate(samples, contestant.name),
                "in_a_group": contestant.group is not None,
            }
            for contestant in contestants
        ],
        "ours": ours,
        "peers": peers,
        "failures": failures,
        "trials": trials,
        "settings": settings,
        "record_tier": _record_tier(cell.ours, [s.details for s in samples if s.name == ours]),
        "samples": [{**asdict(sample), "rate": sample.rate} for sample in samples],
    }  # fmt: skip


def _record_tier(side, details):
    """Return the record tier's hit ratio, and that of the most popular rows, as many as fit into the tier."""
    places = int(details[-1]["memory"]["records"] / SLOT_NBYTES) if details else 0
    if side.stream != "zipf" or not places:
        return None
    weights = 1 / np.arange(1, side.rows + 1)
    best = float(weights[:places].sum() / weights.sum())
    hits = float(np.median([detail["record_hits"] for detail in details]))
    return {"places": places, "hits": hits, "clairvoyant": best, "share": hits / best}


def summary(result):
    """Return head and rows of the table of a result."""
    rates = {contestant["name"]: contestant["rate"] for contestant in result["contestants"]}
    ours, cell = result["ours"], result["cell"]
    memory = f"{cell['ours']['memory'] / 1e6:.0f} MB"
    own_rate = _formatted(rates[ours], 1e-6, ".2f")
    rows = [
        [
            cell["title"], memory, own_rate, peer["peer"], _formatted(rates[peer["peer"]], 1e-6, ".3g"),
            _formatted(peer["ratio"], 1, ".2f"), *_verdict(peer["ratio"], peer["target"], ""),
        ]
        for peer in result["peers"]
    ]  # fmt: skip
    if cell["least_rate"]:
        reached = _verdict(None if rates[ours] is None else rates[ours] / 1e6, cell["least_rate"] / 1e6, " M/s")
        rows.append([cell["title"], memory, own_rate, "ten times the paper's rate", "", "", *reached])
    if tier := result["record_tier"]:
        hits = f"record tier: {tier['hits']:.1%} of lookups, clairvoyant {tier['clairvoyant']:.1%}"
        verdict = _verdict(tier["share"], 0.9, "")
        rows.append([cell["title"], memory, "", hits, "", f"{tier['share']:.2f}", *verdict])
    return HEAD, rows


def costs(result):
    """Return a line for each contestant: its processor time a tuple, cores in use, bytes it read where it says so.

    Also the rate that it would have if it did nothing but read these bytes, as fast as the disk was measured.
    Where tuples arrive by the clock: the longest wait.
    """
    lines = []
    for name in dict.fromkeys(sample["name"] for sample in result["samples"]):
        samples = [sample for sample in result["samples"] if sample["name"] == name]
        if result["cell"]["clocked"]:
            wait = samples[0]["details"].get("clocked_wait")
            lines.append(f"{name}: {'late at every rate' if wait is None else f'longest wait {wait:.2f} s'}")
            continue
        tuples, seconds = (sum(sample[key] for sample in samples) for key in ("tuples", "seconds"))
        processor = sum(sample["details"]["processor_seconds"] for sample in samples)
        line = f"{name}: {processor / tuples * 1e9:,.0f} ns of processor a tuple, {processor / seconds:.2f} cores"
        details = samples[-1]["details"]
        if "pages_read" in details:
            nbytes = PAGE_NBYTES * sum(sample["details"]["pages_read"] for sample in samples)
            line += f", {nbytes / seconds / 1e6:,.0f} MB/s read, hits {details['hit_ratio']:.1%}"
            if nbytes:
                most = result["device"]["sequential_bytes"] * tuples / nbytes
                line += f"; at most {most / 1e6:,.3g} M/s if it only read"
        lines.append(line)
    return lines


def _verdict(value, target, unit):
    if target is None:
        return "", "failed" if value is None else ""
    if value is None:
        return f"{target:g}{unit}", "failed"
    return f"{target:g}{unit}", "reached" if value >= target else "missed"


def _formatted(value, factor, form):
    """Return a number as text, or a dash for a contestant that failed."""
    return "-" if value is None else format(value * factor, form)


def write_report(folder):
    """Write one Markdown table of all results in a folder; return its path."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for path in sorted(folder.glob("*-*.json")):
        lines += [f"| {' | '.join(row)} |" for row in summary(json.loads(path.read_text()))[1]]
    report = folder / "peers.md"
    report.write_text("\n".join(lines) + "\n")
    return report
