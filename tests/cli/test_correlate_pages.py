"""The examples of `headrace correlate` in the pages run as written from a clone, and print what the pages show."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.cli.main import headrace

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/streams.md", "docs/command-line.md")
EXAMPLE = re.compile(r"^    (\$ )?(headrace correlate \S+\.csv .*)\n((?:    .*\n)*)", re.MULTILINE)
MEASURED = re.compile(r"\d[\d,.]* (?:s|rows/s|MiB)\b")


def examples(page):
    """Return the commands of a page and the lines that it shows after each; None for a command that shows none."""
    found = EXAMPLE.findall((ROOT / page).read_text())
    return [
        (command, [line[4:] for line in shown.splitlines()] if prompt else None) for prompt, command, shown in found
    ]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_its_commands_print(page, tmp_path, monkeypatch):
    (tmp_path / "samples").symlink_to(ROOT / "samples")
    monkeypatch.chdir(tmp_path)
    found = examples(page)
    assert found, page
    for command, shown in found:
        done = CliRunner().invoke(headrace, shlex.split(command)[1:])
        assert done.exit_code == 0, done.output
        if shown is not None:
            wanted, printed = (
                [MEASURED.sub("#", line) for line in lines] for lines in (shown, done.output.splitlines())
            )
            assert [line for line in printed if not re.match(r"\d{4}-\d\d-\d\d ", line)] == wanted
