"""`headrace run`: what cannot run says why. What `init` wrote runs in `tests/pipelines/test_scaffold.py`."""

import os
import subprocess
import sys

import pytest

from headrace.pipelines.runner import RunResult


@pytest.fixture
def shop(invoke, tmp_path):
    invoke("init", tmp_path)
    return tmp_path


def test_a_mode_must_be_chosen(invoke, shop):
    outcome = invoke("run", shop / "pipeline.yml")
    assert outcome.code == 2
    assert "--once" in outcome.err
    assert "--follow" in outcome.err


def test_two_modes_exclude_each_other(invoke, shop):
    outcome = invoke("run", shop / "pipeline.yml", "--once", "--follow")
    assert outcome.code == 2
    assert "exclude each other" in outcome.err


def test_a_missing_pipeline_file(invoke, tmp_path):
    outcome = invoke("run", tmp_path / "none.yml", "--once")
    assert outcome.code == 1
    assert "none.yml" in outcome.err


def test_a_folder_in_place_of_a_pipeline_file(invoke, shop):
    outcome = invoke("run", shop, "--once")
    assert outcome.code == 1
    assert f"{shop} is a folder; name the pipeline file in it" in " ".join(outcome.err.split())


def test_a_misspelt_field_fails_before_spark_starts(invoke, shop):
    text = (shop / "pipeline.yml").read_text().replace("policy:", "polcy:")
    (shop / "pipeline.yml").write_text(text)
    outcome = invoke("run", shop / "pipeline.yml", "--once")
    assert outcome.code == 1
    assert "starting Spark" not in outcome.err
    assert "polcy" in outcome.err
    assert "policy" in outcome.err
    assert not (shop / "warehouse").exists()


def test_a_run_names_the_command_that_shows_changes_it_could_not_apply(invoke, shop, monkeypatch):
    counts = {"customer": {"added": 5, "rejected": 2, "routed": 1}, "plain": {"added": 1}}
    result = RunResult("r", "shop", "done", None, 1.0, (), "facts", "errors", "duplicates", changes=counts)
    monkeypatch.setattr("headrace.cli.commands.run.load", lambda *_, **__: result)
    shown = " ".join(invoke("run", shop / "pipeline.yml", "--once").out.split())
    assert "3 changes of dimension customer did not apply; see `headrace errors show --dimension customer" in shown
    assert "changes of dimension plain: 1 added" in shown
    assert "of dimension plain did not apply" not in shown


def run_apart(shop, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        cwd=shop, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.spark
def test_a_missing_java_is_one_clear_line(shop):
    done = run_apart(shop, "run", "pipeline.yml", "--once", JAVA_HOME=str(shop))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (cause,) = [line for line in done.stderr.splitlines() if line.startswith("  cause")]
    assert "JAVA_HOME" in cause
    assert "install" in cause
