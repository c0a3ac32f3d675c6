"""The examples of the page on dimensions run, and print what it shows; so do those of the modules."""

import doctest
import importlib
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "dimensions.md"
MODULES = ["as_of", "declaration", "instants", "snapshots", "store", "values"]


def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name):
    result = doctest.testmod(importlib.import_module(f"headrace.etl.history.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
