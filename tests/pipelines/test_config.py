"""The pipeline file: strict, helpful, with paths and secrets in their places."""

import json
import re
from pathlib import Path

import jsonschema
import pyarrow as pa
import pytest
import yaml

import headrace.pipelines
from headrace.pipelines.batch.preparation import check_pipeline
from headrace.pipelines.config.model import json_schema, load_pipeline
from headrace.pipelines.dimension.tables import create_dimension
from headrace.pipelines.errors import DeltaTableError, PipelineFileError

GOOD = """
name: flights
source:
  format: csv
  path: in
  schema: {id: bigint, tail: string, at: timestamp}
dimensions:
  plane: {path: w/dim_plane, natural_key: [tailnum]}
lookups:
  - {dimension: plane, role: plane, on: {tail: tailnum}, policy: infer}
sink: {path: w/facts}
"""


def write(folder, text):
    file = folder / "pipeline.yml"
    file.write_text(text)
    return file


def changed(folder, change):
    document = yaml.load(GOOD, Loader=yaml.BaseLoader)
    change(document)
    return write(folder, yaml.safe_dump(document, sort_keys=False))


def refused(folder, change):
    with pytest.raises(PipelineFileError) as caught:
        load_pipeline(changed(folder, change))
    return str(caught.value)


def test_paths_are_relative_to_the_file(tmp_path):
    config = load_pipeline(write(tmp_path, GOOD))
    assert config.source.path == str(tmp_path / "in")
    assert config.dimensions["plane"].path == str(tmp_path / "w/dim_plane")
    assert config.errors_path == str(tmp_path / "w/facts_errors")
    assert config.checkpoint == str(tmp_path / ".headrace/flights/checkpoint")
    assert config.catalog == f"sqlite:///{tmp_path}/.headrace/catalog.db"


def put(document, keys, path):
    for key in keys[:-1]:
        document = document[key]
    document[keys[-1]] = path


@pytest.mark.parametrize(
    ("keys", "path", "name", "owner"),
    [
        ("sink.path", "in", "source.path", "sink.path"),
        ("sink.path", ".", "dimensions.plane.path", "sink.path"),
        ("source.path", "w/facts/new", "source.path", "sink.path"),
        ("sink.path", "w/dim_plane", "sink.path", "dimensions.plane.path"),
        ("sink.path", "w/dim_plane/facts", "sink.path", "dimensions.plane.path"),
        ("sink.errors", "w/../w/facts", "sink.errors", "sink.path"),
        ("sink.duplicates", "w/facts_errors", "sink.duplicates", "sink.errors"),
        ("checkpoint", "w/facts/checkpoint", "checkpoint", "sink.path"),
        ("replicas", "w/dim_plane", "replicas", "dimensions.plane.path"),
        ("sink.duplicates", "w/facts_errors_resolutions/", "sink.duplicates", "sink.errors (<path>_resolutions)"),
        ("dimensions.plane.path", "w/facts_duplicates/", "sink.duplicates", "dimensions.plane.path"),
        ("sink.errors", "w/dim_agent_errors", "sink.errors", "dimensions.agent.path (<path>_errors)"),
        ("sink.path", "w/dim_agent_moved", "sink.path", "dimensions.agent.path (<path>_moved)"),
        ("dimensions.agent.changes", "w/facts/changes", "dimensions.agent.changes", "sink.path"),
        ("catalog", "sqlite:///w/facts/runs.db", "catalog", "sink.path"),
    ],
)
def test_tables_and_folders_that_meet_are_refused(tmp_path, keys, path, name, owner):
    def change(document):
        columns = {"code": "string", "city": "string"}
        history = {"effective": "since"}
        document["dimensions"]["agent"] = {
            "path": "w/dim_agent", "natural_key": ["code"], "columns": columns, "history": history
        }  # fmt: skip
        put(document, keys.split("."), path)

    message = refused(tmp_path, change)
    told = (
        rf"{re.escape(name)}: \S+ is the table of {re.escape(owner)}, or lies in its folder; name a folder of its own"
    )
    assert re.search(told, message)


def test_a_table_of_another_file_system_meets_others_too(tmp_path):
    def change(document):
        document["sink"]["path"] = "s3a://bucket/facts"
        document["dimensions"]["plane"]["path"] = "s3a://bucket/facts/plane"

    assert "dimensions.plane.path: s3a://bucket/facts/plane is the table of sink.path" in refused(tmp_path, change)


