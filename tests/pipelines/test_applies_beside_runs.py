"""Changes are applied while a run infers members of the same dimension: two processes, at random moments.

Both number new members, often the same ones. The end state must be that of some order of the batches: the dimension has
the versions that its changes give, no number ever names two members, each order is a fact or rejected exactly once, and
after a restatement each fact has the version of its event time.
"""

import csv
import datetime as dt
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from history_scenario import Orders, normal

from headrace.pipelines.changes import apply_files, check_history
from headrace.pipelines.restating import restate
from headrace.pipelines.runner import run

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark"), pytest.mark.timeout(3600)]

FIRST = dt.date(2024, 1, 1)
PROCESS = Path(__file__).with_name("applying_process.py")


def drawn(rng, number, keys):
    """Return a draw of members: some old ones, and new ones that facts and changes meet at the same time."""
    names = [*(f"c{key}" for key in range(keys)), *(f"n{number + step}" for step in range(4))]
    return [names[int(rng.integers(len(names)))] for _ in range(12)]


def put_changes(shop, rng, number, place="waiting"):
    cities = ["Oslo", "Bergen", "Molde", ""]
    with (shop.folder / place / f"{number:04d}.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["id", "city", "tel", "since", "n", "op"])
        for row, key in enumerate(drawn(rng, number, 8)):
            city, sequence = cities[int(rng.choice(4, p=[0.3, 0.3, 0.3, 0.1]))], number * 100 + row
            day = FIRST + dt.timedelta(int(rng.integers(60)))
            writer.writerow([key, city, f"t{sequence}", day, sequence, "U" if city else "D"])


def orders(rng, number):
    days = [FIRST + dt.timedelta(int(rng.integers(-5, 70))) if rng.random() > 0.05 else None for _ in range(12)]
    members = zip(drawn(rng, number, 8), drawn(rng, number, 8), days, strict=True)
    return [(number * 100 + row, *each) for row, each in enumerate(members)]


class Shop(Orders):
    """Orders, and files of changes that wait for another process."""

    def __init__(self, folder, rng, files):
        super().__init__(folder)
        for name in ("waiting", "changes"):
            (folder / name).mkdir()
        for number in range(files):
            put_changes(self, rng, number)

    def applying(self, seed, pause):
        """Start the process that applies the changes, and wait until it is ready."""
        arguments = [
            sys.executable,
            str(PROCESS),
            str(self.pipeline),
            "customer",
            str(self.folder),
            str(seed),
            str(pause),
        ]
        process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
        waiting = threading.Event()
        while process.poll() is None and not (self.folder / "ready").exists():
            waiting.wait(0.01)
        return process


def check_dimension(shop, folder):
    """Compare the versions with those that the changes give when nothing else happens; return whom each key named."""
    alone = Orders(folder / "alone")
    apply_files(alone.config, "customer", shop.folder / "changes")
    hidden = {"customer_key", "id_spelled", "_sequence", "_entries"}
    plain = [
        {(row["id"], row["valid_from"]): {n: v for n, v in row.items() if n not in hidden} for row in rows}
        for rows in (shop.members.version_rows(), alone.members.version_rows())
    ]
    inferred = {key: row for key, row in plain[0].items() if row["is_inferred"]}
    assert {key: row for key, row in plain[0].items() if key not in inferred} == plain[1]
    assert {key[0] for key in inferred} <= {normal(row[1]) for rows in shop.files for row in rows}
    findings = check_history(shop.config, "customer")
    assert [each for each in findings if not each.rule.startswith("facts of role")] == []
    named = {}
    for row in pa.table(DeltaTable(shop.members.path).load_cdf(starting_version=0)).to_pylist():
        assert named.setdefault(row["customer_key"], row["id"]) == row["id"], row["customer_key"]
    return named


def check_facts(shop, named):
    """Check that each order is a fact or rejected, once, and that the keys of facts name the members of the orders."""
    facts = shop.read("facts")
    errors = [int(row["record"].split(",")[0]) for row in shop.read("facts_errors")]
    given = [row[0] for rows in shop.files for row in rows]
    assert sorted([*(row["order"] for row in facts), *errors]) == given
    for fact in facts:
        assert named[fact["now_key"]] == fact["buyer"]
        assert named[fact["buyer_key"]] == (None if fact["day"] is None else fact["buyer"])
        assert named[fact["seller_key"]] in {fact["seller"], None}
    assert any(fact["seller_key"] > 0 for fact in facts)


def check_restated(shop):
    """Compare the keys of dated facts with the versions."""
    restate(shop.pipeline)
    # Facts that the policy of the seller would reject now stay as they are, and the check counts them apart.
    assert [each for each in check_history(shop.config, "customer") if not each.allowed] == []
    for fact in (row for row in shop.read("facts") if row["day"] is not None):
        found, _ = shop.members.as_of(fact["buyer"], fact["day"])
        assert (fact["buyer_key"], fact["buyer_city"]) == (found["customer_key"], found["city"]), fact
        found, outcome = shop.members.as_of(fact["seller"], fact["day"], "reject")
        if outcome != "reject":  # a member that was added later leaves the facts that lacked it as they are
            assert fact["seller_key"] in {found["customer_key"] if found else -1, -1}, fact


STEPS = ("after plan", "before members:buyer", "before facts", "after facts")


@pytest.mark.slow
def test_changes_applied_between_the_steps_of_a_run_end_as_if_one_came_after_the_other(tmp_path):
    rng = np.random.default_rng(1)
    shop, applied = Shop(tmp_path / "shop", rng, len(STEPS)), []
    shop.put(orders(rng, 0))

    def hook(step):
        if step in STEPS and step not in applied:
            applied.append(step)
            file = min((shop.folder / "waiting").iterdir())
            apply_files(shop.config, "customer", file.rename(shop.folder / "changes" / file.name))

    run(shop.pipeline, hook=hook)
    assert applied == list(STEPS)
    check_facts(shop, check_dimension(shop, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_an_apply_and_a_run_on_one_dimension_end_as_if_one_came_after_the_other(tmp_path, seed):
    rng = np.random.default_rng(seed)
    shop = Shop(tmp_path / "shop", rng, 60)
    process, number = shop.applying(seed, 1.2), 0
    while number < 25 or process.poll() is None:
        shop.put(orders(rng, number))
        run(shop.pipeline)
        number += 1
    assert process.wait() == 0, process.stderr.read()
    process.stderr.close()
    check_restated(shop)
    check_facts(shop, check_dimension(shop, tmp_path))
