"""Facts are corrected by files without MERGE; each kind of table gets the rows and the change feed it must have."""

import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from headrace.etl import Dimension, Policy
from headrace.etl.history import AsOfLookup, History
from headrace.pipelines.delta.commits import Commit, commit_files
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.delta.live_files import LiveFiles
from headrace.pipelines.delta.tables import DeltaHandle, create_table, read_changes, read_rows
from headrace.pipelines.errors import ConservationError, TableMovedError
from headrace.pipelines.restate.candidates import FILE_ID, ROW, file_id
from headrace.pipelines.restate.rewriting import FactFiles
from headrace.pipelines.restate.scanning import merged_ranges

SCHEMA = pa.schema(
    [("n", pa.int64()), ("kind", pa.string()), ("customer", pa.int64()), ("day", pa.date32()),
     ("customer_key", pa.int64()), ("customer_city", pa.string())]
)  # fmt: skip
LOOKUP = AsOfLookup(
    History(Dimension("customer", ("id",), "customer_key", pa.schema({"id": pa.int64(), "city": pa.string()}))),
    "customer",
    {"customer": "id"},
    event_time="day",
    policy=Policy.UNKNOWN,
    carry=("city",),
)
VECTORS, FEED = "delta.enableDeletionVectors", "delta.enableChangeDataFeed"


class Facts:
    """A fact table of several files beside a dictionary of the rows it must have, and corrections at random."""

    def __init__(self, path, *, vectors, feed=True, partition_by=(), rows=400):
        self.path = str(path)
        self.rng = random.Random(7)
        self.rows = {n: self._fact(n) for n in range(rows)}
        self._create(partition_by, {VECTORS: vectors, FEED: feed})
        for first in range(0, rows, 100):
            part = pa.Table.from_pylist([self.rows[n] for n in range(first, first + 100)], SCHEMA)
            with FileWriter(FileSpec(self.path, SCHEMA, partition_by)) as writer:
                for at in range(0, 100, 30):
                    writer.write(part.slice(at, 30).combine_chunks().to_batches()[0])
                commit_files(self.path, DeltaTable(self.path), writer.close(), Commit("facts", first))
        self.handle = DeltaHandle(self.path)
        self.handle.latest()

    def _create(self, partition_by, properties):
        """Create the table, with deletion vectors in its protocol if they are asked for."""
        create_table(self.path, SCHEMA, partition_by)
        table = DeltaTable(self.path)
        settings = {name: str(on).lower() for name, on in properties.items()}
        metadata = {"id": str(table.metadata().id), "format": {"provider": "parquet", "options": {}},
                    "schemaString": table.schema().to_json(), "partitionColumns": list(partition_by),
                    "configuration": settings, "createdTime": 0}  # fmt: skip
        features = ["deletionVectors"] if properties[VECTORS] else []
        protocol = {"minReaderVersion": 3 if features else 1, "minWriterVersion": 7,
                    "writerFeatures": [*features, "changeDataFeed", "appendOnly", "invariants"]}  # fmt: skip
        protocol |= {"readerFeatures": features} if features else {}
        entry = [{"protocol": protocol}, {"metaData": metadata}]
        (DeltaHandle(self.path).live._log / f"{0:020d}.json").write_text("\n".join(map(json.dumps, entry)) + "\n")

    def _fact(self, n):
        city = self.rng.choice(["Oslo", "Bergen", None])
        return {
            "n": n,
            "kind": self.rng.choice("ab"),
            "customer": n % 50,
            "day": None,
            "customer_key": n,
            "customer_city": city,
        }

    def places(self):
        """Return file id and position of each fact."""
        found = {}
        for file in LiveFiles(self.path).at(DeltaTable(self.path).version()):
            numbers = pq.read_table(f"{self.path}/{file.place}", columns=["n"]).column("n").to_pylist()
            gone = set() if file.vector is None else set(file.vector.positions(self.path).tolist())
            name = file.place.rpartition("/")[2]
            found |= {n: (file_id(name), at) for at, n in enumerate(numbers) if at not in gone}
        return found

    def correct(self, files, places, numbers, *, expected=None):
        """Give facts another key and city in one commit, and return the feed as it must be read."""
        new = {
            n: {**self.rows[n], "customer_key": 1000 + n, "customer_city": self.rng.choice(["Voss", None])}
            for n in numbers
        }
        rows = sorted((*places[n], n) for n in numbers)
        columns = {FILE_ID: [row[0] for row in rows], ROW: [row[1] for row in rows]}
        for at, name in enumerate(("customer_key", "customer_city")):
            kind = SCHEMA.field(name).type
            columns[f"_old_{at}"] = pa.array([self.rows[row[2]][name] for row in rows], kind)
            columns[f"_new_{at}"] = pa.array([new[row[2]][name] for row in rows], kind)
        batches = pa.table(columns).to_batches(max_chunksize=37)
        notes = list(files.task({row[0] for row in rows})(batches))
        notes = [json.loads(note.column(0)[0].as_py()) for note in notes]
        files.commit(notes, len(rows) if expected is None else expected, Commit("restate", 0))
        feed = [{**self.rows[n], "_change_type": "update_preimage"} for n in numbers]
        feed += [{**row, "_change_type": "update_postimage"} for row in new.values()]
        self.rows |= new
        return feed

    def read(self):
        rows = read_rows(self.path, DeltaTable(self.path).version(), SCHEMA.names).read_all().cast(SCHEMA)
        return sorted(rows.to_pylist(), key=lambda row: row["n"])

    def feed(self):
        version = DeltaTable(self.path).version()
        return read_changes(self.path, version, version, SCHEMA.names).drop_columns(["_commit_version"]).to_pylist()


