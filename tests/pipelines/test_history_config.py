"""The block `history` of a dimension in a pipeline file, and the declaration that it becomes."""

import datetime as dt
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from headrace.etl.history import History
from headrace.etl.history.declaration import DELETES, UPSERTS
from headrace.pipelines.config.history import history_of
from headrace.pipelines.config.merge import mixed_lookup
from headrace.pipelines.config.model import HistoryConfig, load_pipeline
from headrace.pipelines.errors import PipelineFileError
from headrace.pipelines.restating import restate

BASE = """
name: shop
source: {format: csv, path: in, schema: {order: bigint, customer: bigint, day: date}}
dimensions:
  customer:
    path: w/dim_customer
    natural_key: [id]
    columns: {id: bigint, city: string, phone: string, load: bigint}
    rules: {}
    history: {effective: since}
lookups:
  - {dimension: customer, role: customer, on: {customer: id}}
sink: {path: w/orders}
"""


def config_of(folder, **history):
    document = yaml.load(BASE, Loader=yaml.BaseLoader)
    document["dimensions"]["customer"]["history"] |= history
    file = folder / "pipeline.yml"
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return load_pipeline(file)


def refused(folder, **history):
    with pytest.raises(PipelineFileError) as caught:
        config_of(folder, **history)
    return str(caught.value)


def test_defaults_are_those_of_the_declaration(tmp_path):
    history = history_of(config_of(tmp_path), "customer")
    assert history == History(history.dimension, effective="since")
    assert history.dimension.schema == pa.schema(
        {"id": pa.int64(), "city": pa.string(), "phone": pa.string(), "load": pa.int64()}
    )
    assert history.dimension.surrogate_key == "customer_key"


def test_every_field_arrives(tmp_path):
    given = {
        "effective_type": "timestamp_ntz", "by_day": True, "sequence": "n", "sequence_type": "int", "operation": "op",
        "upserts": ["U"], "deletes": ["X"], "type_0": ["city"], "type_1": ["phone"], "type_2": [], "audit": ["load"],
        "valid_from": "f", "valid_to": "t", "is_current": "c", "version": "v", "is_deleted": "d",
        "end": dt.date(9999, 12, 31),
    }  # fmt: skip
    history = history_of(config_of(tmp_path, **given), "customer")
    tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    types = {"effective_type": pa.timestamp("us"), "sequence_type": pa.int32()}
    assert history == History(history.dimension, effective="since", **(tuples | types))


def test_every_field_and_the_words_of_operation_are_documented():
    page = (Path(__file__).parents[2] / "docs/dimensions.md").read_text()
    table = page.partition("### The fields of history\n")[2].partition("\n### ")[0]
    assert {name for name in HistoryConfig.model_fields if f"`{name}`" not in table} == set()
    assert f"`[{', '.join(UPSERTS)}]`; `[{', '.join(DELETES)}]`" in table


def test_the_block_has_the_fields_of_the_declaration():
    assert set(HistoryConfig.model_fields) == {*History.__dataclass_fields__, "parents"} - {"dimension", "special"}


def test_an_attribute_that_is_not_there(tmp_path):
    message = refused(tmp_path, type_1=["fax"])
    assert "line 20, column 5" in message
    assert "no attribute 'fax'; it has city, phone, load" in message


def test_a_mistake_in_a_history_or_its_lookup_is_told_once(tmp_path):
    assert refused(tmp_path, type_1=["fax"]).count("line ") == 1
    (tmp_path / "pipeline.yml").write_text(BASE.replace("{customer: id}", "{customer: idd}"))
    with pytest.raises(PipelineFileError) as caught:
        load_pipeline(tmp_path / "pipeline.yml")
    assert str(caught.value).count("line ") == 1
    assert "lookup 'customer' compares idd (did you mean 'id'?), but the natural key" in str(caught.value)


