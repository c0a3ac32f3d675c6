"""Settings for the whole suite: hypothesis without a wall-clock deadline, and one printed seed for random data."""

import os
import secrets
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest

hypothesis.settings.register_profile("headrace", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "headrace"))

SHARED_FOLDERS = ("etl", "etl/conformance")
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in SHARED_FOLDERS]  # tests of other layers use them too

SPARK_FOLDERS = ("tests/pipelines/", "tests/samples/")

os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")  # quick starts of every JVM

SEED = int(os.environ.setdefault("HEADRACE_TEST_SEED", str(secrets.randbits(32))))  # worker processes inherit it


def pytest_report_header():
    return f"seed of random data: {SEED} (repeat with HEADRACE_TEST_SEED={SEED})"


@pytest.fixture
def rng():
    """Return a generator whose seed the head of the report names."""
    return np.random.default_rng(SEED)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let one process run all tests that share a Spark session, and keep each other module in one process."""
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 - pytest-xdist may be away

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "spark" if nodeid.startswith(SPARK_FOLDERS) else super()._split_scope(nodeid)

    return Scheduling(config, log)
