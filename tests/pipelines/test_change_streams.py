"""A run applies the changes that wait before each batch of facts, so facts meet members that came before them."""

import pytest
import yaml
from deltalake import DeltaTable

from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.errors import PipelineFileError
from headrace.pipelines.runner import run

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
