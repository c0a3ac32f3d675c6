"""Stages over Arrow batches, without Spark: policies, members, duplicates, settling, replays, damage."""

import datetime as dt
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pydantic import ValidationError

from headrace.etl import OUTCOME_COLUMN
from headrace.pipelines.batch.error_rows import Origin
from headrace.pipelines.batch.metrics import first_failure, reconcile, summarise
from headrace.pipelines.batch.preparation import prepare
from headrace.pipelines.batch.read_step import record_format
from headrace.pipelines.batch.stages import DUPLICATES_ROLE, StageRun, Target
from headrace.pipelines.config.model import PipelineConfig
from headrace.pipelines.delta.tables import DeltaHandle, create_table
from headrace.pipelines.errors import (
    BatchError,
    DeltaTableError,
    PolicyViolationError,
    ReplicaDamagedError,
)
from headrace.pipelines.replica import operators
from headrace.pipelines.spark.frame import (
    FILE,
    MALFORMED,
    MALFORMED_TYPE,
    NOTE,
    PIECES,
    RECORD_NUMBER,
    REJECTED,
    ROUTED,
    SHARD,
    STATE,
    State,
    member_column,
)
from headrace.storage.errors import HeadraceError

STREAM = {"id": "bigint", "tail": "string", "origin": "string", "dest": "string"}


def config_of(tmp_path, lookups, duplicates=None, **more):
    document = {
        "name": "flights",
        "source": {"format": "csv", "path": str(tmp_path), "schema": STREAM},
        "dimensions": {
            "plane": {
                "path": str(tmp_path / "plane"),
                "natural_key": ["tailnum"],
                "columns": {"tailnum": "string", "seats": "int"},
            },
            "airport": {"path": str(tmp_path / "airport"), "natural_key": ["faa"], "columns": {"faa": "string"}},
        },
        "lookups": lookups,
        "sink": {"path": str(tmp_path / "facts")},
        **more,
    }
    if duplicates is not None:
        document["duplicates"] = duplicates
    return PipelineConfig.model_validate(document)


def lookup(role, policy="infer", **more):
    dimension, column, key = {
        "plane": ("plane", "tail", "tailnum"),
        "origin": ("airport", "origin", "faa"),
        "dest": ("airport", "dest", "faa"),
    }[role]
    return {"dimension": dimension, "role": role, "on": {column: key}, "policy": policy, **more}


def ready(config, parallelism=2):
    prepared = prepare(config, parallelism)
    if not DeltaTable.is_deltatable(config.sink.path):
        create_table(config.sink.path, prepared.fact_schema)
    return prepared


def line(row):
    """Return a row (id, tail, origin, dest) as a CSV record; a text in place of a row is a malformed record."""
    if isinstance(row, str):
        return row
    return ",".join("" if value is None else str(value) if isinstance(value, int) else f'"{value}"' for value in row)


def pieces_of(folder, rows):
    """Write rows into a file of the source, and return the frame of its one piece."""
    path = folder / "f.csv"
    path.write_text("\n".join([",".join(STREAM), *map(line, rows)]) + "\n")
    seen = path.stat()
    row = {"file": "f.csv", "path": str(path), "start": 0, "stop": seen.st_size, "first_record": 1}
    row |= {"size": seen.st_size, "mtime_ns": seen.st_mtime_ns}
    return pa.Table.from_pylist([row], PIECES)


def frame(rows):
    """Return rows (id, tail, origin, dest) as the first stage reads them."""
    columns = list(zip(*rows, strict=True)) or [()] * 4
    data = {name: pa.array(values, kind) for name, values, kind in zip(
        STREAM, columns, (pa.int64(), pa.string(), pa.string(), pa.string()), strict=True)}  # fmt: skip
    return pa.record_batch({
        **data,
        FILE: pa.array(["f.csv"] * len(rows)),
        RECORD_NUMBER: pa.array(range(1, len(rows) + 1), pa.int64()),
        MALFORMED: pa.nulls(len(rows), MALFORMED_TYPE),
        STATE: pa.array([int(State.OPEN)] * len(rows), pa.int8()),
        NOTE: pa.nulls(len(rows), pa.string()),
    })  # fmt: skip


