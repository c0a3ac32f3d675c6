import collections
import errno
import os
from datetime import date, datetime
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from arrow_strategies import rows_of, tables
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace.storage
from headrace.storage import Table
from headrace.storage.commit import writer
from headrace.storage.commit.locks import FileLocks
from headrace.storage.errors import (
    ClosedTableError,
    InputError,
    KeyInputError,
    SchemaError,
    StorageIOError,
    TableExistsError,
    UniqueViolationError,
)
from headrace.storage.file.backend import FileBackend
from headrace.storage.format import KeyCodec
from headrace.storage.read.lookup import scan

shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)


def scanned(table, *bounds, **options):
    batches = list(table.scan(*bounds, **options))
    return pa.Table.from_batches(batches, schema=batches[0].schema if batches else table.schema)


def ordered_keys(table, key):
    """Return the keys of a table in their own order, as comparable bytes."""
    codec = KeyCodec(table.schema, key)
    keys = codec.encode(table.combine_chunks())
    return [keys.comparable(row) for row in range(len(keys))]


@shared_folder
@given(tables(), st.sampled_from([1, 30]), st.sampled_from([4096, 16384, 65536]), st.sampled_from([0.1, 0.8, 1.0]))
def test_a_scan_gives_all_rows_in_key_order(tmp_path, case, repeat, page_size, fill):
    rows, key = case
    rows = pa.concat_tables([rows] * repeat)
    with Table.build(tmp_path / "t", rows, key, page_size=page_size, fill=fill, overwrite=True) as table:
        found = scanned(table)
        assert table.check().ok
        assert table.stats.rows == rows.num_rows
    assert collections.Counter(rows_of(found)) == collections.Counter(rows_of(rows))
    keys = ordered_keys(found, key)
    assert keys == sorted(keys)


