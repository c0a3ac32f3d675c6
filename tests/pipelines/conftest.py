"""One Spark session for all tests that need one, and what several of them share."""

import json
import sys
from pathlib import Path

import pytest

from headrace.pipelines.spark.sessions import SparkSettings, session, stop

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def spark():
    """Return the one session; its master allows each task four attempts, as the default master does."""
    settings = SparkSettings(
        master="local[2,4]",
        shuffle_partitions=2,
        conf={
            "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",  # VACUUM starts 10,000 tasks otherwise
        },
    )
    started = session(settings)
    yield started
    stop(started)


@pytest.fixture(autouse=True)
def replicas(tmp_path, monkeypatch):
    """Give each test a folder of its own for replicas."""
    folder = tmp_path / "replicas"
    monkeypatch.setenv("HEADRACE_REPLICAS", str(folder))
    return folder


@pytest.fixture
def notes():
    """Return a function that reads the notes among a stage's output."""

    def read(batches):
        return [json.loads(text) for batch in batches for text in batch.column("_note").to_pylist() if text is not None]

    return read


def pytest_collection_modifyitems(items):
    """Run the tests that need Spark after the others.

    Quick ones fail first, and kernels that another process of the suite compiles at the same time are not compiled
    twice.
    """
    items.sort(key=lambda item: item.get_closest_marker("spark") is not None)
