"""Figure 8: TPC-H, the table Part on disk and the rows of LineItem as the stream."""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.experiments._relations import Relation
from benchmarks.experiments._report import Axes, Check, Outcome
from benchmarks.experiments._settings import MESHJOIN, NOW, PAPER, measure
from headrace.joins import MeshJoin

__all__ = ["fig8"]

PAPER_PARTS = 20_000_000
GENERATOR = Path(sys.executable).with_name("tpchgen-cli")
SCALE, TOY_SCALE = 5.0, 0.02
STREAM_PARTS = 20  # LineItem is generated in so many parts, of which one is the stream
COLUMNS = ["p_name", "p_brand", "p_type"]


@dataclass(frozen=True)
class Part(Relation):
    """The table Part of a scale factor, generated where it is wanted."""

    folder: str = ""
    parts: int = 0

    @property
    def factor(self):
        return self.parts / PAPER_PARTS

    @property
    def rows(self):
        return self.parts

    def content(self, seed=1):  # noqa: ARG002 - the generator has no seed
        return pq.read_table(Path(self.folder) / "part.parquet")


def generate(folder, scale):
    """Make Part, and the first rows of LineItem; return Part's number of rows and the products that are ordered."""
    command = [GENERATOR, "parquet", "-s", f"{scale:g}", "-o", folder]
    for tables in (["-T", "part"], ["-T", "lineitem", "--parts", f"{STREAM_PARTS}", "--part", "1"]):
        subprocess.run([*map(str, command), *tables], check=True, capture_output=True)
    (lines,) = Path(folder).glob("lineitem/*.parquet")
    ordered = pq.read_table(lines, columns=["l_partkey"])["l_partkey"].to_numpy()
    return pq.read_metadata(Path(folder) / "part.parquet").num_rows, ordered.astype(np.int64)


def fig8(world, settings):
    """Throughput over the memory for Part and LineItem."""
    with tempfile.TemporaryDirectory() as folder:
        parts, ordered = generate(folder, TOY_SCALE if settings.least_memory else SCALE)
        relation = Part("part", 0, 0, page_size=8192, key="p_partkey", folder=folder, parts=parts)
        rows = []
        for share in settings.shares:
            contestants = {PAPER: relation.as_in_the_paper(share), NOW: {}, MESHJOIN: {"kind": MeshJoin}}
            for line, options in contestants.items():
                served = measure(world, settings, relation, share, ordered, columns=COLUMNS, **options)
                rows.append({"line": line, "memory_percent": 100 * share, **served.row()})
    axes = Axes("memory_percent", "tuples_per_second", "memory, % of the relation")
    outcome = Outcome("fig8", "Figure 8: TPC-H, LineItem with Part", axes, sorted(rows, key=lambda row: row["line"]))
    ratios = {
        line: [ours / mesh for ours, mesh in zip(outcome.values(line), outcome.values(MESHJOIN), strict=True)]
        for line in (PAPER, NOW)
    }
    told = {line: ", ".join(f"{ratio:.1f}" for ratio in values) for line, values in ratios.items()}
    outcome.checks.append(
        Check(
            "the benefits of SSIJ over MeshJoin are very significant, above all in small memories",
            f"{told[PAPER]} times MeshJoin with table II, {told[NOW]} as it is; products are ordered uniformly, so a "
            "cache has nothing to gain",
            min(ratios[PAPER]) > 1.5,
        )
    )
    return outcome
