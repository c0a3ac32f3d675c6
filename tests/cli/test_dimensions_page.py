"""The commands of the page on dimensions with history print what the page shows."""

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "dimensions.md"


def blocks(section):
    """Yield the commands of a section, each with the lines that follow it."""
    command, lines = None, []
    for line in section.splitlines():
        if line.startswith("    $ ") or (line and not line.startswith("    ")):
            if command is not None:
                yield command, "\n".join(lines).strip() + "\n"
            command, lines = (line[6:] if line.startswith("    $ ") else None), []
        elif command is not None:
            lines.append(line[4:])


def test_the_commands_print_what_the_page_shows(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_REPLICAS", str(tmp_path / "replicas"))
    section = re.search(r"^### Apply changes\n(.*?)^### ", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]
    ran = 0
    for command, shown in blocks(section):
        program, *arguments = shlex.split(command)
        if program == "cat":
            Path(arguments[0]).parent.mkdir(exist_ok=True)
            Path(arguments[0]).write_text(shown)
            continue
        outcome = invoke(*arguments)
        assert outcome.code == 0, outcome
        assert outcome.out.replace(str(tmp_path), "/home/ada") == shown, command
        ran += 1
    assert ran == 5
