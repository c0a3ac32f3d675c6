"""What `dimension check` and `dimension repair` say of broken dimensions, against plain Python."""

from collections import Counter, defaultdict
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake

from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.dimension import repairing
from headrace.pipelines.dimension.check import came_before
from headrace.pipelines.dimension.repairing import repair_dimension
from headrace.pipelines.dimension.tables import check_dimension, create_dimension, plan_repair
from headrace.pipelines.errors import DeltaTableError

UNIQUE = "surrogate keys are unique"
NATURAL = "natural keys are unique"
NULLS = "natural keys are not null"
UNKNOWN = "there is one unknown member"
PROPERTY = "the property headrace.greatestKey is not less than the greatest key"
FACTS = "facts of role a carry the number of the member with their natural key"


@pytest.fixture
def config(tmp_path):
    (tmp_path / "in").mkdir()
    document = {
        "name": "p",
        "source": {"format": "csv", "path": "in", "schema": {"id": "bigint", "c": "string"}},
        "dimensions": {
            "k": {"path": "w/k", "natural_key": ["code"], "columns": {"code": "string", "note": "string"},
                  "rules": {"code": ["trim", "casefold"]}}
        },
        "lookups": [{"dimension": "k", "role": "a", "on": {"c": "code"}, "policy": "infer", "carry": ["note"]}],
        "sink": {"path": "w/fact"},
    }  # fmt: skip
    (tmp_path / "p.yml").write_text(yaml.safe_dump(document))
    return load_pipeline(tmp_path / "p.yml")


def add_members(config, *members):
    rows = [{"k_key": key, "code": code, "note": note, "is_inferred": False} for key, code, note in members]
    path = config.dimensions["k"].path
    schema = pa.schema(
        [("k_key", pa.int64()), ("code", pa.string()), ("note", pa.string()), ("is_inferred", pa.bool_())]
    )
    write_deltalake(path, pa.Table.from_pylist(rows, schema=schema), mode="append")


def add_facts(config, *facts):
    rows = {"id": range(len(facts)), "c": [code for code, _ in facts], "a_key": [key for _, key in facts]}
    table = pa.table(
        {"id": list(rows["id"]), "c": pa.array(rows["c"], pa.string()), "a_key": pa.array(rows["a_key"], pa.int64())}
    )
    write_deltalake(config.sink.path, table, mode="append")


@pytest.fixture
def sound(config):
    create_dimension(config, "k", pa.table({"code": ["AAA", "BBB"], "note": ["x", "y"]}))
    add_facts(config, ("AAA", 1), (" bbb ", 2), (None, -1))
    return config


def found(config):
    return {finding.rule: finding.rows for finding in check_dimension(config, "k")}


def planned(config):
    return {repair.rule: (repair.rows, repair.examples) for repair in plan_repair(config, "k")}


def test_a_sound_dimension_has_no_findings(sound):
    assert found(sound) == {}
    assert planned(sound) == {}


def test_two_members_with_one_number_and_the_facts_of_the_second(sound):
    add_members(sound, (1, "CCC", None))
    add_facts(sound, ("CCC", 1), ("CCC", 1), ("AAA", 1), ("AAA", 1))
    assert found(sound) == {UNIQUE: 1}
    assert planned(sound) == {
        UNIQUE: (1, ("ccc: number 1 becomes 3",)),
        PROPERTY: (0, ()),
        FACTS: (2, ("ccc: number 1 becomes 3 (facts: 2)",)),
    }


def test_the_member_that_most_facts_mean_keeps_the_number(sound):
    add_members(sound, (1, "CCC", None))
    add_facts(sound, ("CCC", 1), ("CCC", 1))
    assert planned(sound)[UNIQUE] == (1, ("aaa: number 1 becomes 3",))
    assert planned(sound)[FACTS] == (1, ("aaa: number 1 becomes 3 (facts: 1)",))


def test_one_natural_key_twice_after_normalisation(sound):
    add_members(sound, (7, " aaa", None))
    add_facts(sound, ("aaa", 7))
    assert found(sound) == {NATURAL: 1, PROPERTY: 1}
    assert planned(sound)[NATURAL] == (1, ("aaa: number 7 is removed, number 1 stays",))
    assert planned(sound)[FACTS] == (1, ("aaa: number 7 becomes 1 (facts: 1)",))


