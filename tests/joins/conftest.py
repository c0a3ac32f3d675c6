"""Random relations and streams, tables on disk, and DuckDB as the oracle of what a join returns."""

import contextlib
import itertools
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from headrace.joins import SSIJ, IndexNestedLoops, MeshJoin
from headrace.storage import table as storage_table
from headrace.storage.errors import MemoryBudgetError

sys.path.insert(0, str(Path(__file__).parent))


def paged(*args, **options):
    """Return SSIJ with paged inner nodes, even where all would fit."""
    return SSIJ(*args, index="paged", **options)


OPERATORS = {"ssij": SSIJ, "paged": paged, "meshjoin": MeshJoin, "inlj": IndexNestedLoops}
KEY_KINDS = ("int64", "int32", "text", "short pair", "text pair", "date")


@dataclass
class Case:
    relation: pa.Table
    stream: pa.Table
    key: list
    on: list
    unique: bool
    how: str = "inner"
    page_size: int = 4096
    cuts: list = field(default_factory=list)

    @property
    def batches(self):
        bounds = sorted({0, len(self.stream), *(cut % (len(self.stream) + 1) for cut in self.cuts)})
        for start, stop in itertools.pairwise(bounds):
            yield from self.stream.slice(start, stop - start).combine_chunks().to_batches()


