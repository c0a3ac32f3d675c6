"""Results of a join that go through transformations, lookups and the search for duplicates, exactly once."""

import copy
import json
import os
import re
import subprocess
import sys

import duckdb
import pytest
from correlation_world import BEGIN, Killed, World, ending_at
from deltalake import DeltaTable
from workers import kill_when, start

from headrace.pipelines.config import load_any, load_steps
from headrace.pipelines.errors import DeltaTableError, PipelineFileError, RejectedRowsError
from headrace.pipelines.rejects import RowId, Selection, dismiss_rows, list_rejects, show_rejects
from headrace.pipelines.retries import retry

STEPS = {
    "transform": [
        {"where": "paid >= 10"},
        {"derive": {"number": "cast(substring(item, 5) as int)", "cents": "cast(paid * 100 as bigint)"}},
        {"rename": {"at_right": "paid_at"}},
    ],
    "dimensions": {"item": {"path": "w/item", "natural_key": ["code"], "columns": {"code": "string"}, "shards": 2}},
    "lookups": [{"dimension": "item", "role": "item", "on": {"item": "code"}, "policy": "infer", "null_key": "reject"}],
}
FACTS = """
    select o.id, o.item, o."at", p."order", p.paid, p."at" as paid_at, cast(p.paid * 100 as bigint) as cents
    from orders o join payments p on o.id = p."order" where p.paid >= 10
"""


@pytest.fixture
def world(tmp_path):
    conf = {"spark.sql.shuffle.partitions": 2}
    return World(tmp_path, options={**copy.deepcopy(STEPS), "spark": {"master": "local[2,4]", "conf": conf}})


def table(world, name):
    return DeltaTable(str(world.folder / "w" / name)).to_pyarrow_table()


def expected(world, where="true"):
    """Return the facts without surrogate keys as DuckDB finds them in the rows of the sources."""
    connection = duckdb.connect()
    for name in world.sources:
        kinds = ", ".join(f'"{column}" {kind.removesuffix("_ntz")}' for column, kind in
                          world.document["sources"][name]["schema"].items())  # fmt: skip
        connection.execute(f"create table {name} ({kinds})")
        connection.executemany(f"insert into {name} values (?, ?, ?)", world.rows[name])
    return sorted(connection.execute(f"select * from ({FACTS}) where {where}").fetchall(), key=repr)


def assert_loaded_once(world, where="item like 'item%'"):
    """Compare the facts with the oracle, and each of their surrogate keys with the member that it names."""
    facts, items = table(world, "paid"), table(world, "item")
    connection = duckdb.connect()
    connection.register("facts", facts)
    connection.register("items", items)
    rows = connection.execute(
        'select id, f.item, "at", "order", paid, paid_at, cents from facts f join items i '
        "on f.item_key = i.item_key and f.item = i.code"
    ).fetchall()
    assert sorted(rows, key=repr) == expected(world, where)
    assert facts.num_rows == len(rows)
    numbers = sorted(items.column("item_key").to_pylist())
    assert len(numbers) == len(set(numbers))
    members = connection.execute("select count(*), count(distinct code) from items where item_key > 0").fetchone()
    assert members[0] == members[1] == len(set(facts.column("item").to_pylist()))


def left_behind(world):
    """Return the files in the state folder that the manifest does not name."""
    named = {run["file"] for run in world.manifest()["runs"]}
    runs = [file.name for file in world.state.glob("*.run") if file.name not in named]
    return [*runs, *(world.state / "results").glob("*")]


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_results_are_transformed_and_looked_up_and_a_run_that_ends_behind_the_members_is_repeated(world, rng):
    world.add_random(rng, 60)
    world.add("orders", [(1, None, BEGIN), (1, "item7x", BEGIN)])

    def killed(step):
        if step == "after members:item":
            raise Killed

    with pytest.raises(Killed):
        world.run(killed)
    assert table(world, "paid").num_rows == 0
    world.add_random(rng, 60)
    result = world.run()
    joined = world.expected('orders.id = payments."order"')
    assert_loaded_once(world, "item in ('item0', 'item1', 'item2')")
    assert left_behind(world) == []
    assert sum(batch.detail["results"] for batch in result.batches) == len(joined)
    filtered = sum(row[4] < 10 for row in joined)
    assert result.as_dict()["filtered"] == filtered
    assert result.total("loaded") + filtered + result.total("rejected") == len(joined)
    assert result.total("rows_in") == 242
    causes = {row["causes"][0]["column"] or row["causes"][0]["role"] for row in world.rejected()}
    assert causes == {"number", "item"}


