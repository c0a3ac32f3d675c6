"""`headrace dimension`: what the pipeline file declares can be made, seen, checked and looked up."""

import datetime as dt
import math
import re
import shutil
import subprocess
import sys

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake


@pytest.fixture
def shop(invoke, tmp_path, monkeypatch):
    invoke("init", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def customers(invoke, shop):
    outcome = invoke("dimension", "create", "customer", "customers.csv")
    assert outcome.code == 0, outcome
    return shop / "warehouse" / "dim_customer"


def test_members_are_numbered_in_key_order_beside_the_unknown_member(customers):
    rows = sorted(DeltaTable(customers).to_pyarrow_table().to_pylist(), key=lambda row: row["customer_key"])
    assert [(row["customer_key"], row["customer"], row["name"]) for row in rows] == [
        (-1, None, None),
        (1, "c1", "Ada"),
        (2, "c2", "Grace"),
    ]


def test_create_reports_what_it_made(invoke, shop):
    document = invoke("dimension", "create", "customer", shop / "customers.csv", "--json").document
    assert (document["members"], document["greatest_key"], document["inferred"]) == (2, 2, 0)


def test_a_dimension_is_not_made_twice(invoke, customers):
    version = DeltaTable(customers).version()
    outcome = invoke("dimension", "create", "customer", "customers.csv")
    assert outcome.code == 1
    assert "already" in outcome.err
    assert DeltaTable(customers).version() == version


def test_list_shows_dimensions_that_are_not_there_yet(invoke, customers):
    documents = {found["name"]: found for found in invoke("dimension", "list", "--json").document}
    assert customers.exists()
    assert documents["customer"]["members"] == 2
    assert documents["product"]["exists"] is False


def test_lookup_compares_keys_as_the_pipeline_does(invoke, customers):
    document = invoke("dimension", "lookup", "customer", " C1 ", "c9", "--json").document
    assert customers.exists()
    assert [member["name"] for member in document["members"]] == ["Ada"]
    assert document["not_found"] == ["c9"]


@pytest.mark.usefixtures("customers")
def test_lookup_names_the_keys_that_are_missing(invoke):
    shown = invoke("dimension", "lookup", "customer", "c8", " C1 ", "c9").out
    assert "1 of 3 keys found" in shown
    assert "Not found: c8, c9" in shown


@pytest.mark.usefixtures("customers")
def test_a_sound_dimension_checks_with_zero(invoke):
    assert invoke("dimension", "check", "customer").code == 0


def test_broken_keys_check_with_three(invoke, customers):
    again = DeltaTable(customers).to_pyarrow_table().filter(pa.compute.field("customer_key") == 1)
    write_deltalake(customers, again, mode="append")
    outcome = invoke("dimension", "check", "customer", "--json")
    assert outcome.code == 3
    assert {finding["rule"] for finding in outcome.document["findings"]} == {
        "surrogate keys are unique",
        "natural keys are unique",
    }


@pytest.mark.usefixtures("shop")
def test_an_unknown_dimension_lists_the_valid_ones(invoke):
    outcome = invoke("dimension", "info", "costumer")
    assert outcome.code == 1
    assert "(did you mean 'customer'?); its dimensions are customer, product" in outcome.err
    assert "go on  correct the command or the cause, then run it again" in outcome.err
    assert "its arguments: headrace dimension info --help" in outcome.err


def test_a_repeated_natural_key_is_named_and_no_table_is_left(invoke, shop):
    (shop / "customers.csv").write_text("customer,name,country\nc1,Ada,UK\nC1 ,Eve,US\n")
    outcome = invoke("dimension", "create", "customer", "customers.csv")
    assert outcome.code == 1
    assert "c1" in outcome.err
    assert not (shop / "warehouse").exists()


@pytest.mark.usefixtures("customers")
def test_facts_of_a_dimension_without_history_are_not_restated(invoke):
    outcome = invoke("dimension", "restate", "customer")
    assert outcome.code == 1
    assert "has no dimension 'customer' with history" in outcome.err


def test_members_are_shown_with_all_their_digits(invoke, customers):
    at = dt.datetime(2024, 1, 2, 3, 4, 5, 6, dt.UTC)
    given = {"customer_key": [7, 8], "customer": ["c7", "c8"], "share": [0.0004, math.inf]}
    rows = pa.table({**given, "at": pa.array([at, None], pa.timestamp("us", "UTC"))})
    write_deltalake(customers, rows, mode="append", schema_mode="merge")
    shown = invoke("dimension", "lookup", "customer", "c7", "c8").out
    assert "0.0004" in shown
    assert "2024-01-02 03:04:05.000006+00:00" in shown
    found = {
        row["customer"]: row
        for row in invoke("dimension", "lookup", "customer", "c7", "c8", "--json").document["members"]
    }
    assert (found["c7"]["share"], found["c8"]["share"]) == (0.0004, "inf")


@pytest.mark.parametrize("options", [[], ["--text", "name"]])
def test_a_value_of_another_type_names_the_declared_one(invoke, shop, options):
    text = (shop / "pipeline.yml").read_text()
    declared = text.replace("name: string", "name: int", 1)
    assert declared != text
    (shop / "pipeline.yml").write_text(declared)
    outcome = invoke("dimension", "create", "customer", "customers.csv", *options)
    assert outcome.code == 1
    remedies = {0: "; correct the value, or the type there", 2: "; leave out --text name"}
    assert f"the pipeline file declares name: int{remedies[len(options)]}" in outcome.err
    assert options or "--text" not in outcome.err.split("go on")[0]
    (shop / "pipeline.yml").write_text(text)
    assert invoke("dimension", "create", "customer", "customers.csv", *options).code == 0


@pytest.mark.usefixtures("customers")
def test_a_value_to_fill_a_column_with_names_the_type_of_the_command(invoke, shop):
    (shop / "ages.csv").write_text("customer,age\nc1,old\n")
    outcome = invoke("dimension", "add-column", "customer", "age", "int", "--from", "ages.csv")
    assert outcome.code == 1
    assert "; the command, or the table, declares age: int; correct the value, or the type there" in outcome.err
    assert invoke("dimension", "add-column", "customer", "age", "string", "--from", "ages.csv").code == 0


@pytest.mark.spark
def test_a_dimension_is_made_again_as_advised(invoke, customers, shop):
    assert run_once(shop) == 0
    refused = invoke("dimension", "create", "customer", "customers.csv")
    found = re.search(r"facts that carry its keys, (\S+), and the checkpoint (\S+), so", refused.err)
    for place in (customers, *found.groups()):
        shutil.rmtree(place)
    assert invoke("dimension", "create", "customer", "customers.csv").code == 0
    assert run_once(shop) == 0
    assert DeltaTable(found[1]).to_pyarrow_table().num_rows > 0


def run_once(shop):
    command = [sys.executable, "-m", "headrace", "run", "pipeline.yml", "--once"]
    return subprocess.run(command, cwd=shop, check=False).returncode
