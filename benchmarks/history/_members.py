"""A dimension with history in Delta: most members have one version, one in five has two."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.pipelines.config.history import history_of
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.delta.commits import Commit, commit_files
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.delta.tables import GREATEST_KEY, open_table
from headrace.pipelines.history.layout import delta_schema
from headrace.pipelines.history.tables import create_history

__all__ = ["LAST_DAY", "Members", "cities", "date", "link_table", "pipeline", "write_files", "write_stream"]

FIRST_DAY = np.datetime64("2020-01-01", "D")
LAST_DAY = 1000  # of the versions: facts of later days belong to the current versions
FIRST_VERSIONS, SECOND_VERSIONS = (0, 100), (500, 900)
EACH = 5  # one member in so many has two versions
CITIES = 10_000
ROWS_OF_A_FILE = 1 << 20
PIPELINE = """
name: {name}
source:
  format: parquet
  path: stream/{name}
  schema: {{number: bigint, customer: bigint, day: date}}
dimensions:
  customer:
    path: {dimension}
    natural_key: [id]
    columns: {{id: bigint, city: string, phone: string}}
    history: {{effective: since, effective_type: date, sequence: n, type_1: [phone]}}
lookups:
  - {{dimension: customer, role: customer, on: {{customer: id}}, event_time: day, policy: infer, carry: [city]}}
sink: {{path: facts_{name}}}
trigger: {{max_files: 2}}
memory: {memory}
replica_memory: {memory}
replicas: replicas
checkpoint: checkpoints/{name}
catalog: {catalog}
"""


def pipeline(folder, name, memory, dimension="customer"):
    """Write the pipeline file of a stream with this name into a folder, and return its configuration."""
    (folder / "stream" / name).mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.yml"
    catalog = f"sqlite:///{folder}/catalog.db"
    file.write_text(PIPELINE.format(name=name, memory=memory, dimension=dimension, catalog=catalog))
    return load_pipeline(file)


def date(days):
    """Return days since the first day as a column of dates."""
    return pa.array(FIRST_DAY + np.asarray(days, dtype=np.int64))


class Members:
    """The members, by position in the order of natural keys.

    Parameters
    ----------
    count
        Number of members.

    Attributes
    ----------
    ids
        Natural keys, with gaps: numbers that are 3 modulo 4 belong to no member.
    start, second
        First days of the first and of the second version; without a second version, the day after all days.
    key
        Surrogate keys of the first versions; a second version has the next number.
    """

    def __init__(self, count, seed=1):
        rng = np.random.default_rng(seed)
        self.ids = np.arange(count, dtype=np.int64) * 4 + rng.integers(0, 3, count)
        self.start = rng.integers(*FIRST_VERSIONS, count)
        self.twice = np.arange(count) % EACH == 0
        self.second = np.where(self.twice, rng.integers(*SECOND_VERSIONS, count), np.iinfo(np.int64).max)
        self.key = 1 + np.arange(count) + np.cumsum(self.twice) - self.twice
        first = rng.integers(0, CITIES, count)
        self.city = np.stack([first, (first + rng.integers(1, CITIES, count)) % CITIES], axis=1)

    def create(self, config, kept=None):
        """Create the dimension of a pipeline with all versions, and return its path.

        With a folder `kept`, the table is made there once, and the dimension is a copy of it.
        """
        history, path = history_of(config, "customer"), config.dimensions["customer"].path
        if kept is None:
            self._write(history, path)
            return path
        made = Path(kept) / f"customers-{len(self.ids)}"
        if not made.exists():
            writing = made.with_suffix(".incomplete")
            shutil.rmtree(writing, ignore_errors=True)
            self._write(history, str(writing))
            writing.rename(made)
        link_table(made, path)
        return path

    def _write(self, history, path):
        create_history(path, history)
        schema = delta_schema(history)
        files = write_files(path, schema, (self._rows(part, schema) for part in self._parts()))
        greatest = {GREATEST_KEY: str(int(self.key[-1] + self.twice[-1]))}
        commit_files(path, open_table(path), files, Commit("benchmark", 0, properties=greatest))

    def _parts(self):
        each = ROWS_OF_A_FILE * EACH // (EACH + 1)
        return (np.arange(at, min(at + each, len(self.ids))) for at in range(0, len(self.ids), each))

    def _rows(self, part, schema):
        """Return the versions of some members, ordered by surrogate key."""
        member = np.repeat(part, 1 + self.twice[part])
        later = np.diff(member, prepend=-1) == 0
        last = later | ~self.twice[member]
        ends = pa.array(self.second[member], mask=last)
        days = pc.add(pc.fill_null(ends, 0), pa.scalar(int(FIRST_DAY.astype(np.int64)))).cast(pa.int32())
        start = np.where(later, self.second[member], self.start[member])
        columns = {
            "customer_key": self.key[member] + later,
            "id": self.ids[member],
            "city": cities(self.city[member, later.astype(np.int64)]),
            "phone": pc.cast(pa.array(self.ids[member] + 70_000_000), pa.string()),
            "valid_from": date(start),
            "valid_to": pc.if_else(pa.array(last), pa.scalar(None, pa.date32()), days.cast(pa.date32())),
            "is_current": last,
            "version": 1 + later.astype(np.int64),
            "_sequence": start,
        }
        rows = len(member)
        false = {name: np.zeros(rows, bool) for name in schema.names if name in {"is_deleted", "is_inferred"}}
        columns |= false
        return pa.table(
            [columns.get(name, pa.nulls(rows, schema.field(name).type)) for name in schema.names], schema.names
        )

    def at(self, member, day):
        """Return surrogate key and number of the city of members at days, of which none is before the first version."""
        later = (day >= self.second[member]).astype(np.int64)
        return self.key[member] + later, self.city[member, later]


def cities(numbers):
    """Return the names of cities with these numbers."""
    names = pa.array([f"City {number:04}" for number in range(CITIES)])
    return names.take(pa.array(numbers))


def write_files(path, schema, tables):
    """Write each table into a data file that no commit names yet, and return the files."""
    files = []
    for table in tables:
        with FileWriter(FileSpec(str(path), schema)) as writer:
            for batch in table.combine_chunks().to_batches():
                writer.write(batch)
            files += writer.close()
    return files


def link_table(path, copy):
    """Make an independent copy of a Delta table that shares its data files, which never change."""
    shutil.copytree(path, copy, copy_function=_copied)


def _copied(source, target):
    if source.endswith((".parquet", ".bin")) and "_delta_log" not in source:
        Path(target).hardlink_to(source)
    else:
        shutil.copy2(source, target)


def write_stream(folder, number, table, files=2):
    """Add a batch to the folder of a stream, as several files, so that all cores can read it."""
    each = -(-len(table) // files)
    for part in range(files):
        pq.write_table(table.slice(part * each, each), folder / f"{number:04}-{part}.parquet")