def by_number(rows):
    return sorted(rows, key=lambda row: (row["n"], row["_change_type"]))


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("partition_by", [(), ("kind",)])
def test_corrected_facts_and_the_change_feed_are_as_after_an_update(tmp_path, vectors, partition_by):
    facts = Facts(tmp_path / "facts", vectors=vectors, partition_by=partition_by)
    files, places = FactFiles(facts.handle, LOOKUP), facts.places()
    assert files.usable
    scattered = range(3, 400, 7)
    rest = [n for n in range(100, 200) if n not in scattered]  # leaves no row of some files
    for numbers in (scattered, rest, range(1, 90, 7)):
        feed = facts.correct(files, places, numbers)
        assert facts.read() == list(facts.rows.values())
        if not vectors:  # deltalake reads the feed of plain tables
            assert by_number(facts.feed()) == by_number(feed)
        commit = json.loads(
            (facts.handle.live._log / f"{facts.handle.table.version():020d}.json").read_text().split("\n")[0]
        )
        assert commit["commitInfo"]["engineInfo"] == "headrace"


def test_a_table_without_change_feed_gets_no_change_files(tmp_path):
    facts = Facts(tmp_path / "facts", vectors=False, feed=False)
    facts.correct(FactFiles(facts.handle, LOOKUP), facts.places(), range(0, 400, 3))
    assert facts.read() == list(facts.rows.values())
    assert not (tmp_path / "facts" / "_change_data").exists()


def test_facts_are_not_corrected_where_another_writer_changed_their_file(tmp_path):
    facts = Facts(tmp_path / "facts", vectors=False)
    files, places = FactFiles(facts.handle, LOOKUP), facts.places()
    DeltaTable(facts.path).optimize.compact()
    with pytest.raises(TableMovedError):
        facts.correct(files, places, range(10))
    assert facts.read() == list(facts.rows.values())


def test_facts_are_corrected_beside_facts_that_another_writer_adds(tmp_path):
    facts = Facts(tmp_path / "facts", vectors=True)
    files, places = FactFiles(facts.handle, LOOKUP), facts.places()
    facts.rows[400] = facts._fact(400)
    with FileWriter(FileSpec(facts.path, SCHEMA)) as writer:
        writer.write(pa.RecordBatch.from_pylist([facts.rows[400]], SCHEMA))
        commit_files(facts.path, DeltaTable(facts.path), writer.close(), Commit("facts", 1000))
    facts.correct(files, places, range(10))
    assert facts.read() == list(facts.rows.values())


