import json

import pytest
from click.testing import CliRunner

from headrace.cli.main import headrace


class Outcome:
    """What a run of the command line left: exit code, standard output and standard error."""

    def __init__(self, result):
        self.code = result.exit_code
        self.out = result.stdout
        self.err = result.stderr

    @property
    def document(self):
        return json.loads(self.out)

    def __repr__(self):
        return f"exit {self.code}\n{self.out}\n{self.err}"


@pytest.fixture
def invoke():
    """Return a function that runs the command line inside this process."""

    def run(*arguments, env=None):
        return Outcome(CliRunner().invoke(headrace, [str(argument) for argument in arguments], env=env))

    return run
