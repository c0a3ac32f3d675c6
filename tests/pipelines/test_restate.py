"""Facts are restated after changes of a dimension: exactly those that moved, once, also after a crash."""

import datetime as dt

import numpy as np
import pytest
from deltalake import DeltaTable
from history_scenario import Orders, first_changes, random_changes, random_orders

from headrace.pipelines.delta.tables import DeltaHandle
from headrace.pipelines.errors import BatchError
from headrace.pipelines.history.moved import (
    ensure_moved_table,
    moved_files,
    moved_note,
    moved_rows,
    settle_moved,
)
from headrace.pipelines.restating import restate
from headrace.pipelines.runner import run

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]


class Restated(Orders):
    """A world whose changes are recorded in the table of moved facts."""

    def change(self, *changes, settle=True):
        """Apply changes, and record what they moved."""
        path, history = self.members.path, self.members.history
        ensure_moved_table(path, history)

        def note(applied, differences):
            return moved_note(
                self.members.written(moved_files(path, history), moved_rows(history, applied, differences))
            )

        applied = self.members.apply(*changes, note=note)
        if settle:
            settle_moved(path)
        return applied

    def roles(self, **options):
        return {result.role: result for result in restate(self.pipeline, **options)}


def stale(world):
    """Return the orders whose buyer is not the version of their day."""
    found = set()
    for fact in world.read("facts"):
        expected, _ = world.expected(tuple(fact[name] for name in ("order", "buyer", "seller", "day")))
        names = ("buyer_key", "buyer_city", "buyer_tel")
        if fact["day"] is not None and any(fact[name] != expected[name] for name in names):
            found.add(fact["order"])
    return found


def day(number):
    return dt.date(2024, 1, number)


@pytest.fixture
def world(tmp_path):
    world = Restated(tmp_path / "world")
    world.change(("c1", 1, "Oslo"), ("c1", 20, "Bergen"), ("c2", 1, "Molde"))
    world.put([(1, "c1", "c2", day(5)), (2, " C1", "c2", day(12)), (3, "c1", "c2", day(25)), (4, "c2", "c1", day(12)),
               (5, "new", "c2", day(12)), (6, "c1", "c2", None)])  # fmt: skip
    run(world.pipeline)
    assert stale(world) == set()
    return world


def buyers(world):
    return {fact["order"]: (fact["buyer_key"], fact["buyer_city"]) for fact in world.read("facts")}


def test_facts_of_a_moved_boundary_get_the_key_and_the_attributes_of_their_version(world):
    before = buyers(world)
    world.change(("c1", 10, "Bergen"))
    assert stale(world) == {2}
    dry = world.roles(dry_run=True)["buyer"]
    assert (dry.facts, dry.restated, dry.batches, dry.dry_run) == (1, 1, 1, True)
    assert buyers(world) == before
    done = world.roles()["buyer"]
    assert (done.facts, done.restated, done.kept) == (1, 1, 0)
    assert stale(world) == set()
    assert buyers(world) == before | {2: before[3]}


@pytest.mark.slow
def test_what_was_restated_is_not_restated_again(world):
    world.change(("c1", 10, "Bergen"))
    world.roles()
    version = DeltaHandle(world.config.sink.path).latest().version
    again = world.roles()["buyer"]
    assert (again.ranges, again.restated) == (0, 0)
    assert DeltaHandle(world.config.sink.path).latest().version == version


def test_a_completed_member_gives_its_attributes_to_the_facts_that_introduced_it(world):
    world.change(("new", 3, "Voss"))
    assert stale(world) == {5}
    assert world.roles()["buyer"].restated == 1
    assert stale(world) == set()


def test_facts_of_a_retired_version_point_to_the_version_before_it(world):
    applied = world.change(("c1", 20, "Oslo"))
    gone = applied.retired.column("customer_key").to_pylist()
    facts = world.read("facts")
    assert {fact["order"] for fact in facts if fact["now_key"] in gone} == {1, 2, 3, 6}
    roles = world.roles()
    assert (roles["buyer"].restated, roles["now"].restated) == (1, 4)
    keys = {row["customer_key"] for row in world.members.rows().to_pylist()}
    assert all({fact["buyer_key"], fact["now_key"]} <= keys for fact in world.read("facts"))
    assert {fact["now_city"] for fact in world.read("facts") if fact["order"] in {1, 2, 3, 6}} == {"Oslo"}


@pytest.mark.slow
def test_facts_without_event_time_that_got_the_current_version_leave_a_retired_version(world):
    world.put([(7, "c2", "c1", None), (8, "c2", "c1", day(25))])
    run(world.pipeline)
    gone = world.change(("c1", 20, "Oslo")).retired.column("customer_key").to_pylist()
    assert {fact["order"] for fact in world.read("facts") if fact["seller_key"] in gone} == {7, 8}
    before = {fact["order"]: fact["seller_key"] for fact in world.read("facts")}
    assert world.roles()["seller"].restated == 2
    after = {fact["order"]: fact["seller_key"] for fact in world.read("facts")}
    assert after == before | dict.fromkeys((7, 8), before[4])
    assert world.roles()["seller"].ranges == 0


