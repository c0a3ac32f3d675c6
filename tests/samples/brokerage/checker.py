"""Compares a warehouse of the brokerage with expected tables: `python checker.py WAREHOUSE EXPECTED`.

Reads the Delta tables with deltalake alone, and needs nothing of Headrace. Surrogate keys are not compared, but each
must lead to the version that its fact names.
"""

import csv
import datetime as dt
import sys
from collections import Counter
from pathlib import Path

from deltalake import DeltaTable

KEYS = {
    "customer_key": ("dim_customer", {"customer_id": "customer_id", "customer_version": "version"}),
    "account_key": ("dim_account", {"account_id": "account_id", "account_version": "version"}),
    "security_key": ("dim_security", {"symbol": "symbol", "security_version": "version"}),
    "broker_key": ("dim_broker", {"broker_id": "broker_id"}),
}
FACTS = ("dim_account", "dim_trade", "fact_cash_balances", "fact_holdings", "fact_watches")


def as_text(value):
    """Return a value as the expected files spell it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dt.datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    return str(value)


def read(warehouse, table):
    """Return the rows of a table as dictionaries."""
    return DeltaTable(str(Path(warehouse) / table)).to_pyarrow_table().to_pylist()


def read_expected(folder, table):
    """Return the columns and the rows of an expected table."""
    with (Path(folder) / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        columns, *rows = csv.reader(file)
    return columns, [tuple(row) for row in rows]


def differences(rows, columns, expected):
    """Return what differs between rows and the expected ones, as text; empty if they are equal."""
    if rows and set(columns) - rows[0].keys():
        return [f"columns are missing: {sorted(set(columns) - rows[0].keys())}"]
    found = Counter(tuple(as_text(row[column]) for column in columns) for row in rows)
    wanted = Counter(expected)
    return [f"is not expected: {row}" for row in sorted((found - wanted).elements())] + [
        f"is missing: {row}" for row in sorted((wanted - found).elements())
    ]


def dangling(warehouse):
    """Return the rows of facts, and of accounts, whose surrogate keys do not lead to the versions that they name."""
    found = []
    for table in FACTS:
        rows = read(warehouse, table)
        for key, (dimension, names) in KEYS.items():
            if not rows or key not in rows[0] or dimension == table:
                continue
            version_of = {version[key]: version for version in read(warehouse, dimension)}
            for row in rows:
                version = version_of.get(row[key])
                if version is None or any(row[name] != version[column] for name, column in names.items()):
                    found.append(f"{table}: {key} {row[key]} is not the version of {row}")
    return found


def required_keys(table):
    """Return the surrogate keys that the rows of a table carry."""
    return {
        "dim_account": {"customer_key", "broker_key"},
        "dim_trade": {"account_key", "customer_key", "security_key", "broker_key"},
        "fact_cash_balances": {"account_key", "customer_key"},
        "fact_holdings": {"account_key", "customer_key", "security_key"},
        "fact_watches": {"customer_key", "security_key"},
    }.get(table, set())


def compare(warehouse, expected):
    """Return the differences by table, and those of the surrogate keys under `keys`."""
    tables = sorted(path.stem for path in Path(expected).glob("*.csv"))
    found = {table: differences(read(warehouse, table), *read_expected(expected, table)) for table in tables}
    for table in tables:
        rows = read(warehouse, table)
        missing = required_keys(table) - (rows[0].keys() if rows else required_keys(table))
        found[table] += [f"has no column {name}" for name in sorted(missing)]
    return {**found, "keys": dangling(warehouse)}


if __name__ == "__main__":
    result = compare(*sys.argv[1:3])
    for name, texts in result.items():
        print(f"{name}: {'equal' if not texts else f'{len(texts)} differences, such as: {texts[0]}'}")  # noqa: T201
    sys.exit(any(result.values()))
