"""`HistoryDimension`: kills between the two commits, other handles, declarations, refusals, special members."""

import datetime as dt
import subprocess
import sys
import textwrap

import pyarrow as pa
import pytest

from headrace.etl import Dimension
from headrace.etl.errors import DeclarationError, DimensionError, MissingMembersError
from headrace.etl.history import AsOfLookup, History, HistoryDimension, SpecialMembers
from headrace.storage.errors import KeyInputError, TableExistsError

CUSTOMER = Dimension("customer", ("id",), "key", pa.schema({"id": pa.int64(), "city": pa.string()}))
HISTORY = History(CUSTOMER, effective="since", effective_type=pa.date32())


def day(number):
    return dt.date(2024, 1, 1) + dt.timedelta(number)


def changes(*rows):
    return pa.table({"id": [r[0] for r in rows], "city": [r[1] for r in rows], "since": [day(r[2]) for r in rows]})


def facts(*rows):
    return pa.table({"customer": pa.array([r[0] for r in rows], pa.int64()), "day": [day(r[1]) for r in rows]})


def cities(dimension, table, **options):
    found = dimension.as_of(table, {"customer": "id"}, "day", carry="city", **options)
    return found.column("customer_city").to_pylist()


@pytest.fixture
def dimension(tmp_path):
    with HistoryDimension.create(tmp_path / "customer", HISTORY, memory="16MiB") as made:
        made.apply_changes(changes((7, "Oslo", 0), (7, "Bergen", 10)))
        yield made