@pytest.mark.spark
def test_steps_that_come_later_name_all_columns_that_the_table_lacks(tmp_path, rng, spark):
    conf = {"spark.sql.shuffle.partitions": 2}
    world = World(tmp_path, options={"spark": {"master": "local[2,4]", "conf": conf}})
    world.add_random(rng, 30)
    world.run()
    before = table(world, "paid").num_rows
    world.document |= copy.deepcopy(STEPS)
    world.write()
    with pytest.raises(
        DeltaTableError, match="no columns 'paid_at', 'number', 'cents', 'item_key', '_outcome'"
    ) as told:
        world.run()
    assert "another table" not in str(told.value)  # the ledger would refuse it
    (statement,) = re.findall(r"ALTER TABLE .*\)$", str(told.value))
    spark.sql(statement)
    world.add_random(rng, 30)
    result = world.run()
    facts = table(world, "paid")
    assert facts.num_rows == before + result.total("loaded")
    assert facts.column("item_key").null_count == before


@pytest.mark.spark
def test_another_table_is_advised_before_the_first_batch_only(tmp_path, rng, spark):
    world = World(tmp_path, options=copy.deepcopy(STEPS))
    spark.sql(f"CREATE TABLE delta.`{world.folder}/w/paid` USING delta AS SELECT 1L AS id")
    world.add_random(rng, 30)
    with pytest.raises(DeltaTableError, match=r"or name another table$"):
        world.run()
    world.document["sink"]["path"] = "w/other"
    world.write()
    assert world.run().total("loaded") == table(world, "other").num_rows > 0


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("part", range(6))
def test_a_run_that_ends_at_any_step_is_repeated_exactly(world, rng, part):
    """Two batches with new members and rejected rows in each; a run ends at each step, and the next one goes on."""
    for _ in range(2):
        world.add_random(rng, 30)
        world.add("orders", [("no number", "x", BEGIN)])
        world.rows["orders"].pop()
    at = part
    while True:
        try:
            world.run(ending_at(at))
        except Killed:
            world.add_random(rng, 10)
            world.add("orders", [(int(rng.integers(12)), f"item{at}", BEGIN)])
            at += 6
            continue
        break
    assert at > 12
    assert_loaded_once(world)
    assert left_behind(world) == []
    assert len([row for row in world.rejected() if row["_file"].startswith("orders/")]) == 2


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_a_driver_that_is_killed_loses_and_doubles_nothing(world, rng):
    for number in range(3):
        for _ in range(2):
            world.add_random(rng, 40)
        world.add("orders", [(3, f"item{number}9", BEGIN)])
        done = [len(list((world.folder / "w" / name / "_delta_log").glob("*.json"))) for name in ("item", "paid")]
        wanted = {
            0: lambda: any((world.state / "results").glob("*")),
            1: lambda: len(list((world.folder / "w/item/_delta_log").glob("*.json"))) > max(1, done[0]),  # noqa: B023
            2: lambda: len(list((world.folder / "w/paid/_delta_log").glob("*.json"))) > done[1],  # noqa: B023
        }
        assert kill_when(start(world), wanted[number % 3])
    script = "from headrace.cli.main import entry_point; entry_point()"
    command = [sys.executable, "-c", script, "run", str(world.pipeline), "--once", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1])["sources"] == ["orders", "payments"]
    assert_loaded_once(world)
    assert left_behind(world) == []


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_rejected_results_are_retried_and_records_of_sources_are_not(world, rng):
    world.add_random(rng, 20)
    world.add("orders", [(1, "item7x", BEGIN), ("no number", "x", BEGIN)])
    world.rows["orders"].pop()
    world.add("payments", [(1, 20.0, BEGIN)])
    world.run()
    steps = load_steps(world.pipeline)
    groups = list_rejects(steps)
    assert {group.file.partition("/")[0] for group in groups} == {"orders", "results"}
    records, _ = show_rejects(steps, Selection(rules=("transform.1.derive",)))
    assert records
    assert all('"item": "item7x"' in record.record.replace('":"', '": "') for record in records)
    world.document["transform"][1]["derive"]["number"] = "try_cast(substring(item, 5) as int)"
    world.write()
    with pytest.raises(RejectedRowsError, match="records of sources"):
        retry(world.pipeline, Selection())
    loaded = table(world, "paid").num_rows
    config = load_any(world.pipeline)
    result = retry(config, Selection(rules=("transform.1.derive",)))
    assert result.run.total("loaded") == len(records)
    assert table(world, "paid").num_rows == loaded + len(records)
    assert [group.file.partition("/")[0] for group in list_rejects(steps, statuses=["open"])] == ["orders"]
    batch, file = next((group.batch, group.file) for group in groups if group.file.startswith("orders/"))
    assert dismiss_rows(steps, Selection(ids=(RowId(batch, file, 2),)), "not an order") == 1
    world.add_random(rng, 20)
    world.run()
    assert_loaded_once(world)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_a_retry_that_ends_at_any_step_is_repeated_exactly(world, rng):
    world.add("orders", [(1, "item7x", BEGIN)])
    world.add("payments", [(1, 20.0, BEGIN)])
    world.run()
    world.document["transform"][1]["derive"]["number"] = "try_cast(substring(item, 5) as int)"
    world.write()
    config, at = load_any(world.pipeline), 0
    while True:
        try:
            retry(config, Selection(), hook=ending_at(at))
        except Killed:
            at += 2
            continue
        break
    assert at > 8
    assert_loaded_once(world)
    world.add_random(rng, 20)
    world.run()
    assert_loaded_once(world)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_duplicate_results_are_found_within_and_between_batches(world, rng):
    world.document = {name: part for name, part in world.document.items() if name not in STEPS}
    world.document["duplicates"] = {"key": ["id", "item"], "action": "route", "order_by": ["paid"], "shards": 2}
    world.write()
    for _ in range(3):
        world.add_random(rng, 30)
    result = world.run()
    joined = world.expected('orders.id = payments."order"')
    facts = table(world, "paid").to_pylist()
    keys = [(row["id"], row["item"]) for row in facts]
    assert len(keys) == len(set(keys))
    assert set(keys) == {row[:2] for row in joined}
    assert table(world, "paid_duplicates").num_rows == len(joined) - len(keys) == result.total("routed")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_results_that_are_only_transformed(world, rng):
    del world.document["lookups"], world.document["dimensions"]
    world.document["transform"].pop(1)
    world.document["sink"]["partition_by"] = ["item"]
    world.write()
    for _ in range(2):
        world.add_random(rng, 30)
    world.run()
    rows = [tuple(row.values()) for row in table(world, "paid").drop_columns(["_outcome"]).to_pylist()]
    assert sorted(rows, key=repr) == [row[:-1] for row in expected(world)]


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_a_batch_with_steps_is_completed_only_with_steps(world, rng):
    world.add_random(rng, 20)

    def killed(step):
        if step == "after facts":
            raise Killed

    with pytest.raises(Killed):
        world.run(killed)
    steps = {name: world.document.pop(name) for name in STEPS}
    world.write()
    with pytest.raises(PipelineFileError, match=r"batch 0 was loaded through steps.* give the pipeline file the steps"):
        world.run()
    world.document |= steps
    world.write()
    world.run()
    assert_loaded_once(world)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_a_commit_of_another_writer_to_the_dimension_does_not_repeat_the_join(world, rng):
    world.add_random(rng, 30)
    world.run()
    world.add("orders", [(1, "item88", BEGIN)])
    world.add("payments", [(1, 33.0, BEGIN)])
    moved, joins = [], []

    def hook(step):
        if step == "after manifest":
            joins.append(step)
        if step == "before members:item" and not moved:
            moved.append(step)
            DeltaTable(str(world.folder / "w/item")).optimize.compact()
            DeltaTable(str(world.folder / "w/item")).alter.set_table_properties(
                {"delta.logRetentionDuration": "interval 90 days"}
            )

    world.run(hook)
    assert moved
    assert len(joins) == 1
    assert_loaded_once(world)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (["lookups", 0, "on"], {"itm": "code"}, "names column 'itm', which the result of `correlate` does not have"),
        (["lookups", 0, "dimension"], "van", "names dimension 'van'; the dimensions are item"),
        (["sink", "partition_by"], ["day"], "names 'day', which the facts do not have"),
        (["sink", "audit"], True, "unknown field"),
        (
            ["dimensions", "item", "path"],
            "w/paid/../../.headrace/paid/checkpoint/state/item",
            "overlaps dimensions.item",
        ),
        (["replicas"], ".headrace/paid/checkpoint/state/r", "overlaps replicas"),
    ],
)
def test_wrong_steps_are_refused_with_their_line(world, place, value, message):
    del world.document["transform"]
    world.assert_refused(place, value, message)


def test_dimensions_that_no_step_uses_are_refused(world):
    del world.document["lookups"], world.document["transform"]
    world.write()
    with pytest.raises(PipelineFileError, match="no step uses them"):
        load_any(world.pipeline)


def test_join_and_lookups_share_the_memory_of_a_worker(world):
    config = load_any(world.pipeline)
    assert config.join_memory == config.steps().memory == 128 << 20
    del world.document["lookups"], world.document["dimensions"]
    world.write()
    assert load_any(world.pipeline).join_memory == 256 << 20
