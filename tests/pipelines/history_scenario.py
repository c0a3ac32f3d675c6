"""A dimension with history in Delta for tests: changes are applied by deletes and appends, and a row-by-row oracle."""

import csv
import datetime as dt
import itertools

import numpy as np
import pyarrow as pa
import yaml
from deltalake import DeltaTable

from headrace.etl import KeyAllocator
from headrace.etl.history import apply_changes, inferred_entries
from headrace.pipelines.config.history import history_of
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.delta.commits import NEW_MEMBERS, Commit, commit_files
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.delta.live_files import LiveFiles
from headrace.pipelines.delta.reads import scan_table
from headrace.pipelines.delta.row_changes import RowChanges, change_rows_exactly, feed_files
from headrace.pipelines.delta.tables import DeltaHandle
from headrace.pipelines.history.differences import row_differences
from headrace.pipelines.history.layout import delta_schema, entries_of, version_rows
from headrace.pipelines.history.tables import create_history


class Members:
    """The Delta table of a dimension with the columns `id`, `city`, `tel`, and its history."""

    def __init__(self, path, history):
        self.path, self.history = str(path), history
        self.count = itertools.count(1)
        create_history(self.path, history)

    @property
    def greatest(self):
        handle = DeltaHandle(self.path)
        handle.latest()
        return handle.greatest_key(self.history.dimension.surrogate_key)

    def table(self):
        return DeltaTable(self.path)

    def rows(self):
        schema = delta_schema(self.history)
        return scan_table(self.table(), schema.names).read_all().cast(schema)

    def entries(self):
        return entries_of(self.history, self.rows())

    def version_rows(self):
        """Return the versions of members, as dicts."""
        return [row for row in self.rows().to_pylist() if row[self.history.dimension.surrogate_key] > 0]

    def changes(self, *changes):
        """Return (id, day, city) as changes; no city is a delete."""
        rows = [
            {"id": key, "since": day if isinstance(day, dt.date) else dt.date(2024, 1, day), "city": city,
             "tel": f"t{key}", "n": next(self.count), "op": "U" if city else "D"}
            for key, day, city in changes
        ]  # fmt: skip
        names = {"since": pa.date32(), "city": pa.string(), "tel": pa.string(), "n": pa.int64(), "op": pa.string()}
        return pa.Table.from_pylist(rows, pa.schema({"id": self.history.dimension.schema.field("id").type, **names}))

    def apply(self, *changes, note=None):
        """Apply (id, day, city) changes in one commit."""
        entries, table = self.entries(), self.table()
        applied = apply_changes(self.history, entries, self.changes(*changes), KeyAllocator(self.greatest))
        differences = row_differences(self.history, entries, applied)
        key = self.history.dimension.surrogate_key
        schema = delta_schema(self.history)
        removed = np.sort(np.asarray(differences.before.column(key)))
        files, feed = (
            self.written(FileSpec(self.path, schema), differences.after),
            self.written(feed_files(self.path, schema), differences.feed),
        )
        commit = Commit("changes", table.version(), {} if note is None else note(applied, differences))
        live = LiveFiles(self.path)
        change_rows_exactly(self.path, table, live, table.version(), RowChanges(key, removed, files, feed), commit)
        return applied

    @staticmethod
    def written(spec, rows):
        with FileWriter(spec) as writer:
            for batch in rows.to_batches():
                writer.write(batch)
            return writer.close()

    def infer(self, *keys):
        added = inferred_entries(self.history, pa.table({"id": keys}), self.greatest + 1 + np.arange(len(keys)))
        files = self.written(FileSpec(self.path, delta_schema(self.history)), version_rows(self.history, added))
        commit_files(self.path, self.table(), files, Commit("facts", self.table().version(), {NEW_MEMBERS: len(keys)}))

    def as_of(self, key, day, before_first="first"):
        """Return the version row of a member at a day, and the outcome: None if there is no such member."""
        found = sorted((row for row in self.version_rows() if row["id"] == key), key=lambda row: row["valid_from"])
        if not found:
            return None, "absent"
        last = found[-1]
        if day >= last["valid_from"]:
            return last, "matched"
        for row in found:
            if row["valid_from"] <= day < (row["valid_to"] or dt.date.max):
                return row, "late"
        return (found[0], "late") if before_first == "first" else (None, before_first)


SCHEMA = {"order": "bigint", "buyer": "string", "seller": "string", "day": "date"}


UNKNOWN = {"city": None, "tel": None, "valid_from": dt.date.min}
"""The unknown member, which is valid for all times."""


