"""Surrogate keys name one member for ever: beside other pipelines, other jobs, failures and deletions.

The oracle is the Delta tables themselves, read with DuckDB: each number names one member, each natural key has one
member, and each fact's key names the member of the fact's own natural key.
"""

import duckdb
import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake

from headrace.pipelines.errors import BatchError, PolicyViolationError
from headrace.pipelines.runner import run

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark"), pytest.mark.timeout(600)]


class CrashError(Exception):
    """Raised by a hook in place of a crash."""


class Project:
    """A folder with a pipeline P: lookups `a` on c and `b` on d of one dimension, both of which infer members."""

    def __init__(self, folder, warehouse, name="p", **more):
        self.folder = folder
        self.warehouse = warehouse
        self.name = name
        (folder / "in").mkdir(parents=True)
        document = {
            "name": name,
            "source": {
                "format": "csv", "path": "in", "schema": {"id": "bigint", "c": "string", "d": "string", "t": "date"}
            },
            "dimensions": {
                "k": {
                    "path": str(warehouse / "k"), "natural_key": ["c"], "columns": {"c": "string"}, "shards": 1,
                }
            },
            "lookups": [
                {"dimension": "k", "role": "a", "on": {"c": "c"}, "policy": "infer"},
                {"dimension": "k", "role": "b", "on": {"d": "c"}, "policy": "infer"},
            ],
            "sink": {"path": str(warehouse / f"fact_{name}")},
            **more,
        }  # fmt: skip
        self.pipeline = folder / "pipeline.yml"
        self.pipeline.write_text(yaml.safe_dump(document))

    def put(self, name, *rows):
        (self.folder / "in" / name).write_text("id,c,d,t\n" + "".join(f"{row}\n" for row in rows))

    def run(self, **options):
        return run(self.pipeline, **options)

    def members(self):
        rows = DeltaTable(str(self.warehouse / "k")).to_pyarrow_table().to_pylist()
        return {row["c"]: row["k_key"] for row in rows if row["k_key"] != -1}

    def check(self, facts):
        """Compare members with one another, and facts with members."""
        connection = duckdb.connect()
        connection.register("k", DeltaTable(str(self.warehouse / "k")).to_pyarrow_table())
        connection.register("f", DeltaTable(str(self.warehouse / f"fact_{self.name}")).to_pyarrow_table())
        twice = "SELECT {0} FROM k WHERE k_key <> -1 GROUP BY {0} HAVING count(*) > 1"
        assert connection.sql(twice.format("k_key")).fetchall() == []
        assert connection.sql(twice.format("c")).fetchall() == []
        wrong = (
            "SELECT f.id, f.c, a.c, f.d, b.c FROM f "
            "LEFT JOIN k a ON f.a_key = a.k_key LEFT JOIN k b ON f.b_key = b.k_key "
            "WHERE f.c IS DISTINCT FROM a.c OR f.d IS DISTINCT FROM b.c"
        )
        assert connection.sql(wrong).fetchall() == []
        assert connection.sql("SELECT count(*) FROM f").fetchall() == [(facts,)]


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path / "p", tmp_path / "wh")


def crash_at(step, times=1):
    left = [times]

    def hook(name):
        if name == step and left[0]:
            left[0] -= 1
            raise CrashError(step)

    return hook


def test_a_batch_whose_rows_differ_after_its_members_were_added_finds_them(project):
    project.put("b.csv", "1,AAA,ZZZ,2024-05-01", "2,BBB,ZZZ,2024-05-01")
    with pytest.raises(BatchError):
        project.run(hook=crash_at("after members:a"))
    assert project.members() == {"AAA": 1, "BBB": 2}
    project.put("b.csv", "2,BBB,ZZZ,2024-05-01")
    project.run()
    assert project.members() == {"AAA": 1, "BBB": 2, "ZZZ": 3}
    project.check(1)


def test_a_record_that_does_not_fit_blocks_nothing(project):
    project.put("b.csv", "1,AAA,ZZZ,20244-05-01", "2,BBB,ZZZ,2024-05-01")
    result = project.run()
    assert (result.total("loaded"), result.total("rejected")) == (1, 1)
    project.check(1)


@pytest.mark.parametrize(
    "step", ["before join", "before members:a", "after members:a", "before members:b", "before facts"]
)
def test_another_pipeline_with_a_catalog_of_its_own_infers_members_in_between(tmp_path, step):
    first = Project(tmp_path / "p", tmp_path / "wh", "p")
    second = Project(tmp_path / "q", tmp_path / "wh", "q")
    first.put("1.csv", *(f"{i},A{i},B{i % 3},2024-05-01" for i in range(20)))
    second.put("1.csv", *(f"{i},A{i + 10},B{i % 5},2024-05-01" for i in range(20)))
    begun = []

    def hook(name):
        if name == step and not begun:
            begun.append(name)
            second.run()

    first.run(hook=hook)
    assert begun
    first.check(20)
    second.check(20)
    assert len(first.members()) == 35


