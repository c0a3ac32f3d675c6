"""The conformance suite against the local API, and its changes in every order and every cut."""

import itertools
import math
import random

import pyarrow as pa
import pytest
from case_files import case_names, changes_of_text, declaration, read_case
from runner import LocalBackend, MemoryBackend, comparable, run_case

ALL_ORDERS = 4


@pytest.mark.parametrize("name", case_names())
def test_case(name, tmp_path):
    run_case(read_case(name), lambda history: LocalBackend(history, tmp_path))


def test_the_suite_has_the_cases_that_were_promised():
    assert len(case_names()) >= 60


def changes_of(case):
    history = declaration(case.get("dimension"))
    steps = [] if "parent" in case or any("snapshot" in step for step in case["steps"]) else case["steps"]
    tables = [changes_of_text(step["changes"], history)[0] for step in steps if "changes" in step]
    return history, pa.concat_tables(tables).to_pylist() if tables else [], tables[0].schema if tables else None


CHANGING = [name for name in case_names() if len(changes_of(read_case(name))[1]) > 1]


def cuts(rows):
    """Yield every way to cut a sequence of rows into batches."""
    for bits in itertools.product([False, True], repeat=len(rows) - 1):
        batches = [[rows[0]]]
        for row, cut in zip(rows[1:], bits, strict=True):
            if cut:
                batches.append([])
            batches[-1].append(row)
        yield batches


def some_cuts(rows, rng):
    """Yield the sequence as one batch, as batches of one row, and cut somewhere; all cuts of a short one."""
    found = list(cuts(rows))
    return found if len(rows) < ALL_ORDERS else [found[0], found[-1], rng.choice(found[1:-1])]


def orders(rows, rng):
    if len(rows) <= ALL_ORDERS:
        return itertools.permutations(rows)
    return [rng.sample(rows, len(rows)) for _ in range(math.factorial(ALL_ORDERS))]


def final_versions(history, batches, schema):
    backend = MemoryBackend(history)
    for batch in batches:
        backend.apply(pa.Table.from_pylist(batch, schema))
    rows = backend.versions().drop_columns(["key"]).to_pylist()
    return sorted(([comparable(value) for value in row.values()] for row in rows), key=repr)


@pytest.mark.parametrize("name", CHANGING)
def test_every_order_in_several_cuts_ends_in_the_same_dimension(name):
    check_orders(name, some_cuts)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CHANGING if len(changes_of(read_case(name))[1]) >= ALL_ORDERS])
def test_every_order_and_every_cut_ends_in_the_same_dimension(name):
    check_orders(name, lambda rows, _: cuts(rows))


def check_orders(name, cut):
    history, rows, schema = changes_of(read_case(name))
    expected = final_versions(history, [rows], schema)
    rng = random.Random(name)
    for order in orders(rows, rng):
        for batches in cut(list(order), rng):
            assert final_versions(history, batches, schema) == expected