def killed_between_commits(folder, rows):
    """Apply changes in a process that dies after the commit of the entries."""
    script = f"""
        import datetime, os, sys
        sys.path.insert(0, {str(__file__.rsplit("/", 1)[0])!r})
        from test_history_store import HISTORY, HistoryDimension, changes
        dimension = HistoryDimension.open({str(folder)!r}, HISTORY)
        dimension._follow = lambda *_: os._exit(9)
        dimension.apply_changes(changes(*{rows!r}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert done.returncode == 9


@pytest.mark.usefixtures("dimension")
def test_lookups_are_right_after_a_kill_between_the_commits(tmp_path):
    killed_between_commits(tmp_path / "customer", [(7, "Narvik", 20), (8, "Moss", 5)])
    asked = facts((7, 0), (7, 10), (7, 20), (8, 4), (8, 5), (9, 5))
    with HistoryDimension.open(tmp_path / "customer", HISTORY) as other:
        assert cities(other, asked) == ["Oslo", "Bergen", "Narvik", "Moss", "Moss", None]
        assert other._is_behind


def test_the_next_change_brings_the_replica_up_to_date(dimension, tmp_path):
    killed_between_commits(tmp_path / "customer", [(7, "Narvik", 20)])
    dimension.apply_changes(changes((8, "Moss", 5)))
    assert not dimension._is_behind
    assert dimension.check() == ()
    assert cities(dimension, facts((7, 20), (8, 6))) == ["Narvik", "Moss"]


def test_another_handle_sees_a_change_after_refresh(dimension, tmp_path):
    with HistoryDimension.open(tmp_path / "customer", HISTORY) as other:
        dimension.apply_changes(changes((7, "Narvik", 20)))
        assert cities(other, facts((7, 20))) == ["Bergen"]
        other.refresh()
        assert cities(other, facts((7, 20))) == ["Narvik"]


def test_keys_of_versions_that_disappeared_are_not_given_again(tmp_path):
    history = History(CUSTOMER, effective="since", effective_type=pa.date32(), sequence="n")
    with HistoryDimension.create(tmp_path / "c", history) as made:
        numbered = changes((7, "Oslo", 0), (7, "Bergen", 10)).append_column("n", pa.array([1, 2]))
        made.apply_changes(numbered)
        retired = made.apply_changes(changes((7, "Oslo", 10)).append_column("n", pa.array([3]))).retired
        made.apply_changes(changes((8, "Moss", 0)).append_column("n", pa.array([4])))
        keys = made.versions(special=False).column("key").to_pylist()
    assert retired.column("key").to_pylist() == [2]
    assert keys == [1, 3]


def test_a_damaged_interval_is_found(dimension):
    row = next(iter(dimension._entries.scan())).slice(0, 1)
    bounds = pa.array([day(9)], pa.date32())
    dimension._entries.apply(row.set_column(row.schema.get_field_index("valid_to"), "valid_to", bounds))
    assert "1 entries are not what their changes say: 7" in dimension.check()[0]


def test_a_damaged_replica_is_found(dimension):
    row = next(iter(dimension._current.scan()))
    dimension._current.apply(row.set_column(row.schema.get_field_index("city"), "city", pa.array(["Moss"])))
    assert dimension.check() == ("the replica of current versions differs from the entries",)


def test_a_lookup_that_fails_names_the_keys(dimension):
    with pytest.raises(MissingMembersError, match="9"):
        dimension.as_of(facts((9, 0)), {"customer": "id"}, "day", policy="fail")


@pytest.mark.usefixtures("dimension")
def test_a_dimension_is_not_made_twice(tmp_path):
    with pytest.raises(TableExistsError):
        HistoryDimension.create(tmp_path / "customer", HISTORY)


@pytest.mark.usefixtures("dimension")
def test_another_declaration_is_refused(tmp_path):
    other = History(CUSTOMER, effective="since", effective_type=pa.date32(), type_1="city")
    with pytest.raises(DimensionError, match="another declaration of type_1, type_2"):
        HistoryDimension.open(tmp_path / "customer", other)


@pytest.mark.usefixtures("dimension")
def test_special_members_may_be_added_later(tmp_path):
    special = SpecialMembers({"city": "Unknown"}, invalid={"city": "Invalid"})
    history = History(CUSTOMER, effective="since", effective_type=pa.date32(), special=special)
    with HistoryDimension.open(tmp_path / "customer", history) as other:
        assert other.versions().column("key").to_pylist() == [-1, -3, 1, 2]


def test_a_folder_without_dimension_is_refused(tmp_path):
    with pytest.raises(DimensionError, match="holds no dimension"):
        HistoryDimension.open(tmp_path, HISTORY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type_1": "nope"}, "no attribute 'nope'"),
        ({"type_0": "city", "type_1": "city"}, "named twice"),
        ({"type_2": ()}, "'city' has no type"),
        ({"valid_from": "city"}, "two columns are called 'city'"),
        ({"effective_type": pa.int64()}, "`effective_type`"),
        ({"sequence": "n", "sequence_type": pa.string()}, "`sequence_type`"),
        ({"end": dt.date(1, 1, 1)}, "`end`"),
        ({"special": SpecialMembers({"town": "?"})}, "names 'town'"),
        ({"special": SpecialMembers({"city": 3})}, "does not fit"),
        ({"deletes": ("I",)}, "both in"),
    ],
)
def test_a_declaration_that_cannot_be_right_is_refused(options, message):
    with pytest.raises(DeclarationError, match=message):
        History(CUSTOMER, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"before_first": "nope"}, "not a valid target"),
        ({"null_time": "not_applicable"}, "has no member 'not_applicable'"),
        ({"carry": "town"}, "no attribute 'town'"),
        ({"policy": "guess"}, "unknown policy"),
    ],
)
def test_a_lookup_that_cannot_be_right_is_refused(options, message):
    with pytest.raises(DeclarationError, match=message):
        AsOfLookup(HISTORY, "buyer", {"customer": "id"}, "day", **options)


@pytest.mark.parametrize(
    ("table", "error"),
    [
        (pa.table({"id": [1], "since": [day(0)]}), DeclarationError),
        (pa.table({"id": [1], "city": [5], "since": [day(0)]}), DeclarationError),
        (pa.table({"id": [1], "city": ["x"], "since": ["2024-01-01"]}), DeclarationError),
        (pa.table({"id": ["1"], "city": ["x"], "since": [day(0)]}), KeyInputError),
    ],
)
def test_changes_of_wrong_columns_change_nothing(dimension, table, error):
    before = dimension.versions()
    with pytest.raises(error):
        dimension.apply_changes(table)
    assert dimension.versions().equals(before)


def test_a_local_time_does_not_meet_an_instant(tmp_path):
    history = History(CUSTOMER, effective="since")
    local = pa.table({"customer": [7], "day": pa.array([0], pa.timestamp("us"))})
    with HistoryDimension.create(tmp_path / "utc", history) as made, pytest.raises(DeclarationError, match="time zone"):
        made.as_of(local, {"customer": "id"}, "day")


def test_many_facts_meet_the_versions_of_an_oracle(tmp_path, rng):
    members, per_member = 400, 5
    rows = [(m, f"c{rng.integers(3)}", int(d)) for m in range(members) for d in rng.integers(0, 60, per_member)]
    asked = [
        (int(m), int(d)) for m, d in zip(rng.integers(0, members + 20, 3000), rng.integers(0, 70, 3000), strict=True)
    ]
    with HistoryDimension.create(tmp_path / "c", HISTORY, page_size=4096) as made:
        for start in range(0, len(rows), 700):
            made.apply_changes(changes(*rows[start : start + 700]))
        found = cities(made, facts(*asked), before_first="unknown")
        assert made.check() == ()
    # Changes of one member and day tie; the least city wins.
    by_day = {}
    for member, city, number in rows:
        by_day.setdefault(member, {}).setdefault(number, []).append(city)
    expected = []
    for member, number in asked:
        known = [other for other in by_day.get(member, {}) if other <= number]
        expected.append(min(by_day[member][max(known)]) if known else None)
    assert found == expected


def test_a_dimension_whose_making_was_killed_is_made_again(tmp_path):
    HistoryDimension.create(tmp_path / "c", HISTORY).close()
    (tmp_path / "c" / "declaration.json").unlink()
    with HistoryDimension.create(tmp_path / "c", HISTORY) as made:
        assert made.check() == ()


def test_a_handle_goes_on_with_a_replica_that_was_built_again(dimension, tmp_path):
    with HistoryDimension.open(tmp_path / "customer", HISTORY) as other:
        killed_between_commits(tmp_path / "customer", [(7, "Narvik", 20)])
        dimension.apply_changes(changes((8, "Moss", 5)))
        other.refresh()
        assert not other._is_behind
        assert cities(other, facts((7, 20), (8, 6))) == ["Narvik", "Moss"]


def test_facts_with_columns_that_are_never_null_are_looked_up(dimension):
    schema = pa.schema([pa.field("customer", pa.int64(), nullable=False), pa.field("day", pa.date32(), nullable=False)])
    assert cities(dimension, facts((7, -5), (7, 3), (7, 12)).cast(schema)) == ["Oslo", "Oslo", "Bergen"]


def twice(table, name):
    """Return a table with a second column of a name."""
    return pa.Table.from_arrays([*table.columns, table.column(name)], names=[*table.column_names, name])


@pytest.mark.parametrize("name", ["id", "city", "since"])
def test_changes_with_a_column_twice_or_without_a_key_are_refused(dimension, name):
    with pytest.raises(DeclarationError, match=f"has 2 columns '{name}'; rename"):
        dimension.apply_changes(twice(changes((7, "Oslo", 30)), name))
    with pytest.raises(DeclarationError, match="has no column 'id'; it has city, since"):
        dimension.apply_changes(changes((7, "Oslo", 30)).drop_columns(["id"]))
    assert dimension.versions(special=False).num_rows == 2


@pytest.mark.parametrize("name", ["customer", "day"])
def test_facts_with_a_column_twice_are_refused(dimension, name):
    with pytest.raises(DeclarationError, match=f"the stream has 2 columns '{name}'; rename"):
        cities(dimension, twice(facts((7, 3)), name))


def test_facts_with_the_column_of_the_input_order_are_refused(dimension):
    table = facts((7, 3))
    with pytest.raises(DeclarationError, match="adds a column '_position'; rename"):
        cities(dimension, table.append_column("_position", [[1]]))
    with pytest.raises(DeclarationError, match=r"it has customer$"):
        cities(dimension, table.drop_columns(["day"]))


def test_members_are_named_by_their_key_columns(dimension):
    with pytest.raises(DeclarationError, match="has no column 'id'; it has customer"):
        dimension.versions_of(pa.table({"customer": [7]}))
    with pytest.raises(DeclarationError, match="has 2 columns 'id'"):
        dimension.versions_of(twice(pa.table({"id": [7]}), "id"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"carry": ("city", "city")}, "carries 'city' twice"),
        ({"before_first": "never"}, "the valid ones are first, unknown"),
        ({"null_time": "never"}, "the valid ones are current, unknown"),
    ],
)
def test_a_lookup_that_cannot_be_run_says_what_is_valid(arguments, message):
    with pytest.raises(DeclarationError, match=message):
        AsOfLookup(HISTORY, "buyer", {"customer": "id"}, "day", **arguments)
