"""Facts that accumulate (`sink.mode: merge`): real runs against an oracle in plain Python, crashes, and refusals."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable

from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.dimension.tables import create_dimension
from headrace.pipelines.errors import BatchError, DeltaTableError, PipelineFileError
from headrace.pipelines.runner import run

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

SCHEMA = {"trade": "bigint", "leg": "string", "at": "int", "opened": "string", "closed": "string", "amount": "int",
          "account": "string"}  # fmt: skip
CHANGING = ("opened", "closed", "amount", "account")


@dataclass
class Desk:
    """A folder with a pipeline that merges trades, the files of its source, and what must come of them."""

    folder: Path
    sink: dict = field(default_factory=dict)
    files: list = field(default_factory=list)
    options: dict = field(default_factory=dict)

    def __post_init__(self):
        (self.folder / "in").mkdir(parents=True)
        self.write()

    @property
    def pipeline(self):
        return self.folder / "pipeline.yml"

    def write(self):
        """Write the pipeline file."""
        document = {
            "name": "trades",
            "source": {"format": "csv", "path": "in", "schema": SCHEMA},
            "dimensions": {"account": {"path": "w/account", "natural_key": ["name"], "columns": {"name": "string"},
                                       "shards": 2}},
            "lookups": [{"dimension": "account", "role": "account", "on": {"account": "name"}, "policy": "infer"}],
            "sink": {"path": "w/facts", "mode": "merge", "key": ["trade", "leg"], "order_by": ["at"], **self.sink},
            "trigger": {"max_files": 1},
            "replicas": "../replicas",
            **self.options,
        }  # fmt: skip
        self.pipeline.write_text(yaml.safe_dump(document, sort_keys=False))

    def add(self, rows):
        """Put a file of rows into the source's folder."""
        hidden = self.folder / "in" / ".hidden"
        with hidden.open("w", newline="") as stream:
            csv.writer(stream).writerows([SCHEMA, *(["" if value is None else value for value in row] for row in rows)])
        hidden.rename(self.folder / "in" / f"{900 - len(self.files)}.csv")
        self.files.append(rows)

    def table(self, name="facts"):
        return DeltaTable(str(self.folder / "w" / name))

    def facts(self):
        """Return the facts as rows by key, without the outcome; a key occurs once."""
        rows = self.table().to_pyarrow_table().to_pylist()
        found = {(row["trade"], row["leg"]): row for row in rows}
        assert len(found) == len(rows), "a key occurs twice"
        return found

    def expected(self, per_batch=1):
        """Merge the rows one by one in plain Python: by batch, then in order within the batch."""
        stored = {}
        order = self.sink.get("order_by", ["at"])
        numbered = list(enumerate(self.files))
        for start in range(0, len(numbered), per_batch):
            rows = [
                (number, at, dict(zip(SCHEMA, row, strict=True)))
                for number, file in numbered[start : start + per_batch]
                for at, row in enumerate(file)
            ]
            rows = [each for each in rows if each[2]["trade"] is not None and each[2]["leg"] is not None]
            if order:
                rows.sort(key=lambda each: (each[2]["at"] is not None, each[2]["at"] or 0, each[0], each[1]))
            for _, _, row in rows:
                self._merge(stored, row, order)
        return stored

    def _merge(self, stored, row, order):
        there = stored.get((row["trade"], row["leg"]))
        if there is None:
            stored[row["trade"], row["leg"]] = row
            return
        if order and (there["at"] is not None and (row["at"] is None or row["at"] < there["at"])):
            return
        kept = self.sink.get("keep", ())
        if self.sink.get("update"):
            kept = [name for name in SCHEMA if name not in {*self.sink["update"], "trade", "leg", *order}]
        values = {name: value for name, value in row.items() if name not in kept}
        if self.sink.get("nulls") == "keep":
            values = {name: value for name, value in values.items() if value is not None}
        there.update(values)

    def check(self, per_batch=1):
        """Compare the facts with the oracle, and each surrogate key with its account."""
        found, expected = self.facts(), self.expected(per_batch)
        assert {key: {name: row[name] for name in SCHEMA} for key, row in found.items()} == expected
        members = {row["name"]: row["account_key"] for row in self.table("account").to_pyarrow_table().to_pylist()}
        for row in found.values():
            if "account_key" not in self.sink.get("keep", ()) and not self.sink.get("update"):
                assert row["account_key"] == members[row["account"]]
        return found