def test_another_job_appends_the_next_number_between_a_crash_and_the_rerun(project):
    project.put("1.csv", "1,AAA,AAA,2024-05-01")
    project.run()
    project.put("2.csv", "2,BBB,BBB,2024-05-01")
    with pytest.raises(BatchError):
        project.run(hook=crash_at("before members:a"))
    row = pa.table({"k_key": [2], "c": ["XXX"], "is_inferred": [False]})
    write_deltalake(str(project.warehouse / "k"), row, mode="append")
    project.run()
    assert project.members() == {"AAA": 1, "XXX": 2, "BBB": 3}
    project.check(2)


def test_another_job_appends_a_member_between_plan_and_commit(project):
    project.put("1.csv", "1,AAA,BBB,2024-05-01")

    def hook(name):
        if name == "before members:a" and "XXX" not in project.members():
            row = pa.table({"k_key": [1], "c": ["XXX"], "is_inferred": [False]})
            write_deltalake(str(project.warehouse / "k"), row, mode="append")

    project.run(hook=hook)
    assert project.members() == {"XXX": 1, "AAA": 2, "BBB": 3}
    project.check(1)


def test_the_number_of_a_deleted_member_is_not_given_again(project):
    project.put("1.csv", "1,AAA,BBB,2024-05-01")
    project.run()
    DeltaTable(str(project.warehouse / "k")).delete("c = 'BBB'")
    project.put("2.csv", "2,CCC,CCC,2024-05-01")
    project.run()
    assert project.members() == {"AAA": 1, "CCC": 3}


def test_two_pipelines_of_one_folder_share_a_dimension(tmp_path):
    """A fails on its file; B loads; A's file is repaired: no number names two members."""
    first = Project(tmp_path / "p", tmp_path / "wh", "a")
    second = Project(tmp_path / "q", tmp_path / "wh", "b")
    first.put("1.csv", "1,a1,a1,2024-05-01")
    with pytest.raises(BatchError):
        first.run(hook=crash_at("before join"))
    second.put("1.csv", "1,b1,b2,2024-05-01")
    second.run()
    first.run()
    first.check(1)
    second.check(1)


def test_a_policy_that_fails_goes_on_once_the_member_is_added(tmp_path):
    project = Project(tmp_path / "p", tmp_path / "wh")
    document = yaml.safe_load(project.pipeline.read_text())
    for lookup in document["lookups"]:
        lookup["policy"] = "fail"
    project.pipeline.write_text(yaml.safe_dump(document))
    project.put("1.csv", "1,AAA,AAA,2024-05-01")
    with pytest.raises(PolicyViolationError, match="AAA"):
        project.run()
    row = pa.table({"k_key": [1], "c": ["AAA"], "is_inferred": [False]})
    write_deltalake(str(project.warehouse / "k"), row, mode="append")
    project.run()
    project.check(1)


def test_a_repeated_natural_key_that_was_removed_lets_the_run_go_on(project):
    project.put("1.csv", "1,AAA,AAA,2024-05-01")
    project.run()
    row = pa.table({"k_key": [7], "c": ["AAA"], "is_inferred": [False]})
    write_deltalake(str(project.warehouse / "k"), row, mode="append")
    project.put("2.csv", "2,AAA,AAA,2024-05-01")
    with pytest.raises(Exception, match="AAA"):
        project.run()
    DeltaTable(str(project.warehouse / "k")).delete("k_key = 7")
    project.run()
    project.check(2)


def test_facts_of_two_writers_with_a_declared_key_hold_no_key_twice(tmp_path):
    """Both pipelines load into one fact table; the second finds what the first loaded in between."""
    more = {"duplicates": {"key": ["id"]}, "sink": {"path": str(tmp_path / "wh" / "fact_p")}}
    first = Project(tmp_path / "p", tmp_path / "wh", "p", **more)
    second = Project(tmp_path / "q", tmp_path / "wh", "q", **more)
    first.put("1.csv", *(f"{i},A,A,2024-05-01" for i in range(10)))
    second.put("1.csv", *(f"{i},A,A,2024-05-01" for i in range(5, 15)))
    begun = []

    def hook(name):
        if name == "before facts" and not begun:
            begun.append(name)
            second.run()

    first.run(hook=hook)
    first.check(15)


def test_a_number_that_another_job_gave_and_facts_carry_is_not_given_again(project):
    project.put("1.csv", "1,AAA,AAA,2024-05-01")
    project.run()
    member = pa.table({"c": ["HHH"], "k_key": pa.array([2], pa.int64()), "is_inferred": [False]})
    write_deltalake(str(project.warehouse / "k"), member, mode="append")
    project.put("2.csv", "2,HHH,AAA,2024-05-01")
    project.run()
    DeltaTable(str(project.warehouse / "k")).delete("k_key = 2")
    project.put("3.csv", "3,BBB,AAA,2024-05-01")
    project.run()
    assert project.members() == {"AAA": 1, "BBB": 3}