@pytest.mark.parametrize(
    ("effective_type", "column", "told"),
    [
        ("date", "order", "of type bigint, which is no time; name a column of type date or timestamp or timestamp_ntz"),
        ("timestamp", "order", "of type bigint, which is no time; name a column of type date or timestamp, or"),
        ("timestamp", "local", "of type timestamp_ntz, which is not comparable with timestamp, the type"),
        ("timestamp_ntz", "at", "of type timestamp, which is not comparable with timestamp_ntz, the type"),
    ],
)
def test_an_event_time_of_an_unsuitable_type_names_lookup_option_and_the_types_that_work(
    tmp_path, effective_type, column, told
):
    def config_with(event_time):
        document = yaml.load(BASE, Loader=yaml.BaseLoader)
        document["source"]["schema"] |= {"at": "timestamp", "local": "timestamp_ntz"}
        document["dimensions"]["customer"]["history"]["effective_type"] = effective_type
        document["lookups"][0]["event_time"] = event_time
        (tmp_path / "pipeline.yml").write_text(yaml.safe_dump(document, sort_keys=False))
        return load_pipeline(tmp_path / "pipeline.yml")

    with pytest.raises(PipelineFileError) as caught:
        config_with(column)
    message = str(caught.value)
    assert f"lookup 'customer': `event_time` names column {column!r} {told}" in message
    assert message.endswith(", or derive one in `transform`")
    advised = message.partition("name a column of type ")[2].partition(", or derive")[0].split(" or ")
    assert len(advised) == (3 if effective_type == "date" else 2)
    for kind in advised:
        config_with({"date": "day", "timestamp": "at", "timestamp_ntz": "local"}[kind])


def test_an_attribute_without_type(tmp_path):
    assert "attribute 'phone' has no type" in refused(tmp_path, type_2=["city"], audit=["load"])


def test_names_that_differ_in_case(tmp_path):
    assert "'city' and 'City' differ only in case" in refused(tmp_path, version="City")


def test_an_effective_type_that_is_no_time(tmp_path):
    assert "`effective_type` is date32 or a timestamp" in refused(tmp_path, effective_type="bigint")


def test_a_history_needs_columns(tmp_path):
    document = yaml.safe_load(BASE.replace(" on:", " 'on':"))
    del document["dimensions"]["customer"]["columns"]
    (tmp_path / "pipeline.yml").write_text(yaml.safe_dump(document))
    with pytest.raises(PipelineFileError, match=r"needs dimensions\.customer\.columns"):
        load_pipeline(tmp_path / "pipeline.yml")


def test_a_dimension_without_history(tmp_path):
    (tmp_path / "pipeline.yml").write_text(BASE.replace("    history: {effective: since}\n", ""))
    with pytest.raises(PipelineFileError, match="declared without history"):
        history_of(load_pipeline(tmp_path / "pipeline.yml"), "customer")


@pytest.mark.parametrize(
    ("sink", "mixed"),
    [
        ({"keep": ["customer_key"]}, "customer_key of the first record of their key, and customer, day"),
        ({"keep": ["customer", "customer_key", "customer_city"]}, "of the last"),
        ({"keep": ["day"]}, "the facts have day of the first"),
        ({"update": ["customer"]}, "and customer of the last"),
        ({"keep": ["customer", "customer_key", "customer_city", "day"]}, None),
        ({"update": ["load"]}, None),
        ({}, None),
    ],
)
def test_merged_facts_that_mix_the_columns_of_a_lookup_are_not_restated(tmp_path, sink, mixed):
    document = yaml.load(BASE, Loader=yaml.BaseLoader)
    document["source"]["schema"]["load"] = "bigint"
    document["lookups"][0] |= {"event_time": "day", "carry": ["city"]}
    document["sink"] |= {"mode": "merge", "key": ["order"], **sink}
    (tmp_path / "pipeline.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    config = load_pipeline(tmp_path / "pipeline.yml")
    if mixed is None:
        assert mixed_lookup(config, config.lookups[0]) is None
    else:
        with pytest.raises(PipelineFileError, match=mixed):
            restate(config)
