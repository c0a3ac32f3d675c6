"""Bulk-loaded golden files with every type open. `python test_golden_types.py FOLDER` writes them anew."""

import datetime as dt
import decimal
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.storage import Table

GOLDEN = Path(__file__).parent / "golden"
ROWS = 120


def all_types():
    """Return a table with an integer key and a payload column of every type, nulls in each."""
    number = [None if n % 5 == 0 else (n * 7919) % 100 - 50 for n in range(ROWS)]
    positive = [None if n is None else abs(n) for n in number]
    ticks = pa.array(number, pa.int64())
    columns = {f"i{bits}": pa.array(number, f"int{bits}") for bits in (8, 16, 32, 64)}
    columns |= {f"u{bits}": pa.array(positive, f"uint{bits}") for bits in (8, 16, 32, 64)}
    columns |= {f"f{bits}": pa.array(number, pa.float64()).cast(f"float{bits}") for bits in (32, 64)}
    columns |= {
        "f16": pa.array(number, pa.float64()).cast(pa.float16()),
        "flag": pa.array([None if n is None else n > 0 for n in number]),
        "date": pa.array([None if n is None else dt.date(2013, 1, 1) + dt.timedelta(n) for n in number]),
        "instant": ticks.cast(pa.timestamp("ms", tz="UTC")),
        "span": ticks.cast(pa.duration("us")),
        "narrow": pa.array([None if n is None else decimal.Decimal(n) for n in number], pa.decimal128(9, 2)),
        "wide": pa.array([None if n is None else decimal.Decimal(n) * 10**20 for n in number], pa.decimal128(38, 5)),
        "text": pa.array([None if n is None else f"text {n}" for n in number]),
        "carrier": pa.array([None if n is None else ("AA", "DL", "UA")[n % 3] for n in number]),
        "raw": pa.array([None if n is None else bytes([n % 256]) * (n % 4) for n in number], pa.binary()),
    }
    return pa.table({"k": pa.array(range(-ROWS, ROWS, 2), pa.int64()), **columns})


def long_runs():
    """Return a table with a key of text and number, runs of one key over several pages, and two levels of nodes."""
    text = [f"N{n % 7}" + "x" * (n % 3) + "\0" * (n % 2) for n in range(900)]
    return pa.table({"tail": text, "leg": pa.array([n % 2 for n in range(900)], pa.int16()), "row": ["r" * 40] * 900})


TABLES = {"v4-all-types": (all_types, ["k"], True), "v4-long-runs": (long_runs, ["tail", "leg"], False)}


@pytest.mark.parametrize("name", TABLES)
def test_a_golden_file_opens(name):
    make, key, unique = TABLES[name]
    with Table.open(GOLDEN / name) as table:
        found = pa.Table.from_batches(list(table.scan()), schema=table.schema)
        assert table.check().ok
        assert (table.key, table.stats.unique) == (tuple(key), unique)
        assert table.app_version("golden") == 1
        assert table.lookup(found.select(key).slice(0, 1)).num_rows >= 1
    wanted = make().sort_by([(column, "ascending") for column in key])
    assert found.equals(wanted.cast(found.schema))


if __name__ == "__main__":
    for file, (make_rows, columns, is_unique) in TABLES.items():
        options = {"unique": is_unique, "page_size": 4096, "fill": 1.0 if is_unique else 0.3, "app": ("golden", 1)}
        Table.build(Path(sys.argv[1]) / file, make_rows(), columns, **options).close()
