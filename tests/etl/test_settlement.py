import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.etl import DUPLICATE_COLUMN, Dimension, Duplicates, Lookup, Outcome, OutcomeCounts, settle
from headrace.etl.errors import ConservationError
from headrace.etl.outcomes import OUTCOMES, add_all, most_severe

NUMBER = Dimension("number", ("id",), "number_key", pa.schema({"id": pa.int64()}))
FIRST = Lookup(NUMBER, "first", {"x": "id"}, "reject")
SECOND = Lookup(NUMBER, "second", {"y": "id"}, "reject")
OUTCOME = st.sampled_from(["matched", "inferred", "unknown", "rejected"])
ROW = st.tuples(OUTCOME, OUTCOME, st.sampled_from([None, "batch", "loaded"]))


def resolved(rows):
    def reasons(column):
        return pa.array(["not there" if row[column] == "rejected" else None for row in rows], pa.string())

    return pa.record_batch(
        {
            "x": pa.array(range(len(rows)), pa.int64()),
            "y": pa.array([-i for i in range(len(rows))], pa.int64()),
            "first_key": pa.array([1] * len(rows), pa.int64()),
            "_first_outcome": pa.array([row[0] for row in rows], pa.string()),
            "_first_reason": reasons(0),
            "second_key": pa.array([1] * len(rows), pa.int64()),
            "_second_outcome": pa.array([row[1] for row in rows], pa.string()),
            "_second_reason": reasons(1),
            DUPLICATE_COLUMN: pa.array([row[2] for row in rows], pa.string()),
        }
    )


def expected_outcome(row):
    found = {*row[:2]} | ({"duplicate"} if row[2] else set())
    return next(name for name in ("rejected", "duplicate", "unknown", "inferred", "matched") if name in found)


@given(st.lists(ROW), st.sampled_from(["drop", "flag", "route"]))
def test_every_row_goes_to_one_place(rows, action):
    settled = settle(resolved(rows), [FIRST, SECOND], Duplicates(pa.schema({"x": pa.int64()}), action))
    outcomes = [expected_outcome(row) for row in rows]
    number = range(len(rows))
    rejected = [n for n in number if outcomes[n] == "rejected"]
    repeated = [n for n in number if outcomes[n] == "duplicate"]
    away = {*rejected, *(repeated if action != "flag" else [])}
    assert settled.loaded.column("x").to_pylist() == [n for n in number if n not in away]
    assert settled.loaded.column("_outcome").to_pylist() == [outcomes[n] for n in number if n not in away]
    assert settled.rejected.column("x").to_pylist() == rejected
    assert settled.routed.column("x").to_pylist() == (repeated if action == "route" else [])
    assert settled.counts.rows == {o: outcomes.count(o) for o in OUTCOMES if o in outcomes}
    assert settled.counts.dropped == (len(repeated) if action == "drop" else 0)


def test_a_rejected_row_keeps_itself_and_every_cause():
    settled = settle(resolved([("matched", "matched", None), ("rejected", "rejected", None)]), [FIRST, SECOND])
    assert settled.rejected.to_pylist() == [
        {
            "x": 1,
            "y": -1,
            "_causes": [
                {"role": "first", "column": "x", "value": "1", "reason": "not there"},
                {"role": "second", "column": "y", "value": "-1", "reason": "not there"},
            ],
        }
    ]


def test_a_long_key_that_a_lookup_rejects_is_shown_by_its_beginning():
    texts = ["k" * 300_000, "k" * 1000, None]
    lookup = Lookup(
        Dimension("code", ("code",), "code_key", pa.schema({"code": pa.string()})), "r", {"c": "code"}, "reject"
    )
    columns = {
        "c": texts,
        "_r_outcome": ["rejected"] * 3,
        "_r_reason": ["not there"] * 3,
        "r_key": pa.nulls(3, pa.int64()),
    }
    settled = settle(pa.record_batch(columns), [lookup])
    values = [causes[0]["value"] for causes in settled.rejected.column("_causes").to_pylist()]
    assert values == ["k" * 1000 + "… (300,000 characters)", "k" * 1000, "null"]
    assert settled.rejected.column("c").to_pylist() == texts


def test_facts_carry_keys_but_no_working_columns():
    settled = settle(resolved([("matched", "matched", None)]), [FIRST, SECOND])
    assert settled.loaded.schema.names == ["x", "y", "first_key", "second_key", "_outcome"]


def test_a_stream_without_lookups_is_matched():
    settled = settle(pa.record_batch({"x": [1, 2]}), [])
    assert settled.loaded.column("_outcome").to_pylist() == ["matched", "matched"]


def test_counts_of_several_batches_add_up():
    lookups = [FIRST, SECOND]
    counts = [
        settle(resolved(rows), lookups).counts
        for rows in ([("matched", "unknown", None)], [("rejected", "matched", None)])
    ]
    total = add_all(counts).check()
    assert (total.rows_in, total.loaded, total.rejected) == (2, 1, 1)
    assert total.lookups["first"] == {Outcome.MATCHED: 1, Outcome.REJECTED: 1}
    assert total.as_dict()["rows"] == {"unknown": 1, "rejected": 1}


def test_the_counts_of_nothing_reconcile():
    assert add_all([]).check().rows_in == 0


def test_a_lost_row_is_noticed():
    with pytest.raises(ConservationError, match="3 rows came in, but 2 went out"):
        OutcomeCounts(rows_in=3, loaded=1, rejected=1).check()


def test_an_outcome_that_misses_rows_is_noticed():
    with pytest.raises(ConservationError, match="plane outcomes"):
        OutcomeCounts(rows_in=1, loaded=1, lookups={"plane": {Outcome.MATCHED: 2}}).check()


def test_a_name_that_is_no_outcome_is_noticed():
    with pytest.raises(ConservationError, match="not an outcome: matchd"):
        most_severe([pa.array(["matchd"])], 1)


def test_outcomes_take_precedence_from_rejected_down():
    assert [str(o) for o in sorted(Outcome, key=lambda o: -o.severity)] == [
        "rejected",
        "duplicate",
        "filtered",
        "late",
        "unknown",
        "inferred",
        "matched",
    ]
