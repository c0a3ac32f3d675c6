"""What `headrace init` wrote runs as it is; the demo's tests run such a pipeline in a process of its own."""

import json

import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

from headrace.cli.main import headrace


def invoke(*arguments):
    done = CliRunner().invoke(headrace, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_the_scaffold_runs_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    invoke("init", ".")
    invoke("dimension", "create", "customer", "customers.csv")
    document = json.loads(invoke("run", "pipeline.yml", "--once", "--json"))
    assert (document["rows_in"], document["loaded"], document["dropped"]) == (5, 4, 1)
    facts = DeltaTable(tmp_path / "warehouse" / "fact_orders").to_pyarrow_table().sort_by("order_id").to_pylist()
    assert [row["customer_key"] for row in facts] == [1, 2, 3, -1]
    assert [run["state"] for run in json.loads(invoke("runs", "--json"))] == ["done"]
