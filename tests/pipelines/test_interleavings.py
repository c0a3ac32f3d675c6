"""Other writers, crashes and changed files between every two steps of a batch.

Two pipelines with catalogs of their own share a dimension and a fact table. At a step of the first one's batch another
writer does its work: the second pipeline, a job that appends the next number by hand, or one that deletes the newest
member. Then the step goes on, or crashes; after a crash the file has other rows, unless the facts hold it already.

The oracle is DuckDB over the Delta tables and the source files: no number names two members, no natural key has two
members, each fact's key names the member of the fact's own natural key, and each source row is exactly once among
facts, rejected rows and routed duplicates.
"""

import shutil

import duckdb
import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake

from headrace.pipelines.errors import BatchError, DeltaTableError
from headrace.pipelines.runner import run

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark"), pytest.mark.timeout(3600)]

BEFORE_FACTS = (
    "after plan", "before join", "after join", "before members:a", "after members:a", "before members:b",
    "after members:b", "before facts",
)  # fmt: skip
AFTER_FACTS = (
    "after facts", "before errors", "after errors", "before duplicates", "after duplicates", "before record",
    "after record", "after batch", "after done",
)  # fmt: skip
WRITERS = ("pipeline", "append", "delete")


class CrashError(Exception):
    """Raised by a hook in place of a crash."""


class Shared:
    """A warehouse with one dimension and one fact table, and two pipelines that load into it."""

    def __init__(self, folder):
        self.folder = folder
        self.warehouse = folder / "wh"
        self.files = 0
        self.removed = set()
        for name in ("p", "q"):
            (folder / name / "in").mkdir(parents=True)
            self.pipeline(name).write_text(yaml.safe_dump(self.document(name)))

    def document(self, name):
        return {
            "name": name,
            "source": {"format": "csv", "path": "in", "schema": {"id": "bigint", "c": "string", "d": "string"}},
            "dimensions": {
                "k": {"path": str(self.warehouse / "k"), "natural_key": ["c"], "columns": {"c": "string"}, "shards": 2}
            },
            "lookups": [
                {"dimension": "k", "role": "a", "on": {"c": "c"}, "policy": "infer"},
                {"dimension": "k", "role": "b", "on": {"d": "c"}, "policy": "infer"},
            ],
            "duplicates": {"key": ["id"], "action": "route"},
            "sink": {"path": str(self.warehouse / "fact"), "audit": True},
        }

    def pipeline(self, name):
        return self.folder / name / "pipeline.yml"

    def put(self, name, file=None):
        """Write a file of known and new members, a row that does not fit, and ids that the other pipeline has too."""
        number = self.files = self.files + 1
        rows = [f"{number}{i},N{number + i % 3},M{number + i % 2}" for i in range(4)]
        rows += [f"{number}9,N{number - 1},X{number}", f"{number}9,N{number},X{number}", f"{max(1, number - 1)}0,N0,N1"]
        rows += [f"{number}8,H{number - 1},H{number}", "odd,N1,N2"]
        place = self.folder / name / "in" / (file or f"{number:04d}.csv")
        place.write_text("id,c,d\n" + "".join(f"{row}\n" for row in rows))
        return place.name

    def write(self, writer):
        """Let another writer do its work."""
        if writer == "pipeline":
            self.put("q")
            run(self.pipeline("q"))
            return
        if not (self.warehouse / "k").exists():
            return
        table = DeltaTable(str(self.warehouse / "k"))
        rows = table.to_pyarrow_table().to_pylist()
        newest = max(rows, key=lambda row: row["k_key"])
        if writer == "append":
            member = {**newest, "c": f"H{self.files}", "k_key": max(newest["k_key"], 0) + 1}
            if member["c"] not in {row["c"] for row in rows}:
                write_deltalake(table, pa.Table.from_pylist([member], pa.schema(table.schema())), mode="append")
        elif newest["k_key"] > 0:
            self.removed.add(newest["k_key"])
            table.delete(f"k_key = {newest['k_key']}")

    def check(self):
        """Compare the tables with one another and with the files."""
        connection = duckdb.connect()
        for view, table in {"k": "k", "f": "fact", "e": "fact_errors", "u": "fact_duplicates"}.items():
            connection.register(view, DeltaTable(str(self.warehouse / table)).to_pyarrow_table())
        connection.register("gone", pa.table({"k_key": pa.array(sorted(self.removed), pa.int64())}))
        sources = f"read_csv('{self.folder}/*/in/*.csv', all_varchar = true, header = true)"
        for key in ("k_key", "c"):
            assert connection.sql(f"SELECT {key} FROM k GROUP BY {key} HAVING count(*) > 1").fetchall() == []
        for role, column in {"a": "c", "b": "d"}.items():
            wrong = (
                f"SELECT f.id, f.{column}, f.{role}_key, k.c FROM f LEFT JOIN k ON f.{role}_key = k.k_key "
                f"WHERE k.c IS DISTINCT FROM f.{column} "
                f"AND NOT (k.k_key IS NULL AND f.{role}_key IN (SELECT k_key FROM gone))"
            )
            assert connection.sql(wrong).fetchall() == []
            named = f"SELECT {role}_key FROM f GROUP BY {role}_key HAVING count(DISTINCT {column}) > 1"
            assert connection.sql(named).fetchall() == []
        assert connection.sql("SELECT id FROM f GROUP BY id HAVING count(*) > 1").fetchall() == []
        found = (
            "SELECT id::VARCHAR AS id, c, d FROM f UNION ALL SELECT id::VARCHAR, c, d FROM u "
            "UNION ALL SELECT * FROM (SELECT split_part(record, ',', 1), split_part(record, ',', 2), "
            "split_part(record, ',', 3) FROM e)"
        )
        given = f"SELECT id, c, d FROM {sources}"
        assert connection.sql(f"({given}) EXCEPT ALL ({found})").fetchall() == []
        assert connection.sql(f"({found}) EXCEPT ALL ({given})").fetchall() == []


