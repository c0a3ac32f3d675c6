"""`headrace source`: files by state, skipping and adopting, without Spark."""

import os

import pytest

from headrace.cli.commands.init import PIPELINE
from headrace.cli.reporting import exits
from headrace.cli.reporting.console import Step
from headrace.cli.reporting.exits import ExitCode
from headrace.pipelines.catalog import Catalog
from headrace.pipelines.config import load_pipeline
from headrace.pipelines.errors import SeveralSourcesError
from headrace.pipelines.lease import Leases
from headrace.pipelines.source import Ledger, examine, printable


@pytest.fixture
def pipeline(tmp_path):
    path = tmp_path / "pipeline.yml"
    path.write_text(PIPELINE)
    folder(path).mkdir(parents=True, exist_ok=True)
    return path


def folder(pipeline):
    return pipeline.parent / os.path.relpath(load_pipeline(pipeline).source.path, pipeline.parent)


def write(pipeline, name, text, date=10**9):
    path = folder(pipeline) / name
    path.write_text(text)
    os.utime(path, (date, date))


def ledger_of(pipeline):
    return Ledger(load_pipeline(pipeline).checkpoint)


def load(pipeline, *names, done=True):
    with ledger_of(pipeline) as ledger:
        number = ledger.next_number()
        ledger.plan(number, "attempt", [examine(str(folder(pipeline)), name) for name in names])
        if done:
            ledger.done(number)


def states(invoke, pipeline):
    document = invoke("source", "list", pipeline, "--json").document
    return {file["name"]: file["state"] for file in document["files"]}


def test_files_are_listed_by_state_the_newest_first(invoke, pipeline):
    for date, name in enumerate(("loaded.csv", "changed.csv", "skipped.csv", "planned.csv", "gone.csv", "new.csv")):
        write(pipeline, name, "id\n1\n", 10**9 + date)
    load(pipeline, "loaded.csv", "changed.csv")
    write(pipeline, "changed.csv", "id\n1\n2\n", 10**9 + 1)
    assert invoke("source", "skip", pipeline, "skipped.csv").code == 0
    load(pipeline, "planned.csv", "gone.csv", done=False)
    (folder(pipeline) / "gone.csv").unlink()
    write(pipeline, "empty.csv", "", 10**9 + 9)
    (folder(pipeline) / "sub").mkdir()
    document = invoke("source", "list", pipeline, "--json").document
    assert [(file["name"], file["state"], file["batch"]) for file in document["files"]] == [
        ("empty.csv", "empty", None), ("new.csv", "new", None), ("gone.csv", "gone", 1), ("planned.csv", "planned", 1),
        ("skipped.csv", "skipped", None), ("changed.csv", "changed", 0), ("loaded.csv", "loaded", 0),
    ]  # fmt: skip
    assert document["counts"] == dict.fromkeys(sorted({file["state"] for file in document["files"]}), 1)
    assert [left["name"] for left in document["left_out"]] == ["sub"]
    told = invoke("source", "list", pipeline, "--limit", "2").out
    assert "and 5 more" in told
    assert "source.recursive" in told


def test_a_source_that_was_never_loaded_has_new_files(invoke, pipeline):
    assert "there are no files in" in invoke("source", "list", pipeline).out
    write(pipeline, "a\nb.csv", "id\n1\n")
    assert states(invoke, pipeline) == {"a\nb.csv": "new"}
    assert "a\\nb.csv" in invoke("source", "list", pipeline).out
    assert not Ledger.exists(load_pipeline(pipeline).checkpoint)


@pytest.mark.parametrize("absolute", [False, True])
def test_a_skipped_file_is_skipped_until_it_changes(invoke, pipeline, absolute):
    write(pipeline, "a[1].csv", "id\nx\n")
    assert invoke("source", "skip", pipeline, folder(pipeline) / "a[1].csv" if absolute else "a[1].csv").code == 0
    assert states(invoke, pipeline) == {"a[1].csv": "skipped"}
    write(pipeline, "a[1].csv", "id\n1\n", 10**9 + 1)
    assert states(invoke, pipeline) == {"a[1].csv": "new"}


def test_a_planned_file_that_is_gone_can_be_skipped(invoke, pipeline):
    write(pipeline, "a.csv", "id\nx\n")
    load(pipeline, "a.csv", done=False)
    (folder(pipeline) / "a.csv").unlink()
    assert invoke("source", "skip", pipeline, "a.csv").code == 0
    with ledger_of(pipeline) as ledger:
        assert ledger.pending().skipped == {"a.csv"}
        ledger.forget(0)
    write(pipeline, "a.csv", "id\n1\n", 10**9 + 1)
    assert states(invoke, pipeline) == {"a.csv": "new"}