def test_dimensions_may_share_a_table_and_a_source_may_have_one_below(tmp_path):
    def change(document):
        document["dimensions"]["again"] = {**document["dimensions"]["plane"], "natural_key": ["serial"]}
        document["lookups"][0]["policy"] = "unknown"
        document["sink"]["path"] = "in/w/facts"

    load_pipeline(changed(tmp_path, change))


@pytest.mark.parametrize("path", ["w/dim_plane", "w/dim_plane/", "./w/../w//dim_plane", "ABSOLUTE"])
def test_two_dimensions_with_one_table_and_one_key_are_refused(tmp_path, path):
    def change(document):
        place = str(tmp_path / "w/dim_plane") if path == "ABSOLUTE" else path
        document["dimensions"]["again"] = {**document["dimensions"]["plane"], "path": place}

    message = refused(tmp_path, change)
    told = "the dimensions 'plane' and 'again' have the same table, "
    assert f"{told}{tmp_path / 'w/dim_plane'}, and the same natural key; declare one dimension" in message


def test_a_shared_table_that_is_missing_names_the_command_that_creates_it(tmp_path):
    def change(document):
        columns = {"tailnum": "string", "serial": "string"}
        plane = {**document["dimensions"]["plane"], "surrogate_key": "plane_key", "columns": columns}
        document["dimensions"] = {"plane": plane, "again": {**plane, "natural_key": ["serial"]}}
        document["lookups"][0]["policy"] = "unknown"
        document["lookups"].append({"dimension": "again", "role": "again", "on": {"tail": "serial"}})

    config = load_pipeline(changed(tmp_path, change))
    told = "dimensions 'plane' and 'again' share does not exist; .* `headrace dimension create plane SOURCE"
    with pytest.raises(DeltaTableError, match=told):
        check_pipeline(config, 1)
    create_dimension(config, "plane", pa.table({"tailnum": ["N1"], "serial": ["7"]}))
    check_pipeline(config, 1)


def test_a_shared_table_takes_no_inferred_members_and_no_history(tmp_path):
    def shared(document, **more):
        document["dimensions"]["again"] = {
            **document["dimensions"]["plane"], "columns": {"serial": "string"}, "natural_key": ["serial"], **more
        }  # fmt: skip

    assert "members that facts infer, which would lack the other natural key" in refused(tmp_path, shared)
    message = refused(tmp_path, lambda document: shared(document, history={"effective": "since"}))
    assert "'plane' and 'again' have the same table" in message
    assert "and a history, which has a table of its own" in message


def test_tables_of_another_file_system_are_compared_without_their_last_slash(tmp_path):
    def change(document):
        plane = document["dimensions"]["plane"]
        plane["path"] = "s3a://bucket/plane"
        document["dimensions"]["again"] = {**plane, "path": "s3a://bucket/plane/"}

    assert "the dimensions 'plane' and 'again' have the same table" in refused(tmp_path, change)


