"""The run catalog and its leases, over SQLite."""

import os
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from sqlalchemy import text, update

from headrace.pipelines.catalog import LEASES, BatchRecord, Catalog
from headrace.pipelines.errors import CatalogError, LeaseHeldError
from headrace.pipelines.lease import Leases


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def catalog(tmp_path, clock):
    with Catalog(f"sqlite:///{tmp_path}/state/catalog.db", clock) as catalog:
        yield catalog


def record(run, batch, **counts):
    zeros = dict.fromkeys(
        ("rows_in", "loaded", "dropped", "routed", "rejected", "new_members", "pages_wanted", "pages_read", "seeks"), 0
    )
    given = {**zeros, "deadline_misses": 0, "hit_ratio": 0.5, **counts}
    return BatchRecord(run=run, stream="s", batch=batch, started=1.0, seconds=2.0, detail={"phases": {}}, **given)


def test_a_run_and_its_batches_come_back(catalog, clock):
    run = catalog.start_run("flights", "once")
    catalog.record_batch(record(run, 0, rows_in=10, loaded=9, rejected=1))
    catalog.record_batch(record(run, 1, rows_in=5, loaded=5, new_members=2))
    clock.now = 1060.0
    catalog.finish_run(run, "done")
    (found,) = catalog.runs("flights")
    assert (found.state, found.started, found.ended, found.batches) == ("done", 1000.0, 1060.0, 2)
    assert (found.rows_in, found.loaded, found.rejected, found.new_members) == (15, 14, 1, 2)
    assert [batch.batch for batch in catalog.batches(run)] == [0, 1]
    assert catalog.batches(run)[0].detail == {"phases": {}}


def test_a_batch_that_is_done_again_replaces_its_record(catalog):
    first, second = catalog.start_run("flights", "once"), catalog.start_run("flights", "once")
    catalog.record_batch(record(first, 0, loaded=1))
    catalog.record_batch(record(second, 0, loaded=2))
    assert catalog.batches(first) == []
    assert catalog.batches(second)[0].loaded == 2


def test_runs_are_listed_newest_first(catalog, clock):
    names = []
    for name in ("a", "b", "a"):
        clock.now += 1
        names.append(catalog.start_run(name, "once"))
    assert [run.id for run in catalog.runs()] == names[::-1]
    assert [run.id for run in catalog.runs("a", limit=1)] == [names[2]]


def state_of(catalog, run):
    return {found.id: (found.state, found.alive) for found in catalog.runs()}[run]


def test_a_run_is_running_while_its_lease_lives_and_lost_once_its_time_is_up(catalog, clock):
    with Leases(catalog, ["d"], seconds=60, clock=clock) as leases:
        run = catalog.start_run("flights", "follow", leases.token)
        clock.now += 50
        leases.check()
        assert state_of(catalog, run) == ("running", 1050.0)
        clock.now += 61
        assert state_of(catalog, run) == ("lost", 1050.0)
        (found,) = catalog.runs()
        assert found.ended == 1050.0
        assert f"process {os.getpid()}" in found.error
        assert "last alive at 1970-01-01 00:17:30+00:00" in found.error


def test_a_run_whose_lease_is_taken_over_is_lost(catalog, clock):
    with Leases(catalog, ["d"], seconds=60, clock=clock) as first:
        run = catalog.start_run("flights", "once", first.token)
        clock.now += 61
        with Leases(catalog, ["d"], seconds=60, clock=clock) as second:
            catalog.start_run("flights", "once", second.token)
            with catalog.transaction() as connection:
                states = connection.execute(text("SELECT state FROM headrace_runs ORDER BY started")).scalars().all()
            assert states == ["lost", "running"]  # stored as soon as the next run begins
            assert state_of(catalog, run) == ("lost", 1000.0)


def test_a_run_that_wakes_up_under_its_own_lease_is_running_again(catalog, clock):
    with Leases(catalog, ["d"], seconds=60, clock=clock) as leases:
        run = catalog.start_run("flights", "follow", leases.token)
        clock.now += 61
        assert state_of(catalog, run)[0] == "lost"
        leases.check()
        assert state_of(catalog, run) == ("running", 1061.0)
        catalog.finish_run(run, "stopped")
    (found,) = catalog.runs()
    assert (found.state, found.error) == ("stopped", None)