class Orders:
    """A pipeline that looks orders up in a dimension with history, and what must come out."""

    def __init__(self, folder, shards=2, **more):
        self.folder = folder
        (folder / "in").mkdir(parents=True)
        self.more = {"shards": shards, **more}
        self.files = []
        self.pipeline.write_text(yaml.safe_dump(self.document(), sort_keys=False))
        self.config = load_pipeline(self.pipeline)
        self.members = Members(folder / "w" / "customer", history_of(self.config, "customer"))

    @property
    def pipeline(self):
        return self.folder / "orders.yml"

    def document(self):
        return {
            "name": "orders",
            "source": {"format": "csv", "path": "in", "schema": SCHEMA},
            "dimensions": {
                "customer": {
                    "path": "w/customer", "natural_key": ["id"], "shards": self.more["shards"],
                    "columns": {"id": "string", "city": "string", "tel": "string"},
                    "rules": {"id": ["trim", "casefold"]},
                    "history": {
                        "effective": "since", "effective_type": "date", "sequence": "n", "operation": "op",
                        "type_1": ["tel"],
                    },
                }
            },
            "lookups": [
                {"dimension": "customer", "role": "buyer", "on": {"buyer": "id"}, "event_time": "day",
                 "policy": "infer", "carry": ["city", "tel"]},
                {"dimension": "customer", "role": "seller", "on": {"seller": "id"}, "event_time": "day",
                 "policy": "unknown", "before_first": "reject", "null_time": "current"},
                {"dimension": "customer", "role": "now", "on": {"buyer": "id"}, "policy": "infer",
                 "carry": ["city", "valid_from"]},
            ],
            "sink": {"path": "w/facts"},
            "trigger": {"max_files": 1},
            "replicas": "replicas",
            "spark": {"master": "local[2,4]", "conf": {"spark.sql.shuffle.partitions": 2}},
            **self.more.get("options", {}),
        }  # fmt: skip

    def put(self, rows):
        """Put a file with (order, buyer, seller, day) rows into the source."""
        name = f"{len(self.files):04d}.csv"
        self.files.append(rows)
        hidden = self.folder / "in" / f".{name}"
        with hidden.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(SCHEMA)
            writer.writerows(["" if value is None else value for value in row] for row in rows)
        hidden.rename(self.folder / "in" / name)

    def read(self, name):
        return DeltaTable(str(self.folder / "w" / name)).to_pyarrow_table().to_pylist()

    def expected(self, row):
        """Return a fact, or the roles that reject it, for a row whose inferred members are in the dimension."""
        order, buyer, seller, day = row
        fact = {"order": order, "buyer": buyer, "seller": seller, "day": day}
        rejected = []
        if day is None:
            fact |= {"buyer_key": -1, "buyer_city": None, "buyer_tel": None}
        else:
            fact |= self._buyer(buyer, day, "buyer", ("city", "tel"))
        fact |= self._buyer(buyer, dt.date.max, "now", ("city", "valid_from"))
        found, outcome = self.members.as_of(normal(seller), day or dt.date.max, "reject")
        if outcome == "reject":
            rejected.append("seller")
        fact["seller_key"] = found["customer_key"] if found else -1
        return fact, rejected

    def _buyer(self, buyer, day, role, carried):
        found, _ = self.members.as_of(normal(buyer), day)
        if found is None:
            return {f"{role}_key": -1, **{f"{role}_{name}": UNKNOWN[name] for name in carried}}
        return {f"{role}_key": found["customer_key"], **{f"{role}_{name}": found[name] for name in carried}}

    def check(self, files):
        """Compare facts and rejected rows of some files with the dimension as it is now, row by row."""
        rows = [row for number in files for row in self.files[number]]
        expected = [self.expected(row) for row in rows]
        wanted = {fact["order"]: fact for fact, rejected in expected if not rejected}
        facts = {row["order"]: row for row in self.read("facts")}
        for order, fact in wanted.items():
            assert {name: facts[order][name] for name in fact} == fact, facts[order]
        assert set(wanted) == set(facts) & {row[0] for row in rows}
        errors = [row for row in self.read("facts_errors") if int(row["_file"].split(".")[0]) in files]
        assert len(errors) == sum(bool(rejected) for _, rejected in expected)
        assert {cause["role"] for row in errors for cause in row["causes"]} <= {"seller"}
        return facts


def normal(key):
    """Normalize a key as the rules of the dimension do; blank is null."""
    return (key or "").strip().casefold() or None


def first_changes(keys):
    """Return a change of each member, so that only customers without a number can be inferred."""
    return [(f"c{key}", dt.date(2024, 1, 5 + key), "Alta") for key in range(keys)]


def random_changes(rng, count, keys):
    """Return changes of members in any order, a tenth of them deletes."""
    cities = ["Oslo", "Bergen", "Molde", None]
    return [
        (f"c{rng.integers(keys)}", dt.date(2024, 1, 1) + dt.timedelta(int(rng.integers(60))),
         cities[int(rng.choice(4, p=[0.3, 0.3, 0.3, 0.1]))])
        for _ in range(count)
    ]  # fmt: skip


def random_orders(rng, count, keys, first):
    """Return orders of known and new customers, before, in and after their histories, some without key or time."""
    rows = []
    for number in range(first, first + count):
        buyer = [f"c{rng.integers(keys)}", f" C{rng.integers(keys)} ", f"n{rng.integers(6)}", None]
        day = dt.date(2023, 12, 20) + dt.timedelta(int(rng.integers(90)))
        rows.append(
            (number, buyer[int(rng.choice(4, p=[0.5, 0.2, 0.25, 0.05]))], f"c{rng.integers(keys + 3)}",
             None if rng.random() < 0.05 else day)
        )  # fmt: skip
    return rows
