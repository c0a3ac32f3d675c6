"""The comparison of a large dimension with what its changes make of it, which must find every difference."""

from datetime import date

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.history._changes import changes
from benchmarks.history._contents import has_repeats, require_expected
from benchmarks.history._members import Members, pipeline
from headrace.pipelines.changes.applying import apply_files

MEMBERS, CHANGED = 2_000, 300


@pytest.fixture(scope="module")
def applied(tmp_path_factory):
    """Return the path of a dimension with changes applied, the file of the changes, and the number of versions."""
    folder = tmp_path_factory.mktemp("large")
    members, config = Members(MEMBERS), pipeline(folder, "large", "64MiB")
    path, file = members.create(config), folder / "changes.parquet"
    pq.write_table(changes(members, np.arange(0, MEMBERS, MEMBERS // CHANGED)[:CHANGED], 0), file)
    apply_files(config, "customer", file)
    return path, file, MEMBERS + MEMBERS // 5 + 1 + CHANGED // 2


def test_the_content_after_changes_is_what_the_query_expects(applied):
    path, file, versions = applied
    assert require_expected(path, [file]) == versions


@pytest.mark.parametrize(("column", "value"), [("phone", "other"), ("city", "Elsewhere"), ("since", date(2030, 1, 1))])
def test_one_other_value_is_found_and_shown(applied, tmp_path, column, value):
    path, file, _ = applied
    given = pq.read_table(file)
    at = int(np.argmin(given["id"]))  # this change opens a version
    values = given[column].to_pylist()
    values[at] = value
    one = tmp_path / "changes.parquet"
    field = given.schema.get_field_index(column)
    pq.write_table(given.set_column(field, column, pa.array(values, given.schema.field(column).type)), one)
    with pytest.raises(AssertionError, match=f"{given['id'][at]}.*is expected"):
        require_expected(path, [one])


def test_a_missing_change_is_found(applied, tmp_path):
    path, file, _ = applied
    one = tmp_path / "changes.parquet"
    pq.write_table(pq.read_table(file).slice(1), one)
    with pytest.raises(AssertionError, match="is expected"):
        require_expected(path, [one])


def test_repeated_keys_are_found_within_a_batch_and_between_batches():
    batches = [pa.array([-1, 1, 2]), pa.array([70, 5])]
    assert not has_repeats(batches)
    assert has_repeats([*batches, pa.array([5])])
    assert has_repeats([*batches, pa.array([6, 6])])
