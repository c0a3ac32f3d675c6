"""The checks of dimensions find the replicas that a run made, and every one that says something else."""

import pyarrow as pa
import pytest
import yaml

from headrace.pipelines.changes import check_history, repair_history
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.dimension import check_dimension
from headrace.pipelines.runner import run
from headrace.storage import Table

DOCUMENT = {
    "name": "shop",
    "source": {
        "format": "csv", "path": "in",
        "schema": {"order": "bigint", "buyer": "bigint", "day": "date", "store": "string"},
    },
    "dimensions": {
        "customer": {
            "path": "w/customer", "natural_key": ["id"], "columns": {"id": "bigint", "city": "string"}, "shards": 2,
            "history": {"effective": "since", "effective_type": "date"}, "changes": "changes",
        },
        "store": {
            "path": "w/store", "natural_key": ["code"], "columns": {"code": "string", "town": "string", "more": "int"},
            "rules": {"code": ["trim"]}, "shards": 2,
        },
    },
    "lookups": [
        {"dimension": "customer", "role": "buyer", "on": {"buyer": "id"}, "event_time": "day", "carry": ["city"]},
        {"dimension": "store", "role": "store", "on": {"store": "code"}, "policy": "infer", "carry": ["town"]},
    ],
    "sink": {"path": "w/facts"}, "replicas": "replicas", "spark": {"master": "local[2,4]"},
}  # fmt: skip


@pytest.mark.spark
def test_every_replica_of_a_run_is_compared(tmp_path, spark):  # noqa: ARG001 - the session
    for name in ("in", "changes"):
        (tmp_path / name).mkdir()
    (tmp_path / "shop.yml").write_text(yaml.safe_dump(DOCUMENT))
    lines = [f"{i},c{i},2024-01-01\n{i},d{i},2024-03-01" for i in range(20)]
    (tmp_path / "changes" / "1.csv").write_text("\n".join(["id,city,since", *lines]) + "\n")
    rows = [f"{i},{i % 20},2024-0{1 + i % 4}-05, s{i % 9} " for i in range(60)]
    (tmp_path / "in" / "1.csv").write_text("\n".join(["order,buyer,day,store", *rows]) + "\n")
    run(tmp_path / "shop.yml")
    config = load_pipeline(tmp_path / "shop.yml")
    assert (check_history(config, "customer"), check_dimension(config, "store")) == ([], [])
    for kind, column in (("customer-entries", "city"), ("customer-current", "city"), ("customer-versions", "city")):
        change(tmp_path, kind, column)
        (finding,) = check_history(config, "customer")
        assert (finding.rule, finding.rows) == ("replicas have the rows of the table", 1), kind
        assert repair_history(config, "customer").left == ()
        assert check_history(config, "customer") == [], kind
    change(tmp_path, "store", "town")
    (finding,) = check_dimension(config, "store")
    assert (finding.rule, finding.rows) == ("replicas have the members of the table", 1)


def change(folder, kind, column):
    file = next(iter((folder / "replicas").glob(f"{kind}-*/*/table.headrace")))
    with Table.open(file, mode="w") as table:
        row = next(iter(table.scan())).slice(0, 1)
        place, field = row.schema.get_field_index(column), row.schema.field(column)
        table.apply(upserts=pa.Table.from_batches([row.set_column(place, field, pa.array(["other"], field.type))]))