@pytest.mark.slow
def test_an_update_before_an_earlier_version_arrives_moves_no_fact_of_current_versions(world):
    before = {fact["order"]: fact["now_key"] for fact in world.read("facts")}
    world.change(("c2", 1, "Hamar"))
    world.change(("c2", dt.date(2023, 5, 1), "Alta"))
    assert stale(world) == {4}
    world.roles()
    assert stale(world) == set()
    assert {fact["order"]: fact["now_key"] for fact in world.read("facts")} == before
    assert {fact["now_city"] for fact in world.read("facts") if fact["order"] == 4} == {"Hamar"}


def test_moved_facts_that_a_killed_run_left_are_restated(world):
    world.change(("c1", 10, "Bergen"), settle=False)
    assert world.roles()["buyer"].restated == 1
    assert stale(world) == set()


@pytest.mark.slow
def test_facts_that_a_policy_would_reject_now_stay_as_they_are(tmp_path):
    world = Restated(tmp_path / "world")
    world.put([(1, "c9", "c9", day(12))])
    run(world.pipeline)
    world.change(("c9", 20, "Oslo"))
    before = [fact["seller_key"] for fact in world.read("facts")]
    assert world.roles()["seller"].kept == 1
    assert [fact["seller_key"] for fact in world.read("facts")] == before


@pytest.mark.slow
def test_a_batch_that_was_planned_before_the_changes_is_restated_next_time(world):
    """Another pipeline's batch plans, then changes come and are restated, and then its facts are committed."""
    world.put([(7, "c1", "c2", day(13))])

    def changes(step):
        if step == "before facts":
            world.change(("c1", 10, "Bergen"))
            other = world.config.model_copy(update={"checkpoint": str(world.folder / "other")})
            restate(other)

    run(world.pipeline, hook=changes)
    assert stale(world) == {7}
    assert world.roles()["buyer"].restated == 1
    assert stale(world) == set()


def restating(world):
    """Return what made the commits that corrected facts."""
    commits = DeltaTable(world.config.sink.path).history()
    return [commit["engineInfo"] for commit in commits if commit["operation"] == "MERGE"]


@pytest.mark.slow
def test_facts_are_corrected_by_deletion_vectors_as_spark_reads_them(world, spark):
    facts = world.config.sink.path
    spark.sql(f"ALTER TABLE delta.`{facts}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    before = {row["order"]: row.asDict() for row in spark.read.format("delta").load(facts).collect()}
    world.change(("c1", 10, "Bergen"))
    version = DeltaHandle(facts).latest().version
    assert world.roles()["buyer"].restated == 1
    after = {row["order"]: row.asDict() for row in spark.read.format("delta").load(facts).collect()}
    corrected = {**before[2], **{name: before[3][name] for name in ("buyer_key", "buyer_city")}}
    corrected |= {name: before[2][name] for name in before[2] if name.startswith("buyer_tel")}
    sold = {**before[4], "seller_key": before[3]["buyer_key"]}
    assert after == before | {2: corrected, 4: sold}
    feed = (
        spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", version + 1).load(facts)
    )
    changes = {row["_change_type"]: row.asDict() for row in feed.where("order = 2").collect()}
    assert (feed.count(), len(changes)) == (4, 2)
    for kind, fact in (("update_preimage", before[2]), ("update_postimage", corrected)):
        assert {name: changes[kind][name] for name in fact} == fact
    assert restating(world) == ["headrace"] * 2


@pytest.mark.slow
def test_facts_whose_files_another_writer_changes_meanwhile_are_corrected_by_merge(world):
    world.change(("c1", 10, "Bergen"))

    def rewritten(step):
        if step == "before batch 0":
            DeltaTable(world.config.sink.path).optimize.z_order(["order"])

    assert world.roles(hook=rewritten)["buyer"].restated == 1
    assert stale(world) == set()
    assert {engine.split("/")[0] for engine in restating(world)} == {"Apache-Spark"}


@pytest.mark.slow
def test_random_changes_are_restated_in_batches_and_across_crashes(tmp_path):
    rng = np.random.default_rng(3)
    world = Restated(tmp_path / "world", 3)
    world.change(*first_changes(12))
    for number in range(2):
        world.put(random_orders(rng, 80, 12, number * 1000))
        run(world.pipeline)
        world.change(*random_changes(rng, 30, 12))
        wrong = stale(world)

        def crash(step):
            if step == "after batch 0":
                raise RuntimeError(step)

        with pytest.raises(BatchError):
            world.roles(most_facts=len(wrong) // 2, hook=crash)
        assert len(stale(world)) < len(wrong)
        assert 0 < world.roles()["buyer"].restated < len(wrong)
        assert stale(world) == set()
        assert len(world.read("facts")) == len({fact["order"] for fact in world.read("facts")})
