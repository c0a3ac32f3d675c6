"""Key rules of pipeline files: replicas, buffers, Delta and the first spelling agree with a reading of the files."""

import csv
import io
import json
import shutil
import unicodedata
from decimal import Decimal, InvalidOperation

import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake

from headrace.etl import DeclarationError
from headrace.pipelines.batch.preparation import check_pipeline
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.dimension.tables import check_dimension, create_dimension, find_members
from headrace.pipelines.errors import PipelineFileError
from headrace.pipelines.runner import run

FORM_C, FORM_D, LIGATURE = "caf\u00e9", "cafe\u0301", "\ufb01sh"
WIDE_SPACE = "\u00a0bar\u2003"


def plain(text):
    return text or None


def folded(text):
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", text.strip()).casefold()) or None


def compatible(text):
    text = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold()).casefold()
    return unicodedata.normalize("NFKC", text) or None


def blank(text):
    return text if text.strip() else None


def scaled(text):
    """Return a number with at most two decimals as a number; None for another one, and for null."""
    number = Decimal(text) if text else None
    return number if number is not None and number == number.quantize(Decimal("0.01")) else None


def whole(text):
    number = float(text) if text else None
    return int(number) if number is not None and number == int(number) else None


def converted(text):
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        return None
    return int(number) if number == int(number) else None


# dimension: type of the stream column, type of the key, rules, oracle
DIMENSIONS = {
    "plain": ("string", "string", [], plain),
    "folded": ("string", "string", ["trim", "casefold", "nfc"], folded),
    "compatible": ("string", "string", ["nfkc", "casefold"], compatible),
    "blank": ("string", "string", ["blank"], blank),
    "scaled": ("decimal(9,4)", "decimal(6,2)", [], scaled),
    "whole": ("double", "bigint", [], whole),
    "converted": ("string", "int", ["convert"], converted),
}
TEXTS = {
    "plain": ["bar", "bar ", "Bar", FORM_C, FORM_D, "", "bar"],
    "folded": [" Bar", "bar ", "BAR", FORM_D, FORM_C.upper(), "   ", "stra\u00dfe", "STRASSE", WIDE_SPACE],
    "compatible": [LIGATURE, "FISH", "fish", "fish ", FORM_D, FORM_C, "\u2460", "1"],
    "blank": ["a", " a", "a ", " ", "\t", "", "a"],
    "scaled": ["1.5", "1.50", "1.5000", "1.5001", "-0.00", "0", "", "2"],
    "whole": ["-0.0", "0", "0.5", "7", "7.0", "", "1e3", "1000"],
    "converted": ["007", " 7 ", "7.0", "-0", "0", "x", "", "7,0"],
}