class Machine:
    """Does what the batch protocol and Spark do: shuffles, rounds, appends of members."""

    def __init__(self, prepared, owner="run", pieces=1):
        self.prepared = prepared
        self.owner = owner
        self.pieces = pieces
        self.plan = {}
        self.notes = []

    def stage_run(self):
        """Return what the stages share; no table takes files, so that all rows travel."""
        config = self.prepared.config
        began = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
        origin = Origin(config.name, "stream", 1, began, config.source.path, record_format(config.source))
        return StageRun(self.owner, self.prepared.shards, {}, origin)

    def target(self, role):
        handle = DeltaHandle(self.prepared.path(role))
        latest = handle.latest()
        base = (
            0 if role == DUPLICATES_ROLE else handle.greatest_key(self.prepared.lookups[role].dimension.surrogate_key)
        )
        return self.plan.setdefault(
            role, Target(latest.version, base, self.prepared.shards.get(role, 1), latest.table_id)
        )

    def run(self, rows, append_members=True):
        """Return the facts; rejected rows and routed duplicates are in `rejected` and `routed`."""
        rounds = self.prepared.rounds()
        table = pieces_of(Path(self.prepared.config.source.path), rows)
        self.notes = []
        for number, groups in enumerate(rounds):
            targets = {role: self.target(role) for group in groups for role in group.roles}
            stages = self.prepared.stages(rounds, number, targets, self.stage_run())
            if number:
                table = rows_of_the_stream(table)
            for stage, group in zip(stages, groups, strict=True):
                table = self.stage(stage, group, table)
            self.notes += [note for note in map(decode, table.column(NOTE).to_pylist()) if note]
            first_failure(self.notes)
            for role in [role for group in groups for role in group.roles if self.prepared.infers(role)]:
                members = [m for m in table.column(member_column(role)).to_pylist() if m is not None]
                if members and append_members:
                    schema = self.prepared.lookups[role].dimension.table_schema
                    write_deltalake(self.prepared.path(role), pa.Table.from_pylist(members, schema), mode="append")
        counts = summarise(self.notes)
        reconcile(counts, {})
        self.counts = counts
        self.rejected = table.column(REJECTED).drop_null().to_pylist()
        self.routed = table.column(ROUTED).drop_null().to_pylist()
        facts = table.filter(pa.array(np.asarray(table.column(STATE)) == State.OPEN))
        return facts.select(self.prepared.fact_schema.names).to_pylist()

    def stage(self, stage, group, table):
        if not group.shuffled:
            parts = [table]
        else:
            shards = np.asarray(table.column(SHARD))
            parts = [table.filter(pa.array(shards == shard)) for shard in np.unique(shards)]
        out = []
        for part in parts:
            size = max(1, -(-part.num_rows // self.pieces))
            out += list(stage(iter(part.to_batches(max_chunksize=size))))
        return pa.Table.from_batches(out, schema=stage.output_schema)


def decode(text):
    return json.loads(text) if text else None


def rows_of_the_stream(table):
    kept = table.filter(pa.array(np.asarray(table.column(STATE)) < State.MEMBER))
    return kept.drop_columns([name for name in kept.column_names if name.startswith("_member_")])


def members(path):
    rows = DeltaTable(path).to_pyarrow_table().to_pylist()
    key = next(name for name in rows[0] if name.endswith("_key"))
    natural = next(name for name in rows[0] if not name.endswith("_key"))
    return {row[natural]: row[key] for row in rows}


@pytest.fixture(autouse=True)
def no_operators_are_left_over():
    yield
    operators._make_room("")


def by_id(rows):
    return {row["id"]: row for row in rows if row["id"] is not None}


def test_an_inferred_member_gets_the_next_key_of_its_shard(tmp_path):
    prepared = ready(config_of(tmp_path, [lookup("plane")]), parallelism=1)
    rows = by_id(Machine(prepared).run([(1, "N2", "", ""), (2, "N1", "", ""), (3, "N2", "", ""), (4, None, "", "")]))
    assert {i: row["plane_key"] for i, row in rows.items()} == {1: 2, 2: 1, 3: 2, 4: -1}
    assert {i: row[OUTCOME_COLUMN] for i, row in rows.items()} == {
        1: "inferred",
        2: "inferred",
        3: "inferred",
        4: "unknown",
    }
    assert members(prepared.path("plane")) == {None: -1, "N1": 1, "N2": 2}


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("pieces", [1, 7])
def test_new_keys_are_unique_and_facts_agree_with_the_dimension(tmp_path, rng, shards, pieces):
    prepared = ready(config_of(tmp_path, [lookup("plane")]), parallelism=shards)
    for _ in range(3):
        tails = [f"N{i}" for i in rng.integers(0, 60, 80)]
        rows = Machine(prepared, pieces=pieces).run([(i, tail, "", "") for i, tail in enumerate(tails)])
        known = members(prepared.path("plane"))
        assert len(set(known.values())) == len(known)
        assert [row["plane_key"] for row in sorted(rows, key=lambda row: row["id"])] == [known[tail] for tail in tails]


def test_two_roles_that_infer_the_same_key_agree(tmp_path):
    prepared = ready(config_of(tmp_path, [lookup("origin"), lookup("dest")]))
    assert [len(groups) for groups in prepared.rounds()] == [2, 1]
    rows = by_id(Machine(prepared).run([(1, "", "A", "B"), (2, "", "B", "A"), (3, "", "C", "A")]))
    known = members(prepared.path("origin"))
    assert set(known) == {None, "A", "B", "C"}
    for row in rows.values():
        assert (row["origin_key"], row["dest_key"]) == (known[row["origin"]], known[row["dest"]])


def test_roles_of_different_dimensions_share_a_round(tmp_path):
    prepared = ready(config_of(tmp_path, [lookup("plane"), lookup("origin"), lookup("dest")]))
    assert [[group.roles for group in groups] for groups in prepared.rounds()] == [
        [(), ("plane",), ("origin",)],
        [("dest",)],
    ]
    rows = by_id(Machine(prepared).run([(1, "N1", "A", "B")]))
    assert rows[1]["plane_key"] == members(prepared.path("plane"))["N1"]
    assert rows[1]["dest_key"] == members(prepared.path("dest"))["B"]


def test_a_rejected_row_keeps_its_cause_and_adds_no_member(tmp_path):
    prepared = ready(config_of(tmp_path, [lookup("plane"), lookup("origin", "reject")]))
    machine = Machine(prepared)
    assert machine.run([(1, "N1", "A", "")]) == []
    (rejected,) = machine.rejected
    assert rejected["causes"] == [
        {"role": "origin", "column": "origin", "value": "A", "reason": "not in the dimension"}
    ]
    assert rejected["reason"] == "origin: origin = A: not in the dimension"
    assert (rejected["_file"], rejected["_record_number"], rejected["record"]) == ("f.csv", 1, '1,"N1","A",""')
    assert members(prepared.path("plane")) == {None: -1}


def test_an_unknown_key_goes_to_the_unknown_member(tmp_path):
    prepared = ready(config_of(tmp_path, [lookup("plane", "unknown")]))
    machine = Machine(prepared)
    assert by_id(machine.run([(1, "N1", "", "")]))[1]["plane_key"] == -1
    assert machine.counts.outcomes.rows == {"unknown": 1}


def test_a_lookup_that_must_not_fail_stops_the_batch(tmp_path):
    prepared = ready(config_of(tmp_path, [lookup("plane", "fail")]))
    with pytest.raises(PolicyViolationError, match=r"N1.*nothing of the batch has been written"):
        Machine(prepared).run([(1, "N1", "", "")])


def test_malformed_records_pass_to_the_errors_and_are_counted(tmp_path):
    prepared = ready(config_of(tmp_path, [lookup("plane"), lookup("origin", "reject")], {"key": ["id"]}))
    machine = Machine(prepared)
    rows = machine.run(["1,2,3,4,5", (1, "N1", None, None), "x"])
    assert [row["id"] for row in rows] == [1]
    found = sorted((row["_record_number"], row["record"]) for row in machine.rejected)
    assert found == [(1, "1,2,3,4,5"), (3, "x")]
    assert (machine.counts.rows_in, machine.counts.outcomes.loaded, machine.counts.outcomes.rejected) == (3, 1, 2)


def test_carried_attributes_come_from_the_member(tmp_path):
    config = config_of(tmp_path, [lookup("plane", carry=["seats"])])
    prepared = ready(config)
    write_deltalake(
        config.dimensions["plane"].path,
        pa.table({
            "plane_key": [5], "tailnum": ["N1"], "seats": pa.array([180], pa.int32()), "is_inferred": [False]
        }),
        mode="append",
    )  # fmt: skip
    rows = by_id(Machine(prepared).run([(1, "N1", "", ""), (2, "N2", "", "")]))
    assert [(rows[i]["plane_key"], rows[i]["plane_seats"]) for i in (1, 2)] in (
        [(5, 180), (6, None)],
        [(5, 180), (7, None)],
    )


@pytest.mark.parametrize(("action", "state"), [("drop", None), ("route", State.DUPLICATE), ("flag", State.OPEN)])
def test_duplicates_within_a_batch_and_against_loaded_facts(tmp_path, action, state):
    config = config_of(tmp_path, [lookup("plane")], {"key": ["id"], "action": action, "order_by": ["tail"]})
    prepared = ready(config)
    loaded = prepared.fact_schema.empty_table().to_pylist()
    loaded.append(dict.fromkeys(prepared.fact_schema.names) | {"id": 1})
    write_deltalake(config.sink.path, pa.Table.from_pylist(loaded, prepared.fact_schema), mode="append")
    machine = Machine(prepared)
    rows = machine.run([(1, "L", "", ""), (2, "B", "", ""), (2, "A", "", ""), (3, "C", "", ""), (None, "D", "", "")])
    flagged = [row for row in rows if row[OUTCOME_COLUMN] == "duplicate"]
    repeats = sorted((row["id"], row["tail"]) for row in [*flagged, *machine.routed])
    kept = {row["tail"] for row in rows if row[OUTCOME_COLUMN] != "duplicate"}
    assert kept == {"A", "C", "D"}
    if state is None:
        assert repeats == []
        assert machine.counts.outcomes.dropped == 2
    else:
        assert repeats == [(1, "L"), (2, "B")]
        assert {row["tail"] for row in (flagged if state is State.OPEN else machine.routed)} == {"L", "B"}
    known = set(members(prepared.path("plane"))) - {None}
    assert known == ({"A", "B", "C", "D", "L"} if action == "flag" else {"A", "C", "D"})


def test_a_replay_before_and_after_the_members_were_added_gives_the_same_rows(tmp_path, rng):
    prepared = ready(config_of(tmp_path, [lookup("plane"), lookup("origin"), lookup("dest")]), parallelism=3)
    rows = [(i, f"N{i % 17}", f"A{i % 5}", f"A{i % 7}") for i in range(60)]
    first = Machine(prepared)
    expected = sorted(map(str, first.run(rows)))
    for _ in range(2):
        replay = Machine(prepared, owner="another run", pieces=3)
        replay.plan = dict(first.plan)
        order = rng.permutation(len(rows))
        assert sorted(map(str, replay.run([rows[i] for i in order], append_members=False))) == expected


def test_a_replay_at_a_version_that_has_the_members_infers_them_again_under_their_keys(tmp_path):
    prepared = ready(config_of(tmp_path, [lookup("plane")]), parallelism=2)
    first = Machine(prepared)
    expected = by_id(first.run([(1, "N1", "", ""), (2, "N2", "", "")]))
    base = first.plan["plane"].base
    known = members(prepared.path("plane"))
    replay = Machine(prepared)
    replay.plan = {"plane": replace(replay.target("plane"), own=((base, max(known.values())),))}
    found = by_id(replay.run([(2, "N2", "", ""), (3, "N3", "", "")]))
    assert found[2] == expected[2]
    assert found[3]["plane_key"] > max(known.values())
    assert replay.counts.total("new_members") == 1


def test_an_operator_is_kept_between_batches_and_follows_new_members(tmp_path):
    prepared = ready(config_of(tmp_path, [lookup("plane")]), parallelism=1)
    machine = Machine(prepared)
    machine.run([(1, "N1", "", "")])
    for expected in ("advanced", "ready"):
        again = Machine(prepared)
        assert by_id(again.run([(1, "N1", "", "")]))[1]["plane_key"] == 1
        assert again.counts.joins["plane"]["replicas"] == {expected: 1}


def test_operators_of_another_run_are_closed(tmp_path):
    prepared = ready(config_of(tmp_path, [lookup("plane")]), parallelism=1)
    Machine(prepared).run([(1, "N1", "", "")])
    Machine(prepared, owner="another").run([(1, "N1", "", "")])
    assert len(operators._KEPT) == 1


def test_damage_met_in_the_join_discards_the_replica_and_the_next_attempt_is_right(tmp_path):
    prepared = ready(config_of(tmp_path, [lookup("plane", "unknown")]))
    schema = prepared.lookups["plane"].dimension.table_schema
    names = [f"N{i:05d}" for i in range(5000)]
    rows = {"plane_key": list(range(1, 5001)), "tailnum": names, "seats": pa.nulls(5000, pa.int32()),
            "is_inferred": [False] * 5000}  # fmt: skip
    write_deltalake(prepared.path("plane"), pa.table(rows).cast(schema), mode="append")
    Machine(prepared).run([(1, "N00001", "", "")])
    (kept,) = operators._KEPT.values()
    file = kept.table.path
    page = 8192
    with file.open("r+b") as stream:
        stream.seek(4 * page)
        stream.write(b"\xff" * (file.stat().st_size - 5 * page))
    wanted = [(i, name, "", "") for i, name in enumerate(names[::50])]
    with pytest.raises(ReplicaDamagedError, match="the replica has been discarded"):
        Machine(prepared).run(wanted)
    again = Machine(prepared)
    assert [row["plane_key"] for row in sorted(again.run(wanted), key=lambda row: row["id"])] == list(
        range(1, 5001, 50)
    )
    assert again.counts.joins["plane"]["replicas"] == {"built: missing": 1}


def test_an_operator_left_in_the_middle_is_not_used_again(tmp_path):
    prepared = ready(config_of(tmp_path, [lookup("plane", "unknown")]))
    machine = Machine(prepared)
    rounds = prepared.rounds()
    (stage,) = prepared.stages(rounds, 0, {"plane": machine.target("plane")}, machine.stage_run())
    stage = replace(stage, reader=None)

    def broken():
        yield frame([(1, "N1", "", "")])
        raise RuntimeError("the input ended too early")

    with pytest.raises(RuntimeError):
        list(stage(broken()))
    assert operators._KEPT == {}
    assert len(machine.run([(2, "N2", "", "")])) == 1


def test_a_stage_without_input_yields_nothing(tmp_path):
    prepared = ready(config_of(tmp_path, [lookup("plane")]))
    machine = Machine(prepared)
    stages = prepared.stages(prepared.rounds(), 0, {"plane": machine.target("plane")}, machine.stage_run())
    assert [list(stage(iter([]))) for stage in stages] == [[], []]


def test_rows_of_two_shards_in_one_task_are_refused(tmp_path):
    prepared = ready(config_of(tmp_path, [lookup("plane")]))
    machine = Machine(prepared)
    _, stage = prepared.stages(prepared.rounds(), 0, {"plane": machine.target("plane")}, machine.stage_run())
    batch = frame([(1, "N1", "", ""), (2, "N2", "", "")]).append_column(SHARD, pa.array([0, 1], pa.int32()))
    with pytest.raises(BatchError, match="rows of shards"):
        list(stage(iter([batch])))


def test_a_shard_depends_on_the_row_and_not_on_its_place(tmp_path):
    prepared = ready(config_of(tmp_path, [lookup("plane")]), parallelism=4)
    rule = prepared.shard_rule("plane", 4)
    rows = [(i, None if i % 3 == 0 else f"N{i}", "", "") for i in range(40)]
    order = np.random.default_rng(1).permutation(len(rows))
    straight = np.asarray(rule.append_to(frame(rows)).column(SHARD))
    mixed = np.asarray(rule.append_to(frame([rows[i] for i in order])).column(SHARD))
    assert mixed.tolist() == straight[order].tolist()
    assert len(set(straight)) == 4


def test_too_little_memory_says_how_much_is_needed(tmp_path):
    prepared = ready(config_of(tmp_path, [lookup("plane")], memory="20KiB"))
    with pytest.raises(HeadraceError, match="at least"):
        Machine(prepared).run([(1, "N1", "", "")])


def test_a_missing_dimension_without_columns_is_named(tmp_path):
    config = config_of(tmp_path, [lookup("plane")])
    plain = config.model_copy(
        update={"dimensions": {"plane": config.dimensions["plane"].model_copy(update={"columns": None})}}
    )
    with pytest.raises(DeltaTableError, match="'plane': there is no Delta table"):
        prepare(plain, 1)


def test_a_dimension_that_lacks_its_key_is_named(tmp_path):
    config = config_of(tmp_path, [lookup("plane")])
    create_table(config.dimensions["plane"].path, pa.schema({"plane_key": pa.int64(), "tail": pa.string()}))
    with pytest.raises(DeltaTableError, match="no column 'tailnum'"):
        prepare(config, 1)


def test_text_against_a_number_key_is_refused_before_the_first_row(tmp_path):
    config = config_of(tmp_path, [lookup("plane")])
    columns = {"tailnum": "bigint"}
    changed = config.model_copy(
        update={"dimensions": {
            **config.dimensions, "plane": config.dimensions["plane"].model_copy(update={"columns": columns})
        }}
    )  # fmt: skip
    with pytest.raises(HeadraceError, match="tail"):
        prepare(changed, 1)


def test_two_columns_of_one_name_in_the_facts_are_refused(tmp_path):
    config = config_of(tmp_path, [lookup("plane") | {"role": "x"}])
    source = config.source.model_copy(update={"columns": {**STREAM, "x_key": "bigint"}})
    with pytest.raises(HeadraceError, match="x_key"):
        prepare(config.model_copy(update={"source": source}), 1)


def test_an_unknown_partition_column_is_refused(tmp_path):
    with pytest.raises(ValidationError, match="'day'"):
        config_of(tmp_path, [lookup("plane")], sink={"path": str(tmp_path / "f"), "partition_by": ["day"]})
