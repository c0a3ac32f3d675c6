"""Transformations in pipeline files: real runs against an oracle in plain Python, and what is refused."""

import csv
import datetime as dt
import json
import re
from decimal import Decimal

import pytest
import yaml
from deltalake import DeltaTable

from headrace.pipelines.errors import BatchError, PipelineFileError
from headrace.pipelines.runner import run

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

SCHEMA = {"id": "bigint", "day": "string", "customer": "string", "price": "string", "quantity": "int", "kind": "string"}
STEPS = [
    {"where": "kind <> 'test'"},
    {"rename": {"kind": "category"}},
    {"derive": {"price": "CAST(price AS decimal(10,2))", "day": "to_date(day, 'dd.MM.yyyy')"}},
    {"derive": {"total": "CAST(price * quantity AS decimal(12,2))", "customer": "upper(trim(customer))"}},
    {"where": "total > 0"},
    {"select": ["customer", "id", "day", "total", "category"]},
]


class Shop:
    """A folder with a pipeline file and the files of its source."""

    def __init__(self, folder):
        self.folder = folder
        self.lines = []
        (folder / "in").mkdir(parents=True)
        self.document = {
            "name": "orders",
            "source": {"format": "csv", "path": "in", "schema": SCHEMA},
            "transform": STEPS,
            "dimensions": {"customer": {"path": "w/customer", "natural_key": ["name"], "columns": {"name": "string"},
                                        "shards": 2}},
            "lookups": [{"dimension": "customer", "role": "customer", "on": {"customer": "name"}, "policy": "infer"}],
            "sink": {"path": "w/facts"},
            "trigger": {"max_files": 1},
            "replicas": "../replicas",
        }  # fmt: skip

    @property
    def pipeline(self):
        return self.folder / "pipeline.yml"

    def write(self, **changes):
        """Write the pipeline file with changes, and return its lines."""
        self.pipeline.write_text(yaml.safe_dump({**self.document, **changes}, sort_keys=False))
        return self.pipeline.read_text().splitlines()

    def add(self, rows):
        """Put a file of rows into the source's folder."""
        path = self.folder / "in" / f"{len(self.lines):03d}.csv"
        with path.with_name(".hidden").open("w", newline="") as stream:
            csv.writer(stream).writerows([SCHEMA, *rows])
        path.with_name(".hidden").rename(path)
        self.lines.append([line.decode() for line in path.read_bytes().splitlines()])

    def read(self, name="facts", order="id"):
        """Return the rows of a Delta table."""
        return sorted(DeltaTable(str(self.folder / "w" / name)).to_pyarrow_table().to_pylist(), key=lambda r: r[order])


@pytest.fixture
def shop(tmp_path):
    return Shop(tmp_path / "shop")


def rows_of(rng, count, first=0):
    """Return rows, some of which are filtered, some of which do not convert."""

    def pick(values):
        return values[int(rng.integers(len(values)))]

    return [
        (
            first + i,
            pick(["01.02.2024", "29.02.2024", "30.02.2024"] if i % 5 == 0 else ["03.04.2024"]),
            pick([" ann", "Bob ", "CY", "", f"new{first + i}"]),
            pick(["1.50", "2", "-1", "", "n/a"] if i % 3 == 0 else ["12.25", "3"]),
            pick([1, 2, 3, ""]),
            pick(["test", "book", "toy", ""]),
        )
        for i in range(count)
    ]


def expected_of(row):
    """Return what becomes of a row: 'filtered', the columns that fail, or the fact."""
    identity, day, customer, price, quantity, kind = row
    if kind in ("test", ""):
        return "filtered"
    failed = []
    if price and not re.fullmatch(r"-?\d+(\.\d+)?", price):
        failed.append("price")
    date = None
    try:
        date = dt.datetime.strptime(day, "%d.%m.%Y").replace(tzinfo=dt.UTC).date()
    except ValueError:
        failed.append("day")
    if failed:
        return sorted(failed)
    total = None if price == "" or quantity == "" else (Decimal(price) * quantity).quantize(Decimal("0.01"))
    if total is None or total <= 0:
        return "filtered"
    name = customer.strip().upper() or None
    return {"customer": name, "id": identity, "day": date, "total": total, "category": kind}