def key_columns(kind, numbers):
    """Return key columns in which equal numbers are equal keys; None stays null."""
    known = [None if number is None else int(number) for number in numbers]
    text = [None if number is None else f"key-{'x' * (number % 5)}-{number}" for number in known]
    if kind == "int64":
        return {"k": pa.array(known, pa.int64())}
    if kind == "int32":
        return {"k": pa.array(known, pa.int32())}
    if kind == "text":
        return {"k": pa.array(text, pa.string())}
    if kind == "date":
        return {"k": pa.array(known, pa.int32()).cast(pa.date32())}
    high = [None if number is None else number // 7 for number in known]
    low = [None if number is None else number % 7 for number in known]
    if kind == "short pair":
        return {"k": pa.array(high, pa.int16()), "k2": pa.array(low, pa.int16())}
    return {
        "k": pa.array([None if h is None else f"\0{h}" for h in high], pa.string()),
        "k2": pa.array(low, pa.int64()),
    }


def make_relation(rng, kind, numbers, text_length):
    size = len(numbers)
    words = rng.choice(["", "alpha", "beta", "ß", "x" * text_length], size)
    return pa.table(
        {
            **key_columns(kind, numbers),
            "v": pa.array(rng.integers(-(2**50), 2**50, size), mask=rng.random(size) < 0.1),
            "w": pa.array(words.astype(object), pa.string(), mask=rng.random(size) < 0.2),
            "f": pa.array(rng.normal(size=size).astype(np.float32)),
        }
    )


def unique_keys(rng, shape, rows):
    """Unique keys that lie evenly, in bunches, or at the ends of their type."""
    if shape == "even":
        keys = rng.permutation(4 * rows)[:rows] - rows
    elif shape == "bunched":
        keys = (2.0 ** rng.uniform(0, 62, rows)).astype(np.int64)
    else:
        keys = np.concatenate([-(2**63) + rng.integers(0, 9, rows), 2**63 - 1 - rng.integers(0, 2**40, rows)])
    return np.unique(keys)


def make_stream(rng, kind, numbers, nulls=0.1):
    size = len(numbers)
    given = [None if rng.random() < nulls else number for number in numbers]
    keys = key_columns(kind, given)
    return pa.table(
        {
            "id": pa.array(range(size), pa.int64()),
            **{f"s_{name}": column for name, column in keys.items()},
            "v": pa.array(rng.choice(["left", "right"], size).astype(object), pa.string()),
        }
    )


@st.composite
def cases(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(KEY_KINDS))
    domain = draw(st.sampled_from([1, 5, 80, 3000]))
    unique = draw(st.booleans())
    rows = draw(st.sampled_from([0, 1, 2, 50, 1500]))
    numbers = rng.permutation(domain)[:rows] if unique else rng.integers(0, domain, rows)
    relation = make_relation(rng, kind, numbers, draw(st.sampled_from([10, 200])))
    length = draw(st.sampled_from([0, 1, 7, 60, 400]))
    if rows * length > 50_000 * domain:
        length = 7
    wanted = rng.integers(-2, domain + 3, length)
    if draw(st.booleans()):
        wanted = np.minimum(wanted, rng.integers(0, domain, length))
    stream = make_stream(rng, kind, wanted)
    key = [name for name in ("k", "k2") if name in relation.column_names]
    return Case(
        relation,
        stream,
        key,
        [(f"s_{name}", name) for name in draw(st.permutations(key))],
        unique,
        draw(st.sampled_from(["inner", "left"])),
        draw(st.sampled_from([4096, 8192])),
        draw(st.lists(st.integers(0, 400), max_size=8)),
    )


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """Return a context manager that makes a table and deletes it."""
    folder, numbers = tmp_path_factory.mktemp("tables"), itertools.count()

    @contextlib.contextmanager
    def build(relation, key, **options):
        path = folder / f"{next(numbers)}.hdr"
        with storage_table.Table.build(path, relation, key=key, **options) as table:
            yield table
        path.unlink()

    return build


def least_memory(operator, table, on, **options):
    """Return the least memory with which the operator starts, as its error says."""
    with pytest.raises(MemoryBudgetError) as error:
        operator(table, on=on, memory=1, **options)
    return int(re.search(r"\((\d+) bytes\)", str(error.value))[1])


def expected(case):
    """Return what DuckDB says."""
    connection = duckdb.connect()
    connection.register("stream", case.stream)
    connection.register("relation", case.relation)
    payload = [name for name in case.relation.column_names if name not in case.key]
    columns = [f"stream.{name}" for name in case.stream.column_names]
    columns += [f"relation.{name} AS {name}{'_right' * (name in case.stream.column_names)}" for name in payload]
    condition = " AND ".join(f"stream.{left} = relation.{right}" for left, right in case.on)
    return connection.sql(
        f"SELECT {', '.join(columns)} FROM stream {case.how} JOIN relation ON {condition}"
    ).to_arrow_table()


def assert_same_rows(result, wanted):
    """Assert that two tables are the same multiset of rows."""
    assert result.column_names == wanted.column_names
    connection = duckdb.connect()
    connection.register("result", result)
    connection.register("wanted", wanted)
    for first, second in (("result", "wanted"), ("wanted", "result")):
        extra = connection.sql(f"SELECT * FROM {first} EXCEPT ALL SELECT * FROM {second}").limit(3).fetchall()
        assert not extra, f"in {first} only: {extra}; {len(result)} rows against {len(wanted)}"


def run(operator, case, table, **options):
    """Push a whole stream through an operator and return the results as a table, and the operator."""
    join = operator(table, on=case.on, how=case.how, **options)
    results = []
    for batch in case.batches:
        results.extend(join.push(batch))
    results.extend(join.finish())
    return pa.Table.from_batches(results, join.output_schema(case.stream.schema)), join


class Tools:
    """What tests take from here: with importlib imports a test cannot import its neighbours."""

    Case = Case
    KEY_KINDS = KEY_KINDS
    key_columns = staticmethod(key_columns)
    make_relation = staticmethod(make_relation)
    make_stream = staticmethod(make_stream)
    unique_keys = staticmethod(unique_keys)
    least_memory = staticmethod(least_memory)
    expected = staticmethod(expected)
    assert_same_rows = staticmethod(assert_same_rows)
    run = staticmethod(run)
    paged = staticmethod(paged)


@pytest.fixture(scope="session")
def tools():
    return Tools


@pytest.fixture(scope="session")
def any_case():
    return cases()


@pytest.fixture(scope="session", params=OPERATORS)
def operator(request):
    return OPERATORS[request.param]
