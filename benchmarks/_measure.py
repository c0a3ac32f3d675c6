"""Fair comparison on a noisy machine: contestants take turns in short rounds, and ratios are taken within a round."""

import csv
import gc
import os
import platform
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Sample", "interleave", "machine", "median_rate", "median_ratio", "print_table", "write_csv"]


@dataclass(frozen=True)
class Sample:
    """Measurement of one contestant in one round."""

    name: str
    round: int
    tuples: int
    seconds: float
    details: dict = field(default_factory=dict)

    @property
    def rate(self):
        return self.tuples / self.seconds if self.seconds else 0.0


def interleave(contestants, rounds, seconds):
    """Let each contestant run for `seconds` or a little longer in each round, in rotating order."""
    samples = []
    for number in range(rounds):
        first = number % len(contestants)
        for contestant in contestants[first:] + contestants[:first]:
            gc.collect()
            started = time.perf_counter()
            tuples = contestant.run(seconds)
            spent = time.perf_counter() - started
            samples.append(Sample(contestant.name, number, tuples, spent, contestant.details()))
    return samples


def median_rate(samples, name):
    """Return the median of a contestant's rates over the rounds, in tuples per second."""
    return statistics.median(sample.rate for sample in samples if sample.name == name)


def median_ratio(samples, name, other):
    """Return the median over the rounds of the speedup of `name` over `other` in the same round."""
    rates = {(sample.name, sample.round): sample.rate for sample in samples}
    numbers = {sample.round for sample in samples}
    return statistics.median(rates[name, number] / rates[other, number] for number in numbers if rates[other, number])


def machine():
    """Return a description of the machine, for the header of a report."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores, load = os.cpu_count(), os.getloadavg()[0]
    return f"{platform.system()} {platform.machine()}, {cores} cores, {memory / 2**30:.0f} GiB, load {load:.1f}"


def print_table(head, rows):
    """Print rows in aligned columns, with numbers right-aligned."""
    text = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in text) for i in range(len(head))]
    for row in text:
        print(
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        )


def write_csv(path, rows):
    """Write dicts, which may differ in their keys, as CSV."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with Path(path).open("w", newline="") as out:
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path}")