def test_facts_that_name_another_member_or_none(sound):
    add_facts(sound, ("AAA", 2), ("BBB", 9), ("ZZZ", 1), ("AAA", None), ("ZZZ", -1))
    assert found(sound) == {FACTS: 4}
    assert planned(sound) == {
        FACTS: (
            4,
            (
                "zzz: number 1 becomes -1 (facts: 1)",
                "aaa: number 2 becomes 1 (facts: 1)",
                "bbb: number 9 becomes 2 (facts: 1)",
                "aaa: number None becomes 1 (facts: 1)",
            ),
        )
    }


def test_facts_that_came_before_their_member_are_counted_and_are_no_fault(sound, rng):
    codes = [f"{rng.integers(40)}", *(f" x{number} " for number in rng.integers(40, size=200)), None]
    add_facts(sound, *((code, -1) for code in codes))
    assert found(sound) == {}
    later = {f"x{number}" for number in range(0, 40, 3)}
    add_members(
        sound, *((10 + place, code.upper(), None) for place, code in enumerate(sorted(later))), (-3, "X1", None)
    )
    stored = DeltaTable(sound.sink.path).to_pyarrow_table().to_pylist()
    count = sum(row["a_key"] == -1 and row["c"] is not None and row["c"].strip() in later for row in stored)
    assert count > 0
    (finding,) = (each for each in check_dimension(sound, "k") if each.allowed)
    assert (finding.rule, finding.rows) == (came_before("a"), count)
    assert set(finding.examples) <= later
    assert FACTS not in planned(sound)


def test_unknown_members_null_keys_and_numbers(sound):
    add_members(sound, (-1, None, None), (5, None, "n"), (None, "DDD", None), (0, "EEE", None))
    rules = found(sound)
    assert rules == {
        UNKNOWN: 1,
        NULLS: 1,
        "every member has a surrogate key": 1,
        "surrogate keys are positive, or -1 for the unknown member": 1,
        PROPERTY: 1,
    }
    plan = planned(sound)
    assert plan["every member has a surrogate key"][1] == ("ddd: number None becomes 6",)
    assert plan["surrogate keys are positive, or -1 for the unknown member"][1] == ("eee: number 0 becomes 7",)


def test_a_missing_unknown_member_is_found(sound):
    DeltaTable(sound.dimensions["k"].path).delete("k_key = -1")
    assert found(sound) == {UNKNOWN: 1}


def test_a_member_that_no_replica_holds_is_found(sound):
    add_members(sound, (2_000, "k" * 17_000, None), (2_001, "long", "y" * 70_000))
    rule = "replicas hold the members, which need at most 65536 bytes, and 16384 for their keys"
    assert found(sound)[rule] == 2


@pytest.mark.parametrize(("code", "note"), [("k" * 17_000, "x"), ("long", "y" * 70_000)])
def test_create_refuses_a_member_that_no_replica_holds(config, code, note):
    with pytest.raises(DeltaTableError, match=f"dimension 'k': the row {code[:9]}.* bytes of a page"):
        create_dimension(config, "k", pa.table({"code": ["AAA", code], "note": ["x", note]}))
    assert not Path(config.dimensions["k"].path).exists()


def test_create_takes_long_members(config):
    create_dimension(config, "k", pa.table({"code": ["k" * 5_000, "b"], "note": ["x", "y" * 10_000]}))
    assert found(config) == {}


def test_nothing_is_changed(sound):
    add_members(sound, (1, "CCC", None))
    versions = [DeltaTable(path).version() for path in (sound.dimensions["k"].path, sound.sink.path)]
    plan_repair(sound, "k")
    assert [DeltaTable(path).version() for path in (sound.dimensions["k"].path, sound.sink.path)] == versions


def rules(repairs):
    return {each.rule: each.action for each in repairs}


def declared_again(tmp_path, **special):
    """Return the configuration with other special members."""
    document = yaml.safe_load((tmp_path / "p.yml").read_text())
    document["dimensions"]["k"]["special"] = special
    (tmp_path / "p.yml").write_text(yaml.safe_dump(document))
    return load_pipeline(tmp_path / "p.yml")