def test_a_change_of_a_loaded_file_can_be_kept_unloaded(invoke, pipeline):
    write(pipeline, "a.csv", "id\n1\n")
    load(pipeline, "a.csv")
    write(pipeline, "a.csv", "id\n1\n2\n")
    assert states(invoke, pipeline) == {"a.csv": "changed"}
    assert invoke("source", "skip", pipeline, "a.csv").code == 0
    assert states(invoke, pipeline) == {"a.csv": "loaded"}


def test_what_cannot_be_skipped_is_named_and_nothing_is_recorded(invoke, pipeline):
    write(pipeline, "a.csv", "id\n1\n")
    write(pipeline, "b.csv", "id\n1\n")
    load(pipeline, "a.csv")
    outcome = invoke("source", "skip", pipeline, "b.csv", "none.csv")
    assert outcome.code == 1
    assert "there is no file 'none.csv'" in outcome.err
    for elsewhere in ("../pipeline.yml", "sub/../../pipeline.yml", "/etc/hostname"):
        outcome = invoke("source", "skip", pipeline, "b.csv", elsewhere)
        assert outcome.code == 1
        assert f"{elsewhere!r} is not in the source folder" in outcome.err
    outcome = invoke("source", "skip", pipeline, "b.csv", "a.csv")
    assert outcome.code == 1
    assert "'a.csv' was loaded and has not changed" in outcome.err
    assert states(invoke, pipeline)["b.csv"] == "new"


def test_adopting_takes_all_files_as_loaded(invoke, pipeline):
    write(pipeline, "a.csv", "id\n1\n")
    write(pipeline, "b.csv", "id\n1\n")
    write(pipeline, "empty.csv", "")
    load(pipeline, "b.csv", done=False)
    document = invoke("source", "adopt", pipeline, "--json").document
    assert (document["files"], document["never_loaded"], document["replaces"]) == (2, ["b.csv"], None)
    assert states(invoke, pipeline) == {"a.csv": "loaded", "b.csv": "loaded", "empty.csv": "empty"}
    assert "b.csv" not in invoke("source", "adopt", pipeline).out


@pytest.mark.parametrize("command", [("skip", "a.csv"), ("adopt",)])
def test_a_pipeline_that_is_running_is_left_alone(invoke, pipeline, command):
    write(pipeline, "a.csv", "id\n1\n")
    config = load_pipeline(pipeline)
    with Catalog(config.catalog) as catalog, Leases(catalog, [f"pipeline:{config.checkpoint}"]):
        outcome = invoke("source", command[0], pipeline, *command[1:])
    assert outcome.code == 1
    assert "in use by process" in outcome.err


def test_a_missing_source_folder_is_named(invoke, pipeline):
    folder(pipeline).rmdir()
    for command in ("list", "adopt"):
        outcome = invoke("source", command, pipeline)
        assert outcome.code == 1
        assert "there is no folder" in outcome.err


@pytest.mark.parametrize(("name", "shown"), [("a b", "a b"), ("a\tb", "a\\tb"), ("é", "é"), ("\x1b[2J", "\\x1b[2J")])
def test_a_name_takes_one_line(name, shown):
    assert printable(name) == shown


def test_the_pipeline_file_of_the_folder_is_the_default(invoke, pipeline, monkeypatch):
    monkeypatch.chdir(pipeline.parent)
    write(pipeline, "bad.csv", "id\n1\n")
    assert invoke("source", "skip", "bad.csv").code == 0
    document = invoke("source", "list", "--json").document
    assert {file["name"]: file["state"] for file in document["files"]}["bad.csv"] == "skipped"


def test_without_the_name_of_a_source_the_error_names_a_command_that_works(invoke, tmp_path):
    for name in ("orders", "payments"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.csv").write_text("id\n1\n")
    pipeline = tmp_path / "paid.yml"
    source = "{{format: csv, path: {0}, schema: {{id: int}}}}"
    pipeline.write_text(
        f"name: paid\nsources: {{orders: {source.format('orders')}, payments: {source.format('payments')}}}\n"
        "correlate: {on: [orders.id = payments.id]}\nsink: {path: paid}\n"
    )
    for command in (["list", pipeline], ["skip", pipeline, "1.csv"], ["list", pipeline, "--source", "order"]):
        outcome = invoke("source", *command)
        assert outcome.code == 2
        remedy = outcome.err.strip().rpartition("as in: headrace ")[2]
        assert invoke(*remedy.split()).code == 0
    with pytest.raises(SeveralSourcesError) as raised:
        load_pipeline(pipeline)
    step = Step("adopting", "nothing", pipeline=pipeline)
    again = exits._way_on(
        raised.value, ExitCode.FAILURE, step, "headrace source adopt", f"headrace source adopt {pipeline}"
    )
    assert again.endswith("headrace run, runs, errors, source list or source skip")
    assert "fix the cause" not in again