@shared_folder
@given(tables(), st.sampled_from([1, 200]), st.randoms(use_true_random=False))
def test_lookup_equals_a_dictionary(tmp_path, case, repeat, random):
    rows, key = case
    rows = pa.concat_tables([rows] * repeat)
    dictionary = collections.defaultdict(list)
    for raw, row in zip(ordered_keys(rows, key), rows_of(rows), strict=True):
        dictionary[raw].append(row)
    index = [random.randrange(rows.num_rows) for _ in range(20)] if rows.num_rows else []
    wanted = rows.select(key).take(pa.array(index, pa.int64()))
    with Table.build(tmp_path / "t", rows.slice(rows.num_rows // 2), key, page_size=4096, overwrite=True) as table:
        stored = collections.Counter(rows_of(rows.slice(rows.num_rows // 2)))
        found = rows_of(table.lookup(wanted))
    expected = [
        row for raw in ordered_keys(wanted, key) for row in dictionary[raw][: len(dictionary[raw])] if stored[row]
    ]
    assert set(found) == set(expected)
    first = ordered_keys(rows.slice(rows.num_rows // 2), key)
    times = [first.count(raw) for raw in ordered_keys(wanted, key)]
    assert len(found) == sum(times)


@shared_folder
@given(st.lists(st.integers(-50, 50), max_size=300), st.integers(-60, 60), st.integers(-60, 60))
def test_range_scans_include_both_bounds(tmp_path, values, low, high):
    rows = pa.table({"k": pa.array(values * 20, pa.int64()), "v": np.arange(len(values) * 20)})
    with Table.build(tmp_path / "t", rows, ["k"], page_size=4096, fill=0.05, overwrite=True) as table:
        assert scanned(table, low, high)["k"].to_pylist() == sorted(k for k in values * 20 if low <= k <= high)
        assert scanned(table, low)["k"].to_pylist() == sorted(k for k in values * 20 if low <= k)
        assert scanned(table, None, high)["k"].to_pylist() == sorted(k for k in values * 20 if k <= high)


@pytest.mark.parametrize("text", [False, True])
def test_runs_of_one_key_over_many_pages_are_found_whole(tmp_path, text):
    values = np.repeat([1, 2, 3, 5, 7], [3, 20_000, 1, 15_000, 2])
    keys = [f"key {value}" for value in values] if text else values
    rows = pa.table({"k": keys, "v": np.arange(len(values)) * 10**9})
    wanted = [keys[3], keys[-1], "key 4" if text else 4, keys[25_000], keys[0]]
    with Table.build(tmp_path / "t", rows, ["k"], page_size=4096) as table:
        assert table.stats.leaves > 20
        found = table.lookup(pa.record_batch({"k": wanted}))
        assert scanned(table, wanted[0], wanted[0]).num_rows == 20_000
    expected = [10**9 * row for key in wanted for row in np.flatnonzero(np.array(keys) == key)]
    assert found["v"].to_pylist() == expected


def test_null_keys_and_keys_out_of_range_match_nothing(tmp_path):
    with Table.build(tmp_path / "t", pa.table({"k": pa.array([1, 2], pa.int8())}), ["k"]) as table:
        assert table.lookup(pa.record_batch({"k": [2, None, 300, 258]})).to_pylist() == [{"k": 2}]


def test_rows_come_in_the_order_of_the_keys_asked_for(tmp_path):
    rows = pa.table({"k": range(10_000), "v": [f"v{n}" for n in range(10_000)]})
    asked = np.random.default_rng(3).integers(-5_000, 15_000, 2_000)
    with Table.build(tmp_path / "t", rows, ["k"], unique=True, page_size=4096) as table:
        found = table.lookup(pa.table({"other": asked, "k": asked}))
    assert found["k"].to_pylist() == [key for key in asked.tolist() if 0 <= key < 10_000]
    assert found["v"].to_pylist() == [f"v{key}" for key in asked.tolist() if 0 <= key < 10_000]


@pytest.mark.parametrize("rows", [0, 1])
def test_tables_of_no_and_one_row(tmp_path, rows):
    source = pa.table({"k": pa.array(["a"][:rows], pa.string()), "v": pa.array([1.5][:rows], pa.float64())})
    with Table.build(tmp_path / "t", source, ["k"], unique=True) as table:
        assert scanned(table).to_pylist() == source.to_pylist()
        assert table.lookup(pa.record_batch({"k": ["a", "b"]})).to_pylist() == source.to_pylist()
        assert list(table.scan("b")) == []
        assert (table.stats.height, table.stats.leaves) == (rows, rows)
        assert table.check().ok


def test_a_scan_of_chosen_columns(tmp_path):
    rows = pa.table({"v": [1, 2], "k": ["a", "b"], "w": [None, 3.5]})
    with Table.build(tmp_path / "t", rows, ["k"]) as table:
        assert scanned(table, columns=["w", "k"]).to_pylist() == [{"w": None, "k": "a"}, {"w": 3.5, "k": "b"}]
        with pytest.raises(SchemaError, match="no column 'x'; its columns are 'v', 'k', 'w'"):
            scanned(table, columns=["x"])


def test_a_scan_of_no_columns_counts_rows(tmp_path):
    with Table.build(tmp_path / "t", pa.table({"k": range(5000), "v": range(5000)}), "k", page_size=4096) as table:
        batches = list(table.scan(10, 4009, columns=[]))
        assert {batch.num_columns for batch in batches} == {0}
        assert sum(batch.num_rows for batch in batches) == 4000


def test_a_single_name_is_one_column_and_other_choices_are_refused(tmp_path):
    with Table.build(tmp_path / "t", pa.table({"k": [1], "vw": [2]}), "k") as table:
        assert scanned(table, columns="vw").to_pylist() == [{"vw": 2}]
        with pytest.raises(SchemaError, match="columns are chosen by a list of their names, not by 5"):
            scanned(table, columns=5)


@pytest.mark.parametrize(
    ("key", "bound"),
    [
        (pa.array([1]), 0.5),
        (pa.array([date(2020, 1, 1)]), datetime(2020, 1, 1, 5)),  # noqa: DTZ001 - has no zone on purpose
        (pa.array([0], pa.timestamp("s")), datetime(1970, 1, 1, 0, 0, 0, 7)),  # noqa: DTZ001 - same
        (pa.array([0], pa.timestamp("s", "UTC")), datetime(1970, 1, 1)),  # noqa: DTZ001 - same
    ],
)
def test_a_bound_between_two_keys_is_refused_not_rounded(tmp_path, key, bound):
    with (
        Table.build(tmp_path / "t", pa.table({"k": key}), "k") as table,
        pytest.raises(KeyInputError, match=r"not a key of the columns k: .* cannot hold"),
    ):
        scanned(table, low=bound)


@pytest.mark.parametrize("keys", [{"k": [1]}, None, 5, [1]])
def test_keys_to_look_up_are_a_batch(tmp_path, keys):
    with (
        Table.build(tmp_path / "t", pa.table({"k": [1]}), "k") as table,
        pytest.raises(KeyInputError, match="keys to look up are a pyarrow record batch"),
    ):
        table.lookup(keys)


@pytest.mark.parametrize(
    "use",
    [
        lambda table: list(table.scan()),
        lambda table: table.lookup(pa.table({"k": [1]})),
        lambda table: table.apply(pa.table({"k": [1]})),
        lambda table: table.stats,
        Table.check,
        Table.compact,
        Table.reader,
        Table.refresh,
    ],
)
def test_a_closed_table_says_so(tmp_path, use):
    table = Table.build(tmp_path / "t", pa.table({"k": [1]}), "k")
    reader = table.reader()
    table.close()
    with pytest.raises(ClosedTableError, match="was closed; open it again"):
        use(table)
    with pytest.raises(ClosedTableError, match="was closed; open it again"):
        list(scan(table.snapshot(), reader, None, None, None))


def test_scans_by_a_key_of_several_columns(tmp_path):
    rows = pa.table({"a": ["x", "x", "y"], "b": [1, 2, 1]})
    with Table.build(tmp_path / "t", rows, ["a", "b"]) as table:
        assert scanned(table, ("x", 2), ("y", 1)).to_pylist() == [{"a": "x", "b": 2}, {"a": "y", "b": 1}]
        with pytest.raises(KeyInputError, match=r"one value for each key column \(a, b\), but 'x' has 1"):
            scanned(table, "x")
        with pytest.raises(KeyInputError, match="not a key of the columns a, b"):
            scanned(table, ("x", "y"))


def test_the_schema_keeps_its_order_and_plain_types(tmp_path):
    source = pa.table(
        {
            "v": pa.array(["a"]).dictionary_encode(),
            "k": pa.array([1], pa.int16()),
            "w": pa.array([b"ab"], pa.binary(2)),
            "x": pa.array(["q"], pa.large_string()),
        }
    )
    with Table.build(tmp_path / "t", source, ["k"]) as table:
        fields = [("v", pa.string()), pa.field("k", pa.int16(), nullable=False), ("w", pa.binary()), ("x", pa.string())]
        assert table.schema == pa.schema(fields)
        assert table.key == ("k",)


def in_chunks(*parts, index=None):
    """Return a column with a dictionary of its own for each part."""
    indices = [pa.array(range(len(part)), index or pa.int8()) for part in parts]
    known = [pa.array(part) for part in parts]
    return pa.chunked_array([pa.DictionaryArray.from_arrays(*chunk) for chunk in zip(indices, known, strict=True)])


@pytest.mark.parametrize(
    "values", [in_chunks(range(100), range(100, 200)), in_chunks(["a", None], ["b"]), in_chunks([0.0], [-0.0])]
)
def test_chunks_whose_dictionaries_cannot_be_combined_are_stored(tmp_path, values):
    rows = pa.table({"k": np.arange(len(values)), "v": values})
    with Table.build(tmp_path / "t", rows.slice(0, 0), key=["k"]) as table:
        table.apply(upserts=rows)
        assert list(map(str, scanned(table)["v"].to_pylist())) == list(map(str, values.to_pylist()))


def test_keys_whose_dictionaries_cannot_be_combined_are_found_and_deleted(tmp_path):
    names = [f"{number:03}" for number in range(200)]
    keys = pa.table({"k": in_chunks(names[:100], names[100:])})
    with Table.build(tmp_path / "t", keys, key=["k"], unique=True) as table:
        assert table.lookup(keys)["k"].to_pylist() == names
        table.apply(deletes=keys)
        assert table.stats.rows == 0


def test_options_are_kept_in_the_file(tmp_path):
    options = {"unique": True, "page_size": 16384, "fill": 0.6}
    Table.build(tmp_path / "t", pa.table({"k": range(9000)}), ["k"], app=("loader", 7), **options).close()
    with Table.open(tmp_path / "t") as table:
        stats = table.stats
        assert (stats.unique, stats.page_size, stats.fill, stats.fragmentation) == (True, 16384, 0.6, 0.0)
        assert stats.bytes == stats.pages * 16384 == os.path.getsize(tmp_path / "t")  # noqa: PTH202 - in bytes
        assert table.app_version("loader") == 7
        assert table.app_version("other") is None


def test_a_lower_fill_factor_takes_more_leaves(tmp_path):
    rows = pa.table({"k": np.arange(20_000) ** 2})
    leaves = []
    for fill in (0.4, 0.8):
        with Table.build(tmp_path / "t", rows, ["k"], fill=fill, overwrite=True) as table:
            leaves.append(table.stats.leaves)
    assert 1.8 <= leaves[0] / leaves[1] <= 2.2


def test_an_existing_table_is_kept_unless_overwriting_is_asked_for(tmp_path):
    Table.build(tmp_path / "t", pa.table({"k": [1]}), ["k"]).close()
    with pytest.raises(TableExistsError, match="exists already"):
        Table.build(tmp_path / "t", pa.table({"k": [2]}), ["k"])
    with Table.build(tmp_path / "t", pa.table({"k": [3]}), ["k"], overwrite=True) as table:
        assert scanned(table).to_pylist() == [{"k": 3}]


def broken_batches():
    yield pa.record_batch({"k": [1]})
    raise OSError("the source broke")


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (pa.table({"k": [1, 2, 1]}), {"unique": True}, UniqueViolationError, "key k=1 occurs more than once"),
        (pa.table({"k": [1, None]}), {}, KeyInputError, r"'k' is null, but a key never is \(row 1\)"),
        (pa.table({"k": [1], "v": ["x" * 9000]}), {}, InputError, "the key k=1 does not fit in a page of 8192"),
        (pa.table({"k": [1], "v": [[1]]}), {}, SchemaError, "'v' has type list.*cannot store"),
        (
            pa.table([[1], [None]], schema=pa.schema([("k", pa.int64()), pa.field("v", pa.int64(), nullable=False)])),
            {},
            SchemaError,
            "column 'v' holds nulls, but its schema says it never does",
        ),
        (pa.table({"v": [1]}), {}, SchemaError, "no column 'k' for the key; the columns are 'v'"),
        (pa.table([[1], [2]], names=["k", "k"]), {}, SchemaError, "'k' occurs more than once"),
        (pa.table({"k": [1]}), {"page_size": 5000}, InputError, "a page has 4096, 8192"),
        (pa.table({"k": [1]}), {"fill": 1.5}, InputError, "fill factor is a share"),
        (pa.table({"k": [1]}), {"memory": "much"}, InputError, "not a size"),
        (iter([]), {}, InputError, "no batch, so its columns are unknown"),
        ([1], {}, InputError, "record batches or of paths, not of int"),
        ([pa.record_batch({"k": [1]}), 5], {}, InputError, "record batches or of paths, not of int"),
        (5, {}, InputError, "a source is a pyarrow table, .* not int; convert it"),
        (None, {}, InputError, "a source is a pyarrow table, .* not NoneType; convert it"),
        ({"k": [1]}, {}, InputError, "a source is a pyarrow table, .* not dict; convert it"),
        ("", {}, InputError, "'' is not the path of a file or folder"),
        (pa.table({"k": [1]}), {"key": 5}, SchemaError, "a key is the name of a column .* not 5"),
        (pa.table({"k": [1]}), {"key": [["k"]]}, SchemaError, "a key is the name of a column"),
        (pa.table({"k": [1]}), {"fill": "x"}, InputError, "fill factor is a share"),
        (pa.table({"k": [1]}), {"page_size": 8192.0}, InputError, "a page has 4096, 8192"),
        (pa.table({"k": [1]}), {"app": ("a",)}, InputError, "a name and a whole version"),
        (pa.table({"k": [1]}), {"temp_directory": 5}, InputError, "5 is not the path"),
        (
            [pa.record_batch({"k": [1]}), pa.record_batch({"k": ["2"]})],
            {},
            SchemaError,
            "'k' does not fit the type int64",
        ),
        ([pa.record_batch({"k": [1]}), pa.record_batch({"z": [2]})], {}, SchemaError, "column 'k' is missing"),
        (broken_batches(), {}, Exception, "source broke|cannot build"),
    ],
)
def test_a_failed_build_says_why_and_leaves_what_was_there(tmp_path, source, options, error, message):
    Table.build(tmp_path / "t", pa.table({"k": [42]}), ["k"]).close()
    with pytest.raises(error, match=message):
        Table.build(tmp_path / "t", source, **{"key": ["k"], "overwrite": True, **options})
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    with Table.open(tmp_path / "t") as table:
        assert scanned(table).to_pylist() == [{"k": 42}]


@pytest.mark.parametrize(
    ("step", "left"), [("touch", "nothing was left behind"), ("replace", "is left, which the next build removes")]
)
def test_a_build_in_a_folder_that_is_read_only_says_so(tmp_path, monkeypatch, step, left):
    """The file system refuses to remove too, even where there is no file."""

    def refused(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with monkeypatch.context() as patch:
        for name in (step, "unlink"):
            patch.setattr(Path, name, refused)
        with pytest.raises(StorageIOError, match=f"cannot build .*t: Read-only file system.*{left}"):
            Table.build(tmp_path / "t", pa.table({"k": [1]}), key=["k"])
    Table.build(tmp_path / "t", pa.table({"k": [1]}), key=["k"]).close()
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize("path", [5, None, "", "a\0b", b"t"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(InputError, match="is not the path of a file or folder"):
        Table.build(path, pa.table({"k": [1]}), "k")
    with pytest.raises(InputError, match="is not the path of a file or folder"):
        Table.open(path)


@pytest.mark.parametrize("wait", ["x", None, -1, float("nan")])
def test_a_time_to_wait_is_a_number_of_seconds(tmp_path, wait):
    Table.build(tmp_path / "t", pa.table({"k": [1]}), "k").close()
    with pytest.raises(InputError, match=r"the time to wait .* is a number of seconds from 0 on"):
        Table.open(tmp_path / "t", mode="w", wait=wait)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_not_replaced(tmp_path, make):
    make(tmp_path / "t")
    kind = (tmp_path / "t").stat().st_mode
    with pytest.raises(InputError, match="t is not a regular file; name another file"):
        Table.build(tmp_path / "t", pa.table({"k": [1]}), "k", overwrite=True)
    assert (tmp_path / "t").stat().st_mode == kind


def test_a_path_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(StorageIOError, match="File name too long"):
        Table.build(tmp_path / ("x" * 300), pa.table({"k": [1]}), "k")


def test_a_build_in_a_missing_folder_names_it(tmp_path):
    with pytest.raises(InputError, match=r"folder .*nowhere does not exist"):
        Table.build(tmp_path / "nowhere" / "t", pa.table({"k": [1]}), ["k"])


def test_importing_the_package_does_not_import_numba():
    import subprocess  # noqa: PLC0415 - only here
    import sys  # noqa: PLC0415 - only here

    code = "import headrace.storage, sys; assert not {'numba', 'duckdb'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_names_of_the_package_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'Tables'"):
        _ = headrace.storage.Tables


def test_an_unknown_mode_is_refused(tmp_path):
    Table.build(tmp_path / "t", pa.table({"k": [1]}), ["k"]).close()
    with pytest.raises(InputError, match="'r' or 'w', not 'rw'"):
        Table.open(tmp_path / "t", mode="rw")


@pytest.mark.parametrize("mode", ["r", "w"])
def test_a_forked_process_does_not_write_with_its_parents_handle(tmp_path, monkeypatch, mode):
    Table.build(tmp_path / "t", pa.table({"k": [1]}), ["k"]).close()
    with Table.open(tmp_path / "t", mode=mode) as table:
        parent = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: parent + 1)
        with pytest.raises(StorageIOError, match="before this process was forked"):
            table.apply(inserts=pa.table({"k": [2]}))


def test_a_table_open_for_writing_claims_those_snapshots_that_are_used(tmp_path):
    path, relation = tmp_path / "t", pa.table({"id": range(1000), "v": range(1000)})
    with Table.build(tmp_path / "other", relation, key=["id"], unique=True) as other:
        other.apply(pa.table({"id": [1], "v": [-1]}))  # the compilation of kernels leaves cycles, which claim
        list(scan(other.snapshot(), other.reader(), 1, 1, None))
    Table.build(path, relation, key=["id"], unique=True).close()
    seen = FileBackend(path, "w")
    locks = FileLocks(seen.fileno(), str(path))
    with Table.open(path, mode="w") as table:
        table.apply(pa.table({"id": [1], "v": [-1]}))
        used = table.snapshot()
        for value in range(50):
            table.apply(pa.table({"id": [1], "v": [value]}))
            assert locks.oldest_claim(table.snapshot().txid) == used.txid
        rows = pa.Table.from_batches(scan(used, table.reader(), 1, 1, None))
        assert rows.to_pylist() == [{"id": 1, "v": -1}]
        del used, rows
        assert locks.oldest_claim(table.snapshot().txid) is None
        table.refresh()
        table.apply(pa.table({"id": [1], "v": [7]}))
        assert locks.oldest_claim(table.snapshot().txid) is None
    seen.close()


def test_a_value_that_would_change_is_refused_until_its_column_is_cast(tmp_path):
    rows = pa.table({"k": [1], "v": pa.array([0.5], pa.float32())})
    with Table.build(tmp_path / "t", rows, key="k", unique=True) as table:
        with pytest.raises(SchemaError, match=r"'v' of type double cannot be stored as float: 0.1 .*\(row 1\); cast"):
            table.apply(pa.table({"k": [1, 2], "v": [2.0, 0.1]}))
        assert table.lookup(pa.table({"k": [1, 2]})).to_pylist() == rows.to_pylist()
        table.apply(pa.table({"k": [1, 2], "v": pa.array([2.0, 0.1]).cast(pa.float32())}))
        assert table.lookup(pa.table({"k": [2]})).column("v").cast(pa.float64()).to_pylist() == [pytest.approx(0.1)]


def test_a_key_that_does_not_fit_is_named_and_leaves_the_table_open_for_changes(tmp_path):
    instants = pa.table({"k": pa.array([0], pa.timestamp("ns"))})
    with Table.build(tmp_path / "t", instants, key="k", unique=True) as table:
        far = pa.table({"k": pa.array([10**15], pa.timestamp("s"))})  # Python has no type for this time
        with pytest.raises(KeyInputError, match=r"key column 'k' is .*1000000000000000.* cannot hold \(row 0\)"):
            table.apply(far)
        assert table.lookup(far).num_rows == 0
        assert table.apply(pa.table({"k": pa.array([5], pa.timestamp("s"))})).inserted == 1


def test_an_error_before_the_first_write_does_not_poison_the_handle(tmp_path, monkeypatch):
    with Table.build(tmp_path / "t", pa.table({"k": [0]}), key="k") as table:
        with monkeypatch.context() as patch:
            patch.setattr(writer, "prepare", Mock(side_effect=MemoryError))
            with pytest.raises(MemoryError):
                table.apply(pa.table({"k": [1]}))
        assert table.apply(pa.table({"k": [1]})).inserted == 1
