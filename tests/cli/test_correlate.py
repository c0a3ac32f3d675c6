"""`headrace correlate`: the relational join of files whatever the algorithm, the order of arrival, and the output."""

import datetime as dt
import itertools
import json
import signal
import subprocess
import sys

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest

from headrace.joins.streams.catalog import ALGORITHMS

MULTISET_DIFFERENCE = "(FROM {0} EXCEPT ALL FROM {1}) UNION ALL (FROM {1} EXCEPT ALL FROM {0})"
START = dt.datetime(2024, 1, 1, tzinfo=dt.UTC).replace(tzinfo=None)


def times(rng, rows):
    steps = np.sort(rng.integers(0, 3_600_000, rows))
    return pa.array([START + dt.timedelta(milliseconds=int(step)) for step in steps], pa.timestamp("us"))


@pytest.fixture(scope="module")
def feeds(tmp_path_factory):
    """Return a folder with orders as CSV, payments as JSON lines, and shipments as a folder of Parquet files."""
    folder, rng = tmp_path_factory.mktemp("feeds"), np.random.default_rng(3)
    orders = pa.table({"id": rng.integers(0, 900, 800), "item": rng.choice(["ax", "bolt"], 800), "at": times(rng, 800)})
    payments = {"order": rng.integers(0, 900, 700), "paid": rng.random(700).round(3), "at": times(rng, 700)}
    shipments = pa.table({"parcel": rng.integers(0, 900, 600), "at": times(rng, 600)})
    pc.write_csv(orders, folder / "orders.csv")
    lines = [json.dumps(row, default=str) for row in pa.table(payments).to_pylist()]
    (folder / "payments.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "shipments").mkdir()
    for number in range(3):
        pq.write_table(shipments.slice(200 * number, 200), folder / "shipments" / f"{number}.parquet")
    return folder


def wanted(feeds, sql):
    connection = duckdb.connect()
    connection.register("orders", pc.read_csv(feeds / "orders.csv"))
    connection.sql(f"CREATE VIEW payments AS FROM read_json('{feeds}/payments.jsonl')")
    connection.sql(f"CREATE VIEW shipments AS FROM read_parquet('{feeds}/shipments/*.parquet')")
    return connection.sql(sql).to_arrow_table()


def assert_same(found, expected):
    assert found.num_rows == expected.num_rows
    expected = expected.rename_columns(found.column_names)
    assert duckdb.sql(MULTISET_DIFFERENCE.format("found", "expected")).fetchall() == []


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_the_result_is_the_relational_join(invoke, feeds, tmp_path, algorithm):
    out = tmp_path / "out.parquet"
    options = ["--on", "orders.id=payments.order", "--algorithm", algorithm, "-o", out, "--json"]
    outcome = invoke("correlate", feeds / "orders.csv", feeds / "payments.jsonl", *options)
    assert outcome.code == 0, outcome
    assert_same(pq.read_table(out), wanted(feeds, "SELECT * FROM orders o JOIN payments p ON o.id = p.order"))
    assert outcome.document["algorithm"] == ("diner" if algorithm == "auto" else algorithm)
    assert outcome.document["rows_in"] == {"orders": 800, "payments": 700}
    assert outcome.document["rows_out"] == pq.read_metadata(out).num_rows >= outcome.document["rows_early"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet"]


@pytest.mark.parametrize("how", ["left", "right", "full"])
def test_unmatched_rows_are_kept_on_request(invoke, feeds, tmp_path, how):
    out = tmp_path / "out.parquet"
    inputs = [feeds / "shipments", f"p={feeds / 'payments.jsonl'}"]
    outcome = invoke("correlate", *inputs, "--on", "parcel=order", "--how", how, "-o", out)
    assert outcome.code == 0, outcome
    assert_same(
        pq.read_table(out), wanted(feeds, f"SELECT * FROM shipments s {how} JOIN payments p ON s.parcel = p.order")
    )


@pytest.mark.parametrize(
    "arrival",
    [
        ["--time", "at"],
        ["--time", "orders.at,at", "--speed", "1e9"],
        ["--rate", "500", "--rate", "payments=20", "--seed", "7"],
        ["--rate", "1e6", "--speed", "100"],
    ],
)
def test_the_result_does_not_depend_on_the_order_of_arrival(invoke, feeds, tmp_path, arrival):
    parts = tmp_path / "parts"
    options = ["--near", "at", "--within", "2s", "--parts", parts, "--json", *arrival]
    outcome = invoke("correlate", feeds / "orders.csv", feeds / "payments.jsonl", *options)
    assert outcome.code == 0, outcome
    sql = "SELECT * FROM orders o JOIN payments p ON abs(epoch_ms(o.at::TIMESTAMP) - epoch_ms(p.at)) <= 2000"
    assert_same(pq.read_table(parts), wanted(feeds, sql))
    assert all(path.name.startswith("part-") for path in parts.iterdir())


def test_three_inputs_are_joined_at_once_by_the_operators_that_can(invoke, feeds, tmp_path):
    inputs = [feeds / name for name in ("orders.csv", "payments.jsonl", "shipments")]
    on = ["--on", "orders.id=payments.order,payments.order=shipments.parcel"]
    able = [name for name, entry in ALGORITHMS.items() if entry.most_inputs != 2]
    for algorithm in ("auto", *able):
        out = tmp_path / f"{algorithm}.parquet"
        outcome = invoke("correlate", *inputs, *on, "--algorithm", algorithm, "-o", out)
        if not able:
            assert outcome.code == 1
            assert "no algorithm makes this inner join of 3 inputs; join two inputs at a time" in outcome.err
            continue
        assert outcome.code == 0, outcome
        sql = "SELECT * FROM orders o JOIN payments p ON o.id = p.order JOIN shipments s ON p.order = s.parcel"
        assert_same(pq.read_table(out), wanted(feeds, sql))


def test_a_file_with_only_a_heading_has_the_types_that_it_is_compared_with(invoke, tmp_path):
    (tmp_path / "none.csv").write_text("id,item\n")
    (tmp_path / "b.csv").write_text("order,paid\n7,1.5\n")
    pq.write_table(pa.table({"parcel": [dt.date(2024, 1, 1)]}), tmp_path / "c.parquet")
    for second, on in (("b.csv", "id=order"), ("c.parquet", "id=parcel"), ("b.csv", "item=paid")):
        for inputs, pair in ((["none.csv", second], on), ([second, "none.csv"], "=".join(on.split("=")[::-1]))):
            files = [tmp_path / name for name in inputs]
            outcome = invoke("correlate", *files, "--on", pair, "--how", "full", "-o", tmp_path / "o.parquet", "--json")
            assert outcome.code == 0, outcome
            written = pq.read_table(tmp_path / "o.parquet")
            left, right = pair.split("=")
            assert written.num_rows == 1
            assert written.schema.field(left).type == written.schema.field(right).type != pa.string()


def test_the_first_file_of_a_folder_with_a_record_says_the_types(invoke, tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "1.csv").write_text("id,item\n")
    (folder / "3.csv").write_text("id,item\n8,z\n")
    (tmp_path / "b.jsonl").write_text('{"order": 8}\n{"order": 7}\n')
    (folder / "2.csv").write_text("id,item\n7,x\n")
    outcome = invoke("correlate", folder, tmp_path / "b.jsonl", "--on", "id=order", "-o", tmp_path / "o.parquet")
    assert outcome.code == 0, outcome
    assert sorted(pq.read_table(tmp_path / "o.parquet").column("id").to_pylist()) == [7, 8]


def test_results_in_order_of_time_come_early(invoke, feeds, tmp_path):
    outcome = invoke(
        *["correlate", feeds / "orders.csv", feeds / "payments.jsonl", "--on", "id=order", "--time", "at"],
        *["-o", tmp_path / "o.parquet", "--json"],
    )
    assert outcome.document["rows_early"] == outcome.document["rows_out"] > 0


def test_inputs_larger_than_memory_are_spilled_and_the_spill_files_removed(invoke, tmp_path):
    rng = np.random.default_rng(4)
    for name in ("a", "b"):
        pq.write_table(
            pa.table({"k": rng.integers(0, 30_000, 30_000), "v": rng.random(30_000)}), tmp_path / f"{name}.pq"
        )
    (tmp_path / "spill").mkdir()
    (tmp_path / "a.pq").rename(tmp_path / "a.parquet")
    (tmp_path / "b.pq").rename(tmp_path / "b.parquet")
    outcome = invoke(
        *["correlate", tmp_path / "a.parquet", tmp_path / "b.parquet", "--on", "k", "--memory", "512KiB"],
        *["--spill", tmp_path / "spill", "-o", tmp_path / "o.parquet", "--json"],
    )
    assert outcome.code == 0, outcome
    assert outcome.document["rows_spilled"] > 0
    assert outcome.document["memory_peak"] <= outcome.document["memory"] == 512 << 10
    assert list((tmp_path / "spill").iterdir()) == []
    sql = f"SELECT count(*) FROM '{tmp_path}/a.parquet' a JOIN '{tmp_path}/b.parquet' b USING (k)"
    assert outcome.document["rows_out"] == duckdb.sql(sql).fetchall()[0][0]


def test_rows_are_printed_as_csv_or_as_json_lines(invoke, feeds):
    inputs = ["correlate", feeds / "orders.csv", feeds / "payments.jsonl", "--on", "id=order"]
    expected = wanted(feeds, "SELECT count(*) FROM orders o JOIN payments p ON o.id = p.order").column(0)[0].as_py()
    heading, *rows = invoke(*inputs).out.splitlines()
    assert heading == "id,item,at,order,paid,at_right"
    assert len(rows) == expected
    outcome = invoke(*inputs, "--json")
    documents = [json.loads(line) for line in outcome.out.splitlines()]
    assert len(documents) == expected
    assert all(document["id"] == document["order"] for document in documents)
    assert f"{expected:,} results" in outcome.err


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [("007", "7", []), ("007", '"007"', [("007", "007")]), ("7", "7.0", [(7.0, 7.0)])],
)
def test_csv_columns_take_types_that_can_match(invoke, tmp_path, left, right, found):
    (tmp_path / "a.csv").write_text(f"k\n{left}\n")
    (tmp_path / "b.csv").write_text(f"k,x\n{right},1\n")
    outcome = invoke("correlate", tmp_path / "a.csv", tmp_path / "b.csv", "--on", "k", "-o", tmp_path / "o.parquet")
    assert outcome.code == 0, outcome
    assert [(row["k"], row["k_right"]) for row in pq.read_table(tmp_path / "o.parquet").to_pylist()] == found


@pytest.mark.parametrize(
    ("name", "values", "last", "hint"),
    [
        ("b.csv", "7\n", "x\n", "name the column in --text"),
        (
            "b.jsonl",
            '{"k": 1, "v": "2024-01-01"}\n',
            '{"k": 1, "v": "x"}\n',
            "JSON strings, name",
        ),
        ("b.jsonl", '{"k": 1, "v": "x"}\n', '{"k": 1, "v": {}}\n', "write all its values as JSON strings"),
        ("b.jsonl", '{"k": 1, "v": "x"}\n', '{"k": 1, "v": "x", "w": 1}\n', "'w'"),
    ],
)
def test_a_late_value_of_another_type_is_refused_with_a_remedy_that_works(invoke, tmp_path, name, values, last, hint):
    (tmp_path / "a.csv").write_text("k\n1\n")
    csv = name.endswith(".csv")
    line = f"1,{values}" if csv else values
    more = f"1,{last}" if csv else last
    (tmp_path / name).write_text(("k,v\n" if csv else "") + line * (2_000_000 // len(line)) + more)
    command = ["correlate", tmp_path / "a.csv", tmp_path / name, "--on", "k", "-o", tmp_path / "out.parquet"]
    refused = invoke(*command)
    assert refused.code == 1
    assert hint in refused.err
    assert ("--text" in refused.err) == ("name" in hint)
    if "name" in hint:
        found = invoke(*command, "--text", "v")
        assert found.code == 0, found
        assert pq.read_schema(tmp_path / "out.parquet").field("v").type == pa.string()


def test_a_column_to_keep_as_text_must_be_one_of_some_input(invoke, tmp_path):
    (tmp_path / "a.csv").write_text("k\n1\n")
    (tmp_path / "b.csv").write_text("k,code\n1,007\n1,7\n")
    command = ["correlate", tmp_path / "a.csv", tmp_path / "b.csv", "--on", "k"]
    assert invoke(*command, "--text", "code").out.splitlines()[1:] == ['1,1,"007"', '1,1,"7"']
    refused = invoke(*command, "--text", "kode")
    assert "--text names 'kode', which is a column of no input: a has k; b has k, code" in refused.err


@pytest.mark.parametrize("encoded", [pa.Array.dictionary_encode, lambda column: column.cast(pa.string_view())])
def test_dictionaries_and_views_are_joined_by_their_values(invoke, tmp_path, encoded):
    shops = encoded(pa.array(["x", None, "y", "x"]))
    pq.write_table(pa.table({"shop": shops, "n": [1, 2, 3, 4]}), tmp_path / "a.parquet")
    towns = pa.array(["x", "y", None], pa.large_string())
    pq.write_table(pa.table({"town": towns, "kind": pa.array([b"1", None, b"2"]).dictionary_encode()}),
                   tmp_path / "b.parquet")  # fmt: skip
    command = ["correlate", tmp_path / "a.parquet", tmp_path / "b.parquet", "--on", "shop=town"]
    done = invoke(*command, "-o", tmp_path / "out.parquet")
    assert done.code == 0, done
    rows = sorted(tuple(row.values()) for row in pq.read_table(tmp_path / "out.parquet").to_pylist())
    assert rows == [("x", 1, "x", b"1"), ("x", 4, "x", b"1"), ("y", 3, "y", None)]
    assert pq.read_schema(tmp_path / "out.parquet").types == [pa.string(), pa.int64(), pa.large_string(), pa.binary()]


def test_dictionaries_are_joined_if_text_names_a_column_beside_them(invoke, tmp_path):
    encoded = pa.array(["a", "b"]).dictionary_encode()
    pq.write_table(pa.table({"k": encoded, "code": ["1", "2"]}), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("k,code\na,007\n")
    found = invoke("correlate", tmp_path / "a.parquet", tmp_path / "b.csv", "--on", "k", "--text", "code")
    assert found.out.splitlines()[1:] == ['"a","1","a","007"']


def test_operators_can_be_named_as_messages_name_them(invoke, feeds, tmp_path):
    arguments = [
        "correlate",
        feeds / "orders.csv",
        feeds / "payments.jsonl",
        "--on",
        "id=order",
        "-o",
        tmp_path / "o.parquet",
    ]
    done = invoke(*arguments, "--algorithm", "DoublePipelinedHash", "--how", "full")
    assert done.code == 0, done


@pytest.mark.parametrize("on", ["k", "a.k=b.k,b.k=c.k", "b.k=c.k,a.k=b.k"])
@pytest.mark.parametrize(
    ("first", "second", "third", "found"),
    [
        ("7", "7", "x\n7", 1),  # whole numbers in two, text in the third
        ("7\n8", "7\n8", "7.0\n8.5", 1),
        ("7", "7.5\n7", "x\n7", 1),
        ("", "7", "x\n7", 0),  # a heading alone takes a type, and then the next one
        ("007", "7", "007", 0),
    ],
)
def test_a_type_spreads_along_all_conditions(invoke, tmp_path, on, first, second, third, found):
    files = [tmp_path / f"{name}.csv" for name in "abc"]
    for file, values in zip(files, (first, second, third), strict=True):
        file.write_text(f"k\n{values}\n")
    for inputs in itertools.permutations(files):
        outcome = invoke("correlate", *inputs, "--on", on)
        assert outcome.code == 0, outcome.err
        assert len(outcome.out.splitlines()) == 1 + found


def test_whole_numbers_of_json_match_floats(invoke, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"k": 7}\n{"k": 8}\n')
    (tmp_path / "b.csv").write_text("k\n7.0\n8.5\n")
    outcome = invoke("correlate", tmp_path / "a.jsonl", tmp_path / "b.csv", "--on", "k", "--json")
    assert outcome.document == {"k": 7.0, "k_right": 7.0}


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
@pytest.mark.parametrize("condition", [["--on", "k"], ["--near", "k", "--within", "0.1"]])
def test_whole_numbers_that_floats_do_not_hold_are_refused(invoke, tmp_path, name, condition):
    numbers = [1, 2**53 + 1]
    lines = ["k", *map(str, numbers)] if name == "a.csv" else [f'{{"k": {number}}}' for number in numbers]
    (tmp_path / name).write_text("\n".join(lines))
    (tmp_path / "b.csv").write_text(f"k\n{2**53}.0\n1.5\n")
    refused = invoke("correlate", tmp_path / name, tmp_path / "b.csv", *condition, "-o", tmp_path / "o.parquet")
    assert refused.code == 1
    assert "column k: its whole numbers are compared with floats" in refused.err
    assert not (tmp_path / "o.parquet").exists()
    (tmp_path / "b.csv").write_text(f"k\n{2**53}\n1\n")  # whole numbers in both columns, as the message says
    done = invoke("correlate", tmp_path / name, tmp_path / "b.csv", *condition, "--json")
    assert done.document == {"k": 1, "k_right": 1}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--on", "id=none"], "payments has no column 'none'; its columns are order, paid, at"),
        (["--on", "id=order", "--algorithm", "magic"], "the algorithms are auto, diner"),
        (["--near", "at", "--within", "5"], "--within 5 has no unit, but orders.at and payments.at are times"),
        (["--near", "at", "--within", "1s", "--algorithm", "xjoin"], "on bands alone; choose diner"),
        (["--on", "id=order", "--how", "full", "--algorithm", "diner"], "makes no full join"),
        (["--on", "id=order", "--time", "day"], "--time names no column of orders"),
        (["--on", "id=order", "--time", "item,payments.at"], "has type string, which has no times"),
        (["--on", "id=order", "--rate", "orders=5"], "add --rate payments=N"),
        (["--on", "id=order", "--rate", "fast"], "is not a number of rows per second"),
        (["--on", "id=order", "--rate", "others=4"], "names no input; the inputs are orders, payments"),
        (["--on", "id=order", "--rate", "-1"], "must be a positive number"),
        (["--on", "id=order", "--memory", "1KiB"], "give the join more, as in --memory 4MiB"),
        (["--on", "id=order", "--spill", "/none"], "name another with --spill"),
        (["--on", "item=paid"], "so that both are floats or neither is"),
    ],
)
def test_what_cannot_be_joined_is_refused_with_the_remedy(invoke, feeds, tmp_path, options, told):
    out = tmp_path / "out.parquet"
    out.write_text("older result")
    outcome = invoke("correlate", feeds / "orders.csv", feeds / "payments.jsonl", "-o", out, *options)
    assert outcome.code == 1, outcome
    assert told in outcome.err
    assert "left   nothing; " in outcome.err
    assert out.read_text() == "older result"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "--on or --near"),
        (["--near", "at"], "belong together"),
        (["--near", "at", "--within", "5s", "--within", "9s"], "--within': it is given 2 times; give it once"),
        (["--on", "id=order", "--speed", "2"], "--speed belongs to"),
        (["--on", "id=order", "--seed", "2"], "--seed belongs to"),
        (["--on", "id=order", "--time", "at", "--rate", "4"], "do not go together"),
        (["--on", "id=order", "-o", "o.parquet", "--parts", "p"], "do not go together"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(invoke, feeds, options, told):
    outcome = invoke("correlate", feeds / "orders.csv", feeds / "payments.jsonl", *options)
    assert outcome.code == 2
    assert told in outcome.err


def test_a_wrong_name_of_an_input_is_named(invoke, feeds):
    inputs = [feeds / "orders.csv", feeds / "payments.jsonl", feeds / "shipments"]
    for count in (2, 3):
        outcome = invoke("correlate", *inputs[:count], "--on", "order.id=payments.order")
        assert "no input is named 'order' (did you mean 'orders'?)" in outcome.err, outcome


def test_a_failure_before_the_first_result_says_that_nothing_was_printed(invoke, tmp_path):
    (tmp_path / "a.csv").write_text("id,t\n1,2\n1,1\n")
    (tmp_path / "b.csv").write_text("id,t\n2,2\n")
    outcome = invoke("correlate", tmp_path / "a.csv", tmp_path / "b.csv", "--on", "id", "--time", "t")
    assert outcome.code == 1
    assert "left   nothing; no result was printed" in outcome.err


@pytest.mark.parametrize("algorithm", ["miner", "diner", "progressive-merge", "xjoin"])
def test_the_memory_that_a_refusal_names_is_enough_at_once(invoke, tmp_path, algorithm):
    lines = [f"{number % 97},{'x' * (number % 400)}" for number in range(2000)]
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("\n".join(["key,text", *lines[:: 1 if name == "a" else 40]]) + "\n")
    for on in ("key", "text"):
        command = ["correlate", tmp_path / "a.csv", tmp_path / "b.csv", "--on", on, "--algorithm", algorithm, "--quiet"]
        refused = invoke(*command, "--memory", "16KiB")
        assert refused.code == 1, refused
        memory = refused.err.partition("give the join more, as in --memory ")[2].split()[0]
        outcome = invoke(*command, "--memory", memory)
        assert outcome.code == 0, outcome.err


def test_conditions_of_a_repeated_option_all_hold(invoke, tmp_path):
    pc.write_csv(pa.table({"id": [1, 1, 2], "day": [1, 2, 2], "hour": [3, 3, 3]}), tmp_path / "a.csv")
    pc.write_csv(pa.table({"id": [1, 2], "day": [2, 2], "hour": [4, 9]}), tmp_path / "b.csv")
    options = ["--on", "a.id=b.id", "--on", "a.day=b.day", "--near", "a.day=b.day", "--near", "a.hour=b.hour"]
    outcome = invoke("correlate", tmp_path / "a.csv", tmp_path / "b.csv", *options, "--within", "1", "--quiet")
    assert outcome.code == 0, outcome
    assert outcome.out.splitlines()[1:] == ["1,2,3,1,2,4"]


def test_inputs_have_different_names(invoke, feeds):
    assert invoke("correlate", feeds / "orders.csv", "--on", "id").code == 2
    outcome = invoke("correlate", feeds / "orders.csv", feeds / "orders.csv", "--on", "id")
    assert outcome.code == 2
    assert "NAME=PATH" in outcome.err
    assert invoke("correlate", feeds / "orders.csv", f"again={feeds / 'orders.csv'}", "--on", "id").code == 0


def test_times_out_of_order_are_told_with_their_row(invoke, tmp_path):
    (tmp_path / "a.csv").write_text("k,t\n1,5\n2,9\n3,7\n")
    (tmp_path / "b.csv").write_text("k,t\n1,5\n2,\n")
    inputs = [
        "correlate",
        tmp_path / "a.csv",
        tmp_path / "b.csv",
        "--on",
        "k",
        "--time",
        "t",
        "--parts",
        tmp_path / "p",
    ]
    outcome = invoke(*inputs)
    assert outcome.code == 1
    assert "row 3 of input 'a' is earlier than the row before it; sort the input by 't'" in outcome.err
    (tmp_path / "a.csv").write_text("k,t\n1,5\n2,9\n3,9\n")
    assert "row 2 of input 'b' has no time in column 't'" in invoke(*inputs).err
    (tmp_path / "b.csv").write_text("k,t\n1,5\n2,6\n")
    assert invoke(*inputs).code == 0, "what a failed run left is replaced"
    assert sorted(pq.read_table(tmp_path / "p").column("k").to_pylist()) == [1, 2]


def test_a_malformed_record_leaves_parts_that_are_marked_as_incomplete(invoke, tmp_path):
    (tmp_path / "a.csv").write_text("k,t\n" + "".join(f"{k},{k}\n" for k in range(200_000)) + "x,y\n")
    (tmp_path / "b.csv").write_text("k,t\n1,1\n")
    parts = tmp_path / "p"
    outcome = invoke("correlate", tmp_path / "b.csv", tmp_path / "a.csv", "--on", "k", "--parts", parts)
    assert outcome.code == 1
    assert "200002" in outcome.err.replace(",", "") or "200001" in outcome.err.replace(",", "")
    assert "marked as incomplete; the next run replaces them" in outcome.err
    assert (parts / "_incomplete").exists()
    assert not list(parts.glob(".part*"))


@pytest.mark.parametrize("place", ["-o", "--parts"])
def test_results_do_not_go_where_inputs_are_read(invoke, feeds, place):
    inputs = ["correlate", feeds / "shipments", feeds / "orders.csv", "--on", "parcel=id"]
    outcome = invoke(*inputs, place, feeds / "shipments" / "new.parquet")
    assert outcome.code == 1
    assert "would be read as part of it" in outcome.err


def test_parts_go_to_a_folder_of_their_own(invoke, feeds, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    outcome = invoke("correlate", feeds / "shipments", feeds / "orders.csv", "--on", "parcel=id", "--parts", tmp_path)
    assert outcome.code == 1
    assert "holds notes.txt already" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


SLOWLY = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background begin by ignoring it
from headrace.joins.streams import arrivals
wait = arrivals._wait
def told(*arguments):
    print("waiting", flush=True)
    return wait(*arguments)
arrivals._wait = told
from headrace.cli.main import headrace
headrace(sys.argv[1:])
"""


@pytest.mark.parametrize(("number", "place"), [(signal.SIGINT, "-o"), (signal.SIGKILL, "--parts")])
def test_a_stopped_run_leaves_nothing_that_looks_complete(invoke, feeds, tmp_path, number, place):
    inputs = ["correlate", feeds / "orders.csv", feeds / "payments.jsonl", "--on", "id=order", place, tmp_path / "out"]
    command = [sys.executable, "-c", SLOWLY, *inputs, "--time", "at", "--speed", "0.001"]
    process = subprocess.Popen(
        [str(each) for each in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for _ in range(2):  # the first arrival is due at once
        assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number), errors
    if place == "-o":
        assert list(tmp_path.iterdir()) == []
    else:
        assert (tmp_path / "out" / "_incomplete").exists()
    assert invoke(*inputs).code == 0, "the next run replaces what is left"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert place == "-o" or all(path.name.startswith("part-") for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize(("how", "algorithm"), [("inner", "diner"), ("full", "xjoin")])
def test_the_algorithm_that_a_symmetric_hash_join_advises_does_the_join(invoke, tmp_path, how, algorithm):
    rows = "".join(f"{number},{'x' * 400}\n" for number in range(2000))
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text(f"key,text\n{rows}")
    command = ["correlate", tmp_path / "a.csv", tmp_path / "b.csv", "--on", "key", "--how", how, "--memory", "1MiB"]
    refused = invoke(*command, "--quiet", "--algorithm", "symmetric-hash")
    assert refused.code == 1, refused
    assert f"or use an algorithm that spills, as in --algorithm {algorithm}\n" in refused.err
    assert invoke(*command, "--quiet", "--algorithm", algorithm).code == 0
