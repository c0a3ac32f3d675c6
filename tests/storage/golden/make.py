"""Write the golden tables of the current format version, unless they exist.

.venv/bin/python tests/storage/golden/make.py
"""

import datetime as dt
import decimal
import json
import sys
from pathlib import Path

import pyarrow as pa

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from headrace.storage.format.constants import FORMAT_VERSION  # noqa: E402 - after the path is set
from headrace.storage.table import Table  # noqa: E402 - as above

UTC = dt.UTC


def day(number):
    return dt.date(2013, 1, 1) + dt.timedelta(days=number)


def integers(numbers):
    """Return rows with a key of one word and a payload of every fixed-width kind."""
    return pa.Table.from_pylist(
        [
            {
                "flight": n - 50,
                "year": None if n % 7 == 0 else 1990 + n % 30,
                "flag": n % 3 == 0,
                "weight": n / 8,
                "price": decimal.Decimal(n * n) / 100,
                "wide": decimal.Decimal(10**30 + n),
                "day": day(n),
                "seen": None if n % 5 == 0 else dt.datetime(2013, 1, 1, n % 24, tzinfo=UTC),
                "carrier": ["AA", "UA", "9E", None][n % 4],
            }
            for n in numbers
        ],
        schema=pa.schema(
            [
                ("flight", pa.int32()),
                ("year", pa.int16()),
                ("flag", pa.bool_()),
                ("weight", pa.float64()),
                ("price", pa.decimal128(12, 2)),
                ("wide", pa.decimal128(38, 0)),
                ("day", pa.date32()),
                ("seen", pa.timestamp("us", "UTC")),
                ("carrier", pa.string()),
            ]
        ),
    )


def texts(numbers):
    """Return rows with a composite key of text and date, several rows a key, and text of all lengths."""
    return pa.Table.from_pylist(
        [
            {
                "tail": f"N{n % 40:03}\x00ü"[: 3 + n % 5],
                "day": day(n % 3),
                "note": None if n % 6 == 0 else "abc" * (n % 50),
                "raw": bytes([n % 256]) * (n % 4),
            }
            for n in numbers
        ],
        schema=pa.schema([("tail", pa.string()), ("day", pa.date32()), ("note", pa.string()), ("raw", pa.binary())]),
    )


GOLDEN = {"integers": (integers, ["flight"], True), "texts": (texts, ["tail", "day"], False)}


def write(folder, name):
    """Write a golden table to a folder, and its rows as JSON; return the path of the table."""
    rows, key, unique = GOLDEN[name]
    path = folder / f"v{FORMAT_VERSION}-{name}.table"
    with Table.build(path, rows(range(400)), key=key, unique=unique, page_size=4096, app=("golden", 1)) as table:
        table.apply(rows(range(380, 420)), rows(range(30, 60)).select(key), app=("golden", 2))
        table.apply(deletes=rows(range(5)).select(key), app=("other", -7))
        content = pa.Table.from_batches(list(table.scan()), schema=table.schema).to_pylist()
    path.with_suffix(".json").write_text(json.dumps(content, default=str, indent=0) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    for name in GOLDEN:
        if not (HERE / f"v{FORMAT_VERSION}-{name}.table").exists():
            write(HERE, name)
