"""A ledger that does not belong to its fact table is refused, and each way on that the message names leads on."""

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from test_loop import record

from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.delta.tables import DeltaHandle, create_table, has_table, registered_streams, stream_registry
from headrace.pipelines.errors import DeltaTableError, LedgerError
from headrace.pipelines.loop import BatchLoop, StopRequest
from headrace.pipelines.source.feed import SourceFeed
from headrace.pipelines.source.identity import application, check_identity, replaced_stream, source_of
from headrace.pipelines.source.ledger import Ledger
from headrace.pipelines.source.source_files import adopt_files

SCHEMA = pa.schema([("id", pa.int64())])


class DeltaLoader:
    """Appends the records of a batch to a Delta table as the protocol does: with transaction, note, registration."""

    def __init__(self, config, facts, ledger):
        self.config = config
        self.facts = facts
        self.ledger = ledger

    def finish(self, number, stream, _attempt=None):
        self.facts.latest()
        loaded = self.facts.transaction(application(stream, "facts"))
        return None if loaded is None or loaded < number else record(number, 0)

    def run_batch(self, pieces, number, stream, attempt):
        rows = [int(text) for name in pieces for text in (Path(self.config.source.path) / name).read_text().split()]
        properties = registered_streams(self.facts, self.config.name, stream, source_of(self.config))
        if properties:
            DeltaTable(self.config.sink.path).alter.set_table_properties(properties, raise_if_not_exists=False)
        name = application(stream, "facts")
        note = json.dumps({"application": name, "transaction": number, "attempt": attempt})
        committed = CommitProperties(
            custom_metadata={"userMetadata": note}, app_transactions=[Transaction(name, number)]
        )
        write_deltalake(
            self.config.sink.path, pa.table({"id": rows}, SCHEMA), mode="append", commit_properties=committed
        )
        self.facts.latest()
        return record(number, len(rows))


class Project:
    """A project folder with a pipeline file, whose runs need no Spark."""

    def __init__(self, folder):
        self.folder = folder
        self.document = {
            "name": "orders",
            "source": {"format": "csv", "path": "in", "schema": {"id": "bigint", "c": "string"}},
            "dimensions": {"k": {"path": "wh/k", "natural_key": ["c"], "columns": {"c": "string"}}},
            "lookups": [{"dimension": "k", "role": "k", "on": {"c": "c"}}],
            "sink": {"path": "wh/facts"},
        }
        self.count = 0

    @property
    def config(self):
        (self.folder / "p.yml").write_text(yaml.safe_dump(self.document))
        return load_pipeline(self.folder / "p.yml")

    def arrive(self):
        self.count += 1
        (self.folder / "in").mkdir(parents=True, exist_ok=True)
        (self.folder / "in" / f"f{self.count}").write_text(str(self.count))

    def run(self, ran_before=False):
        config = self.config
        if not has_table(config.sink.path):
            create_table(config.sink.path, SCHEMA)
        with Ledger(config.checkpoint) as ledger:
            facts = DeltaHandle(config.sink.path)
            facts.latest()
            check_identity(config, ledger, facts, ran_before=ran_before)
            loop = BatchLoop(
                SourceFeed(config.source, config.trigger, ledger),
                DeltaLoader(config, facts, ledger), lambda files: [file.name for file in files],
            )  # fmt: skip
            loop.run(StopRequest())
            return ledger.stream

    def refused(self, match, **options):
        before = self.facts
        with pytest.raises(LedgerError, match=match) as caught:
            self.run(**options)
        assert self.facts == before
        return str(caught.value)

    @property
    def facts(self):
        if not has_table(self.config.sink.path):
            return []
        return sorted(DeltaTable(self.config.sink.path).to_pyarrow_table().column("id").to_pylist())

    @property
    def checkpoint(self):
        return Path(self.config.checkpoint)


@pytest.fixture
def project(tmp_path):
    made = Project(tmp_path / "p")
    for _ in range(2):
        made.arrive()
        made.run()
    return made


def go_on(project, expected):
    """Load one file more, and expect these facts before it."""
    project.arrive()
    project.run()
    assert project.facts == sorted([*expected, project.count])


def test_runs_go_on(project):
    go_on(project, [1, 2])


# The checkpoint is gone


@pytest.fixture
def lost(project, tmp_path):
    shutil.move(project.checkpoint, tmp_path / "backup")
    assert "headrace source adopt PIPELINE" in project.refused("a run would load every file again. Restore the check")
    return project


def test_a_lost_checkpoint_can_be_restored(lost, tmp_path):
    shutil.rmtree(lost.checkpoint)
    shutil.move(tmp_path / "backup", lost.checkpoint)
    go_on(lost, [1, 2])


def test_a_lost_checkpoint_can_be_replaced_by_adopting(lost):
    adopt_files(lost.config)
    go_on(lost, [1, 2])
    go_on(lost, [1, 2, 3])


