"""A pipeline whose source is the folder of an extraction loads each row once."""

import sqlite3

import pytest
import yaml
from deltalake import DeltaTable

from headrace.pipelines import extract, load_pipeline, run

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]


def insert(file, *rows):
    connection = sqlite3.connect(file)
    with connection:
        connection.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, c TEXT, paid DECIMAL(8, 2))")
        connection.executemany("INSERT INTO orders VALUES (?, ?, ?)", rows)
    connection.close()


def facts(config):
    rows = DeltaTable(config.sink.path).to_pyarrow_table().select(["id", "paid"]).to_pylist()
    return sorted((row["id"], str(row["paid"])) for row in rows)


def test_new_rows_of_a_table_are_loaded_once(tmp_path):
    document = {
        "name": "orders",
        "source": {
            "format": "parquet", "path": "in", "schema": {"id": "bigint", "c": "string", "paid": "decimal(8,2)"},
        },
        "dimensions": {"k": {"path": "wh/k", "natural_key": ["c"], "columns": {"c": "string"}, "shards": 1}},
        "lookups": [{"dimension": "k", "role": "k", "on": {"c": "c"}, "policy": "infer"}],
        "sink": {"path": "wh/facts"},
    }  # fmt: skip
    (tmp_path / "p.yml").write_text(yaml.safe_dump(document))
    config = load_pipeline(tmp_path / "p.yml")
    file, out = tmp_path / "shop.db", tmp_path / "in"
    insert(file, (1, "a", 0.1), (2, "b", 5))
    extract(f"sqlite:///{file}", "orders", out, new_by="id", rows_per_file=1)
    assert run(config).total("loaded") == 2
    insert(file, (3, "a", 7.25))
    (out / "part-000001.parquet").unlink()  # loaded files may go
    for rows in (1, 0):
        assert extract(f"sqlite:///{file}", "orders", out, new_by="id").rows == rows
        assert run(config).total("loaded") == rows
    assert facts(config) == [(1, "0.10"), (2, "5.00"), (3, "7.25")]
