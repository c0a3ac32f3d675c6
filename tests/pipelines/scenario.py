"""A small world for end-to-end tests: files that arrive, a pipeline file, and a plain-Python oracle of the result."""

import csv
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import yaml
from deltalake import DeltaTable

from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.dimension.tables import create_dimension

SCHEMA = {
    "id": "bigint",
    "tail": "string",
    "origin": "string",
    "dest": "string",
    "carrier": "string",
    "amount": "double",
}


@dataclass
class World:
    """A folder with a pipeline, what was put in it, and what must come out."""

    folder: Path
    shards: int | None = None
    duplicates: dict = field(default_factory=lambda: {"key": ["id"]})
    files: list = field(default_factory=list)
    options: dict = field(default_factory=dict)

    def __post_init__(self):
        (self.folder / "in").mkdir(parents=True)
        self.write_pipeline()
        config = load_pipeline(self.pipeline)
        planes = pa.table({"tailnum": ["N1", "N2", "N3"], "seats": pa.array([10, 20, 30], pa.int32())})
        create_dimension(config, "plane", planes)
        create_dimension(config, "airport", pa.table({"faa": ["JFK", "LAX"]}))
        create_dimension(config, "carrier", pa.table({"code": ["AA", "UA"]}))

    @property
    def pipeline(self):
        return self.folder / "pipeline.yml"

    def write_pipeline(self):
        """Write the pipeline file, as the world is now."""
        shards = {} if self.shards is None else {"shards": self.shards}
        document = {
            "name": "flights",
            "source": {"format": "csv", "path": "in", "schema": SCHEMA},
            "dimensions": {
                "plane": {"path": "w/plane", "natural_key": ["tailnum"], **shards,
                          "columns": {"tailnum": "string", "seats": "int"}},
                "airport": {"path": "w/airport", "natural_key": ["faa"], **shards, "columns": {"faa": "string"}},
                "carrier": {"path": "w/carrier", "natural_key": ["code"], "columns": {"code": "string"}},
            },
            "lookups": [
                {"dimension": "plane", "role": "plane", "on": {"tail": "tailnum"}, "policy": "infer",
                 "carry": ["seats"]},
                {"dimension": "airport", "role": "origin", "on": {"origin": "faa"}, "policy": "infer"},
                {"dimension": "airport", "role": "dest", "on": {"dest": "faa"}, "policy": "infer"},
                {"dimension": "carrier", "role": "carrier", "on": {"carrier": "code"}, "policy": "reject"},
            ],
            "duplicates": self.duplicates,
            "sink": {"path": "w/facts"},
            "trigger": {"max_files": 1},
            "replicas": "../replicas",
            "spark": {"master": "local[2,4]", "conf": {"spark.sql.shuffle.partitions": 2}},
            **self.options,
        }  # fmt: skip
        self.pipeline.write_text(yaml.safe_dump(document, sort_keys=False))

    def add_file(self, rows, extra=()):
        """Put a file of rows into the source's folder, with lines that do not fit."""
        number = len(self.files)
        self.files.append((rows, list(extra)))
        hidden = self.folder / "in" / f".{number}.csv"
        with hidden.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(SCHEMA)
            writer.writerows(["" if value is None else value for value in row] for row in rows)
            stream.writelines(line + "\n" for line in extra)
        hidden.rename(self.folder / "in" / f"{number:04d}.csv")

    def read(self, name):
        """Return the rows of a Delta table."""
        return DeltaTable(str(self.folder / "w" / name)).to_pyarrow_table().to_pylist()

    def members(self, name, key, natural):
        """Return surrogate keys by natural key, and check that both are unique."""
        rows = self.read(name)
        found = {row[natural]: row[key] for row in rows}
        assert len(found) == len(rows) == len({row[key] for row in rows}), f"{name} has a key twice"
        return found

    def check(self):
        """Compare all tables with what the files say must be in them; return the facts."""
        planes = self.members("plane", "plane_key", "tailnum")
        airports = self.members("airport", "airport_key", "faa")
        carriers = self.members("carrier", "carrier_key", "code")
        expected, rejected, seen = self.expected()
        facts = sorted(self.read("facts"), key=lambda row: row["id"])
        stream = [tuple(row[name] for name in SCHEMA) for row in facts]
        assert stream == sorted(expected)
        for row in facts:
            assert row["plane_key"] == planes[row["tail"]]
            assert row["origin_key"] == airports[row["origin"]]
            assert row["dest_key"] == airports[row["dest"]]
            assert row["carrier_key"] == carriers[row["carrier"]]
            assert row["plane_seats"] == {"N1": 10, "N2": 20, "N3": 30}.get(row["tail"])
        errors = self.read("facts_errors")
        malformed = [row for row in errors if row["causes"][0]["role"] is None]
        assert sorted(row["record"] for row in malformed) == sorted(rejected["malformed"])
        assert sorted(row["causes"][0]["value"] for row in errors if row not in malformed) == rejected["carrier"]
        assert set(planes) == {None, "N1", "N2", "N3"} | {row[1] for row in expected}
        assert set(airports) == {None, "JFK", "LAX"} | {row[2] for row in expected} | {row[3] for row in expected}
        assert len(seen) == len(facts)
        return facts

    def expected(self):
        """Return facts, rejected rows and loaded ids, batch by batch in plain Python."""
        facts, rejected, seen = [], {"malformed": [], "carrier": []}, set()
        for rows, extra in self.files:
            rejected["malformed"] += extra
            good = [row for row in rows if row[4] in {"AA", "UA", None}]
            rejected["carrier"] += [row[4] for row in rows if row[4] not in {"AA", "UA", None}]
            fresh = [row for row in good if row[0] not in seen]
            kept = {row[0]: min((other for other in fresh if other[0] == row[0]), key=lambda other: other[5])
                    for row in fresh}  # fmt: skip
            facts += list(kept.values())
            seen |= set(kept)
        return facts, {name: sorted(values) for name, values in rejected.items()}, seen


def random_rows(rng, count, first):
    """Return rows with known and new members, missing keys, repeated ids, and carriers that are not there.

    The last row has new members in every role, so that every step of the protocol has something to do.
    """

    def pick(names):
        return names[int(rng.integers(len(names)))]

    rows = []
    for i in range(count):
        tail = pick(["N1", "N2", "N3", None, *(f"X{j}" for j in range(first, first + 12))])
        airports = [pick(["JFK", "LAX", *(f"A{j % 9}" for j in range(first, first + 6))]) for _ in range(2)]
        identity = first * 1000 + (i if rng.random() < 0.95 else int(rng.integers(max(i, 1))))
        rows.append(
            (identity, tail, *airports, pick(["AA", "UA", "UA", "ZZ"] if i % 9 == 0 else ["AA", "UA"]), float(i))
        )
    rows.append((first * 1000 + 999, f"T{first}", f"O{first}", f"D{first}", "AA", 999.0))
    return rows