def test_after_a_lost_checkpoint_the_fact_table_can_be_removed(lost):
    shutil.rmtree(lost.config.sink.path)
    lost.run()
    assert lost.facts == [1, 2]


def test_a_lost_checkpoint_is_refused_with_duplicates_too_since_a_key_may_be_null(lost):
    lost.document["duplicates"] = {"key": ["id"]}
    message = lost.refused("a run would load every file again")
    assert "declare `duplicates`" not in message
    follow_removal(lost, message)


def follow_removal(project, message):
    """Remove what a message names, and expect that every file is loaded again."""
    for path in re.search("to load every file again, remove (.*)$", message)[1].replace(" and ", ", ").split(", "):
        shutil.rmtree(path)
    go_on(project, range(1, project.count + 1))


def test_a_project_copied_without_its_checkpoint_is_refused(project, tmp_path):
    shutil.copytree(project.folder, tmp_path / "q", ignore=shutil.ignore_patterns(".headrace"))
    copy = Project(tmp_path / "q")
    copy.count = project.count
    copy.refused("the project was copied without it")
    adopt_files(copy.config)
    go_on(copy, [1, 2])
    go_on(project, [1, 2])


def test_a_project_moved_with_its_checkpoint_goes_on(project, tmp_path):
    project.folder.rename(tmp_path / "q")
    project.folder = tmp_path / "q"
    go_on(project, [1, 2])


def test_a_table_of_an_earlier_release_needs_its_checkpoint_too(project):
    shutil.rmtree(project.checkpoint)
    path = project.config.sink.path
    DeltaTable(path).alter.set_table_properties({"headrace.streams": "{}"}, raise_if_not_exists=False)
    project.refused("a run would load every file again", ran_before=True)


def test_a_stream_that_registered_and_loaded_nothing_is_no_obstacle(tmp_path):
    project = Project(tmp_path / "p")
    project.arrive()
    create_table(project.config.sink.path, SCHEMA)
    properties = registered_streams(DeltaHandle(project.config.sink.path), "orders", "s", source_of(project.config))
    DeltaTable(project.config.sink.path).alter.set_table_properties(properties, raise_if_not_exists=False)
    project.run()
    assert project.facts == [1]


# The checkpoint is another one's


def test_the_checkpoint_of_another_stream_is_refused(project, tmp_path):
    other = Project(tmp_path / "other")
    other.arrive()
    other.run()
    shutil.move(project.checkpoint, tmp_path / "backup")
    shutil.copytree(other.checkpoint, project.checkpoint)
    project.refused("is that of stream")
    adopt_files(project.config)
    go_on(project, [1, 2])
    shutil.rmtree(project.checkpoint)
    shutil.copytree(other.checkpoint, project.checkpoint)
    follow_removal(project, project.refused("is that of stream"))


def test_an_older_copy_of_the_checkpoint_is_refused(project, tmp_path):
    shutil.copytree(project.checkpoint, tmp_path / "old")
    go_on(project, [1, 2])
    shutil.move(project.checkpoint, tmp_path / "newest")
    shutil.copytree(tmp_path / "old", project.checkpoint)
    project.refused("has batch 2 of this stream, which the ledger .* does not know")
    shutil.rmtree(project.checkpoint)
    shutil.copytree(tmp_path / "newest", project.checkpoint)
    go_on(project, [1, 2, 3])
    shutil.rmtree(project.checkpoint)
    shutil.copytree(tmp_path / "old", project.checkpoint)
    adopt_files(project.config)
    go_on(project, [1, 2, 3, 4])


def test_an_older_copy_is_refused_with_duplicates_too_since_its_numbers_are_taken(project, tmp_path):
    project.document["duplicates"] = {"key": ["id"]}
    shutil.copytree(project.checkpoint, tmp_path / "old")
    go_on(project, [1, 2])
    shutil.rmtree(project.checkpoint)
    shutil.copytree(tmp_path / "old", project.checkpoint)
    follow_removal(project, project.refused("does not know"))


# The fact table is another one


@pytest.mark.parametrize("batches", [0, 1])
def test_a_fact_table_that_lacks_a_loaded_batch_is_refused(project, tmp_path, batches):
    path = Path(project.config.sink.path)
    newest = tmp_path / "newest"
    shutil.copytree(path, newest)
    shutil.rmtree(path)
    if batches:
        copy = Project(tmp_path / "p")
        old = copy_of_first_batch(newest, tmp_path / "first")
        shutil.copytree(old, path)
        assert copy.facts == [1]
    project.refused("has batch 0 of this stream as the last one" if batches else "has no batch of this stream")
    if path.exists():
        shutil.rmtree(path)
    shutil.copytree(newest, path)
    go_on(project, [1, 2])


