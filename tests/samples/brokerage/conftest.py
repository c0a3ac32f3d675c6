import sys
import tarfile
from pathlib import Path

import pytest

from headrace.pipelines.spark.sessions import SparkSettings, session, stop

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Return the folder of the small data set: `source`, and `expected/after_batch1` to 3."""
    folder = tmp_path_factory.mktemp("small")
    with tarfile.open(HERE / "small.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="session")
def spark():
    """Return the session that loads in this process use."""
    started = session(SparkSettings(master="local[2]", shuffle_partitions=2))
    yield started
    stop(started)