def test_a_link_to_another_file_system_stays(tmp_path):
    config = load_pipeline(changed(tmp_path, lambda d: d["sink"].update(path="s3a://bucket/facts")))
    assert config.sink.path == "s3a://bucket/facts"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(memmory="1MiB"), ("memmory", "did you mean 'memory'?", "deadline")),
        (lambda d: d["source"].update(fromat="csv"), ("source.fromat", "'format'", "schema")),
        (lambda d: d["dimensions"]["plane"].update(ruls={}), ("dimensions.plane.ruls", "'rules'", "shards")),
        (lambda d: d["lookups"][0].update(polcy="infer"), ("lookups.0.polcy", "'policy'", "carry")),
        (lambda d: d["source"].pop("path"), ("source.path", "missing")),
        (lambda d: d["lookups"][0].update(policy="guess"), ("lookups.0.policy", "'guess'", "'unknown'")),
        (lambda d: d["source"]["schema"].update(at="timestmp"), ("source.schema.at", "did you mean 'timestamp'?")),
        (lambda d: d["source"].update(time_zone="Mars/Olympus"), ("source.time_zone", "Mars/Olympus")),
        (lambda d: d.update(deadline="5 parsecs"), ("deadline", "parsecs", "ms")),
        (lambda d: d.update(memory="lots"), ("memory", "'lots'", "MiB")),
        (lambda d: d["lookups"][0].update(dimension="plan"), ("'plan' (did you mean 'plane'?); the dimensions are",)),
        (
            lambda d: d["lookups"][0].update(on={"tail": "tailnumber"}),
            ("compares tailnumber (did you mean 'tailnum'?), but", "is tailnum"),
        ),
        (
            lambda d: d.update(trigger={"max_files": "many"}),
            ("trigger.max_files: needs a whole number, not 'many'",),
        ),
        (lambda d: d["source"].update(path=""), ("source.path: string should have at least 1 character, not ''",)),
        (lambda d: d["source"].update(recursive="maybe"), ("source.recursive: needs true or false, not 'maybe'",)),
        (lambda d: d.update(sink="w/facts"), ("sink: needs fields of its own, not 'w/facts'",)),
        (
            lambda d: d["dimensions"]["plane"].update(natural_key="tailnum"),
            ("natural_key: needs a list, not 'tailnum'",),
        ),
        (lambda d: d["lookups"][0].update(on={"tale": "tailnum"}), ("'tale'", "id, tail, at")),
        (lambda d: d.update(duplicates={"key": ["nope"]}), ("duplicates", "'nope'")),
        (lambda d: d["lookups"].append(d["lookups"][0]), ("two lookups", "'plane'")),
        (lambda d: d["source"]["schema"].update(_state="int"), ("'_state'", "begins with '_'")),
        (lambda d: d["source"]["schema"].update({"a.b": "int"}), ("'a.b'", "has a dot or a backtick", "`rename`")),
        (lambda d: d.update(name="a b"), ("name: a name starts with", "'.' and '-'; 'a b' does not")),
        (lambda d: d.update(name="../up"), ("name: a name starts with", "'../up' does not")),
        (lambda d: d["lookups"][0].update(role="a.b"), ("lookups.0.role", "and '-'; 'a.b' does not")),
        (lambda d: d["source"]["schema"].update(ID="int"), ("'id' and 'ID'", "differ only in case")),
        (
            lambda d: d["lookups"].append({**d["lookups"][0], "role": "Plane"}),
            ("'plane' and 'Plane'", "differ only in case"),
        ),
        (lambda d: d["source"]["schema"].update(Plane_Key="int"), ("'Plane_Key' and 'plane_key'", "another role")),
        (lambda d: d["source"]["schema"].update(plane_key="int"), ("two columns 'plane_key'", "another role")),
        (
            lambda d: d["dimensions"]["plane"].update(columns={"tailnum": "string", "TAILNUM": "int"}),
            ("'tailnum' and 'TAILNUM'", "differ only in case"),
        ),
        (
            lambda d: d["dimensions"]["plane"].update(columns={"tailnum": "string", "Plane_Key": "int"}),
            ("'plane_key' and 'Plane_Key'", "differ only in case"),
        ),
        (
            lambda d: d["dimensions"]["plane"].update(columns={"tailnum": "double"}),
            ("natural key column 'tailnum' is double", "decimal(p,s)"),
        ),
        (lambda d: d["dimensions"]["plane"].update(columns={"seats": "int"}), ("no column 'tailnum'", "seats")),
        (lambda d: d["dimensions"]["plane"].update(rules={"seats": ["trim"]}), ("rules for 'seats'",)),
        (lambda d: d["lookups"][0].update(on={"tail": "tail"}), ("compares tail", "is tailnum")),
        (
            lambda d: (d["source"]["schema"].update(w="float"), d.update(duplicates={"key": ["w"]})),
            ("duplicates: column 'w' is float", "decimal(p,s)"),
        ),
        (lambda d: d["sink"].update(partition_by=["day"]), ("'day'", "plane_key")),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path, change, words):
    message = refused(tmp_path, change)
    assert str(tmp_path / "pipeline.yml") in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", ["web-shop", "web.shop", "2024", "Web_Shop-2"])
