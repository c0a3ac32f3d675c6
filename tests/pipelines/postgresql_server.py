"""A PostgreSQL server that the tests start, where its programs and driver are installed."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest


def program(name):
    """Return the path of one of the server's programs, or None."""
    there = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(there[-1]) if there else shutil.which(name)


needs_server = [
    pytest.mark.skipif(program("initdb") is None, reason="PostgreSQL's server is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("psycopg") is None, reason="needs headrace[postgresql]"),
]


@contextlib.contextmanager
def running_server():
    """Start a server on a socket in a folder of its own; PostgreSQL refuses to run as root, so another user runs it."""
    folder = Path("/tmp") / f"headrace-postgresql-{os.getpid()}"  # the path of a socket is short
    folder.mkdir()
    user = {"user": "postgres"} if os.getuid() == 0 else {}
    if user:
        shutil.chown(folder, "postgres")
    data = folder / "data"
    options = f"-k {folder} -c listen_addresses='' -c fsync=off"
    try:
        for command in (
            [program("initdb"), "-D", data, "-U", "loader", "--auth=trust", "--no-sync", "-E", "UTF8"],
            [program("pg_ctl"), "-D", data, "-l", folder / "log", "-o", options, "-w", "start"],
        ):
            subprocess.run(command, check=True, capture_output=True, cwd="/", **user)
        yield folder
    finally:
        stop = [program("pg_ctl"), "-D", data, "-m", "immediate", "stop"]
        subprocess.run(stop, check=False, capture_output=True, cwd="/", **user)
        shutil.rmtree(folder)
