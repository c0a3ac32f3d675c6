"""Transformations in pipeline files: real runs against an oracle in plain Python, and what is refused."""

import csv
import datetime as dt
import re
from decimal import Decimal

import pytest
import yaml
from deltalake import DeltaTable

from headrace.pipelines.errors import BatchError, PipelineFileError
from headrace.pipelines.runner import run

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

SCHEMA = {"id": "bigint", "day": "string", "customer": "string", "price": "string", "quantity": "int", "kind": "string"}
STEPS = [
    {"where": "kind <> 'test'"},
    {"rename": {"kind": "category"}},
    {"derive": {"price": "CAST(price AS decimal(10,2))", "day": "to_date(day, 'dd.MM.yyyy')"}},
    {"derive": {"total": "CAST(price * quantity AS decimal(12,2))", "customer": "upper(trim(customer))"}},
    {"where": "total > 0"},
    {"select": ["customer", "id", "day", "total", "category"]},
]


class Shop:
    """A folder with a pipeline file and the files of its source."""

    def __init__(self, folder):
        self.folder = folder
        self.lines = []
        (folder / "in").mkdir(parents=True)
        self.document = {
            "name": "orders",
            "source": {"format": "csv", "path": "in", "schema": SCHEMA},
            "transform": STEPS,
            "dimensions": {"customer": {"path": "w/customer", "natural_key": ["name"], "columns": {"name": "string"},
                                        "shards": 2}},
            "lookups": [{"dimension": "customer", "role": "customer", "on": {"customer": "name"}, "policy": "infer"}],
            "sink": {"path": "w/facts"},
            "trigger": {"max_files": 1},
            "replicas": "../replicas",
        }  # fmt: skip

    @property
    def pipeline(self):
        return self.folder / "pipeline.yml"

    def write(self, **changes):
        """Write the pipeline file with changes, and return its lines."""
        self.pipeline.write_text(yaml.safe_dump({**self.document, **changes}, sort_keys=False))
        return self.pipeline.read_text().splitlines()

    def add(self, rows):
        """Put a file of rows into the source's folder."""
        path = self.folder / "in" / f"{len(self.lines):03d}.csv"
        with path.with_name(".hidden").open("w", newline="") as stream:
            csv.writer(stream).writerows([SCHEMA, *rows])
        path.with_name(".hidden").rename(path)
        self.lines.append([line.decode() for line in path.read_bytes().splitlines()])

    def read(self, name="facts", order="id"):
        """Return the rows of a Delta table."""
        return sorted(DeltaTable(str(self.folder / "w" / name)).to_pyarrow_table().to_pylist(), key=lambda r: r[order])


@pytest.fixture
def shop(tmp_path):
    return Shop(tmp_path / "shop")


def rows_of(rng, count, first=0):
    """Return rows, some of which are filtered, some of which do not convert."""
    pick = [lambda values: values[int(rng.integers(len(values)))]][0]
    return [
        (
            first + i,
            pick(["01.02.2024", "29.02.2024", "30.02.2024"] if i % 5 == 0 else ["03.04.2024"]),
            pick([" ann", "Bob ", "CY", "", f"new{first + i}"]),
            pick(["1.50", "2", "-1", "", "n/a"] if i % 3 == 0 else ["12.25", "3"]),
            pick([1, 2, 3, ""]),
            pick(["test", "book", "toy", ""]),
        )
        for i in range(count)
    ]


def expected_of(row):
    """Return what becomes of a row: 'filtered', the columns that fail, or the fact."""
    identity, day, customer, price, quantity, kind = row
    if kind in ("test", ""):
        return "filtered"
    failed = []
    if price and not re.fullmatch(r"-?\d+(\.\d+)?", price):
        failed.append("price")
    date = None
    try:
        date = dt.datetime.strptime(day, "%d.%m.%Y").replace(tzinfo=dt.UTC).date()
    except ValueError:
        failed.append("day")
    if failed:
        return sorted(failed)
    total = None if price == "" or quantity == "" else (Decimal(price) * quantity).quantize(Decimal("0.01"))
    if total is None or total <= 0:
        return "filtered"
    name = customer.strip().upper() or None
    return {"customer": name, "id": identity, "day": date, "total": total, "category": kind}


def check(shop, files, result):
    """Compare facts, rejected rows and counts with the oracle."""
    judged = [(number, at, expected_of(row)) for number, rows in enumerate(files) for at, row in enumerate(rows, 1)]
    facts = [each for _, _, each in judged if isinstance(each, dict)]
    members = {row["name"]: row["customer_key"] for row in shop.read("customer", "customer_key")}
    found = shop.read()
    assert [{name: row[name] for name in facts[0]} for row in found] == sorted(facts, key=lambda row: row["id"])
    assert all(row["customer_key"] == members[row["customer"]] for row in found)
    assert set(members) == {None} | {row["customer"] for row in facts}
    rejected = {
        (f"{number:03d}.csv", at): (each, shop.lines[number][at]) for number, at, each in judged if isinstance(each, list)
    }
    errors = shop.read("facts_errors", "_record_number")
    told = {
        (row["_file"], row["_record_number"]): (sorted(cause["column"] for cause in row["causes"]), row["record"])
        for row in errors
    }
    assert told == rejected
    assert len(errors) == len(rejected)
    if result is not None:
        assert result.total("loaded") == len(facts)
        assert result.as_dict()["filtered"] == sum(each == "filtered" for _, _, each in judged)
        assert result.as_dict()["outcomes"]["filtered"] == result.as_dict()["filtered"]
        assert result.total("rejected") == len(rejected)
        assert result.total("rows_in") == len(judged)


def test_steps_are_applied_in_order_and_every_record_is_accounted_for(shop, rng):
    shop.write()
    files = [rows_of(rng, 60), rows_of(rng, 40, 1000)]
    for rows in files:
        shop.add(rows)
    result = run(shop.pipeline)
    check(shop, files, result)
    assert list(DeltaTable(str(shop.folder / "w/facts")).schema().to_arrow().names)[:5] == [
        "customer", "id", "day", "total", "category",
    ]  # fmt: skip
