"""A process that extracts a table and kills itself before one of its calls that make something durable."""

import os
import signal
import sys
from pathlib import Path

from headrace.pipelines.database import extract

url, table, folder, new_by, fatal = sys.argv[1:]
calls = 0


def counted(function):
    def call(*arguments):
        global calls  # noqa: PLW0603 - the whole state of this process
        calls += 1
        if calls == int(fatal):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    return call


os.fsync = counted(os.fsync)
Path.rename = counted(Path.rename)
Path.replace = counted(Path.replace)
extract(url, table, folder, new_by=new_by or None, rows_per_file=4)
