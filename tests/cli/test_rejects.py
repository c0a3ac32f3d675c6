"""`headrace errors`: rejected rows can be counted, shown and dismissed without Spark, and selections are checked."""

import dataclasses
import re

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from headrace.pipelines.batch.error_rows import ERROR_SCHEMA
from headrace.pipelines.catalog import BatchRecord
from headrace.pipelines.config import load_pipeline
from headrace.pipelines.retries import RetryResult
from headrace.pipelines.runner import RunResult


def rejected(batch, file, number, reason, *, column="amount", role=None, pipeline="orders"):
    cause = {"role": role, "column": column, "value": "?", "reason": reason}
    return {
        "pipeline": pipeline, "stream": "s1", "batch": batch, "_file": file, "_record_number": number,
        "reason": f"{column} = ?: {reason}", "causes": [cause], "record": f"{number},?", "heading": "id,amount",
    }  # fmt: skip


ROWS = [
    rejected(0, "a.csv", 1, "is not a number"),
    rejected(0, "a.csv", 2, "is not a number"),
    rejected(0, "b.csv", 7, "not in the dimension", column="customer", role="customer"),
    rejected(3, "c.csv", 1, "is not a number"),
    rejected(3, "c.csv", 2, "is not a number", pipeline="another"),
]


@pytest.fixture
def shop(invoke, tmp_path, monkeypatch):
    invoke("init", tmp_path)
    monkeypatch.chdir(tmp_path)
    config = load_pipeline("pipeline.yml")
    rows = [{**row, "pipeline": config.name if row["pipeline"] == "orders" else row["pipeline"]} for row in ROWS]
    write_deltalake(config.errors_path, pa.Table.from_pylist(rows, ERROR_SCHEMA))
    return config


def groups(invoke, *options):
    document = invoke("errors", "list", "--json", *options).document
    return sorted((each["batch"], each["file"], each["status"], each["rows"]) for each in document["groups"])


def test_rows_are_counted_by_rule_batch_and_file_of_this_pipeline(invoke, shop):
    assert groups(invoke) == [(0, "a.csv", "open", 2), (0, "b.csv", "open", 1), (3, "c.csv", "open", 1)]
    assert groups(invoke, "--rule", "CUSTOMER") == [(0, "b.csv", "open", 1)]
    assert groups(invoke, "--batch", 3, "--batch", 0, "--file", "c.csv") == [(3, "c.csv", "open", 1)]
    assert groups(invoke, "--stream", "s2") == []
    shown = invoke("errors", "list", "--limit", 1).out
    assert "amount: is not a number" in shown
    assert "and 2 more lines" in shown
    assert "stream" not in shown
    assert shop.errors_path in shown


@pytest.mark.parametrize(("numbers", "line"), [([9], "batch: 9"), ([9, 10], "batches: 9, 10")])
@pytest.mark.usefixtures("shop")
def test_a_retry_prints_the_numbers_of_its_batches(invoke, monkeypatch, numbers, line):
    names = [each.name for each in dataclasses.fields(BatchRecord)]
    batches = tuple(BatchRecord(**{**dict.fromkeys(names, 0), "batch": number, "detail": {}}) for number in numbers)
    result = RunResult("r", "orders", "done", None, 1.0, batches, "f", "e", "d")
    monkeypatch.setattr("headrace.pipelines.retry", lambda *_, **__: RetryResult(1, result))
    shown = invoke("errors", "retry", "0/a.csv:1")
    assert shown.code == 0, shown
    assert line in [re.sub(" {2,}", ": ", each.strip()) for each in shown.out.splitlines()]


def test_rows_of_two_streams_are_told_apart(invoke, shop):
    write_deltalake(shop.errors_path, pa.Table.from_pylist([{**ROWS[0], "stream": "t2"}], ERROR_SCHEMA), mode="append")
    listed = invoke("errors", "list").out
    assert "By rule, stream, batch and file" in listed
    assert [line.split()[:5] for line in listed.splitlines() if "a.csv" in line] == [
        ["open", "2", "s1", "0", "a.csv"], ["open", "1", "t2", "0", "a.csv"]
    ]  # fmt: skip
    assert "say which one with --stream" in invoke("errors", "dismiss", "0/a.csv:1", "--reason", "a test").err
    assert "  stream  t2" in invoke("errors", "show", "--batch", 0).out
    assert "1 row dismissed" in invoke("errors", "dismiss", "0/a.csv:1", "--stream", "t2", "--reason", "a test").out


@pytest.mark.usefixtures("shop")
def test_records_are_shown_with_cause_and_limit(invoke):
    found = invoke("errors", "show", "--json", "0/b.csv:7").document
    assert [(each["id"], each["status"], each["record"], each["note"]) for each in found] == [
        ("0/b.csv:7", "open", "7,?", None)
    ]
    assert "and 2 more; --limit shows more" in invoke("errors", "show", "--limit", 2).out


def test_dismissed_rows_are_kept_with_their_reason(invoke, shop):
    before = DeltaTable(shop.errors_path).version()
    outcome = invoke("errors", "dismiss", "--file", "a.csv", "--reason", "a test")
    assert (outcome.code, outcome.out) == (0, f"{shop.name}: 2 rows dismissed\n")
    assert groups(invoke, "--status", "open") == [(0, "b.csv", "open", 1), (3, "c.csv", "open", 1)]
    assert "a test" in invoke("errors", "show", "0/a.csv:1").out
    assert "nothing was dismissed" in invoke("errors", "dismiss", "0/a.csv:1", "--reason", "again").out
    assert invoke("errors", "dismiss", "--all", "--reason", "all", "--json").document["dismissed"] == 2
    assert DeltaTable(shop.errors_path).version() == before


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("retry",), 2, "select rows by ID"),
        (("retry", "--all", "--batch", 0), 2, "--all excludes a selection"),
        (("retry", "9/a.csv:1"), 1, "no rejected row is named 9/a.csv:1"),
        (("dismiss", "--all"), 2, "Missing option '--reason'"),
        (("dismiss", "--all", "--reason", " "), 1, "say why"),
        (("show", "a.csv"), 1, "write BATCH/FILE:RECORD"),
    ],
)
def test_a_choice_that_cannot_be_met_is_refused(invoke, arguments, code, message):
    outcome = invoke("errors", *arguments)
    assert (outcome.code, message in outcome.err) == (code, True), outcome


def test_columns_are_added_filled_and_removed(invoke, shop, tmp_path):
    assert shop.dimensions["customer"].columns is not None
    invoke("dimension", "create", "customer", "customers.csv")
    (tmp_path / "more.csv").write_text("customer,segment\n C1 ,retail\nc9,none\n")
    document = invoke(
        "dimension", "add-column", "customer", "segment", "string", "--from", "more.csv", "--json"
    ).document
    assert (document["filled"], document["without_value"], document["without_member"]) == (1, 1, 1)
    assert invoke("dimension", "inferred", "customer").out == "dimension customer has no inferred members\n"
    outcome = invoke("dimension", "drop-column", "customer", "segment")
    assert (outcome.code, "was removed" in outcome.out) == (0, True), outcome
    outcome = invoke("dimension", "widen-column", "customer", "name", "int")
    assert (outcome.code, "declares dimensions.customer.columns.name as string" in outcome.err) == (1, True), outcome


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize("name", ["nonsense", "9/a.csv:1"])
def test_a_row_that_is_not_there_is_no_cause_to_repeat_the_command(invoke, name):
    told = " ".join(invoke("errors", "show", name).err.split())
    assert "go on correct the command or the cause" in told
