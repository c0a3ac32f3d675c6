"""Rejected rows that are retried and dismissed: against a plain reading of the files, under kills and on bad input."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
from decimal import Decimal, InvalidOperation

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake

from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.dimension.tables import create_dimension
from headrace.pipelines.errors import BatchError, RejectedRowsError
from headrace.pipelines.rejects import RowId, Selection, dismiss_rows, list_rejects, show_rejects
from headrace.pipelines.rejects.retries import retry_batches
from headrace.pipelines.retries import retry
from headrace.pipelines.runner import run

EVERYTHING = Selection()
SCHEMA = {"id": "bigint", "code": "string", "region": "string", "amount": "decimal(8,2)"}
STEPS = (
    "after plan", "before join", "after join", "before members:code", "after members:code", "before facts",
    "after facts", "before resolutions", "after resolutions", "before record", "after record", "after batch",
    "after done",
)  # fmt: skip


class KillError(BaseException):
    """Raised by a hook in place of a kill: no handler of errors sees it."""


class Shop:
    """A pipeline of orders: an inferring lookup and one that rejects, with decimal amounts."""

    def __init__(self, folder, **source):
        self.folder = folder
        (folder / "in").mkdir(parents=True)
        self.source = {"format": "csv", "path": "in", "schema": SCHEMA, **source}
        self.options = {}
        self.write()
        config = load_pipeline(self.pipeline)
        create_dimension(config, "region", pa.table({"region": ["north", "south"]}))

    @property
    def pipeline(self):
        return self.folder / "pipeline.yml"

    @property
    def config(self):
        return load_pipeline(self.pipeline)

    def write(self, **source):
        self.source |= source
        columns = {"code": "string"}
        document = {
            "name": "shop",
            "source": self.source,
            "dimensions": {
                "code": {"path": "w/code", "natural_key": ["code"], "columns": columns, "shards": 2},
                "region": {"path": "w/region", "natural_key": ["region"], "columns": {"region": "string"}},
            },
            "lookups": [
                {"dimension": "code", "role": "code", "on": {"code": "code"}, "policy": "infer"},
                {"dimension": "region", "role": "region", "on": {"region": "region"}, "policy": "reject"},
            ],
            "sink": {"path": "w/facts", "audit": True},
            "trigger": {"max_files": 1},
            "replicas": "replicas",
            "spark": {"master": "local[2,4]", "conf": {"spark.sql.shuffle.partitions": 2}},
            **self.options,
        }
        self.pipeline.write_text(yaml.safe_dump(document, sort_keys=False))

    def put(self, name, text):
        (self.folder / "in" / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    def rows(self, table):
        return DeltaTable(str(self.folder / "w" / table)).to_pyarrow_table().to_pylist()

    def facts(self):
        """Return the facts by id, each once, with the members that their keys name."""
        names = {}
        for role in ("code", "region"):
            members = self.rows(role)
            names[role] = {row[f"{role}_key"]: row[role] for row in members}
            assert len(names[role]) == len(members) == len({row[role] for row in members})
        found = self.rows("facts")
        for row in found:
            assert (names["code"][row["code_key"]], names["region"][row["region_key"]]) == (row["code"], row["region"])
        return sorted((row["id"], row["code"], row["region"], row["amount"]) for row in found)

    def status(self):
        records, total = show_rejects(self.config)
        assert total == len(records) == len({record.id for record in records})
        return {record.id: record.status for record in records}


def expected(text, *, comma=False, regions=("north", "south")):
    """Return what a plain reading of a CSV loads: the facts, and the numbers of the records that are rejected."""
    facts, rejected = [], []
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), 1):
        amount = row["amount"].replace(",", ".") if comma else row["amount"]
        try:
            fact = (int(row["id"]), row["code"], row["region"], Decimal(amount))
        except (ValueError, InvalidOperation):
            fact = None
        if fact is None or (comma and "." in row["amount"]) or row["region"] not in regions:
            rejected.append(number)
        else:
            facts.append(fact)
    return facts, rejected


@pytest.fixture
def shop(tmp_path):
    return Shop(tmp_path / "shop")


def add_region(shop, name):
    table = DeltaTable(str(shop.folder / "w/region"))
    member = {"region_key": 90, "region": name, "is_inferred": False}
    write_deltalake(table, pa.Table.from_pylist([member], pa.schema(table.schema().to_arrow())), mode="append")


FIRST = 'id,code,region,amount\n1,A,north,1.00\n2,B,east,2.00\n3,C,north,"3,50"\n4,D,south,x\n5,E,west,5.00\n'
SECOND = 'amount,region,id,code\n"6,25",south,6,F\n7.00,north,7,A\n"8,00",east,8,G\n'


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_retried_rows_are_loaded_by_the_present_rules_and_the_rest_stays_open(shop):
    shop.put("1.csv", FIRST)
    shop.put("2.csv", SECOND)
    assert run(shop.pipeline).total("rejected") == sum(len(expected(text)[1]) for text in (FIRST, SECOND)) == 6
    before = sorted(fact for text in (FIRST, SECOND) for fact in expected(text)[0])
    assert shop.facts() == before
    (shop.folder / "in/2.csv").unlink()  # a retry needs no file
    shop.write(decimal=",")
    add_region(shop, "east")

    result = retry(shop.pipeline, Selection(rules=("DECIMAL comma",)))

    loaded = [(3, "C", "north", Decimal("3.50")), (6, "F", "south", Decimal("6.25")), (8, "G", "east", Decimal("8.00"))]
    assert (result.selected, result.run.total("loaded"), result.run.total("rejected")) == (4, 3, 1)
    assert shop.facts() == sorted([*before, *loaded])
    assert shop.status() == {
        "0/1.csv:2": "open", "0/1.csv:3": "retried", "0/1.csv:4": "open", "0/1.csv:5": "open",
        "1/2.csv:1": "retried", "1/2.csv:3": "retried",
    }  # fmt: skip
    ((again,), _) = show_rejects(shop.config, Selection(ids=(RowId(0, "1.csv", 4),)))
    assert again.reason == "amount = x: is not a number with ',' before its fraction and nothing between its digits"
    assert again.note == "rejected again by batch 2"
    (by,) = {row["_batch"] for row in shop.rows("facts") if row["id"] in {3, 6, 8}}
    assert by == 2
    assert {row["_file"] for row in shop.rows("facts") if row["id"] in {6, 8}} == {"2.csv"}


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_rows_of_a_heading_that_is_not_declared_any_more_are_refused_until_both_are(shop):
    shop.put("1.csv", FIRST)
    run(shop.pipeline)
    before = show_rejects(shop.config)
    add_region(shop, "east")

    shop.options = {"transform": [{"rename": {"total": "amount"}}]}
    later = {name: kind for name, kind in SCHEMA.items() if name != "amount"} | {"total": "decimal(8,2)"}
    shop.write(schema=later)
    shop.put("2.csv", "id,code,region,total\n6,F,north,6.00\n7,G,west,7.00\n")
    assert run(shop.pipeline).total("loaded") == 1
    told = (
        r"^4 of the selected rows come from 1\.csv, whose columns are not those that are declared now: column 'total' "
        r"is missing; column 'amount' is not declared\. Its heading: id, code, region, amount; expected: id, code, "
        r"region, total\. Nothing was retried, .*docs/files\.md, 'When a column is renamed'"
    )
    with pytest.raises(RejectedRowsError, match=told):
        retry(shop.pipeline, EVERYTHING)
    assert not (shop.folder / "w/facts_errors_resolutions").exists()
    first = Selection(files=("1.csv",))
    assert show_rejects(shop.config, first) == before
    assert retry(shop.pipeline, Selection(files=("2.csv",))).run.total("rejected") == 1

    shop.options = {"transform": [{"derive": {"amount": "coalesce(amount, total)"}}, {"select": [*SCHEMA]}]}
    shop.write(schema=SCHEMA | {"total": "decimal(8,2)"}, missing_fields="null")
    shop.put("3.csv", FIRST.replace("1,A,north,1.00", "8,A,north,8.00"))
    shop.put("4.csv", "total,id,code,region\n9.00,9,A,north\n")
    assert run(shop.pipeline).total("loaded") == 3
    assert retry(shop.pipeline, Selection(rules=("region",), files=("1.csv",))).run.total("loaded") == 1
    assert [(fact[0], fact[3]) for fact in shop.facts()] == [(number, Decimal(number)) for number in (1, 2, 2, 6, 8, 9)]


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_a_row_that_was_retried_or_dismissed_is_not_retried_again(shop):
    shop.put("1.csv", FIRST)
    run(shop.pipeline)
    assert dismiss_rows(shop.config, Selection(ids=(RowId(0, "1.csv", 4),)), " not an order ") == 1
    assert dismiss_rows(shop.config, Selection(files=("1.csv",), rules=("amount",)), "no") == 1
    assert dismiss_rows(shop.config, Selection(rules=("amount",)), "no") == 0
    add_region(shop, "east")
    first = retry(shop.pipeline, EVERYTHING)
    second = retry(shop.pipeline, EVERYTHING)
    assert (first.selected, first.run.total("loaded"), second.selected, second.run.total("loaded")) == (2, 1, 1, 0)
    assert [fact[0] for fact in shop.facts()] == [1, 2]
    ((dismissed,), _) = show_rejects(shop.config, Selection(ids=(RowId(0, "1.csv", 4),)))
    assert (dismissed.status, dismissed.note) == ("dismissed", "not an order")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_a_killed_retry_is_completed_by_the_next_run_whatever_the_step(shop):
    add_region(shop, "east")
    facts = []
    for number, step in enumerate(STEPS):
        name = f"{number}.csv"
        text = f'id,code,region,amount\n{number}0,N{number},north,"{number},5"\n{number}1,N{number},south,?\n'
        shop.write(decimal=".")
        shop.put(name, text)
        run(shop.pipeline)
        shop.write(decimal=",")
        kill(shop, step, name)
        other = retry if number % 2 else run
        other(shop.pipeline, *([Selection(files=("none",))] if number % 2 else []))
        facts += expected(text, comma=True)[0]
        assert shop.facts() == sorted(facts), step
        statuses = {
            record.record_number: record.status for record in show_rejects(shop.config, Selection(files=(name,)))[0]
        }
        assert statuses == {1: "retried", 2: "open"}, step
        assert retry(shop.pipeline, Selection(files=(name,))).run.total("loaded") == 0


def kill(shop, step, name):
    """Retry the rejected rows of a file, and stop at a step as a kill does."""
    reached = []

    def hook(now):
        if now == step:
            reached.append(now)
            raise KillError

    with pytest.raises(KillError):
        retry(shop.pipeline, Selection(files=(name,)), hook=hook)
    assert reached


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_a_retry_that_fails_leaves_its_rows_open_and_the_next_run_works(shop):
    shop.put("1.csv", FIRST)
    run(shop.pipeline)
    shop.write(decimal=",")

    def fail(step):
        if step == "before facts":
            raise RuntimeError("the disk is full")

    with pytest.raises(BatchError, match="the disk is full"):
        retry(shop.pipeline, EVERYTHING, hook=fail)
    assert set(shop.status().values()) == {"open"}
    shop.put("2.csv", 'id,code,region,amount\n9,Z,north,"9,00"\n')
    assert run(shop.pipeline).total("loaded") == 1
    assert retry(shop.pipeline, EVERYTHING).run.total("loaded") == 1
    assert [fact[0] for fact in shop.facts()] == [1, 3, 9]


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_rows_of_spark_written_tables_are_retried(shop, monkeypatch):
    monkeypatch.setattr("headrace.pipelines.batch.tables.takes_files", lambda _: False)
    shop.put("1.csv", FIRST)
    run(shop.pipeline)
    shop.write(decimal=",")
    with pytest.raises(KillError):
        retry(shop.pipeline, EVERYTHING, hook=raise_at("after facts"))
    run(shop.pipeline)
    assert [fact[0] for fact in shop.facts()] == [1, 3]
    assert shop.status() == {"0/1.csv:2": "open", "0/1.csv:3": "retried", "0/1.csv:4": "open", "0/1.csv:5": "open"}


def raise_at(step):
    def hook(now):
        if now == step:
            raise KillError

    return hook


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_rows_of_a_repeated_file_and_of_two_batches_keep_their_identity(shop):
    shop.write(changed="reload")
    shop.put("1.csv", FIRST)
    run(shop.pipeline)
    shop.put("1.csv", FIRST.replace("4,D,south,x", "4,D,south,xx"))
    run(shop.pipeline)
    assert sorted(shop.status()) == [f"{batch}/1.csv:{record}" for batch in (0, 1) for record in (2, 3, 4, 5)]
    shop.write(decimal=",")
    result = retry(shop.pipeline, Selection(rules=("amount",)))
    assert (result.selected, len(result.run.batches), result.run.total("loaded")) == (4, 2, 2)
    assert [name for name, status in shop.status().items() if status == "retried"] == ["0/1.csv:3", "1/1.csv:3"]


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_bytes_that_were_no_text_are_retried_in_the_encoding_that_they_have(shop):
    text = "id,code,region,amount\n1,caf\u00e9,north,1.00\n2,\\xe9,north,2.00\n3,B,east,3.00\n"
    shop.put("1.csv", text.encode("latin-1"))
    assert run(shop.pipeline).total("rejected") == 2
    shop.write(encoding="latin-1")
    assert retry(shop.pipeline, Selection(rules=("UTF-8",))).run.total("loaded") == 1
    assert [fact[:2] for fact in shop.facts()] == [(1, "caf\u00e9"), (2, "\\xe9")]


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_records_of_json_and_parquet_are_retried_exactly(tmp_path):
    lines = [
        '{"id": 1, "code": "A", "region": "east", "amount": 1.25}',
        '{"id": 2, "code": "B"',
        '{"id": 3, "amount": 1}',
    ]
    shop = Shop(tmp_path / "json", format="json")
    shop.put("1.json", "\n\n".join(lines))
    assert run(shop.pipeline).total("rejected") == 3
    shop.write(missing_fields="null")
    add_region(shop, "east")
    assert retry(shop.pipeline, EVERYTHING).run.total("loaded") == 2
    found = sorted((row["id"], row["code"], row["amount"], row["region_key"]) for row in shop.rows("facts"))
    assert found == [(1, "A", Decimal("1.25"), 90), (3, None, Decimal(1), -1)]

    shop = Shop(tmp_path / "parquet", format="parquet")
    columns = {
        "id": pa.array([1, 2], pa.int16()), "code": pa.array(["\u00e9", None]).dictionary_encode(),
        "region": ["east", "east"], "amount": pa.array([Decimal("1.123"), Decimal("2.500")]), "note": [[1.5], None],
    }  # fmt: skip
    pq.write_table(pa.table(columns), shop.folder / "in/1.parquet")
    assert run(shop.pipeline).total("rejected") == 2
    add_region(shop, "east")
    shop.write(schema={**SCHEMA, "amount": "decimal(8,2)"})
    (shop.folder / "in/1.parquet").unlink()
    assert retry(shop.pipeline, EVERYTHING).run.total("loaded") == 1
    (fact,) = shop.rows("facts")
    assert (fact["id"], fact["code"], fact["amount"]) == (2, None, Decimal("2.50"))


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_a_text_that_is_two_records_now_is_not_loaded(shop):
    shop.put("1.csv", 'id,code,region,amount\n1,"A\n2,B",north,x\n3,C,north,x\n')
    assert run(shop.pipeline).total("rejected") == 2
    shop.write(quote="", nulls=["x"])
    result = retry(shop.pipeline, EVERYTHING)
    assert (result.run.total("loaded"), result.run.total("rejected")) == (1, 1)
    ((first,), _) = show_rejects(shop.config, Selection(ids=(RowId(0, "1.csv", 1),)))
    assert "is not exactly one record as CSV is declared now" in first.reason


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_a_retried_duplicate_is_not_loaded_twice(shop):
    shop.options = {"duplicates": {"key": ["id"]}}
    shop.write()
    shop.put("1.csv", FIRST)
    run(shop.pipeline)
    shop.put("2.csv", "id,code,region,amount\n3,C,north,3.50\n")
    run(shop.pipeline)
    shop.write(decimal=",")
    result = retry(shop.pipeline, Selection(ids=(RowId(0, "1.csv", 3),)))
    assert (result.run.total("loaded"), result.run.total("dropped")) == (0, 1)
    assert shop.status()["0/1.csv:3"] == "retried"
    assert [fact[0] for fact in shop.facts()] == [1, 3]


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_retried_rows_pass_the_transformations(shop):
    shop.put("1.csv", FIRST + '9,H,north,"-1,00"\n')
    run(shop.pipeline)
    shop.options = {
        "transform": [{"derive": {"code": "upper(code) || 'X'"}}, {"where": "amount > 0"}],
    }
    shop.write(decimal=",")
    result = retry(shop.pipeline, Selection(rules=("amount",)))
    batch = result.run.batches[0]
    assert (batch.rows_in, batch.loaded, batch.rejected) == (3, 1, 1)
    assert [fact[:2] for fact in shop.facts()] == [(1, "A"), (3, "CX")]
    assert retry(shop.pipeline, Selection(rules=("amount",))).run.total("rows_in") == 1
    assert shop.status()["0/1.csv:6"] == "retried"  # it was filtered, as a record of a file would be


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_retried_rows_are_merged(shop):
    shop.options = {"sink": {"path": "w/facts", "mode": "merge", "key": ["id"]}}
    shop.write()
    shop.put("1.csv", 'id,code,region,amount\n1,A,north,1.00\n2,B,north,"2,00"\n')
    shop.put("2.csv", 'id,code,region,amount\n2,B,south,"3,00"\n')
    run(shop.pipeline)
    shop.write(decimal=",")
    with pytest.raises(KillError):
        retry(shop.pipeline, EVERYTHING, hook=raise_at("after facts"))
    assert retry(shop.pipeline, EVERYTHING).selected == 0
    assert [(fact[0], fact[2], fact[3]) for fact in shop.facts()] == [
        (1, "north", Decimal("1.00")), (2, "south", Decimal("3.00"))
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_transformed_records_that_are_retried_meet_newer_facts_in_their_order(shop, rng):
    """Merge, transform and retry together, ended after each step in turn, against a dictionary."""
    shop.options = {
        "transform": [{"derive": {"code": "upper(code)", "size": "cast(amount * 2 as decimal(12,2))"}}],
        "sink": {
            "path": "w/facts",
            "mode": "merge",
            "key": ["id"],
            "order_by": ["code"],
            "keep": ["region", "region_key"],
        },
    }
    shop.write()
    records = []
    for number in range(4):
        lines = ["id,code,region,amount"]
        for _ in range(6):
            row = (
                int(rng.integers(5)),
                f"{rng.choice(list('abcdefgh'))}{len(records)}",
                str(rng.choice(["north", "south"])),
                int(rng.integers(100)),
            )
            records.append((*row, rng.random() < 0.4))
            amount = f'"{row[3]},00"' if records[-1][4] else f"{row[3]}.00"
            lines.append(f"{row[0]},{row[1]},{row[2]},{amount}")
        shop.put(f"{number}.csv", "\n".join(lines) + "\n")
    run(shop.pipeline)
    shop.write(decimal=",")
    for step in ("after plan", "after join", "before facts", "after facts", "before resolutions", "after batch", None):
        try:
            retry(shop.pipeline, EVERYTHING, hook=raise_at(step))
        except KillError:
            continue
    retry(shop.pipeline, EVERYTHING)
    found = {row["id"]: (row["code"], row["size"]) for row in shop.rows("facts")}
    newest = {}
    for key, code, _, amount, _ in records:
        newest[key] = max(newest.get(key, ("", 0)), (code.upper(), Decimal(2 * amount)))
    assert found == newest
    assert len(shop.rows("facts")) == len(found)
    assert set(shop.status().values()) <= {"retried"}


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_what_is_not_there_is_named(shop):
    shop.put("1.csv", FIRST)
    run(shop.pipeline)
    with pytest.raises(RejectedRowsError, match=r"no rejected row is named 7/1\.csv:1"):
        dismiss_rows(shop.config, Selection(ids=(RowId(7, "1.csv", 1),)), "no")
    with pytest.raises(RejectedRowsError, match="say why"):
        dismiss_rows(shop.config, EVERYTHING, "  ")
    with pytest.raises(RejectedRowsError, match="BATCH/FILE:RECORD"):
        RowId.parse("1.csv")
    with pytest.raises(KillError):
        retry(shop.pipeline, EVERYTHING, hook=raise_at("after facts"))
    with pytest.raises(RejectedRowsError, match="a retry of 4 rejected rows, was interrupted"):
        dismiss_rows(shop.config, EVERYTHING, "no")
    groups = list_rejects(shop.config)
    assert sum(group.rows for group in groups) == 4
    assert {(group.status, group.batch, group.file) for group in groups} == {("open", 0, "1.csv")}


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("signs", ["planned", "facts"])
@pytest.mark.slow
def test_a_retry_process_that_is_killed_is_completed(shop, signs):
    shop.put("1.csv", FIRST)
    run(shop.pipeline)
    shop.write(decimal=",")
    log = shop.folder / "w/facts/_delta_log"
    before = len(list(log.glob("*.json")))
    command = [sys.executable, "-m", "headrace", "errors", "retry", "--all", "-p", str(shop.pipeline)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    waiting = threading.Event()
    while process.poll() is None:
        planned = signs == "planned" and (shop.folder / "w/facts_errors_resolutions").exists()
        if planned or len(list(log.glob("*.json"))) > before:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        waiting.wait(0.002)
    run(shop.pipeline)
    retry(shop.pipeline, EVERYTHING)
    assert [fact[0] for fact in shop.facts()] == [1, 3]
    assert shop.status()["0/1.csv:3"] == "retried"


def test_batches_of_a_retry_are_limited_and_each_file_has_one_origin():
    rows = [("s", 0, "a", number) for number in range(1, 6)]
    rows += [("s", 0, "b", 1), ("s", 1, "a", 1), ("s", 1, "c", 1), ("t", 0, "a", 9)]
    table = pa.table(
        {
            "stream": [row[0] for row in rows], "batch": [row[1] for row in rows], "_file": [row[2] for row in rows],
            "_record_number": [row[3] for row in rows], "size": [10] * len(rows),
        }
    )  # fmt: skip
    for most_rows, most_bytes in ((2, 1000), (100, 25), (100, 1), (100, 1000), (1, 1)):
        batches = retry_batches(table, most_rows, most_bytes)
        assert [tuple(row) for batch in batches for row in batch] == rows
        for batch in batches:
            assert len(batch) <= most_rows
            assert len(batch) == 1 or 10 * len(batch) <= most_bytes
            origins = {(row.file, row.stream, row.batch) for row in batch}
            assert len({file for file, _, _ in origins}) == len(origins)


def test_no_error_table_is_no_rejected_row(tmp_path):
    shop = Shop(tmp_path / "shop")
    assert (list_rejects(shop.config), show_rejects(shop.config), json.dumps(shop.status())) == ([], ([], 0), "{}")
