"""The page on joins of streams: its examples run, and its table of algorithms is that of the operators."""

import doctest
from pathlib import Path

from headrace.joins.streams.catalog import ALGORITHMS

PAGE = Path(__file__).parents[3] / "docs" / "streams.md"


def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0
    assert list(tmp_path.iterdir()) == []


def test_the_page_says_what_each_algorithm_can_do():
    page = PAGE.read_text()
    table = page[page.index("| algorithm | inputs |") :].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ")[:4] for line in table.splitlines() if line.startswith("| `")]
    assert rows == [
        [f"`{name}`", str(entry.most_inputs or "2 or more"), ", ".join(entry.hows), "yes" if entry.bands else "no"]
        for name, entry in ALGORITHMS.items()
    ]