def test_a_wrong_place_is_refused(tmp_path):
    facts = Facts(tmp_path / "facts", vectors=True)
    files, places = FactFiles(facts.handle, LOOKUP), facts.places()
    swapped = places | {1: places[2], 2: places[1]}
    with pytest.raises(TableMovedError, match="not those that were read"):
        facts.correct(files, swapped, [1, 2])
    assert facts.read() == list(facts.rows.values())


def test_a_lost_fact_is_refused(tmp_path):
    facts = Facts(tmp_path / "facts", vectors=True)
    with pytest.raises(ConservationError):
        facts.correct(FactFiles(facts.handle, LOOKUP), facts.places(), [1, 2], expected=3)
    assert facts.handle.latest().version == DeltaTable(facts.path).version() == 4


@pytest.mark.parametrize("partition_by", ["customer_city", "day"])
def test_a_table_whose_partitions_depend_on_the_lookup_is_left_to_merge(tmp_path, partition_by):
    facts = Facts(tmp_path / "facts", vectors=partition_by == "customer_city", partition_by=(partition_by,), rows=100)
    assert not FactFiles(facts.handle, LOOKUP).usable


def test_positions_survive_where_files_are_read_in_parts(tmp_path):
    """Row groups without facts to correct are not read."""
    facts = Facts(tmp_path / "facts", vectors=True)
    file = LiveFiles(facts.path).at(4)[0]
    place = f"{facts.path}/{file.place}"
    pq.write_table(pq.read_table(place), place, row_group_size=9)
    places = facts.places()
    facts.correct(FactFiles(facts.handle, LOOKUP), places, np.arange(5, 100, 31).tolist())
    assert facts.read() == list(facts.rows.values())


@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us", "UTC")])
def test_facts_are_found_as_by_comparing_each_with_each_range(keys, kind):
    rng = random.Random(keys)
    names = ("a", "b")[:keys]

    def key():
        return [rng.choice([None, *map(str, range(6))]) for _ in names]

    def time():
        return rng.choice([None, *range(40)])

    def times(values):
        unit = 1 if kind == pa.date32() else 3_600_000_000
        whole = pa.array([None if value is None else value * unit for value in values], pa.int64())
        return whole.cast(pa.int32()).cast(kind) if kind == pa.date32() else whole.cast(kind)

    def in_range(row, held):
        low, high = held[-2:]
        if row[-1] is None or None in row or row[:-1] != held[:-2]:
            return False
        return (low is None or row[-1] >= low) and (high is None or row[-1] < high)

    def columns(rows):
        return [pa.array([row[place] for row in rows], pa.string()) for place in range(keys)]

    ranges = [(*key(), *sorted((time(), time()), key=lambda each: -1 if each is None else each)) for _ in range(30)]
    ranges = [(*row[:-2], row[-2], row[-1]) if rng.random() < 0.9 else (*row[:-2], row[-2], None) for row in ranges]
    facts = [(*key(), time()) for _ in range(2000)]
    bounds = [times([row[at] for row in ranges]) for at in (-2, -1)]
    moved = merged_ranges(names, pa.table([*columns(ranges), *bounds], names=[*names, "_moved_from", "_moved_to"]))
    at = [row[-1] for row in facts]
    step = 86_400_000_000 if kind == pa.date32() else 3_600_000_000
    ticks = np.array([np.iinfo(np.int64).min if each is None else each * step for each in at])
    expected = [number for number, row in enumerate(facts) if any(in_range(row, held) for held in ranges)]
    assert moved.among(columns(facts), ticks).tolist() == expected
    assert 0 < len(expected) < len(facts)


def test_facts_are_not_found_without_ranges():
    none = pa.table({"a": pa.array([], pa.string()), "_moved_from": pa.array([], pa.date32()),
                     "_moved_to": pa.array([], pa.date32())})  # fmt: skip
    assert merged_ranges(("a",), none).among([pa.array(["x"])], np.array([0])).tolist() == []
