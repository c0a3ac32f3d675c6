"""Drivers that are killed with SIGKILL at every step, on two executors, with other writers at the same moments.

The oracle is the same pipeline without a disturbance: the dimension with its surrogate keys, the facts, the rejected
rows and changes, and the moved facts must be equal.
"""

import csv
import datetime as dt
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from history_scenario import Orders, random_changes, random_orders
from pyspark.find_spark_home import _find_spark_home

from headrace.pipelines.changes import apply_files, check_history
from headrace.pipelines.runner import run

JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
DRIVER = Path(__file__).with_name("killed_driver.py")
APPLY = (
    "after plan", "before apply", "after apply", "before changes", "after changes", "before errors", "after errors",
    "before moved", "after moved", "after done",
)  # fmt: skip
RUN = (
    "after listing", "before join", "after join", "before members:buyer", "after members:buyer", "before facts",
    "after facts", "before record", "after record", "after batch",
)  # fmt: skip
PARTS = 6  # of the moments; each ends with a comparison of its own
WRITERS = ("merge", "optimize", "apply", "append", "none")
OWN = {"_dimension_version", "stream", "run", "loaded_at", "rejected_at", "_file", "_loaded_at"}


class Shop(Orders):
    """Orders whose customers change by files, beside a dimension of products; the files of all rounds wait."""

    def __init__(self, folder, rounds, rng, **more):
        super().__init__(folder, **more)
        for name in ("changes", "products", "next/changes", "next/in"):
            (folder / name).mkdir(parents=True)
        for number in range(rounds):
            self._put_changes("changes", number, [("c0", dt.date(2024, 1, 1), "Alta"), *random_changes(rng, 30, 12)])
            self._put_changes("products", number, random_changes(rng, 5, 3))
            self.put(
                [
                    *random_orders(rng, 40, 12, number * 1000),
                    (number * 1000 + 999, f"x{number}", "c0", dt.date(2024, 2, 20)),
                ]
            )
        for name in ("changes", "in"):
            for file in sorted((folder / name).iterdir()):
                file.rename(folder / "next" / name / file.name)

    def document(self):
        document = super().document()
        history = {"effective": "since", "effective_type": "date", "sequence": "n", "operation": "op"}
        document["dimensions"]["customer"]["changes"] = "changes"
        document["dimensions"]["product"] = {
            "path": "w/product", "natural_key": ["id"], "columns": {"id": "string", "city": "string", "tel": "string"},
            "history": history,
        }  # fmt: skip
        return document

    def _put_changes(self, name, number, changes):
        with (self.folder / name / f"{number:04d}.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["id", "city", "tel", "since", "n", "op"])
            for place, (key, day, city) in enumerate(changes):
                sequence = number * 1000 + place
                writer.writerow([key, city or "", f"t{sequence}", day, sequence, "U" if city else "D"])
            writer.writerow(["", "Oslo", "", dt.date(2024, 1, 1), 0, "U"])

    def put_next(self):
        for name in ("changes", "in"):
            file = min((self.folder / "next" / name).iterdir())
            file.rename(self.folder / name / file.name)

    def contents(self):
        """Return the rows of the tables, without what tells one run from another."""
        tables = {name: f"w/{name}" for name in ("customer", "customer_errors", "customer_moved", "product", "facts")}
        tables["facts_errors"] = "w/facts_errors"
        return {name: self._content(self.folder / path) for name, path in tables.items()}

    @staticmethod
    def _content(path):
        rows = pa.table(DeltaTable(str(path)).scan()).to_pylist()
        kept = [
            {name: value for name, value in row.items() if name not in OWN} for row in rows if row.get("order") != -1
        ]
        return Counter(repr(sorted(row.items())) for row in kept)


def drive(shop, command, step, writer, end):
    """Run the driver, and return its exit code."""
    arguments = [sys.executable, str(DRIVER), str(shop.pipeline), command, step, writer, end]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 0), (step, writer, end, done.stderr[-3000:])


def settle(shop):
    apply_files(shop.config, "product", shop.folder / "products")
    findings = check_history(shop.config, "customer")
    assert [each for each in findings if not each.rule.startswith("facts of role")] == []


def assert_equal(found, expected):
    for name, rows in expected.items():
        assert (found[name] - rows, rows - found[name]) == (Counter(), Counter()), name


@pytest.mark.parametrize("step", ["after changes", pytest.param("before changes", marks=pytest.mark.slow)])
def test_a_killed_apply_is_completed_by_the_next_process(tmp_path, step):
    shops = [Shop(tmp_path / name, 1, np.random.default_rng(3)) for name in ("killed", "plain")]
    drive(shops[0], "local", step, "none", "kill")
    shops[1].put_next()
    for shop in shops:
        apply_files(shop.config, "customer", shop.folder / "changes")
        settle(shop)
    names = ("customer", "customer_errors", "customer_moved")
    contents = [{name: shop._content(shop.folder / "w" / name) for name in names} for shop in shops]
    assert_equal(*contents)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_drivers_killed_at_every_step_on_two_executors_beside_other_writers(tmp_path, part):
    moments = [("apply", step) for step in APPLY] + [("run", step) for step in RUN]
    moments += [("apply", "before apply"), ("run", "before join")]
    ends = [*(["kill", "kill", "go"] * len(moments))[: len(moments) - 2], "executor", "executor"]
    own = range(part, len(moments), PARTS)
    conf = {"spark.sql.shuffle.partitions": 2, "spark.executor.extraJavaOptions": JAVA}
    cluster = {"master": "local-cluster[2,1,1024]", "conf": conf}
    killed = Shop(tmp_path / "killed", len(own), np.random.default_rng(part), options={"spark": cluster})
    for number in own:
        drive(killed, *moments[number], WRITERS[number % len(WRITERS)], ends[number])
    plain = Shop(tmp_path / "plain", len(own), np.random.default_rng(part))
    for number in own:
        plain.put_next()
        if moments[number][0] == "apply":
            apply_files(plain.config, "customer", plain.folder / "changes")
        run(plain.pipeline)
    run(killed.pipeline)
    for shop in (killed, plain):
        settle(shop)
    shutil.rmtree(Path(_find_spark_home()) / "work", ignore_errors=True)
    assert_equal(killed.contents(), plain.contents())
