"""The run catalog over a PostgreSQL server that the tests start, where its programs and driver are installed."""

import subprocess
import threading

import pytest
from postgresql_server import needs_server, program, running_server

from headrace.pipelines.catalog import BatchRecord, Catalog
from headrace.pipelines.errors import CatalogError, LeaseHeldError
from headrace.pipelines.lease import Leases

pytestmark = needs_server


@pytest.fixture(scope="module")
def server():
    with running_server() as folder:
        yield folder


@pytest.fixture
def url(server):
    return f"postgresql+psycopg://loader@/postgres?host={server}"


def record(run, batch):
    counts = dict.fromkeys(("dropped", "routed", "rejected", "new_members", "pages_wanted", "pages_read", "seeks"), 0)
    return BatchRecord(
        run=run, stream="s", batch=batch, started=1.0, seconds=2.0, rows_in=5, loaded=5, hit_ratio=0.5,
        deadline_misses=0, detail={"phases": {"join": 0.5}}, **counts,
    )  # fmt: skip


def test_runs_batches_and_leases_live_there(url):
    with Catalog(url) as catalog, Leases(catalog, ["pipeline:flights"]) as leases:
        run = catalog.start_run("flights", "once", leases.token)
        catalog.record_batch(record(run, 0))
        catalog.record_batch(record(run, 0))
        with pytest.raises(LeaseHeldError), Catalog(url) as other:
            Leases(other, ["pipeline:flights"]).__enter__()
        assert [(found.state, found.batches, found.loaded) for found in catalog.runs("flights")] == [("running", 1, 5)]
        catalog.finish_run(run, "done")
        assert catalog.batches(run)[0].detail == {"phases": {"join": 0.5}}
        assert catalog.runs("flights")[0].state == "done"


def test_a_run_whose_lease_is_gone_is_lost(url):
    with Catalog(url) as catalog:
        run = catalog.start_run("gone", "follow", "a lease that is gone")
        (found,) = catalog.runs("gone")
        assert (found.id, found.state) == (run, "lost")


def test_many_may_open_a_new_catalog_at_once(server):
    subprocess.run([program("createdb"), "-h", server, "-U", "loader", "fresh"], check=True, capture_output=True)
    failures = []

    def use():
        try:
            Catalog(f"postgresql+psycopg://loader@/fresh?host={server}").close()
        except CatalogError as error:
            failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_server_that_is_away_is_one_line(server):
    with pytest.raises(CatalogError, match="check that it can be reached and written") as caught:
        Catalog(f"postgresql+psycopg://loader@/postgres?host={server}/nowhere")
    assert "\n" not in str(caught.value)