@pytest.fixture
def shared(tmp_path):
    world = Shared(tmp_path)
    world.put("p")
    run(world.pipeline("p"))
    return world


def at(step, action):
    """Return a hook that acts once, when a step is reached first; and the list of what it acted at."""
    acted = []

    def hook(name):
        if name == step and not acted:
            acted.append(name)
            action()

    return hook, acted


def crash():
    raise CrashError


def interleave(world, step, writer, *, crashes):
    """Load a file with another writer at a step, and perhaps a crash there; then what a replay does."""
    file = world.put("p")

    def action():
        world.write(writer)
        if crashes:
            crash()

    hook, acted = at(step, action)
    if not crashes:
        run(world.pipeline("p"), hook=hook)
    else:
        with pytest.raises(BatchError):
            run(world.pipeline("p"), hook=hook)
        if step in BEFORE_FACTS:
            world.put("p", file)
        run(world.pipeline("p"))
    assert acted == [step]
    world.check()


QUICK = [
    ("before members:a", "pipeline", False),
    ("after members:a", "delete", True),
    ("before facts", "pipeline", False),
    ("after facts", "append", True),
    ("before duplicates", "pipeline", True),
]


def test_other_writers_at_some_steps(shared):
    for step, writer, crashes in QUICK:
        interleave(shared, step, writer, crashes=crashes)


@pytest.mark.slow
@pytest.mark.parametrize("by_spark", [False, True])
def test_other_writers_between_every_two_steps(shared, monkeypatch, by_spark):
    if by_spark:
        monkeypatch.setattr("headrace.pipelines.batch.tables.takes_files", lambda _: False)
    for position, step in enumerate((*BEFORE_FACTS, *AFTER_FACTS)):
        for number, writer in enumerate(WRITERS):
            interleave(shared, step, writer, crashes=(position + number) % 2 == 0)


@pytest.mark.slow
def test_staged_rows_that_are_gone_are_named(shared, monkeypatch):
    monkeypatch.setattr("headrace.pipelines.batch.tables.takes_files", lambda _: False)
    shared.put("p")
    hook, _ = at("after facts", crash)
    with pytest.raises(BatchError):
        run(shared.pipeline("p"), hook=hook)
    (staged,) = (shared.warehouse / "fact_errors" / "_headrace_staged").iterdir()
    kept = staged.rename(shared.folder / "kept")
    with pytest.raises(DeltaTableError, match=r"-errors was written for .*fact_errors but has been removed"):
        run(shared.pipeline("p"))
    kept.rename(staged)
    run(shared.pipeline("p"))
    shared.check()


def test_a_fact_table_that_is_made_anew_during_a_batch_is_not_written_to(shared):
    shared.put("p")

    def remake():
        shutil.rmtree(shared.warehouse / "fact")
        write_deltalake(str(shared.warehouse / "fact"), pa.table({"id": [1]}))

    hook, _ = at("before facts", remake)
    with pytest.raises(DeltaTableError, match="removed or recreated"):
        run(shared.pipeline("p"), hook=hook)
    assert DeltaTable(str(shared.warehouse / "fact")).version() == 0