def test_a_run_of_a_killed_process_is_lost_at_once(tmp_path):
    url = f"sqlite:///{tmp_path}/c.db"
    script = (
        "import os, signal\n"
        "from headrace.pipelines.catalog import Catalog\n"
        "from headrace.pipelines.lease import Leases\n"
        f"catalog = Catalog({url!r})\n"
        "catalog.start_run('flights', 'once', Leases(catalog, ['d']).__enter__().token)\n"
        "catalog.start_run('flights', 'once')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    with Catalog(url) as catalog:
        assert [run.state for run in catalog.runs()] == ["lost", "lost"]


def test_the_catalog_of_an_older_release_is_brought_up_to_date(tmp_path):
    url = f"sqlite:///{tmp_path}/c.db"
    with closing(sqlite3.connect(tmp_path / "c.db")) as old:
        old.executescript(
            "CREATE TABLE headrace_meta (version INTEGER PRIMARY KEY); INSERT INTO headrace_meta VALUES (1);"
            "CREATE TABLE headrace_runs (id VARCHAR(36) PRIMARY KEY, pipeline VARCHAR(64) NOT NULL, mode VARCHAR(16), "
            "state VARCHAR(16), started FLOAT, ended FLOAT, host VARCHAR(255), pid INTEGER, error TEXT);"
            "INSERT INTO headrace_runs VALUES "
            f"('a', 'p', 'once', 'running', 1, NULL, '{socket.gethostname()}', {1 << 30}, NULL),"
            "('b', 'p', 'once', 'done', 2, 3, 'h', 1, NULL);"
        )
    with Catalog(url) as catalog:
        assert [(run.id, run.state) for run in catalog.runs()] == [("b", "done"), ("a", "lost")]
        catalog.start_run("p", "once")
    with Catalog(url) as catalog:
        assert len(catalog.runs()) == 3


def test_a_url_that_is_none_is_refused_without_its_password():
    with pytest.raises(CatalogError) as caught:
        Catalog("nosuch://user:s3cret@host/db")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "module", "remedy"),
    [
        ("postgresql+psycopg://u:s3cret@h/d", "psycopg", "pip install 'headrace[postgresql]'"),
        ("postgresql+psycopg2://h/d", "psycopg2", "write the URL as postgresql+psycopg://"),
        ("mysql+pymysql://h/d", "pymysql", "pip install pymysql"),
    ],
)
def test_a_driver_that_is_missing_is_named_with_the_remedy(monkeypatch, url, module, remedy):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(CatalogError) as caught:
        Catalog(url)
    assert module in str(caught.value)
    assert remedy in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "c.db").write_text("not a database, but long enough to look at" * 50)
    with pytest.raises(CatalogError, match="not a database"):
        Catalog(f"sqlite:///{tmp_path}/c.db")


def test_a_newer_catalog_is_refused(tmp_path):
    url = f"sqlite:///{tmp_path}/c.db"
    with Catalog(url) as catalog, catalog.transaction() as connection:
        connection.execute(text("UPDATE headrace_meta SET version = 99"))
    with pytest.raises(CatalogError, match="newer release"):
        Catalog(url)


def test_a_lease_is_held_by_one(catalog, clock):
    with Leases(catalog, ["dimension:plane", "pipeline:a"], clock=clock):
        with pytest.raises(LeaseHeldError, match=f"dimension:plane is in use by process {os.getpid()}"):
            Leases(catalog, ["pipeline:b", "dimension:plane"], clock=clock).__enter__()
        with Leases(catalog, ["pipeline:b"], clock=clock):
            pass
    with Leases(catalog, ["dimension:plane"], clock=clock):
        pass


def test_a_lease_whose_time_is_up_is_taken_over_and_its_holder_is_told(catalog, clock):
    with Leases(catalog, ["d"], seconds=60, clock=clock) as first:
        clock.now += 61
        with Leases(catalog, ["d"], seconds=60, clock=clock) as second:
            with pytest.raises(LeaseHeldError, match="taken over"):
                first.check()
            second.check()


def test_a_lease_that_is_renewed_lasts(catalog, clock):
    with Leases(catalog, ["d"], seconds=60, clock=clock) as first:
        clock.now += 59
        first.check()
        clock.now += 59
        with pytest.raises(LeaseHeldError):
            Leases(catalog, ["d"], clock=clock).__enter__()


def test_the_lease_of_a_dead_process_of_this_machine_is_taken_over_at_once(tmp_path):
    url = f"sqlite:///{tmp_path}/c.db"
    script = (
        "import os, signal, sys\n"
        "from headrace.pipelines.catalog import Catalog\n"
        "from headrace.pipelines.lease import Leases\n"
        f"leases = Leases(Catalog({url!r}), ['d']).__enter__()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    with Catalog(url) as catalog, Leases(catalog, ["d"]) as leases:
        leases.check()


def test_a_process_id_that_was_given_again_is_not_taken_for_the_holder(catalog, clock):
    Leases(catalog, ["d"], clock=clock)._take("d")
    with catalog.transaction() as connection:
        connection.execute(update(LEASES).values(process="1"))
    with Leases(catalog, ["d"], clock=clock) as leases:
        leases.check()


def test_a_holder_on_another_machine_is_believed_until_its_time_is_up(catalog, clock):
    Leases(catalog, ["d"], seconds=60, clock=clock)._take("d")
    with catalog.transaction() as connection:
        connection.execute(update(LEASES).values(machine="elsewhere x y", pid=1, process="1"))
    with pytest.raises(LeaseHeldError, match="on elsewhere"):
        Leases(catalog, ["d"], clock=clock).__enter__()
    clock.now += 60
    with Leases(catalog, ["d"], clock=clock):
        pass
