"""Partial changes and parents in pipeline files end in the same versions as the Python API's, whatever the loads."""

import datetime as dt
import random

import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable

from headrace.etl.history import Follow, HistoryDimension
from headrace.pipelines.changes import SnapshotOptions, apply_files, check_history
from headrace.pipelines.config.history import references_of
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.delta.tables import open_table, read_rows
from headrace.pipelines.errors import PipelineFileError

DAYS = [dt.date(2024, 1, day) for day in range(1, 8)]
COMMON = {"effective": "since", "effective_type": "date", "sequence": "n", "operation": "op"}
CUSTOMER = {
    "path": "w/customer", "natural_key": ["id"], "columns": {"id": "bigint", "city": "string", "load": "bigint"},
    "history": {**COMMON, "audit": ["load"]}, "changes": "customers", "shards": 2,
}  # fmt: skip
ACCOUNT = {
    "path": "w/account", "natural_key": ["account"],
    "columns": {
        "account": "bigint", "name": "string", "kind": "string", "customer": "bigint", "customer_key": "bigint",
        "customer_from": "date", "customer_city": "string", "load": "bigint",
    },
    "history": {
        **COMMON, "audit": ["load"], "partial": "given",
        "parents": [
            {
                "dimension": "customer", "on": {"customer": "id"}, "audit": {"load": "load"},
                "carry": {"customer_key": "customer_key", "customer_from": "valid_from", "customer_city": "city"},
            }
        ],
    },
    "changes": "accounts", "shards": 2,
}  # fmt: skip
DOCUMENT = {
    "name": "bank",
    "source": {"format": "csv", "path": "in", "schema": {"order": "bigint", "account": "bigint", "day": "date"}},
    "dimensions": {"account": ACCOUNT, "customer": CUSTOMER},
    "lookups": [
        {"dimension": "account", "role": "account", "on": {"account": "account"}, "event_time": "day",
         "carry": ["customer", "customer_city"]}
    ],
    "sink": {"path": "w/facts"}, "memory": "16MiB", "replica_memory": "16MiB", "replicas": "replicas",
    "spark": {"master": "local[2,4]"},
}  # fmt: skip
CUSTOMERS = {
    "op": pa.string(),
    "id": pa.int64(),
    "city": pa.string(),
    "load": pa.int64(),
    "since": pa.date32(),
    "n": pa.int64(),
}
ACCOUNTS = {
    "op": pa.string(), "account": pa.int64(), "name": pa.string(), "kind": pa.string(), "customer": pa.int64(),
    "load": pa.int64(), "since": pa.date32(), "n": pa.int64(), "given": pa.list_(pa.string()),
}  # fmt: skip
SHOWN = [
    "account",
    "name",
    "kind",
    "customer",
    "customer_from",
    "customer_city",
    "load",
    "valid_from",
    "valid_to",
    "is_current",
    "version",
    "is_deleted",
]


class Bank:
    """A pipeline file with a parent and its child, and the same dimensions of the Python API."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("in", "customers", "accounts"):
            (folder / name).mkdir()
        (folder / "bank.yml").write_text(yaml.safe_dump(DOCUMENT))
        self.config = load_pipeline(folder / "bank.yml")
        (self.reference,) = references_of(self.config, "account")
        self.customers = HistoryDimension.create(folder / "api" / "customer", self.reference.parent)
        self.accounts = HistoryDimension.create(folder / "api" / "account", self.reference.child)
        self.load = 0

    def give(self, customers, accounts):
        """Apply one load to the dimensions of the Python API, and write it as files."""
        self.load += 1
        tables = []
        for rows, kinds in ((customers, CUSTOMERS), (accounts, ACCOUNTS)):
            columns = {name: [row[name] for row in rows] for name in kinds}
            tables.append(pa.table(columns, schema=pa.schema(list(kinds.items()))))
        self.customers.apply_changes(tables[0])
        # The number of a cascade is only compared with those of other cascades.
        follow = Follow(self.reference, self.customers, tables[0], 1000 + self.load)
        self.accounts.apply_changes(tables[1], follow=follow)
        for name, rows, kinds in (("customers", customers, CUSTOMERS), ("accounts", accounts, ACCOUNTS)):
            if rows:
                lines = [",".join(kinds), *(",".join(text(row[name]) for name in kinds) for row in rows)]
                (self.folder / name / f"{self.load}.csv").write_text("\n".join(lines) + "\n")

    def apply(self, name, folder, **options):
        if any((self.folder / folder).iterdir()):
            return apply_files(self.config, name, self.folder / folder, **options)
        return None

    def expected(self):
        return sorted(map(repr, self.accounts.versions(special=False).select(SHOWN).to_pylist()))

    def versions(self, name):
        table = DeltaTable(str(self.folder / "w" / name))
        return [
            row
            for row in read_rows(
                table.table_uri[7:],
                open_table(table.table_uri[7:]).version(),
                [field.name for field in table.schema().fields],
            )
            .read_all()
            .to_pylist()
            if row[f"{name}_key"] > 0
        ]

    def found(self):
        """Return the versions, whose surrogate keys of customers must be those of the customers' versions."""
        keys = {row["customer_key"]: (row["id"], row["valid_from"], row["city"]) for row in self.versions("customer")}
        rows = self.versions("account")
        for row in rows:
            named = (row["customer"], row["customer_from"], row["customer_city"])
            assert keys.get(row["customer_key"], named) == named
            assert (row["customer_key"] is None) == (row["customer_from"] is None)
        return sorted(repr({name: row[name] for name in SHOWN}) for row in rows)


def text(value):
    if isinstance(value, list):
        return f'"{", ".join(value)}"'
    return "" if value is None else str(value)


def random_load(rng, number):
    def common():
        return {"op": rng.choice("UUUD"), "since": rng.choice(DAYS), "n": rng.randrange(4), "load": number}

    customers = [{"id": rng.randrange(3), "city": rng.choice("xyz"), **common()} for _ in range(rng.randrange(4))]
    lists = (None, None, ["name"], ["customer", "load"], ["kind", "load"], ["name", "kind"])
    accounts = [
        {"account": rng.randrange(4), "name": rng.choice("pq"), "kind": rng.choice("rs"), "customer": rng.randrange(3),
         "given": rng.choice(lists), **common()}
        for _ in range(rng.randrange(4))
    ]  # fmt: skip
    return customers, accounts


@pytest.mark.parametrize("seed", range(6))
def test_loads_in_any_cut_end_in_the_versions_of_the_python_api(tmp_path, seed):
    rng, bank = random.Random(seed), Bank(tmp_path)
    for number in range(1, 6):
        bank.give(*random_load(rng, number))
        if rng.random() < 0.6:
            bank.apply("customer", "customers")
        if rng.random() < 0.6:
            bank.apply("account", "accounts")
    bank.apply("customer", "customers")
    bank.apply("account", "accounts")
    assert bank.found() == bank.expected()
    for name in ("customer", "account"):
        assert check_history(bank.config, name) == []
