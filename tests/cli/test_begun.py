"""What a failure left is true: nothing where it came before the first batch, and otherwise what was committed."""

import pytest

from headrace.cli.reporting.begun import Begun, in_spark
from headrace.cli.reporting.console import Console
from headrace.pipelines.hooks import Step

PIPELINE = """
name: shop
source: {format: csv, path: in, schema: {order: bigint, customer: bigint}}
dimensions:
  customer:
    path: w/dim_customer
    natural_key: [id]
    columns: {id: bigint, city: string}
    history: {effective: since, effective_type: date}
  plain: {path: w/dim_plain, natural_key: [id], columns: {id: bigint, name: string}}
lookups:
  - {dimension: plain, role: plain, on: {customer: id}}
sink: {path: w/orders}
"""


@pytest.fixture(autouse=True)
def shop(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_REPLICAS", str(tmp_path / "replicas"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.yml").write_text(PIPELINE)
    (tmp_path / "changes").mkdir()
    return tmp_path


def left(outcome):
    assert outcome.code == 1, outcome
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("  left")]
    return line.removeprefix("  left   ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "nopipe.yml", "--once"], "what was loaded before; this run began no batch"),
        (["run", "pipeline.yml", "--once"], "what was loaded before; this run began no batch"),  # no folder of files
        (["errors", "retry", "-p", "nopipe.yml", "--all"], "the rejected rows as they were"),
        (["dimension", "restate", "nosuch"], "the facts as they were"),
        (["dimension", "apply", "customer", "nofolder"], "no change was applied"),
        (["dimension", "apply", "custommer", "changes"], "no change was applied"),
        (["dimension", "apply", "plain", "changes"], "no change was applied"),
        (["dimension", "apply", "customer", "changes", "-p", "nopipe.yml"], "no change was applied"),
        (["dimension", "repair", "customer", "-p", "nopipe.yml"], "the dimension as it was"),
        (["dimension", "add-column", "plain", "a", "int", "--from", "no.csv"], "the columns as they were"),
    ],
)
def test_a_failure_before_the_first_batch_left_nothing(invoke, arguments, text):
    assert left(invoke(*arguments)) == text


def test_a_failure_within_a_batch_left_what_was_committed(invoke, shop):
    (shop / "changes" / "1.csv").write_text("id,city,since\n1,Oslo,2024-01-01\n")
    assert invoke("dimension", "apply", "customer", "changes").code == 0
    (shop / "pipeline.yml").write_text(f"{PIPELINE}trigger: {{max_files: 1}}\n")
    (shop / "changes" / "2.csv").write_text("id,city,since\n2,Oslo,2024-01-01\n")
    (shop / "changes" / "3.csv").write_text("id,town,since\n1,Oslo,2024-02-01\n")
    outcome = invoke("dimension", "apply", "customer", "changes")
    assert left(outcome) == "changes that were committed; run again to continue"
    outcome = invoke("dimension", "apply", "customer", "changes")
    assert left(outcome) == "no change was applied"


def test_a_listing_begins_nothing():
    begun = Begun("nothing", "something")
    for step in ("after start", "before checks", "after listing"):
        begun.note(step)
    assert begun.left() == "nothing"
    begun.note("after plan")
    begun.note("after listing")
    assert begun.left() == "something"


def test_the_steps_of_a_run_are_shown_and_noted(monkeypatch, capsys):
    monkeypatch.setattr("headrace.pipelines.spark.jars_are_cached", lambda: False)
    begun, seconds = Begun("nothing", "something"), iter(range(0, 1000, 3))
    with in_spark(Console(lambda: next(seconds)), begun) as hook:
        hook(Step("before checks", "checking the tables"))
        assert begun.left() == "nothing"
        monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
        monkeypatch.delenv("TERM", raising=False)
        hook(Step("after plan", "batch 0: reading 1 file"))
        hook("before join")
    assert begun.left() == "something"
    shown = capsys.readouterr().err
    assert "starting Spark; Delta's jars are fetched first" in shown
    assert "batch 0: reading 1 file" in shown