def copy_of_first_batch(table, place):
    """Return a copy of a table as it was after its first batch: table, properties, batch 0."""
    shutil.copytree(table, place)
    for log in sorted((place / "_delta_log").glob("*.json"))[3:]:
        log.unlink()
    return place


@pytest.mark.parametrize("way", ["adopt", "all again"])
def test_a_fact_table_that_was_replaced_can_be_gone_on_with(project, way):
    shutil.rmtree(project.config.sink.path)
    create_table(project.config.sink.path, SCHEMA)
    project.refused("the fact table was replaced, or is an older copy. Restore the fact table; or")
    if way == "adopt":
        adopt_files(project.config)
        go_on(project, [])
    else:
        shutil.rmtree(project.config.sink.path)
        shutil.rmtree(project.checkpoint)
        go_on(project, [1, 2])


@pytest.mark.parametrize("way", ["forward", "adopt", "all again"])
def test_a_fact_table_that_was_restored_to_an_older_version_is_refused(project, way):
    path = project.config.sink.path
    newest = DeltaTable(path).version()
    DeltaTable(path).restore(newest - 1)
    project.refused(f"was restored to a version before the last batch .* Restore the table to its version {newest}")
    if way == "forward":
        DeltaTable(path).restore(newest)
        go_on(project, [1, 2])
    elif way == "adopt":
        adopt_files(project.config)
        go_on(project, [1])
    else:
        shutil.rmtree(path)
        shutil.rmtree(project.checkpoint)
        go_on(project, [1, 2])


# The pipeline has another name


@pytest.mark.parametrize("duplicates", [None, {"key": ["id"]}])
def test_a_renamed_pipeline_is_refused(project, duplicates):
    project.document |= {"name": "sales", "duplicates": duplicates}
    project.refused("holds facts that pipeline orders loaded from the same source")
    project.document["name"] = "orders"
    go_on(project, [1, 2])


def test_a_renamed_pipeline_can_adopt(project):
    project.document["name"] = "sales"
    project.refused("Give the pipeline its old name")
    adopt_files(project.config)
    go_on(project, [1, 2])


def test_a_renamed_pipeline_can_load_another_table(project):
    project.document["name"] = "sales"
    project.document["sink"]["path"] = "wh/other"
    go_on(project, [1, 2])


def test_another_pipeline_of_another_source_or_pattern_may_load_the_same_table(project):
    project.document["name"] = "sales"
    project.document["source"]["files"] = "g*"
    (project.folder / "in/g1").write_text("7")
    project.run()
    assert project.facts == [1, 2, 7]
    assert set(stream_registry(DeltaHandle(project.config.sink.path))) == {"orders", "sales"}


# Parts


def test_a_source_is_named_relative_to_the_facts(project, tmp_path):
    config = project.config
    assert source_of(config) == "../../in/*"
    remote = config.sink.model_copy(update={"path": "s3://b/facts"})
    assert source_of(config.model_copy(update={"sink": remote})) == f"{tmp_path}/p/in/*"


def test_a_stream_that_is_replaced_is_known_until_the_new_one_is_registered(project):
    config = project.config
    with Ledger(config.checkpoint) as ledger:
        before = ledger.stream
        assert replaced_stream(config, ledger, DeltaHandle(config.sink.path)) is None
    adopt_files(config)
    with Ledger(config.checkpoint) as ledger:
        assert replaced_stream(config, ledger, DeltaHandle(config.sink.path)) == before == ledger.replaces
    project.arrive()
    project.run()
    with Ledger(config.checkpoint) as ledger:
        assert replaced_stream(config, ledger, DeltaHandle(config.sink.path)) is None


@pytest.mark.parametrize("text", ["[", "[]", '{"a": 1}', '{"a": {"stream": "s"}}'])
def test_a_registry_that_cannot_be_read_is_told(tmp_path, text):
    create_table(str(tmp_path / "t"), SCHEMA)
    DeltaTable(tmp_path / "t").alter.set_table_properties({"headrace.streams": text}, raise_if_not_exists=False)
    with pytest.raises(DeltaTableError, match=r"headrace\.streams of .* is not what Headrace writes"):
        stream_registry(DeltaHandle(str(tmp_path / "t")))


def test_a_stream_is_registered_once(tmp_path):
    create_table(str(tmp_path / "t"), SCHEMA)
    handle = DeltaHandle(str(tmp_path / "t"))
    properties = registered_streams(handle, "a", "s", "in/*")
    DeltaTable(tmp_path / "t").alter.set_table_properties(properties, raise_if_not_exists=False)
    handle.latest()
    assert registered_streams(handle, "a", "s", "in/*") == {}
    assert json.loads(registered_streams(handle, "b", "t", "in/*")["headrace.streams"]) == {
        "a": {"stream": "s", "source": "in/*"}, "b": {"stream": "t", "source": "in/*"},
    }  # fmt: skip
