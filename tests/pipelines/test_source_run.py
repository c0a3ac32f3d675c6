"""Runs under Spark as far as they concern the source: odd names, pieces, the ledger and the fact table's registry."""

import os
import shutil
import signal

import pytest
import yaml
from deltalake import DeltaTable

from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.delta.tables import DeltaHandle, create_table, stream_registry
from headrace.pipelines.errors import BatchError, LedgerError, SourceFileError
from headrace.pipelines.runner import run
from headrace.pipelines.source.discovery import examine
from headrace.pipelines.source.ledger import Ledger
from headrace.pipelines.source.pieces import piece_frame
from headrace.pipelines.source.source_files import adopt_files, list_files, skip_files

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]


class Project:
    """A folder with a pipeline of one dimension."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "in").mkdir(parents=True)
        self.document = {
            "name": "orders",
            "source": {"format": "csv", "path": "in", "schema": {"id": "bigint", "c": "string"}},
            "dimensions": {"k": {"path": "../wh/k", "natural_key": ["c"], "columns": {"c": "string"}, "shards": 1}},
            "lookups": [{"dimension": "k", "role": "k", "on": {"c": "c"}, "policy": "infer"}],
            "sink": {"path": "../wh/facts"},
            "replicas": "../replicas",
        }

    @property
    def config(self):
        (self.folder / "p.yml").write_text(yaml.safe_dump(self.document))
        return load_pipeline(self.folder / "p.yml")

    def write(self, name, *numbers):
        path = self.folder / "in" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("id,c\n" + "".join(f"{number},c{number}\n" for number in numbers))

    def run(self, **options):
        return run(self.config, **options)

    @property
    def facts(self):
        return sorted(DeltaTable(self.config.sink.path).to_pyarrow_table().column("id").to_pylist())


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path / "p[1] %41 {x}")


def test_odd_names_are_loaded_once_and_what_is_left_out_is_told(project):
    names = [
        "ok.csv",
        "a[1].csv",
        "a1.csv",
        "b?.csv",
        "bc.csv",
        "d*.csv",
        "08:00.csv",
        "e%41.csv",
        "new\nline.csv",
        "é",
    ]
    for number, name in enumerate(names):
        project.write(name, number)
    project.write("sub/f.csv", 99)
    (project.folder / "in/empty.csv").touch()
    result = project.run()
    assert project.facts == list(range(len(names)))
    assert [left["name"] for left in result.as_dict()["left_out"]] == ["sub", "empty.csv"]
    os.utime(project.folder / "in/ok.csv", (0, 0))
    project.document["source"]["recursive"] = True
    project.write("empty.csv", 100)
    project.run()
    assert project.facts == [*range(len(names)), 99, 100]


def test_a_large_file_is_read_in_pieces_and_each_record_once(project, spark, monkeypatch):
    monkeypatch.setattr("headrace.pipelines.source.pieces._LEAST_BYTES", 1 << 20)
    project.write("large.csv", *range(400_000))
    project.write("small.csv", 400_000)
    found = list_files(project.config).files
    with Ledger(project.config.checkpoint) as ledger:
        assert ledger.is_new
    frame = piece_frame(
        spark, project.config.source, [examine(project.config.source.path, each.name) for each in found]
    )
    assert frame.count() > 2
    assert frame.rdd.getNumPartitions() == 2
    project.run()
    assert project.facts == list(range(400_001))


@pytest.mark.parametrize("step", ["after plan", "after facts", "after batch"])
def test_a_crash_loses_and_doubles_nothing(project, step):
    project.write("a.csv", 1, 2)

    def crash(name):
        if name == step:
            raise RuntimeError(step)

    with pytest.raises(BatchError, match=step):
        project.run(hook=crash)
    project.write("b.csv", 3)
    project.run()
    assert project.facts == [1, 2, 3]
    assert {file.state for file in list_files(project.config).files} == {"loaded"}


def test_a_lost_checkpoint_is_refused_and_adopted(project):
    project.write("a.csv", 1)
    project.run()
    registered = stream_registry(DeltaHandle(project.config.sink.path))["orders"]
    assert registered["source"] == "../../p[1] %41 {x}/in/*"
    shutil.rmtree(project.config.checkpoint)
    with pytest.raises(LedgerError, match="a run would load every file again"):
        project.run()
    adopt_files(project.config)
    project.write("b.csv", 2)
    project.run()
    assert project.facts == [1, 2]
    assert stream_registry(DeltaHandle(project.config.sink.path))["orders"]["stream"] != registered["stream"]


def test_a_table_that_spark_writes_registers_its_stream_too(project):
    project.write("a.csv", 1)
    project.run()
    path = project.config.sink.path
    schema = DeltaHandle(path).schema()
    shutil.rmtree(path)
    shutil.rmtree(project.config.checkpoint)
    create_table(path, schema)
    DeltaTable(path).alter.add_constraint({"positive": "id > 0"})
    project.document["source"]["files"] = "*.{csv,it's}"
    project.run()
    assert project.facts == [1]
    assert stream_registry(DeltaHandle(path))["orders"]["source"] == "../../p[1] %41 {x}/in/*.{csv,it's}"


def test_a_file_that_stops_a_batch_is_skipped_or_repaired(project):
    project.write("good.csv", 1)
    (project.folder / "in/bad.csv").write_bytes(b"id,other\n1,2\n")
    with pytest.raises((BatchError, SourceFileError), match=r"bad\.csv"):
        project.run()
    skip_files(project.config, ["bad.csv"])
    project.run()
    assert project.facts == [1]
    project.write("bad.csv", 2)
    project.run()
    assert project.facts == [1, 2]


def test_a_followed_source_is_loaded_until_a_signal_comes(project):
    project.write("a.csv", 1)
    seen = []

    def told(record):
        seen.append(record)
        if len(seen) == 1:
            project.write("b.csv", 2)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    result = project.run(follow=True, on_batch=told)
    assert (result.state, result.signal, project.facts) == ("stopped", signal.SIGTERM, [1, 2])
