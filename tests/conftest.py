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

SEED = int(os.environ.setdefault("HEADRACE_TEST_SEED", str(secrets.randbits(32))))  # worker processes inherit it


def pytest_report_header():
    return f"seed of random data: {SEED} (repeat with HEADRACE_TEST_SEED={SEED})"


@pytest.fixture
def rng():
    """Return a generator whose seed the head of the report names."""
    return np.random.default_rng(SEED)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Give one worker all tests that use the Spark session, and each other module to one worker (pytest-xdist)."""
    for item in items:
        group = "spark" if "spark" in getattr(item, "fixturenames", ()) else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
