"""The scaffold is a pipeline that can be read as it is, and nothing is written over."""

import pytest

from headrace.cli.commands.init import FILES
from headrace.pipelines.config import load_pipeline


def test_the_pipeline_file_is_valid(invoke, tmp_path):
    outcome = invoke("init", tmp_path / "shop")
    assert outcome.code == 0
    config = load_pipeline(tmp_path / "shop" / "pipeline.yml")
    assert [lookup.role for lookup in config.lookups] == ["customer", "product"]


def test_what_is_there_stays(invoke, tmp_path):
    (tmp_path / "pipeline.yml").write_text("mine")
    outcome = invoke("init", tmp_path)
    assert outcome.code == 1
    assert "already there" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["pipeline.yml"]
    assert (tmp_path / "pipeline.yml").read_text() == "mine"


@pytest.mark.parametrize("command", [("init",), ("demo", "--dir")])
def test_a_file_is_no_place_for_a_folder(invoke, tmp_path, command):
    (tmp_path / "there").write_text("mine")
    outcome = invoke(*command, tmp_path / "there")
    assert outcome.code == 2
    assert "is a file" in outcome.err
    assert (tmp_path / "there").read_text() == "mine"


def test_json_lists_the_files(invoke, tmp_path):
    assert invoke("init", tmp_path, "--json").document["files"] == list(FILES)
