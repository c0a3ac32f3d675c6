"""A small world for tests of correlations: sources, a pipeline file, an engine in this process, DuckDB as oracle."""

import copy
import itertools
import json
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import DeltaTable

from headrace.pipelines.catalog import Catalog
from headrace.pipelines.config import load_any
from headrace.pipelines.correlate.rows import chunks_of, start_rows
from headrace.pipelines.correlate.tasks import PIECES_OF_SOURCES
from headrace.pipelines.correlating import run_with
from headrace.pipelines.errors import PipelineFileError

ORDERS = {"id": "bigint", "item": "string", "at": "timestamp_ntz"}
PAYMENTS = {"order": "int", "paid": "double", "at": "timestamp_ntz"}
SHIPMENTS = {"order": "bigint", "item": "string", "van": "string"}
BEGIN = datetime(2024, 1, 1)  # noqa: DTZ001 - the columns have no zone


class Killed(BaseException):
    """An end of the process at a step."""


def ending_at(number):
    """Return a hook that raises `Killed` at the step of this number, counted from 0."""
    steps = itertools.count()

    def hook(step):
        if next(steps) == number:
            raise Killed(step)

    return hook


class LocalEngine:
    """Runs the stages in this process, as Spark would: each row of the frame goes to the task of its shard."""

    def __init__(self, cores=2):
        self.cores = cores

    def run(self, pieces, read, joins):
        fields = PIECES_OF_SOURCES.names
        parts = [pieces[at :: self.cores] for at in range(self.cores)]
        batches = [
            batch
            for part in parts
            for batch in read(
                [pa.RecordBatch.from_pylist([{name: row[name] for name in fields} for row in part], PIECES_OF_SOURCES)]
            )
        ]
        starts = start_rows(len(joins), read.shards)
        batches += [starts.slice(at, 1) for at in range(starts.num_rows)]
        for join in joins:
            batches = [done for shard in range(read.shards) for done in join(_of_shard(batches, shard))]
        return [chunk.note() for batch in batches for chunk in chunks_of(batch) if chunk.stage < 0]


def _of_shard(batches, shard):
    return [batch for batch in batches if batch.column(0)[0].as_py() == shard]


@dataclass
class World:
    """A folder with a pipeline, and what was put into its sources."""

    folder: Path
    correlate: dict = field(default_factory=lambda: {"on": ["orders.id = payments.order"]})
    sources: tuple = ("orders", "payments")
    options: dict = field(default_factory=dict)
    rows: dict = field(default_factory=dict)
    files: int = 0
    contents: dict = field(default_factory=dict)

    def __post_init__(self):
        schemas = {"orders": ORDERS, "payments": PAYMENTS, "shipments": SHIPMENTS}
        for name in self.sources:
            (self.folder / name).mkdir(parents=True)
            self.rows[name] = []
        kinds = {"orders": "csv", "payments": "parquet", "shipments": "csv"}
        self.document = {
            "name": "paid",
            "sources": {
                name: {"format": kinds[name], "path": name, "schema": dict(schemas[name])} for name in self.sources
            },
            "correlate": copy.deepcopy(self.correlate),
            "sink": {"path": "w/paid"},
            "trigger": {"max_files": 1},
            **self.options,
        }
        self.write()

    @property
    def pipeline(self):
        return self.folder / "pipeline.yml"

    @property
    def state(self):
        return self.folder / ".headrace/paid/checkpoint/state"

    def write(self):
        self.pipeline.write_text(yaml.safe_dump(self.document, sort_keys=False))

    def assert_refused(self, place, value, message):
        """Set a value of the pipeline file, and check that it is refused with its line."""
        part = self.document
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = value
        self.write()
        with pytest.raises(PipelineFileError, match=r"pipeline\.yml, line \d+, column \d+") as raised:
            load_any(self.pipeline)
        assert message in str(raised.value)

    def shards(self, number):
        self.document["correlate"]["shards"] = number
        self.write()

    def run(self, hook=lambda _step: None):
        config = load_any(self.pipeline)
        with Catalog(config.catalog) as catalog:
            return run_with(LocalEngine(), catalog, config, hook=hook)

    def add(self, source, rows):
        """Put rows into a file of a source. `None` is null."""
        self.rows[source] += rows
        self.files += 1
        self.contents[source, self.files] = rows
        names = list(self.document["sources"][source]["schema"])
        if source == "payments":
            kinds = [pa.int32(), pa.float64(), pa.timestamp("us")]
            columns = [pa.array([row[at] for row in rows], kind) for at, kind in enumerate(kinds)]
            pq.write_table(pa.table(columns, names=names), self.folder / source / f"{self.files:04d}.parquet")
            return
        lines = [",".join("" if value is None else str(value) for value in row) for row in rows]
        (self.folder / source / f"{self.files:04d}.csv").write_text("\n".join([",".join(names), *lines]) + "\n")

    def row_of(self, file, number):
        """Return a row of a file, which the error table names as `source/0001.csv` with a number from 1."""
        source, _, name = file.partition("/")
        return self.contents[source, int(Path(name).stem)][number - 1]

    def add_random(self, rng, count, keys=12, hours=6):
        """Put random rows into a file of each source, some of them without a key."""
        for source in self.sources:
            rows = []
            for _ in range(count):
                key = None if rng.random() < 0.05 else int(rng.integers(keys))
                at = BEGIN + timedelta(seconds=int(rng.integers(hours * 3600)))
                item = f"item{int(rng.integers(3))}"
                rows.append(
                    {
                        "orders": (key, item, at),
                        "payments": (key, float(rng.integers(100)), None if rng.random() < 0.05 else at),
                        "shipments": (key, item, f"van {key}"),
                    }[source]
                )
            self.add(source, rows)

    def results(self):
        """Return the result rows in order."""
        rows = DeltaTable(str(self.folder / "w/paid")).to_pyarrow_table().to_pylist()
        return sorted((tuple(row.values()) for row in rows), key=repr)

    def rejected(self):
        return DeltaTable(str(self.folder / "w/paid_errors")).to_pyarrow_table().to_pylist()

    def expected(self, where, sources=None):
        """Return what DuckDB finds for a condition between the sources."""
        kinds = {"bigint": pa.int64(), "int": pa.int32(), "double": pa.float64(), "string": pa.string()}
        connection = duckdb.connect()
        names = self.sources if sources is None else sources
        for name in names:
            schema = self.document["sources"][name]["schema"]
            columns = [
                pa.array([row[at] for row in self.rows[name]], kinds.get(kind, pa.timestamp("us")))
                for at, kind in enumerate(schema.values())
            ]
            connection.register(name, pa.table(columns, names=list(schema)))
        columns = ", ".join(f"{name}.*" for name in names)
        found = connection.execute(f"select {columns} from {', '.join(names)} where {where}").fetchall()
        return sorted(found, key=repr)

    def manifest(self):
        """Return the only manifest there is, as a document."""
        (file,) = self.state.glob("*.manifest")
        return json.loads(file.read_bytes().split(b"\n")[0])