def trades(rng, count, keys=12, nulls=True):
    """Return rows for few trades, so that most rows update one, with nulls and out of order."""

    def pick(values):
        return values[int(rng.integers(len(values)))]

    return [
        (
            pick(range(keys)) if rng.random() > 0.05 or not nulls else None,
            pick(["a", "b"]),
            pick([None, *range(1, 12)]) if nulls else pick(range(1, 12)),
            pick(["mon", "tue", None]),
            pick(["wed", "thu", None]),
            pick([1, 2, 3, None]),
            pick(["ann", "bob", "cy", f"new{i % 7}", None]),
        )
        for i in range(count)
    ]


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path / "desk")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("sink", "per_batch"),
    [
        pytest.param({}, 1, marks=pytest.mark.slow),
        pytest.param({"order_by": []}, 3, marks=pytest.mark.slow),
        pytest.param({"keep": ["opened", "account", "account_key"], "audit": True}, 2, marks=pytest.mark.slow),
        pytest.param({"update": ["closed"], "nulls": "keep"}, 1, marks=pytest.mark.slow),
        ({"nulls": "keep", "keep": ["opened"], "partition_by": ["leg"]}, 2),
    ],
    ids=["replace", "arrival", "keep", "update", "nulls"],
)
def test_rows_of_a_key_become_one_fact_as_if_merged_one_by_one(tmp_path, rng, sink, per_batch):
    desk = Desk(tmp_path / "desk", sink=sink, options={"trigger": {"max_files": per_batch}})
    for _ in range(3):
        desk.add(trades(rng, 40))
    result = run(desk.pipeline)
    desk.check(per_batch)
    bad = sum(row[0] is None for rows in desk.files for row in rows)
    assert [result.total(name) for name in ("rows_in", "loaded", "rejected")] == [120, 120 - bad, bad]
    for batch in result.batches:
        merged = batch.detail["merged"]
        assert sum(merged.values()) == batch.loaded
    assert sum(batch.detail["merged"]["inserted"] for batch in result.batches) == len(desk.facts())
    if bad:
        errors = desk.table("facts_errors").to_pyarrow_table().to_pylist()
        assert {row["reason"] for row in errors} == {"trade = null: is null, but sink.key identifies the fact by it"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("per_batch", [pytest.param(1, marks=pytest.mark.slow), 9])
def test_a_null_that_keeps_a_value_keeps_what_was_looked_up_with_it(tmp_path, per_batch):
    """The key and the carried attributes are those of the member that the fact names, whose attributes may be null."""
    members = pa.table({"name": ["ann", "bob"], "city": ["Oslo", None]})
    options = {
        "trigger": {"max_files": per_batch},
        "dimensions": {
            "account": {"path": "w/account", "natural_key": ["name"], "columns": {"name": "string", "city": "string"}}
        },
        "lookups": [
            {"dimension": "account", "role": "account", "on": {"account": "name"}, "null_key": "unknown",
             "carry": ["city"]}
        ],
    }  # fmt: skip
    desk = Desk(tmp_path / "desk", sink={"nulls": "keep"}, options=options)
    create_dimension(load_pipeline(desk.pipeline), "account", members)
    accounts = {1: ["ann", None], 2: ["ann", "bob"], 3: [None, "ann"], 4: [None, None], 5: ["bob", "ann", None, "bob"]}
    for at in range(4):
        desk.add([(t, "a", at, None, None, 1, a[at]) for t, a in accounts.items() if at < len(a)])
    run(desk.pipeline)
    keys = {row["name"]: row["account_key"] for row in desk.table("account").to_pyarrow_table().to_pylist()}
    expected = {1: "ann", 2: "bob", 3: "ann", 4: None, 5: "bob"}
    cities = {"ann": "Oslo", "bob": None, None: None}
    found = {key[0]: (row["account"], row["account_key"], row["account_city"]) for key, row in desk.facts().items()}
    assert found == {t: (name, keys[name], cities[name]) for t, name in expected.items()}


@pytest.mark.slow
def test_kept_columns_hold_what_the_first_record_said(tmp_path):
    desk = Desk(tmp_path / "de sk#c")
    desk.sink = {"keep": ["opened", "account_key", "_loaded_at"], "audit": True}
    desk.write()
    desk.add([(1, "a", 1, "mon", None, 5, "ann")])
    run(desk.pipeline)
    first = desk.facts()[1, "a"]
    desk.add(
        [(1, "a", 3, "tue", "fri", 7, "bob"), (1, "a", 2, "wed", "thu", 6, "cy"), (2, "a", 1, "tue", None, 1, "cy")]
    )
    result = run(desk.pipeline)
    then = desk.facts()[1, "a"]
    assert (then["opened"], then["closed"], then["amount"], then["account"]) == ("mon", "fri", 7, "bob")
    assert (then["account_key"], then["_loaded_at"]) == (first["account_key"], first["_loaded_at"])
    assert (then["_file"], then["_batch"]) == ("899.csv", first["_batch"] + 1)
    assert result.batches[0].detail["merged"] == {"inserted": 1, "updated": 1, "superseded": 1, "older": 0}


class CrashError(Exception):
    """Raised by a hook in place of a crash."""


STEPS = ("before join", "after members:account", "before merge", "after facts", "after errors", "before record")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_crash_at_any_step_changes_nothing(desk, rng):
    for step in STEPS:
        desk.add([*trades(rng, 30), (None, "a", 1, None, None, None, f"new {step}"), (1, "a", 1, None, None, 1, step)])

        def crash(name, step=step):
            if name == step:
                raise CrashError(step)

        with pytest.raises(BatchError, match=step):
            run(desk.pipeline, hook=crash)
    run(desk.pipeline)
    desk.check()
    commits = [json.loads(commit.get("userMetadata") or "{}") for commit in desk.table().history()]
    loaded = [note["transaction"] for note in commits if "pending" in note]
    assert sorted(loaded) == sorted(set(loaded))
    assert len(loaded) == len(STEPS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_driver_that_is_killed_loses_and_doubles_nothing(tmp_path, rng):
    conf = {"spark.sql.shuffle.partitions": 2}
    desk = Desk(tmp_path / "desk", options={"spark": {"master": "local[2,4]", "conf": conf}})
    for _ in range(3):
        desk.add(trades(rng, 40))
    log = desk.folder / "w" / "facts" / "_delta_log"
    for wanted in (3, 5):  # table, key, stream; then in the midst of the batches
        command = [sys.executable, "-m", "headrace.pipelines", str(desk.pipeline), "--once"]
        driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        while driver.poll() is None and len(list(log.glob("*.json"))) < wanted:
            threading.Event().wait(0.005)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    run(desk.pipeline)
    desk.check()


@pytest.mark.timeout(900)
def test_other_writers_of_the_session_do_not_carry_the_batch(desk, spark, tmp_path):
    desk.add([(1, "a", 1, "mon", None, 5, "ann")])
    run(desk.pipeline)
    spark.range(3).write.format("delta").save(str(tmp_path / "other"))
    (info,) = DeltaTable(str(tmp_path / "other")).history()
    assert "userMetadata" not in info
    merges = [commit for commit in desk.table().history() if commit["operation"] == "MERGE"]
    assert len(merges) == 1
    assert json.loads(merges[0]["userMetadata"])["transaction"] == 0
    assert desk.table().transaction_version(json.loads(merges[0]["userMetadata"])["application"]) == 0


TWO_INPUTS = {
    "dimensions": {"account": {"path": "w/account", "natural_key": ["name", "day"]}},
    "lookups": [{"dimension": "account", "role": "account", "on": {"account": "name", "opened": "day"}}],
}
REFUSED = [
    ({"sink": {"key": []}}, "mode:", "sink.mode merge needs sink.key"),
    (
        {"sink": {"key": ["trad"]}},
        "trad",
        "sink.key names 'trad', which the stream does not have (did you mean 'trade'?)",
    ),
    ({"sink": {"order_by": ["att"]}}, "att", "sink.order_by names 'att'"),
    ({"sink": {"keep": ["opened"], "update": ["closed"]}}, "keep:", "sink.update and sink.keep exclude each other"),
    ({"sink": {"keep": ["trade"]}}, "- trade", "which is in sink.key or sink.order_by"),
    ({"sink": {"update": ["account_kye"]}}, "account_kye", "(did you mean 'account_key'?)"),
    ({"sink": {"mode": "append", "order_by": []}}, "key:", "sink.key applies to `mode: merge`"),
    ({"sink": {"nulls": "keep"}, **TWO_INPUTS}, "- dimension", "take account, opened of a fact from several records"),
    ({"duplicates": {"key": ["trade"]}}, "duplicates:", "duplicates and `sink.mode: merge` exclude each other"),
]


@pytest.fixture
def in_zone(monkeypatch):
    """Return a function that sets the local time zone of this process, which has nothing to say in a run."""

    def enter(zone):
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield enter
    monkeypatch.undo()
    time.tzset()


def merged_times(folder, texts):
    """Merge one fact for each time, and return the facts' times."""
    (folder / "in").mkdir()
    document = {
        "name": "times",
        "source": {"format": "csv", "path": "in", "schema": {"at": "timestamp"}},
        "sink": {"path": "w/facts", "mode": "merge", "key": ["at"]},
    }
    (folder / "p.yml").write_text(yaml.safe_dump(document))
    (folder / "in/1.csv").write_text("\n".join(["at", *texts]) + "\n")
    run(folder / "p.yml")
    times = DeltaTable(str(folder / "w/facts")).to_pyarrow_table().column("at")
    return sorted(each.isoformat() for each in times.to_pylist())


@pytest.mark.parametrize(
    ("zone", "text"), [("Asia/Kolkata", "9999-12-31T23:59:59.999999"), ("America/New_York", "0001-01-01T00:00:00")]
)
def test_the_local_zone_does_not_matter_to_a_key_at_the_ends_of_time(tmp_path, in_zone, zone, text):
    in_zone(zone)
    assert merged_times(tmp_path, [text]) == [f"{text}+00:00"]


def test_other_readers_find_merged_times_of_all_years(tmp_path):
    texts = ["0001-01-01T00:00:00", "1500-01-01T00:00:00", "2024-05-01T10:00:00.000001", "9999-12-31T23:59:59.999999"]
    assert merged_times(tmp_path, texts) == [f"{text}+00:00" for text in texts]


def test_the_message_on_a_repeated_key_shows_its_time_in_utc(tmp_path, spark, in_zone):
    table = tmp_path / "w/facts"
    spark.sql(f"CREATE TABLE delta.`{table}` (at timestamp, _outcome string) USING delta")
    spark.sql(f"INSERT INTO delta.`{table}` SELECT timestamp'9999-12-31 23:00:00', 'x' FROM range(2)")
    in_zone("Asia/Kolkata")
    with pytest.raises(DeltaTableError, match=r"has 2 rows with at = 9999-12-31 23:00:00, but sink.key identifies one"):
        merged_times(tmp_path, ["2024-01-01"])


def test_a_merge_that_makes_no_sense_is_refused_with_its_line(desk):
    for changes, mark, reason in REFUSED:
        desk.sink = changes.get("sink", {})
        desk.options = {name: value for name, value in changes.items() if name != "sink"}
        desk.write()
        with pytest.raises(PipelineFileError) as error:
            run(desk.pipeline)
        lines = desk.pipeline.read_text().splitlines()
        number = max(number for number, text in enumerate(lines, 1) if mark in text)
        assert reason in str(error.value)
        assert f"line {number}, column" in str(error.value), str(error.value)


COLUMNS = ", ".join(f"`{name}` {kind}" for name, kind in SCHEMA.items()) + ", account_key bigint, _outcome string"
SHAPES = {
    "partitioned by what changes": ("", "PARTITIONED BY (closed)", {}, ()),
    "column mapping": ("", "", {"delta.columnMapping.mode": "name"}, ()),
    "deletion vectors": ("", "", {"delta.enableDeletionVectors": "true"}, ()),
    "row tracking": ("", "", {"delta.enableRowTracking": "true"}, ()),
    "liquid clustering": ("", "CLUSTER BY (trade)", {}, ()),
    "generated": (", tens bigint GENERATED ALWAYS AS (CAST(amount * 10 AS bigint))", "", {}, ()),
    "default": (", note string", "", {"delta.feature.allowColumnDefaults": "supported"},
                ("ALTER TABLE {table} ALTER COLUMN note SET DEFAULT 'none'",)),
    "identity": (", number bigint GENERATED ALWAYS AS IDENTITY", "", {}, ()),
    "constraint": ("", "", {}, ("ALTER TABLE {table} ADD CONSTRAINT few CHECK (amount < 3 OR amount IS NULL)",)),
    "not null": ("", "", {}, ()),
    "no feed": ("", "", {"delta.enableChangeDataFeed": "false"}, ()),
}  # fmt: skip


def make(spark, path, shape):
    more, clause, properties, then = shape
    columns = COLUMNS.replace("`leg` string", "`leg` varchar(1) NOT NULL") if shape is SHAPES["not null"] else COLUMNS
    listed = ", ".join(f"'{name}' = '{value}'" for name, value in {"delta.minReaderVersion": "1", **properties}.items())
    if clause.startswith("PARTITIONED"):
        listed = "'delta.enableChangeDataFeed' = 'true'"
    spark.sql(f"CREATE TABLE delta.`{path}` ({columns}{more}) USING delta {clause} TBLPROPERTIES ({listed})")
    for statement in then:
        spark.sql(statement.format(table=f"delta.`{path}`"))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", SHAPES)
def test_a_table_feature_does_not_change_what_is_merged(tmp_path, spark, name):
    desk = Desk(tmp_path / "desk")
    make(spark, f"{desk.folder}/w/facts", SHAPES[name])
    desk.add([(1, "a", 1, "mon", None, 1, "ann"), (2, "b", 1, "mon", None, 2, "bob")])
    desk.add(
        [(1, "a", 2, "mon", "fri", 2, "ann"), (3, "b", 1, "mon", None, 1, "bob"), (2, "b", 2, "mon", "x", 9, "bob")]
    )
    run(desk.pipeline)
    found = spark.read.format("delta").load(f"{desk.folder}/w/facts").collect()
    rows = sorted((row["trade"], row["leg"], row["at"], row["closed"], row["amount"]) for row in found)
    last = (2, "b", 1, None, 2) if name == "constraint" else (2, "b", 2, "x", 9)
    assert rows == [(1, "a", 2, "fri", 2), last, (3, "b", 1, None, 1)]
    if name == "generated":
        assert all(row["tens"] == 10 * row["amount"] for row in found)
    if name == "default":
        assert {row["note"] for row in found} == {"none"}
    if name == "identity":
        assert len({row["number"] for row in found}) == 3


def test_a_table_that_a_merge_could_not_keep_right_is_refused(desk, spark):
    path = f"{desk.folder}/w/facts"
    make(spark, path, ("", "", {}, ("ALTER TABLE {table} ADD CONSTRAINT both CHECK (opened <= closed)",)))
    desk.add([(1, "a", 1, "mon", "wed", 1, "ann")])
    desk.sink = {"keep": ["opened"]}
    desk.write()
    with pytest.raises(DeltaTableError, match="takes from several records"):
        run(desk.pipeline)
    spark.sql(f"ALTER TABLE delta.`{path}` DROP CONSTRAINT both")
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.appendOnly' = 'true')")
    with pytest.raises(DeltaTableError, match="a merge updates stored rows; use"):
        run(desk.pipeline)
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.appendOnly' = 'false')")
    spark.sql(f"INSERT INTO delta.`{path}` (trade, leg) VALUES (7, 'a'), (7, 'a')")
    with pytest.raises(DeltaTableError, match=r"has 2 rows with trade = 7, leg = a, but sink.key identifies one row"):
        run(desk.pipeline)
    spark.sql(f"DELETE FROM delta.`{path}`")
    run(desk.pipeline)
    desk.check()
    desk.sink = {"mode": "append", "key": [], "order_by": []}
    desk.add([(1, "a", 1, "mon", "wed", 1, "ann")])
    desk.write()
    run(desk.pipeline)
    desk.sink = {}
    desk.write()
    with pytest.raises(DeltaTableError, match="has 2 rows with trade = 1, leg = a"):
        run(desk.pipeline)
