"""The run catalog is shown as runs, and as the batches of one run."""

import os

import pytest

from headrace.cli.commands.init import PIPELINE
from headrace.pipelines.catalog import BatchRecord, Catalog
from headrace.pipelines.config import load_pipeline


@pytest.fixture
def pipeline(tmp_path):
    path = tmp_path / "pipeline.yml"
    path.write_text(PIPELINE)
    return path


@pytest.fixture
def run(pipeline):
    with Catalog(load_pipeline(pipeline).catalog, clock=lambda: 1.7e9) as catalog:
        run = catalog.start_run("orders", "once")
        catalog.record_batch(
            BatchRecord(
                run=run, stream="s", batch=0, started=1.7e9, seconds=2.5, rows_in=10, loaded=8, dropped=1, routed=0,
                rejected=1, new_members=3, hit_ratio=0.5, pages_wanted=4, pages_read=6, seeks=2, deadline_misses=0,
                detail={},
            )
        )  # fmt: skip
        catalog.finish_run(run, "done")
    return run


def test_a_pipeline_that_has_not_run(invoke, pipeline):
    outcome = invoke("runs", pipeline)
    assert outcome.code == 0
    assert outcome.out == "orders has not run yet\n"


def test_runs_are_listed_with_their_sums(invoke, pipeline, run):
    (found,) = invoke("runs", pipeline, "--json").document
    assert (found["id"], found["state"], found["rows_in"], found["new_members"]) == (run, "done", 10, 3)
    assert run[:8] in invoke("runs", pipeline).out


def test_a_run_is_shown_with_its_batches(invoke, pipeline, run):
    document = invoke("runs", pipeline, "--run", run[:6], "--json").document
    assert [batch["loaded"] for batch in document["batch_records"]] == [8]
    assert "Batches" in invoke("runs", pipeline, "--run", run[:6]).out


def test_a_run_of_a_process_that_has_ended_is_shown_as_lost(invoke, pipeline):
    with Catalog(load_pipeline(pipeline).catalog, clock=lambda: 1.7e9) as catalog:
        catalog.start_run("orders", "follow", "a lease that is gone")
    (found,) = invoke("runs", pipeline, "--json").document
    assert (found["state"], found["alive"]) == ("lost", 1.7e9)
    assert "last alive at 2023-11-14 22:13:20" in invoke("runs", pipeline, "--run", found["id"]).out


def test_the_log_of_spark_is_found(invoke, pipeline, run, monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    log = tmp_path / "logs" / f"spark-20230101T000000-{os.getpid()}.log"
    log.parent.mkdir()
    log.touch()
    assert invoke("runs", pipeline, "--run", run, "--json").document["spark_log"] == str(log)


@pytest.mark.usefixtures("run")
def test_an_unknown_run_is_a_failure(invoke, pipeline):
    outcome = invoke("runs", pipeline, "--run", "zzz")
    assert outcome.code == 1
    assert "no run of orders begins with 'zzz'" in outcome.err


def test_a_misspelt_field_is_named_with_the_valid_ones(invoke, pipeline):
    pipeline.write_text(PIPELINE.replace("memory:", "memroy:"))
    outcome = invoke("runs", pipeline)
    assert outcome.code == 1
    assert "memroy" in outcome.err
    assert "memory" in outcome.err


def test_an_unknown_time_zone_is_named(invoke, pipeline):
    pipeline.write_text(PIPELINE.replace("time_zone: UTC", "time_zone: Mars/Olympus"))
    outcome = invoke("runs", pipeline)
    assert outcome.code == 1
    assert "Mars/Olympus" in outcome.err
