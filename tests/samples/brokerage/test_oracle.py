"""The oracle and the expected tables agree, and the checker finds what differs."""

import pytest
from checker import differences, read_expected
from oracle import TABLES, Warehouse


@pytest.fixture(scope="module")
def computed(small):
    warehouse, found = Warehouse(small / "source"), {}
    for batch in (1, 2, 3):
        warehouse.load(batch)
        found[batch] = warehouse.tables()
    return found


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("table", TABLES)
def test_the_oracle_computes_the_expected_table(small, computed, table, batch):
    columns, rows = read_expected(small / "expected" / f"after_batch{batch}", table)
    assert columns == TABLES[table]
    assert computed[batch][table] == sorted(rows)


def test_the_checker_names_rows_that_differ():
    rows = [{"a": 1, "b": None}, {"a": 2, "b": True}]
    assert differences(rows, ["a", "b"], [("2", "true"), ("1", "")]) == []
    assert differences(rows, ["a", "b"], [("1", ""), ("1", "")]) == [
        "is not expected: ('2', 'true')",
        "is missing: ('1', '')",
    ]
    assert differences(rows, ["a", "c"], []) == ["columns are missing: ['c']"]