def test_a_name_may_hold_hyphens_and_dots(tmp_path, name):
    assert load_pipeline(changed(tmp_path, lambda d: d.update(name=name))).name == name


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("  format: csv", "  fromat: csv", "line 4, column 3: source.fromat: unknown field"),
        ("  path: in\n", "", "line 3, column 1: source.path: is missing"),
        ("policy: infer", "policy: guess", "line 10, column 58: lookups.0.policy: 'guess'"),
        ("{tail: tailnum}", "{tale: tailnum}", "line 10, column 42: lookup 'plane' names column 'tale'"),
        ("at: timestamp", "at: timestmp", "line 6, column 38: source.schema.at: unknown type"),
        ("sink: {path: w/facts}", "sink: {path: '${NOT_SET}'}", "line 11, column 8: the file uses ${NOT_SET}"),
        ("sink: {path: w/facts}", "sink: {path: w/facts", "line 12, column 1: the file is not valid YAML: expected"),
        ("sink:", "name: b\nsink:", "line 11, column 1: the file is not valid YAML: 'name' is given twice"),
        ("sink:", "catalog: 'x://u:pw@h/d'\nsink:", "line 11, column 1: catalog: the URL holds a password"),
    ],
)
def test_an_error_names_line_and_column(tmp_path, old, new, place):
    assert old in GOOD
    file = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(PipelineFileError) as caught:
        load_pipeline(file)
    assert str(caught.value).startswith(f"{file}, line ")
    assert place in str(caught.value)


def test_every_problem_is_named_at_once(tmp_path):
    message = refused(tmp_path, lambda d: (d.update(memmory=1), d["sink"].update(eror="x")))
    assert "memmory" in message
    assert "sink.eror" in message


def test_a_field_given_twice_is_refused(tmp_path):
    with pytest.raises(PipelineFileError, match="'name' is given twice"):
        load_pipeline(write(tmp_path, GOOD + "name: other\n"))


@pytest.mark.parametrize("text", ["[1, 2]", "", "a: [", "!!python/object/apply:os.system [ls]"])
def test_a_file_that_holds_no_pipeline_is_refused(tmp_path, text):
    with pytest.raises(PipelineFileError):
        load_pipeline(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(
        PipelineFileError,
        match=r"there is no pipeline file .*nowhere\.yml; correct the path, or write one with `headrace init`",
    ):
        load_pipeline(tmp_path / "nowhere.yml")


def test_secrets_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("CATALOG_PASSWORD", "s3cret")
    url = "postgresql://loader:${CATALOG_PASSWORD}@db/headrace"
    assert load_pipeline(changed(tmp_path, lambda d: d.update(catalog=url))).catalog.endswith(":s3cret@db/headrace")


def test_a_secret_that_is_not_set_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("CATALOG_PASSWORD", raising=False)
    assert "CATALOG_PASSWORD" in refused(tmp_path, lambda d: d.update(catalog="x://u:${CATALOG_PASSWORD}@db/h"))


def test_a_password_in_the_file_is_refused_and_not_repeated(tmp_path):
    message = refused(tmp_path, lambda d: d.update(catalog="postgresql://loader:s3cret@db/headrace"))
    assert "${VARIABLE}" in message
    assert "s3cret" not in message


@pytest.mark.parametrize("text", ["x: &a [*a]", "x: &a {y: *a}", "x: " + "[" * 5000 + "]" * 5000])
def test_a_file_that_never_ends_is_refused(tmp_path, text):
    with pytest.raises(PipelineFileError, match="nested too deeply, or a part of it holds itself"):
        load_pipeline(write(tmp_path, text))


def test_yes_and_no_are_names_not_booleans(tmp_path):
    config = load_pipeline(write(tmp_path, GOOD.replace("tail: string", "no: string").replace("{tail:", "{no:")))
    assert "no" in config.source.columns


def test_the_json_schema_in_the_package_is_current():
    kept = Path(headrace.pipelines.__file__).with_name("pipeline.schema.json").read_text()
    assert kept == json_schema(), "write json_schema() to pipelines/pipeline.schema.json"


@pytest.mark.parametrize("value", ["null", "'null'", "~"])
def test_missing_fields_may_be_null_with_or_without_quotes(tmp_path, value):
    text = GOOD.replace("path: in", f"path: in\n  missing_fields: {value}")
    assert load_pipeline(write(tmp_path, text)).source.missing_fields == "null"
    jsonschema.validate(yaml.safe_load(text.replace(" on:", " 'on':")), json.loads(json_schema()))


def test_the_json_schema_takes_what_the_reader_takes():
    jsonschema.validate(yaml.safe_load(GOOD.replace(" on:", " 'on':")), json.loads(json_schema()))


def test_the_json_schema_refuses_an_unknown_field():
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**yaml.safe_load(GOOD.replace(" on:", " 'on':")), "memmory": 1}, json.loads(json_schema()))


# What is written, and what YAML 1.1 reads