def text_of(number, shift):
    """Return a file in which each dimension's texts take turns."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["id", *TEXTS])
    for row in range(9):
        writer.writerow([number * 100 + row, *(texts[(row + shift) % len(texts)] for texts in TEXTS.values())])
    return stream.getvalue()


def document():
    dimensions = {
        name: {
            "path": f"w/{name}", "natural_key": ["k"], "rules": {"k": rules} if rules else {}, "shards": 2,
            "columns": {"k": kind, "k_spelled": "string"},
        }
        for name, (_, kind, rules, _) in DIMENSIONS.items()
    }  # fmt: skip
    lookups = [
        {"dimension": name, "role": name, "on": {name: "k"}, "policy": "infer", "unfit_key": "unknown"}
        for name in DIMENSIONS
    ]
    schema = {"id": "int", **{name: kind for name, (kind, *_) in DIMENSIONS.items()}}
    return {
        "name": "p", "source": {"format": "csv", "path": "in", "schema": schema}, "dimensions": dimensions,
        "lookups": lookups, "sink": {"path": "w/facts"}, "replicas": "replicas", "trigger": {"max_files": 1},
    }  # fmt: skip


def rows_of(path):
    return DeltaTable(str(path)).to_pyarrow_table().to_pylist()


def check(folder, files, made=()):
    """Compare members, spellings and facts with a plain reading of the files in the order of their loading.

    `made` has the natural keys of members of the dimension `folded` that another job wrote, as they are in the table.
    """
    given = [row for name in files for row in csv.DictReader(io.StringIO((folder / "in" / name).read_text()))]
    facts = {row["id"]: row for row in rows_of(folder / "w/facts")}
    assert sorted(facts) == sorted(int(row["id"]) for row in given)
    for name, (kind, _, _, oracle) in DIMENSIONS.items():
        spelled = {oracle(key): None for key in made} if name == "folded" else {}
        own = set(spelled)
        for row in given:
            if oracle(row[name]) is not None:
                spelled.setdefault(oracle(row[name]), row[name])
        members = [row for row in rows_of(folder / f"w/{name}") if row[f"{name}_key"] != -1]
        numbers = {oracle(row["k"]) if name == "folded" else row["k"]: row[f"{name}_key"] for row in members}
        assert len(set(numbers.values())) == len(numbers) == len(members), name
        assert set(numbers) == set(spelled), name
        if name == "folded":
            assert {row["k"] for row in members} == {*made, *(set(spelled) - own)}
        for row in given:
            assert facts[int(row["id"])][f"{name}_key"] == numbers.get(oracle(row[name]), -1), (name, row[name])
        if kind == "string":
            found = {oracle(row["k"]) if name == "folded" else row["k"]: row["k_spelled"] for row in members}
            assert found == spelled, name


@pytest.fixture
def project(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "p.yml").write_text(yaml.safe_dump(document(), sort_keys=False))
    return tmp_path


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_replicas_buffers_and_delta_agree_on_keys_and_the_first_spelling_is_kept(project):
    files = []
    for number in range(3):
        files.append(f"{number}.csv")
        (project / "in" / files[-1]).write_text(text_of(number, 2 * number))
        run(project / "p.yml")
        check(project, files)
        if number == 1:
            shutil.rmtree(project / "replicas")  # they are built again from Delta, instead of from its changes
    config = load_pipeline(project / "p.yml")
    assert [check_dimension(config, name) for name in DIMENSIONS] == [[]] * len(DIMENSIONS)
    found = find_members(config, "folded", [["BAR"], ["\u00a0bar"], ["nobody"]])
    assert (found.members.column("k").to_pylist(), found.missing) == (["bar"], [2])


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_members_of_another_job_that_are_not_normalized_are_found(project):
    made = [" BAR ", FORM_D.upper()]
    rows = {"folded_key": [-1, 5, 9], "k": [None, *made], "k_spelled": pa.nulls(3, pa.string())}
    write_deltalake(str(project / "w/folded"), pa.table(rows))
    (project / "in/0.csv").write_text(text_of(0, 0))
    run(project / "p.yml")
    check(project, ["0.csv"], made)
    config = load_pipeline(project / "p.yml")
    assert find_members(config, "folded", [["bar"]]).members.column("folded_key").to_pylist() == [5]
    assert check_dimension(config, "folded") == [] or "feed" in check_dimension(config, "folded")[0].rule


def test_members_of_a_source_keep_their_spelling(project):
    config = load_pipeline(project / "p.yml")
    create_dimension(config, "folded", pa.table({"k": ["STRASSE", " Bar"]}))
    create_dimension(config, "converted", pa.table({"k": ["007", "12"]}))
    for name, spelled in {"folded": {"bar": " Bar", "strasse": "STRASSE"}, "converted": {7: "007", 12: "12"}}.items():
        assert {row["k"]: row["k_spelled"] for row in rows_of(project / f"w/{name}")} == {None: None, **spelled}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("scaled", {"rules": {"k": ["trim"]}}, "applies to text only"),
        ("whole", {"rules": {"k": ["fold"]}}, "'trim', 'casefold', 'nfc', 'nfkc', 'blank' or 'convert'"),
        ("plain", {"columns": {"k": "string", "k_spelled": "int"}}, "'k_spelled' keeps the first spelling of 'k'"),
    ],
)
def test_a_rule_that_cannot_be_met_is_refused(project, name, change, message):
    changed = json.loads(json.dumps(document()))
    changed["dimensions"][name] |= change
    (project / "p.yml").write_text(yaml.safe_dump(changed, sort_keys=False))
    with pytest.raises((PipelineFileError, DeclarationError), match=message):
        check_pipeline(load_pipeline(project / "p.yml"), 1)
    assert not (project / "w").exists()
