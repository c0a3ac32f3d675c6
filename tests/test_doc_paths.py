"""Docs name only paths that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LAYER_PATH = re.compile(r"`((?:storage|joins|etl|pipelines|cli|samples)/[\w/.-]*)`")


def paths_in(page):
    return LAYER_PATH.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_paths_that_exist(page):
    assert [path for path in paths_in(page) if not (ROOT / path).exists()] == []


def test_paths_are_found():
    assert "pipelines/runner.py" in paths_in(ROOT / "docs" / "architecture.md")