def check(shop, files, result):
    """Compare facts, rejected rows and counts with the oracle."""
    judged = [(number, at, expected_of(row)) for number, rows in enumerate(files) for at, row in enumerate(rows, 1)]
    facts = [each for _, _, each in judged if isinstance(each, dict)]
    members = {row["name"]: row["customer_key"] for row in shop.read("customer", "customer_key")}
    found = shop.read()
    assert [{name: row[name] for name in facts[0]} for row in found] == sorted(facts, key=lambda row: row["id"])
    assert all(row["customer_key"] == members[row["customer"]] for row in found)
    assert set(members) == {None} | {row["customer"] for row in facts}
    rejected = {
        (f"{number:03d}.csv", at): (each, shop.lines[number][at])
        for number, at, each in judged
        if isinstance(each, list)
    }
    errors = shop.read("facts_errors", "_record_number")
    told = {
        (row["_file"], row["_record_number"]): (sorted(cause["column"] for cause in row["causes"]), row["record"])
        for row in errors
    }
    assert told == rejected
    assert len(errors) == len(rejected)
    if result is not None:
        assert result.total("loaded") == len(facts)
        assert result.as_dict()["filtered"] == sum(each == "filtered" for _, _, each in judged)
        assert result.as_dict()["outcomes"]["filtered"] == result.as_dict()["filtered"]
        assert result.total("rejected") == len(rejected)
        assert result.total("rows_in") == len(judged)


def test_steps_are_applied_in_order_and_every_record_is_accounted_for(shop, rng):
    shop.write()
    files = [rows_of(rng, 60), rows_of(rng, 40, 1000)]
    for rows in files:
        shop.add(rows)
    result = run(shop.pipeline)
    check(shop, files, result)
    assert list(DeltaTable(str(shop.folder / "w/facts")).schema().to_arrow().names)[:5] == [
        "customer", "id", "day", "total", "category",
    ]  # fmt: skip


class CrashError(Exception):
    """Raised by a hook in place of a crash."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_crash_at_any_step_changes_nothing(shop, rng):
    shop.write()
    files = []
    for number, step in enumerate(
        ("before join", "after join", "after members:customer", "after facts", "after errors")
    ):
        files.append(rows_of(rng, 40, 1000 * number))
        shop.add(files[-1])

        def crash(name, step=step):
            if name == step:
                raise CrashError(step)

        with pytest.raises(BatchError, match=step):
            run(shop.pipeline, hook=crash)
        if number == 2:
            shop.write(lookups=[{**shop.document["lookups"][0]}], trigger={"max_files": 2})
    result = run(shop.pipeline)
    assert result.as_dict()["filtered"] == result.as_dict()["outcomes"].get("filtered", 0)
    check(shop, files, None)


RULES = """
import pandas as pd
from pyspark.sql import functions as F
import helpers

seen = []


@F.udf("string")
def word(text):
    return helpers.spelled(text)


@F.pandas_udf("long")
def plus(values: pd.Series) -> pd.Series:
    assert values.notna().all(), "a closed row reached the function"
    return values + 1


def clean(frame):
    frame = frame.where("kind is not null").withColumn("_no", F.lit(1)).drop("_no")
    return frame


def tidy(frame):
    tidied = frame.where("kind is not null and quantity > 1").withColumn("spelled", word("kind"))
    return tidied.withColumn("next", plus("id")).where(word("kind") != "TOY").select("next", "id", "spelled")


def chained(frame):
    named = frame.withColumn("label", F.coalesce("kind", F.lit("none"))).where("quantity > 0")
    return named.withColumn("loud", F.upper("label")).withColumn("size", F.length("loud")).drop("label", "day")


