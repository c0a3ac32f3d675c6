"""The page size that rows ask for is the smallest that the clustered table takes, and replicas use it."""

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from headrace.etl import Dimension
from headrace.pipelines.delta.tables import DeltaHandle, create_dimension
from headrace.pipelines.errors import DeltaTableError
from headrace.pipelines.replica.catch_up import ReplicaSpec, catch_up
from headrace.pipelines.replica.row_sizes import RowSizes
from headrace.pipelines.replica.rows import MemberRows
from headrace.storage import Table
from headrace.storage.errors import InputError

SCHEMA = pa.schema([("a", pa.string()), ("b", pa.binary()), ("n", pa.decimal128(38, 2)), ("t", pa.string())])
SIZES = (4096, 8192, 16384, 32768, 65536)
WIDE = Dimension("plane", ("tail",), "plane_key", pa.schema({"tail": pa.string(), "notes": pa.string()}))


def smallest_that_builds(folder, rows, key):
    for size in SIZES:
        try:
            Table.build(folder / "t", rows, key=key, page_size=size, overwrite=True).close()
        except InputError:
            continue
        return size
    return None


@pytest.mark.parametrize("key", [["a"], ["a", "b"], ["n"]])
def test_the_page_size_is_the_smallest_that_builds(tmp_path, rng, key):
    sizes = RowSizes(SCHEMA, pa.schema([SCHEMA.field(name) for name in key]))
    for column in ("a", "b", "t"):
        for edge in (*SIZES, *(size // 4 for size in SIZES)):
            length = edge - int(rng.integers(0, 120))
            filler = "\0" if rng.random() < 0.3 else "q"
            row = {"a": "x", "b": b"y", "n": 1, "t": None}
            row[column] = (filler * length).encode() if column == "b" else filler * length
            rows = pa.Table.from_pylist([row], schema=SCHEMA)
            assert sizes.page_size(rows, 4096) == smallest_that_builds(tmp_path, rows, key), (key, column, length)


def test_the_bound_never_hides_a_long_row(rng):
    sizes = RowSizes(SCHEMA, pa.schema([SCHEMA.field("a"), SCHEMA.field("b")]))
    for _ in range(50):
        lengths = rng.integers(0, 9000, 3)
        row = {"a": "\0" * int(lengths[0]), "b": b"\0" * int(lengths[1]), "n": None, "t": "z" * int(lengths[2])}
        rows = pa.Table.from_pylist([row], schema=SCHEMA)
        exact = int(np.max(sizes.of_each(rows)))
        assert sizes.needs(rows, 8192) in ({exact} if exact > 8192 else {exact, 0})


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "plane")
    create_dimension(path, WIDE, pa.table({"tail": ["N1", "N2"], "notes": ["a", "b"]}))
    return path


def reach(path, version):
    narrow = Dimension("plane", ("tail",), "plane_key", WIDE.schema, inferred_flag=None)
    spec = ReplicaSpec(MemberRows(narrow), path, DeltaHandle(path).latest().table_id, 1, None, 1 << 28)

    def use(reached):
        with Table.open(reached.file) as table:
            rows = [row for batch in table.scan() for row in batch.to_pylist()]
            size = table.stats.page_size
        return reached.action, size, {row["tail"]: (row["plane_key"], row["notes"]) for row in rows}

    return catch_up(spec, 0, version, 0, use)


def append(path, tail, notes, key):
    row = {"plane_key": key, "tail": tail, "notes": notes, "is_inferred": False}
    write_deltalake(path, pa.Table.from_pylist([row], schema=WIDE.table_schema), mode="append")


@pytest.mark.parametrize(
    ("tail", "notes", "size"), [("k" * 5000, "x", 32768), ("N3", "y" * 10_000, 16384), ("N3", "z" * 65_000, 65536)]
)
def test_a_long_member_makes_the_pages_larger(path, tail, notes, size):
    append(path, tail, notes, 3)
    action, page_size, rows = reach(path, 1)
    assert (action, page_size) == ("built: missing", size)
    assert rows == {"N1": (1, "a"), "N2": (2, "b"), tail: (3, notes)}


def test_a_longer_member_that_arrives_later_has_the_replica_built_again(path):
    assert reach(path, 0)[:2] == ("built: missing", 8192)
    append(path, "N3", "y" * 10_000, 3)
    assert reach(path, 1)[:2] == ("built: longer rows", 16384)
    append(path, "N4", "y" * 12_000, 4)
    action, page_size, rows = reach(path, 2)
    assert (action, page_size) == ("advanced", 16384)
    assert rows["N4"] == (4, "y" * 12_000)


@pytest.mark.parametrize(("tail", "notes"), [("k" * 17_000, "x"), ("N3", "y" * 66_000)])
def test_a_member_that_fits_no_page_is_named(path, tail, notes):
    append(path, tail, notes, 3)
    with pytest.raises(DeltaTableError, match=f"the row {tail[:20]}.*needs .* bytes of a page.*shorten its texts"):
        reach(path, 1)