@pytest.mark.usefixtures("sound")
def test_a_repair_fixes_what_needs_no_decision_and_lists_the_rest(tmp_path):
    config = declared_again(tmp_path, unknown={"note": "none"}, invalid={"note": "bad"})
    add_members(config, (7, " aaa", None))
    version = DeltaTable(config.dimensions["k"].path).version()
    dry = repair_dimension(config, "k", dry_run=True)
    assert DeltaTable(config.dimensions["k"].path).version() == version
    done = repair_dimension(config, "k")
    assert rules(done.fixed) == {
        "there is one invalid member": "add the member",
        "special members have the declared values": "set the declared values",
        PROPERTY: "set the property to 7",
    }
    assert rules(dry.fixed) == rules(done.fixed)
    assert (
        rules(dry.left)
        == rules(done.left)
        == {NATURAL: "keep the member with the lowest number, and remove the others"}
    )
    rows = DeltaTable(config.dimensions["k"].path).to_pyarrow_table().to_pylist()
    members = {row["k_key"]: (row["code"], row["note"], row["is_inferred"]) for row in rows}
    assert members == {
        -3: (None, "bad", False), -1: (None, "none", False), 1: ("aaa", "x", False), 2: ("bbb", "y", False),
        7: (" aaa", None, False),
    }  # fmt: skip
    assert found(config) == {NATURAL: 1}
    assert repair_dimension(config, "k").fixed == ()


def test_a_greater_key_of_another_writer_is_not_lost_by_a_repair(sound, monkeypatch):
    path, commit, others = sound.dimensions["k"].path, repairing.commit_exactly, [9]
    add_members(sound, (7, "DDD", None))

    def after_another(*arguments):
        if others:
            add_members(sound, (others.pop(), "EEE", None))
        return commit(*arguments)

    monkeypatch.setattr(repairing, "commit_exactly", after_another)
    assert [each.rule for each in repair_dimension(sound, "k").fixed] == [PROPERTY]
    assert DeltaTable(path).metadata().configuration["headrace.greatestKey"] == "9"


def test_members_that_a_repair_would_number_leave_the_property_to_them(sound):
    add_members(sound, (7, "DDD", None), (7, "EEE", None))
    dry, done = repair_dimension(sound, "k", dry_run=True), repair_dimension(sound, "k")
    assert rules(done.fixed) == rules(dry.fixed) == {PROPERTY: "set the property to 7"}
    assert rules(done.left) == rules(dry.left)
    assert set(rules(done.left)) == {UNIQUE, PROPERTY}
    assert "'8'" in rules(done.left)[PROPERTY]


def test_random_states_against_plain_python(config, rng):
    create_dimension(config, "k", pa.table({"code": ["a0"], "note": ["x"]}))
    names = [f"A{i}" for i in range(8)]
    members = [(int(rng.integers(2, 12)), names[int(rng.integers(8))]) for _ in range(10)]
    facts = [(names[int(rng.integers(8))].lower(), int(rng.integers(1, 14))) for _ in range(60)]
    add_members(config, *((key, code, None) for key, code in members))
    add_facts(config, *facts)
    rows = [(1, "a0"), *((key, code.lower()) for key, code in members)]
    by_key, codes = defaultdict(set), Counter(code for _, code in rows)
    for key, code in rows:
        by_key[key].add(code)
    expected = {
        UNIQUE: sum(count - 1 for count in Counter(key for key, _ in rows).values()),
        NATURAL: sum(count - 1 for count in codes.values()),
        FACTS: sum(code not in by_key[key] for code, key in facts),
    }
    rules = found(config)
    assert {rule: rules.get(rule, 0) for rule in expected} == expected
    assert planned(config).get(FACTS, (0,))[0] == moved_facts(rows, facts)


def moved_facts(rows, facts):
    """Return how many facts change their number when members are repaired as the documentation says."""
    kept = {}
    for key, code in sorted(rows):
        kept.setdefault(code, key)
    meant = Counter((key, code) for code, key in facts)
    owners = {}
    for code, key in sorted(kept.items()):
        best = owners.get(key)
        if best is None or meant[(key, code)] > meant[(key, best)]:
            owners[key] = code
    number = max(key for key, _ in rows)
    target = {}
    for code, key in sorted(kept.items()):
        if owners[key] == code:
            target[code] = key
        else:
            number += 1
            target[code] = number
    return sum(target.get(code, -1) != key for code, key in facts)
