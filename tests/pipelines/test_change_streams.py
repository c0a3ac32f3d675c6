"""A run applies the changes that wait before each batch of facts, so facts meet members that came before them."""

import pytest
import yaml
from click.testing import CliRunner
from deltalake import DeltaTable

from headrace.cli.main import headrace
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.errors import PipelineFileError
from headrace.pipelines.runner import run
from headrace.storage.errors import HeadraceError

DOCUMENT = {
    "name": "shop",
    "source": {"format": "csv", "path": "in", "schema": {"order": "bigint", "buyer": "bigint", "day": "date"}},
    "dimensions": {
        "customer": {
            "path": "w/customer", "natural_key": ["id"], "columns": {"id": "bigint", "city": "string"},
            "history": {"effective": "since", "effective_type": "date"}, "changes": "changes", "shards": 2,
        }
    },
    "lookups": [
        {"dimension": "customer", "role": "buyer", "on": {"buyer": "id"}, "event_time": "day", "carry": ["city"]}
    ],
    "sink": {"path": "w/facts"},
    "trigger": {"max_files": 1},
    "replicas": "replicas",
    "spark": {"master": "local[2,4]"},
}  # fmt: skip


@pytest.fixture
def shop(tmp_path):
    for name in ("in", "changes"):
        (tmp_path / name).mkdir()
    (tmp_path / "shop.yml").write_text(yaml.safe_dump(DOCUMENT))
    return tmp_path


def facts(shop):
    rows = DeltaTable(str(shop / "w" / "facts")).to_pyarrow_table().to_pylist()
    return sorted((row["order"], row["buyer_city"], row["buyer_key"] > 0) for row in rows)


@pytest.mark.spark
def test_facts_of_a_run_meet_the_changes_before_them(shop, spark):  # noqa: ARG001 - the session
    (shop / "changes" / "1.csv").write_text("id,city,since\n7,Oslo,2024-01-01\n7,Bergen,2024-03-01\n,x,2024-01-01\n")
    (shop / "changes" / "0.csv").touch()
    (shop / "in" / "1.csv").write_text("order,buyer,day\n1,7,2024-02-01\n2,7,2024-03-05\n3,8,2024-03-05\n")
    (shop / "in" / "2.csv").write_text("order,buyer,day\n4,8,2024-03-06\n5,7,2024-03-06\n")
    later = "id,city,since\n8,Narvik,2024-01-01\n7,Bodo,2024-03-06\n"

    def arrives(record):
        if record.batch == 0:
            (shop / "changes" / "2.csv").write_text(later)

    result = run(shop / "shop.yml", on_batch=arrives)
    assert result.total("loaded") == 5
    assert facts(shop) == [
        (1, "Oslo", True), (2, "Bergen", True), (3, None, False), (4, "Narvik", True), (5, "Bodo", True),
    ]  # fmt: skip
    assert result.changes == {"customer": {"added": 2, "versioned": 2, "rejected": 1}}
    assert result.as_dict()["changes"] == result.changes
    again = run(shop / "shop.yml")
    assert again.changes == {"customer": {}}
    for each in (result, again):
        assert [left.name for left in each.left_out] == [str(shop / "changes" / "0.csv")]


def command(*arguments):
    """Run a command of the terminal."""
    return CliRunner().invoke(headrace, list(arguments))


@pytest.mark.spark
def test_a_change_of_the_past_leads_to_the_facts_that_it_moved(shop, spark, monkeypatch):  # noqa: ARG001
    monkeypatch.chdir(shop)
    (shop / "changes" / "1.csv").write_text("id,city,since\n7,Oslo,2024-01-01\n7,Bergen,2024-03-01\n")
    (shop / "in" / "1.csv").write_text("order,buyer,day\n1,7,2024-02-20\n2,7,2024-03-05\n")
    told = command("run", "shop.yml", "--once").stdout
    assert "changes of dimension customer: 1 added, 1 versioned\n" in told
    (shop / "changes" / "2.csv").write_text("id,city,since\n7,Bergen,2024-02-10\n")
    told = command("run", "shop.yml", "--once").stdout
    restate = "headrace dimension restate customer --pipeline shop.yml"
    assert f"changes of dimension customer: 1 updated; `{restate}` corrects the facts in" in told
    assert "changes of dimension" not in command("run", "shop.yml", "--once").stdout
    checked = command("dimension", "check", "customer", "-p", "shop.yml")
    assert (checked.exit_code, f"`{restate}` corrects facts" in checked.stdout) == (3, True)
    assert "7 at 2024-02-20" in checked.stdout
    assert "dimension repair" not in checked.stdout
    assert command(*restate.split()[1:]).exit_code == 0
    assert command("dimension", "check", "customer", "-p", "shop.yml").exit_code == 0
    assert facts(shop) == [(1, "Bergen", True), (2, "Bergen", True)]


@pytest.mark.spark
def test_a_run_that_fails_tells_what_it_did_to_dimensions(shop, spark, monkeypatch):  # noqa: ARG001
    monkeypatch.chdir(shop)
    document = yaml.safe_load((shop / "shop.yml").read_text())
    plain = {"path": "w/store", "natural_key": ["store"], "columns": {"store": "bigint"}}
    document["dimensions"]["store"] = plain
    document["lookups"].append({"dimension": "store", "role": "store", "on": {"order": "store"}})
    (shop / "shop.yml").write_text(yaml.safe_dump(document))
    assert command("run", "shop.yml", "--once").exit_code == 0
    plain["columns"]["name"] = "string"
    (shop / "shop.yml").write_text(yaml.safe_dump(document))
    (shop / "changes" / "1.csv").write_text("id,city,since\n7,Oslo,2024-01-01\n,x,2024-01-01\n")
    (shop / "in" / "1.csv").write_text("other\n1\n")
    failed = command("run", "shop.yml", "--once")
    assert failed.exit_code == 1
    done = [line for line in failed.stderr.splitlines() if line.startswith("  done ")]
    assert "the column 'name' string was added" in done[0]
    assert done[1:] == ["  done   changes of dimension customer: 1 added, 1 rejected"]
    skipped = command("source", "skip", "shop.yml", "1.csv")
    assert skipped.exit_code == 0
    told = command("run", "shop.yml", "--once").stdout
    assert "was added" not in told
    assert "changes of dimension" not in told


@pytest.mark.spark
def test_changes_before_a_batch_of_changes_that_fails_are_told(shop, spark):  # noqa: ARG001
    (shop / "changes" / "1.csv").write_text("id,city,since\n7,Oslo,2024-01-01\n")
    (shop / "changes" / "2.csv").write_text("nothing\n7\n")
    with pytest.raises(HeadraceError) as failed:
        run(shop / "shop.yml")
    assert failed.value.__notes__ == ["changes of dimension customer: 1 added"]


def test_a_folder_of_changes_must_be_there(shop):
    (shop / "changes").rmdir()
    with pytest.raises(PipelineFileError, match=r"dimensions\.customer\.changes: there is no folder"):
        run(shop / "shop.yml")


def test_changes_need_a_history(shop):
    document = yaml.safe_load((shop / "shop.yml").read_text())
    del document["dimensions"]["customer"]["history"]
    del document["lookups"][0]["event_time"]
    (shop / "shop.yml").write_text(yaml.safe_dump(document))
    with pytest.raises(PipelineFileError, match="which need a history"):
        load_pipeline(shop / "shop.yml")