def plain(frame):
    return frame.select((F.col("id") * 2).alias("double"), "id", F.lit(None).cast("string").alias("nothing"))


def stateful(frame):
    seen.append(1)
    return frame.withColumn("calls", F.lit(len(seen)))


def not_a_frame(frame):
    return frame.count()


def other(frame):
    return frame.sparkSession.range(3)


def divides(frame):
    return frame.withColumn("share", F.lit(1 / len(frame.take(1))))


def broken(frame):
    return frame.nothing


def last(frame):
    from pyspark.sql import Window
    return frame.withColumn("n", F.row_number().over(Window.orderBy("id")))


def fails(frame):
    return frame.withColumn("spelled", F.udf(lambda text: 1 // 0, "int")("id"))
"""


def test_a_python_function_sees_open_rows_only(shop):
    (shop.folder / "rules.py").write_text(RULES)
    (shop.folder / "helpers.py").write_text("def spelled(text):\n    return text.upper()\n")
    shop.write(transform=[{"python": "rules:tidy"}, {"python": "rules:plain"}, {"derive": {"next": "id + 1"}}],
               dimensions={}, lookups=[], duplicates={"key": ["id"], "shards": 1})  # fmt: skip
    rows = [
        (1, "", "a", "", 2, "book"),
        (2, "", "a", "", 1, "book"),
        (3, "", "a", "", 9, ""),
        (4, "", "b", "", 3, "toy"),
    ]
    shop.add([*rows, ("x", "", "", "", "", ""), (5, "", "b", "", 3, "map"), (5, "", "b", "", 3, "map")])
    result = run(shop.pipeline)
    wanted = [{"double": 2 * i, "id": i, "nothing": None, "next": i + 1, "_outcome": "matched"} for i in (1, 5)]
    assert shop.read() == wanted
    counts = ("rows_in", "loaded", "dropped", "rejected", "filtered")
    assert [result.as_dict()[name] for name in counts] == [7, 2, 1, 1, 3]
    shop.write(transform=[{"python": "rules:fails"}], dimensions={}, lookups=[], duplicates={"key": ["id"]},
               sink={"path": "w/others"}, name="others")  # fmt: skip
    with pytest.raises(
        BatchError,
        match=r"function in transform.0.python or .*: integer division.*ZeroDivisionError",
    ):
        run(shop.pipeline)


REFUSED = [
    ([{"where": "knd <> 'test'"}], "where", "there is no column 'knd' (did you mean 'kind'?); this step has id, day"),
    ([{"derive": {"a": "rand()"}}], "a:", "rand() may give another value"),
    ([{"derive": {"a": "date_add(now(), 1)"}}], "a:", "now() may give another value"),
    ([{"derive": {"a": "unix_timestamp()"}}], "a:", "current_timestamp() may give another value"),
    ([{"derive": {"a": "uuid()"}}], "a:", "uuid() may give"),
    ([{"derive": {"a": "monotonically_increasing_id()"}}], "a:", "monotonically_increasing_id() may give"),
    ([{"derive": {"a": "input_file_name()"}}], "a:", "input_file_name() may give"),
    ([{"derive": {"a": "current_user()"}}], "a:", "current_user() may give"),
    ([{"derive": {"a": "cast('today' as date)"}}], "a:", "the text 'today' as a time may give"),
    ([{"derive": {"a": "to_timestamp(' Now ')"}}], "a:", "as a time may give"),
    ([{"derive": {"a": "to_date(concat('TO', 'day'))"}}], "a:", "as a time may give"),
    ([{"derive": {"a": "year('yesterday')"}}], "a:", "as a time may give"),
    ([{"python": "rules:divides"}], "python", "rules:divides failed for an empty frame: ZeroDivisionError"),
    ([{"derive": {"a": "DATE 'Today'"}}], "a:", "changes from day to day"),
    ([{"derive": {"a": "sum(id)"}}], "a:", "an aggregate combines several records"),
    ([{"derive": {"a": "row_number() over (order by id)"}}], "a:", "Spark's operator Window is not allowed"),
    ([{"derive": {"a": "explode(array(1, 2))"}}], "a:", "Spark's operator Generate is not allowed: explode"),
    ([{"derive": {"a": "(select max(id) from range(3))"}}], "a:", "a subquery reads rows outside the record"),
    ([{"derive": {"a": "id +"}}], "a:", "correct the step"),
    ([{"derive": {"a": "nofunction(id)"}}], "a:", "nofunction"),
    ([{"derive": {"a": "id", "b": "a + 1"}}], "b:", "'a' is derived in this step"),
    ([{"derive": {"Kind": "id"}}], "Kind", "differ only in case; write 'kind'"),
    ([{"derive": {"_state": "0"}}], "_state", "begins with '_', which is kept for Headrace"),
    ([{"derive": {"a": "array(id)"}}], "derive", "column 'a' has the type array<bigint>, which facts cannot hold"),
    ([{"derive": {"a": "null"}}], "derive", "column 'a' has the type void"),
    ([{"where": "kind"}], "where", "FILTER_NOT_BOOLEAN|boolean|BOOLEAN"),
    ([{"rename": {"kin": "category"}}], "kin:", "there is no column 'kin' (did you mean 'kind'?)"),
    ([{"rename": {"kind": "DAY"}}], "rename", "column 'DAY' and 'day' differ only in case"),
    ([{"rename": {"kind": "kind.of"}}], "rename", "column 'kind.of' has a dot or a backtick"),
    ([{"rename": {"kind": "id"}}], "rename", "column 'id' occurs twice"),
    ([{"select": ["id", "price", "quantitty"]}], "quantitty", "(did you mean 'quantity'?)"),
    ([{"select": ["id", "id"]}], "select", "column 'id' occurs twice"),
    (
        [{"select": ["id"]}],
        "customer: name",
        "names column 'customer', which the stream after `transform` does not have",
    ),
    ([{"rename": {"customer": "client"}}], "customer: name", "does not have; it has id, day, client"),
    ([{"python": "rules:stateful"}], "python", "gives two plans when it is called twice"),
    ([{"python": "rules:not_a_frame"}], "python", "returned int; return a Spark DataFrame"),
    ([{"python": "rules:other"}], "python", "is not made from the one that the function received"),
    ([{"python": "rules:broken"}], "python", "Attribute `nothing` is not supported; correct the step"),
    ([{"python": "rules:last"}], "python", "Spark's operator Window is not allowed"),
    ([{"python": "rules:clean"}], "python", "column '_no' begins with '_'"),
    ([{"python": "rules:tydy"}], "python", "has no function 'tydy' (did you mean 'tidy'?)"),
    ([{"python": "ruls:tidy"}], "python", "there is no module 'ruls' (did you mean 'rules'?)"),
    (
        [{"derive": {"a": "id"}, "where": "true"}],
        "derive",
        "a step is exactly one of derive, where, rename, select, python",
    ),
    ([{"drive": {"a": "id"}}], "drive", "did you mean 'derive'?"),
]


def test_what_would_not_be_the_same_again_is_refused_with_its_line(shop):
    (shop.folder / "rules.py").write_text(RULES)
    (shop.folder / "helpers.py").write_text("")
    shop.add([(1, "", "a", "", 2, "book")])
    for steps, mark, reason in REFUSED:
        lines = shop.write(transform=steps)
        with pytest.raises(PipelineFileError) as error:
            run(shop.pipeline)
        message = str(error.value)
        assert any(part in message for part in reason.split("|")), f"{steps}: {message}"
        line = next(number for number, text in enumerate(lines, 1) if text.strip(" -").startswith(mark))
        assert f"line {line}, column" in message, f"{steps}: {message}"
    assert not (shop.folder / "w").exists()


def test_a_condition_that_fails_rejects_the_record(shop):
    steps = [{"rename": {"kind": "the `kind`.of"}}, {"where": "CAST(price AS int) / quantity > 1 AND id > 0"}]
    columns = {"select": ["id", "customer", "kind"]}
    shop.write(transform=[*steps, {"derive": {"kind": "upper(`the ``kind``.of`)"}}, columns])
    shop.add(
        [(1, "", "a", "x", 2, "map"), (2, "", "a", "7", 2, "map"), (3, "", "b", "7", 0, "b"), (4, "", "", "1", 2, "")]
    )
    result = run(shop.pipeline)
    assert [(row["id"], row["kind"]) for row in shop.read()] == [(2, "MAP")]
    assert [result.as_dict()[name] for name in ("rows_in", "loaded", "rejected", "filtered")] == [4, 1, 2, 1]
    errors = shop.read("facts_errors", "_record_number")
    assert [(row["_record_number"], row["record"]) for row in errors] == [(1, "1,,a,x,2,map"), (3, "3,,b,7,0,b")]
    assert [row["causes"][0]["value"] for row in errors] == [
        "id = 1, price = x, quantity = 2",
        "id = 3, price = 7, quantity = 0",
    ]
    assert all(row["reason"].startswith("transform.1.where: (((CAST(") for row in errors)


def test_a_column_that_is_never_null_is_null_in_rows_that_bypass_a_step(shop):
    (shop.folder / "rules.py").write_text(RULES)
    (shop.folder / "helpers.py").write_text("")
    shop.write(transform=[{"derive": {"price": "CAST(price AS int)"}}, {"python": "rules:chained"}])
    shop.add(
        [(1, "", "a", "x", 2, "map"), (2, "", "a", "7", 2, ""), (3, "", "b", "7", 0, "b"), ("z", "", "", "", "", "")]
    )
    result = run(shop.pipeline)
    assert [(row["id"], row["loud"], row["size"]) for row in shop.read()] == [(2, "NONE", 4)]
    assert [result.as_dict()[name] for name in ("rows_in", "loaded", "rejected", "filtered")] == [4, 1, 2, 1]


def test_expressions_follow_ansi_rules_whatever_the_session_says(shop, spark):
    spark.conf.set("spark.sql.ansi.enabled", "false")
    try:
        shop.write(transform=[{"derive": {"price": "CAST(price AS int)"}}])
        shop.add([(1, "", "a", "x", 2, "book"), (2, "", "a", "7", 2, "book")])
        result = run(shop.pipeline)
    finally:
        spark.conf.set("spark.sql.ansi.enabled", "true")
    assert [(row["id"], row["price"]) for row in shop.read()] == [(2, 7)]
    assert result.total("rejected") == 1
    (error,) = shop.read("facts_errors", "_record_number")
    assert error["reason"] == "price = x: transform.0.derive: CAST(price AS INT) fails for this record"


@pytest.fixture
def loaded(tmp_path):
    """Return a function that runs steps over JSON lines; it returns the facts and the causes, by the record's id."""

    def loads(schema, steps, lines, zone="UTC"):
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        source = {"format": "json", "path": "in", "schema": {"id": "int", **schema}, "time_zone": zone}
        document = {"name": "facts", "source": source, "transform": steps, "sink": {"path": "w/facts"}}
        (tmp_path / "pipeline.yml").write_text(yaml.safe_dump(document))
        run(tmp_path / "pipeline.yml")
        facts = DeltaTable(str(tmp_path / "w" / "facts")).to_pyarrow_table().to_pylist()
        errors = []
        if (tmp_path / "w" / "facts_errors").exists():
            errors = DeltaTable(str(tmp_path / "w" / "facts_errors")).to_pyarrow_table().to_pylist()
        causes = {json.loads(row["record"])["id"]: row["reason"] for row in errors}
        return {row["id"]: row for row in facts}, causes

    return loads


def test_what_is_not_a_finite_number_is_no_decimal(loaded):
    numbers = ["NaN", "inf", "-inf", 999.994, 999.995, 1e300, 1e-320, -0.125, 2.5e-3, None]
    lines = [{"id": at, "x": number, "f": number if at != 5 else 0} for at, number in enumerate(numbers)]
    derived = {
        "dec": "CAST(x AS decimal(5,2))",
        "list": "CAST(array(x) AS array<decimal(5,2)>)[0]",
        "other": "CAST(map(1, named_struct('a', f)) AS map<int, struct<a: decimal(5,2)>>)[1].a",
        "each": "transform(array(x), v -> CAST(v AS decimal(5,2)))[0]",
        "tried": "try_cast(x AS decimal(5,2))",
        "wide": "CAST(f AS decimal(20,15))",
    }
    steps = [{"derive": derived}]
    facts, causes = loaded({"x": "double", "f": "float"}, steps, lines)
    texts = {3: "999.99", 6: "0.00", 7: "-0.13", 8: "0.00"}
    assert {at: row["dec"] for at, row in facts.items()} == {9: None, **{at: Decimal(t) for at, t in texts.items()}}
    assert all(row["list"] == row["each"] == row["tried"] == row["other"] == row["dec"] for row in facts.values())
    assert facts[8]["wide"] == Decimal("0.002499999944121")
    assert set(causes) == {0, 1, 2, 4, 5}
    assert causes[0].startswith("dec = NaN: transform.0.derive: CAST(x AS DECIMAL(5,2)) fails for this record")
    assert causes[1].startswith("dec = Infinity: transform.0.derive: CAST(x AS DECIMAL(5,2)) fails for this record")
    assert "CAST(f AS DECIMAL(20,15)) fails for this record" in causes[0]


def test_a_cast_that_may_fail_is_null_for_what_is_not_a_finite_number(loaded):
    lines = [{"id": 1, "x": "NaN"}, {"id": 2, "x": "-inf"}, {"id": 3, "x": 1.25}]
    facts, causes = loaded({"x": "double"}, [{"derive": {"d": "try_cast(x AS decimal(5,2))"}}], lines)
    assert ({at: row["d"] for at, row in facts.items()}, causes) == ({1: None, 2: None, 3: Decimal("1.25")}, {})


def test_a_time_outside_the_years_1_to_9999_rejects_the_record(loaded):
    days = ["9999-12-31", "0001-01-01", "2024-02-28", "2024-02-28", "2024-02-28", None]
    moves = [1, -1, 2**31 - 1, -(2**31), 2, 1]
    lines = [{"id": at, "day": day, "i": move} for at, (day, move) in enumerate(zip(days, moves, strict=True))]
    nested = "named_struct('d', array(date_add(day, i), day))"
    steps = [
        {"derive": {"day": "day", "nested": nested, "at": "CAST(day AS timestamp) + make_interval(0, 0, 0, i)"}},
        {"derive": {"due": "nested.d[0]", "local": "CAST(day AS timestamp_ntz) + make_interval(0, 0, 0, i)"}},
        {"select": ["id", "due", "at", "local"]},
    ]
    facts, causes = loaded({"day": "date", "i": "int"}, steps, lines)
    due = dt.date(2024, 3, 1)
    local = dt.datetime.combine(due, dt.time())
    assert facts[4] == {"id": 4, "due": due, "at": local.replace(tzinfo=dt.UTC), "local": local, **_rest(facts[4])}
    assert (set(facts), set(causes), facts[5]["due"]) == ({4, 5}, {0, 1, 2, 3}, None)
    assert causes[0].startswith("at = +10000-01-01 00:00:00: transform.0.derive: ")
    assert causes[0].endswith(" is not within the years 1 to 9999")
    assert causes[1].startswith("at = 0000-12-31 00:00:00: transform.0.derive: ")
    assert "date_add(day, i)" in causes[2]
    assert "fails for this record" in causes[3]


def _rest(row):
    return {name: value for name, value in row.items() if name.startswith("_")}


def test_each_column_outside_the_years_is_named_up_to_the_last_microsecond(loaded):
    steps = [
        {"derive": {"date": "date_add(day, 1)", "literal": "if(id = 3, DATE'9999-12-31', day)"}},
        {"derive": {"at": "timestamp_micros(micros)", "text": "CAST(day AS string)"}},
        {"derive": {"moved": "to_utc_timestamp(at, 'Asia/Tokyo')"}},
    ]
    first, last = -62_135_596_800_000_000, 253_402_300_799_999_999
    hours = 9 * 3_600_000_000 + 1_139_000_000  # more than Tokyo's mean solar time was ahead of UTC
    times = [first + hours, last, last + 1, first - 1, first]
    lines = [{"id": at, "day": "2024-01-01", "micros": time} for at, time in enumerate(times)]
    lines.append({"id": 5, "day": "9999-12-31", "micros": 0})
    facts, causes = loaded({"day": "date", "micros": "bigint"}, steps, lines)
    assert (set(facts), set(causes)) == ({0, 1}, {2, 3, 4, 5})
    assert facts[1]["at"] == dt.datetime.max.replace(tzinfo=dt.UTC)
    assert causes[2].startswith(
        "at = +10000-01-01 00:00:00: transform.1.derive: timestamp_micros(micros) is not within"
    )
    assert causes[3].startswith("at = 0000-12-31 23:59:59.999999: transform.1.derive: timestamp_micros(micros) is not")
    assert causes[4].startswith("moved = 0000-12-31 ")
    assert causes[5] == ("date = +10000-01-01: transform.0.derive: date_add(day, 1) is not within the years 1 to 9999")


def test_a_constant_outside_the_years_and_a_day_that_wraps_around_reject_the_record(loaded):
    steps = [
        {"where": "i < 0 OR date_add(day, i) > day"},
        {"where": "i > 0 OR date_sub(day, i) > day"},
        {"derive": {"big": "if(i = 3, DATE'2024-01-01', NULL)"}},
        {"derive": {"end": "DATE'+10000-01-01'"}},
    ]
    moves = [2**31 - 1, -(2**31), -5, 3]
    lines = [{"id": at, "day": "2024-01-01", "i": move} for at, move in enumerate(moves)]
    facts, causes = loaded({"day": "date", "i": "int"}, steps, lines)
    assert (facts, set(causes)) == ({}, {0, 1, 2, 3})
    assert "transform.0.where: " in causes[0]
    assert "transform.1.where: " in causes[1]
    assert causes[0].endswith(" fails for this record")
    for at in (2, 3):
        assert causes[at] == (
            "end = +10000-01-01: transform.3.derive: DATE '+10000-01-01' is not within the years 1 to 9999"
        )


def test_expressions_read_local_times_in_utc_and_a_source_reads_them_in_its_zone(loaded):
    texts = ["2024-03-31 01:30", "2024-03-31 02:30", "2024-03-31 03:30"]
    lines = [{"id": at, "l": text, "at": text} for at, text in enumerate(texts)]
    lines += [{"id": 3, "l": texts[1], "at": texts[0]}]
    derived = {
        "cast": "CAST(l AS timestamp)",
        "moved": "to_utc_timestamp(l, 'Europe/Berlin')",
        "day": "CAST(from_utc_timestamp(at - interval 90 minutes, 'Europe/Berlin') AS date)",
    }
    steps = [{"derive": derived}]
    facts, causes = loaded({"l": "string", "at": "timestamp"}, steps, lines, zone="Europe/Berlin")
    told = {at: [row[name].strftime("%H:%M") for name in ("at", "cast", "moved")] for at, row in facts.items()}
    assert told == {0: ["00:30", "01:30", "00:30"], 2: ["01:30", "03:30", "01:30"], 3: ["00:30", "02:30", "01:30"]}
    assert [facts[at]["day"] for at in (0, 2)] == [dt.date(2024, 3, 31)] * 2
    assert set(causes) == {1}
    assert causes[1].startswith("at = 2024-03-31 02:30")