YAML_NUMBERS = [
    "0x1F",
    "0x_",
    "010",
    "0b11",
    "1_000",
    "12:30:45",
    "190:20:30.15",
    "1.50",
    "1.0e+3",
    "1e3",
    "+7",
    "-0",
    "=",
]


@pytest.mark.parametrize("text", [*YAML_NUMBERS, "yes", "No", "on", "TRUE", "y"])
def test_a_field_for_text_gets_what_is_written(tmp_path, text):
    file = write(
        tmp_path,
        GOOD.replace("path: in", f"path: in\n  nulls: [{text}]\n  missing_fields: error")
        + f"spark: {{conf: {{some.option: {text}}}}}\n",
    )
    config = load_pipeline(file)
    assert config.source.nulls == [text]
    assert config.spark.conf == {"some.option": text}


@pytest.mark.parametrize("text", ["7", "-7", "1.5", "true", "2026-01-01", "2026-1-1 10:00:00", "null", "~", ".inf"])
def test_another_value_than_text_is_refused_with_its_line_and_the_remedy(tmp_path, text):
    file = write(tmp_path, GOOD.replace("path: in", f"path: in\n  nulls:\n  - NA\n  - {text}"))
    with pytest.raises(PipelineFileError) as caught:
        load_pipeline(file)
    remedy = re.fullmatch(
        r".*, line 8, column 5: source.nulls.1: needs text, not .*; "
        r"if this is text, write it in quotes: (.*)",
        str(caught.value),
    )
    assert remedy
    quoted = load_pipeline(write(tmp_path, GOOD.replace("path: in", f"path: in\n  nulls: [{remedy[1]}]")))
    assert quoted.source.nulls == [text]


def test_a_name_of_a_column_that_is_a_number_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(PipelineFileError, match=r"source\.schema\.7: .*; if this is text, write it in quotes: '7'"):
        load_pipeline(write(tmp_path, GOOD.replace("id: bigint", "id: bigint, 7: int")))
    assert "010" in load_pipeline(write(tmp_path, GOOD.replace("id: bigint", "id: bigint, 010: int"))).source.columns


@pytest.mark.parametrize("text", YAML_NUMBERS)
def test_a_special_member_has_the_text_that_is_written(tmp_path, text):
    special = f"columns: {{tailnum: string, code: string}}, special: {{unknown: {{code: {text}}}}}"
    file = write(tmp_path, GOOD.replace("natural_key: [tailnum]", f"natural_key: [tailnum], {special}"))
    assert load_pipeline(file).dimensions["plane"].special.unknown == {"code": text}


@pytest.mark.parametrize("text", ["7", "1.5", "true", "2026-01-01"])
def test_another_value_for_a_text_of_a_special_member_is_refused_with_its_line(tmp_path, text):
    special = f"columns: {{tailnum: string, code: string}}, special: {{unknown: {{code: {text}}}}}"
    file = write(tmp_path, GOOD.replace("natural_key: [tailnum]", f"natural_key: [tailnum], {special}"))
    with pytest.raises(PipelineFileError, match=r"line 8, column \d+: .*'code'.* is text, .*; write it in quotes"):
        load_pipeline(file)


@pytest.mark.parametrize(("text", "seconds"), [("2", 2.0), ("1.50", 1.5), (".5", 0.5), ("1.0e+1", 10.0), ("2s", "2s")])
def test_a_field_for_a_number_takes_every_spelling_of_a_decimal_number(tmp_path, text, seconds):
    assert load_pipeline(write(tmp_path, f"{GOOD}deadline: {text}\n")).deadline == seconds


@pytest.mark.parametrize("field", ["deadline: 1:30", "deadline: 010", "memory: 0x1F", "trigger: {max_files: 0x1F}"])
def test_a_number_in_a_spelling_of_yaml_alone_is_refused(tmp_path, field):
    with pytest.raises(PipelineFileError, match=r"line 12, "):
        load_pipeline(write(tmp_path, f"{GOOD}{field}\n"))


def test_an_option_of_an_earlier_release_keeps_the_text_of_a_null(tmp_path):
    def loaded(text):
        return load_pipeline(write(tmp_path, GOOD.replace("path: in", f"path: in\n  options: {{nullValue: {text}}}")))

    assert loaded("0x1F").source.nulls == ["0x1F"]
    with pytest.raises(PipelineFileError, match=r"source.nulls.0: needs text, not True"):
        loaded("true")
