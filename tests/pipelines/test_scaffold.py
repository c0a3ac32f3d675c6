"""What `headrace init` wrote runs as it is; the demo's tests run such a pipeline in a process of its own."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

from headrace.cli.main import headrace


def invoke(*arguments):
    done = CliRunner().invoke(headrace, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]


def refusal():
    """Return the cause of a run that is refused, and see that it changes no table."""
    before = state()
    done = CliRunner().invoke(headrace, ["run", "pipeline.yml", "--once", "-q"])
    assert (done.exit_code, state()) == (1, before)
    return re.search("cause  (.*)", done.stderr)[1]


def state():
    """Return facts and open rejected rows."""
    facts = []
    if Path("warehouse/fact_orders").exists():
        facts = DeltaTable("warehouse/fact_orders").to_pyarrow_table().column("amount").to_pylist()
    counts = json.loads(invoke("errors", "list", "--json"))["counts"]
    return sorted(map(str, facts)), counts["open"]


def deliver(name, *records):
    Path("incoming", name).write_text("\n".join(["order_id,customer,product,ordered_at,amount", *records, ""]))


def remove(paths):
    for path in paths.replace(" and ", ", ").split(", "):
        shutil.rmtree(path)


LOADED = (["10.00", "12.75", "25.50", "5.00", "5.00"], 1)


@pytest.fixture
def lost(tmp_path, monkeypatch):
    """Return what the refusal of a run after the loss of `.headrace` says."""
    monkeypatch.chdir(tmp_path)
    invoke("init", ".")
    deliver("n.csv", ",C1,P1,2025-01-01 10:00,5.00", '77,C1,P1,2025-01-01 10:00,"5,00"')
    invoke("run", "pipeline.yml", "--once", "-q")
    assert state() == LOADED
    Path(".headrace").rename("backup")
    return refusal()


def test_after_a_lost_checkpoint_the_project_goes_on_with_its_facts(lost):
    assert "Restore the checkpoint; or" in lost
    shutil.rmtree(".headrace")
    shutil.copytree("backup", ".headrace")
    invoke("run", "pipeline.yml", "--once", "-q")
    assert state() == LOADED
    shutil.rmtree(".headrace")
    adopt = re.search("`headrace (source adopt .*?)`", refusal())[1]
    invoke(*adopt.split())
    deliver("later.csv", ",C1,P1,2025-01-01 10:00,6.00")
    invoke("run", "pipeline.yml", "--once", "-q")
    assert state() == ([*LOADED[0], "6.00"], 1)


def test_after_a_lost_checkpoint_the_project_begins_again(lost):
    remove(re.search("to load every file again, remove (.*)$", lost)[1])
    invoke("run", "pipeline.yml", "--once", "-q")
    assert state() == LOADED


@pytest.mark.usefixtures("lost")
def test_rejected_rows_without_their_facts_are_not_rejected_twice():
    shutil.rmtree("warehouse/fact_orders")
    left = refusal()
    assert "holds 1 open rows that pipeline orders rejected" in left
    shutil.copytree("warehouse", "copy")
    remove(re.search("To begin again, remove (.*?) too;", left)[1])
    invoke("run", "pipeline.yml", "--once", "-q")
    assert state() == LOADED
    shutil.rmtree("warehouse")
    shutil.rmtree(".headrace")
    shutil.copytree("copy", "warehouse")
    dismiss = re.search("`headrace (errors dismiss .*?)`", refusal())[1]
    invoke(*dismiss.replace("TEXT", "again").split())
    invoke("run", "pipeline.yml", "--once", "-q")
    assert state() == LOADED


def test_the_scaffold_runs_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    invoke("init", ".")
    invoke("dimension", "create", "customer", "customers.csv")
    document = json.loads(invoke("run", "pipeline.yml", "--once", "--json"))
    assert (document["rows_in"], document["loaded"], document["dropped"]) == (5, 4, 1)
    facts = DeltaTable(tmp_path / "warehouse" / "fact_orders").to_pyarrow_table().sort_by("order_id").to_pylist()
    assert [row["customer_key"] for row in facts] == [1, 2, 3, -1]
    assert [run["state"] for run in json.loads(invoke("runs", "--json"))] == ["done"]
