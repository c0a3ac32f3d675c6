"""Partial changes and parents in pipeline files end in the same versions as the Python API's, whatever the loads."""

import contextlib
import copy
import datetime as dt
import random
import subprocess
import sys

import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable

from headrace.etl.history import Follow, HistoryDimension
from headrace.pipelines.changes import SnapshotOptions, apply_files, check_history
from headrace.pipelines.changes.repairing import RowRepair
from headrace.pipelines.config.history import history_of, references_of
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.delta.tables import DeltaHandle, open_table, read_rows
from headrace.pipelines.dimension import add_column
from headrace.pipelines.errors import DeltaTableError, PipelineFileError
from headrace.pipelines.history.layout import delta_schema
from headrace.pipelines.runner import run

DAYS = [dt.date(2024, 1, day) for day in range(1, 8)]
COMMON = {"effective": "since", "effective_type": "date", "sequence": "n", "operation": "op"}
CUSTOMER = {
    "path": "w/customer", "natural_key": ["id"], "columns": {"id": "bigint", "city": "string", "load": "bigint"},
    "history": {**COMMON, "audit": ["load"]}, "changes": "customers", "shards": 2,
}  # fmt: skip
ACCOUNT = {
    "path": "w/account", "natural_key": ["account"],
    "columns": {
        "account": "bigint", "name": "string", "kind": "string", "customer": "bigint", "customer_key": "bigint",
        "customer_from": "date", "customer_city": "string", "load": "bigint",
    },
    "history": {
        **COMMON, "audit": ["load"], "partial": "given",
        "parents": [
            {
                "dimension": "customer", "on": {"customer": "id"}, "audit": {"load": "load"},
                "carry": {"customer_key": "customer_key", "customer_from": "valid_from", "customer_city": "city"},
            }
        ],
    },
    "changes": "accounts", "shards": 2,
}  # fmt: skip
DOCUMENT = {
    "name": "bank",
    "source": {"format": "csv", "path": "in", "schema": {"order": "bigint", "account": "bigint", "day": "date"}},
    "dimensions": {"account": ACCOUNT, "customer": CUSTOMER},
    "lookups": [
        {"dimension": "account", "role": "account", "on": {"account": "account"}, "event_time": "day",
         "carry": ["customer", "customer_city"]}
    ],
    "sink": {"path": "w/facts"}, "memory": "16MiB", "replica_memory": "16MiB", "replicas": "replicas",
    "spark": {"master": "local[2,4]"},
}  # fmt: skip
CUSTOMERS = {
    "op": pa.string(),
    "id": pa.int64(),
    "city": pa.string(),
    "load": pa.int64(),
    "since": pa.date32(),
    "n": pa.int64(),
}
ACCOUNTS = {
    "op": pa.string(), "account": pa.int64(), "name": pa.string(), "kind": pa.string(), "customer": pa.int64(),
    "load": pa.int64(), "since": pa.date32(), "n": pa.int64(), "given": pa.list_(pa.string()),
}  # fmt: skip
SHOWN = [
    "account",
    "name",
    "kind",
    "customer",
    "customer_from",
    "customer_city",
    "load",
    "valid_from",
    "valid_to",
    "is_current",
    "version",
    "is_deleted",
]


class Bank:
    """A pipeline file with a parent and its child, and the same dimensions of the Python API."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("in", "customers", "accounts"):
            (folder / name).mkdir()
        (folder / "bank.yml").write_text(yaml.safe_dump(DOCUMENT))
        self.config = load_pipeline(folder / "bank.yml")
        (self.reference,) = references_of(self.config, "account")
        self.customers = HistoryDimension.create(folder / "api" / "customer", self.reference.parent)
        self.accounts = HistoryDimension.create(folder / "api" / "account", self.reference.child)
        self.load = 0

    def give(self, customers, accounts):
        """Apply one load to the dimensions of the Python API, and write it as files."""
        self.load += 1
        tables = []
        for rows, kinds in ((customers, CUSTOMERS), (accounts, ACCOUNTS)):
            columns = {name: [row[name] for row in rows] for name in kinds}
            tables.append(pa.table(columns, schema=pa.schema(list(kinds.items()))))
        self.customers.apply_changes(tables[0])
        # The number of a cascade is only compared with those of other cascades.
        follow = Follow(self.reference, self.customers, tables[0], 1000 + self.load)
        self.accounts.apply_changes(tables[1], follow=follow)
        for name, rows, kinds in (("customers", customers, CUSTOMERS), ("accounts", accounts, ACCOUNTS)):
            if rows:
                lines = [",".join(kinds), *(",".join(text(row[name]) for name in kinds) for row in rows)]
                (self.folder / name / f"{self.load}.csv").write_text("\n".join(lines) + "\n")

    def apply(self, name, folder, **options):
        if any((self.folder / folder).iterdir()):
            return apply_files(self.config, name, self.folder / folder, **options)
        return None

    def expected(self):
        return sorted(map(repr, self.accounts.versions(special=False).select(SHOWN).to_pylist()))

    def versions(self, name):
        table = DeltaTable(str(self.folder / "w" / name))
        return [
            row
            for row in read_rows(
                table.table_uri[7:],
                open_table(table.table_uri[7:]).version(),
                [field.name for field in table.schema().fields],
            )
            .read_all()
            .to_pylist()
            if row[f"{name}_key"] > 0
        ]

    def found(self):
        """Return the versions, whose surrogate keys of customers must be those of the customers' versions."""
        keys = {row["customer_key"]: (row["id"], row["valid_from"], row["city"]) for row in self.versions("customer")}
        rows = self.versions("account")
        for row in rows:
            named = (row["customer"], row["customer_from"], row["customer_city"])
            assert keys.get(row["customer_key"], named) == named
            assert (row["customer_key"] is None) == (row["customer_from"] is None)
        return sorted(repr({name: row[name] for name in SHOWN}) for row in rows)


def text(value):
    if isinstance(value, list):
        return f'"{", ".join(value)}"'
    return "" if value is None else str(value)


def random_load(rng, number):
    def common():
        return {"op": rng.choice("UUUD"), "since": rng.choice(DAYS), "n": rng.randrange(4), "load": number}

    customers = [{"id": rng.randrange(3), "city": rng.choice("xyz"), **common()} for _ in range(rng.randrange(4))]
    lists = (None, None, ["name"], ["customer", "load"], ["kind", "load"], ["name", "kind"])
    accounts = [
        {"account": rng.randrange(4), "name": rng.choice("pq"), "kind": rng.choice("rs"), "customer": rng.randrange(3),
         "given": rng.choice(lists), **common()}
        for _ in range(rng.randrange(4))
    ]  # fmt: skip
    return customers, accounts


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed else ()) for seed in range(6)])
def test_loads_in_any_cut_end_in_the_versions_of_the_python_api(tmp_path, seed):
    rng, bank = random.Random(seed), Bank(tmp_path)
    for number in range(1, 6):
        bank.give(*random_load(rng, number))
        if rng.random() < 0.6:
            bank.apply("customer", "customers")
        if rng.random() < 0.6:
            bank.apply("account", "accounts")
    bank.apply("customer", "customers")
    bank.apply("account", "accounts")
    assert bank.found() == bank.expected()
    for name in ("customer", "account"):
        assert check_history(bank.config, name) == []


def steps_of(bank):
    """Return the steps of applying a load to both dimensions."""
    steps = []
    bank.apply("customer", "customers", hook=steps.append)
    bank.apply("account", "accounts", hook=steps.append)
    return steps


def customer(number, city, since, n):
    return {"op": "U", "id": number, "city": city, "since": dt.date(2024, 1, since), "n": n, "load": n}


def account(number, name, owner, since, n, given=None):
    row = {"op": "U", "account": number, "name": name, "kind": "r", "customer": owner, "n": n, "load": n}
    return {**row, "since": dt.date(2024, 1, since), "given": given}


def two_loads(bank):
    yield bank.give(
        [customer(1, "x", 1, 1), customer(2, "y", 1, 2)], [account(5, "p", 1, 2, 1), account(6, "q", 2, 2, 2)]
    )
    yield bank.give([customer(1, "z", 4, 3)], [account(6, "s", 1, 5, 3, ["name", "customer"])])


class CrashError(Exception):
    """The end of a process."""


def test_a_run_that_ends_at_any_step_is_continued(tmp_path):
    (tmp_path / "whole").mkdir()
    whole = Bank(tmp_path / "whole")
    steps = [steps_of(whole) for _ in two_loads(whole)][1]
    assert whole.found() == whole.expected()
    (tmp_path / "killed").mkdir()
    killed = Bank(tmp_path / "killed")
    waiting = list(range(len(steps)))

    def crash(_step):
        count[0] += 1
        if waiting and count[0] > waiting[0]:
            waiting.pop(0)
            raise CrashError

    for number, _ in enumerate(two_loads(killed)):
        if number == 0:
            steps_of(killed)
            continue
        while waiting:
            count = [0]
            try:
                killed.apply("customer", "customers", hook=crash)
                killed.apply("account", "accounts", hook=crash)
            except CrashError:
                continue
            break
    steps_of(killed)
    assert killed.found() == killed.expected() == whole.expected()
    assert check_history(killed.config, "account") == []


def test_children_follow_when_changes_of_the_parent_are_applied(tmp_path):
    bank = Bank(tmp_path)
    for _ in two_loads(bank):
        bank.apply("customer", "customers")
        result = bank.apply("account", "accounts")
    bank.give([customer(1, "w", 6, 4)], [])
    result = bank.apply("customer", "customers")
    assert result.as_dict()["followed"] == {"account": {"versioned": 2}}
    assert bank.found() == bank.expected()
    version = open_table(str(tmp_path / "w" / "account")).version()
    assert bank.apply("account", "accounts").batches == ()
    assert open_table(str(tmp_path / "w" / "account")).version() == version


def test_a_snapshot_of_children_has_no_columns_of_their_parents(tmp_path):
    bank = Bank(tmp_path)
    for _ in two_loads(bank):
        steps_of(bank)
    (tmp_path / "all.csv").write_text("account,name,kind,customer,load\n6,s,r,2,9\n")
    apply_files(bank.config, "account", tmp_path / "all.csv", snapshot=SnapshotOptions("2024-01-06", "9", "delete"))
    rows = [row for row in bank.versions("account") if row["is_current"]]
    found = {row["account"]: (row["customer"], row["customer_city"], row["is_deleted"]) for row in rows}
    assert found == {5: (1, "z", True), 6: (2, "y", False)}
    bank.found()  # the surrogate keys are those of the versions


def test_a_change_that_lists_what_it_cannot_give_is_rejected(tmp_path):
    bank = Bank(tmp_path)
    (tmp_path / "customers" / "1.csv").write_text("op,id,city,load,since,n\nU,1,x,1,2024-01-01,1\n")
    head = "op,account,name,kind,customer,load,since,n,given"
    lines = [
        "U,5,p,r,1,1,2024-01-01,1,name|customer",
        "U,5,p,r,1,1,2024-01-02,2,customer_city",
        "U,5,,,,,2024-01-03,3,nam",
    ]
    (tmp_path / "accounts" / "1.csv").write_text("\n".join([head, *lines]) + "\n")
    steps_of(bank)
    (row,) = bank.versions("account")
    assert (row["name"], row["kind"], row["customer"], row["customer_city"]) == ("p", None, 1, "x")
    errors = DeltaTable(str(tmp_path / "w" / "account_errors")).to_pyarrow_table().to_pylist()
    assert sorted(each["_record_number"] for each in errors) == [2, 3]
    assert all("'given' names what is no attribute" in each["causes"][0]["reason"] for each in errors)


@pytest.mark.spark
def test_a_run_applies_parents_first_and_facts_meet_what_followed(tmp_path, spark):  # noqa: ARG001 - the session
    bank = Bank(tmp_path)
    (tmp_path / "in" / "1.csv").write_text("order,account,day\n1,5,2024-01-03\n2,5,2024-01-05\n3,6,2024-01-06\n")
    for _ in two_loads(bank):
        pass
    run(tmp_path / "bank.yml")
    assert bank.found() == bank.expected()
    rows = DeltaTable(str(tmp_path / "w" / "facts")).to_pyarrow_table().to_pylist()
    found = {row["order"]: (row["account_customer"], row["account_customer_city"]) for row in rows}
    assert found == {1: (1, "x"), 2: (1, "z"), 3: (1, "z")}
    bank.give([customer(1, "w", 6, 4)], [])
    (tmp_path / "in" / "2.csv").write_text("order,account,day\n4,5,2024-01-06\n")
    result = run(tmp_path / "bank.yml")
    assert result.changes == {"customer": {"versioned": 1}, "account": {"versioned": 2}}
    assert bank.found() == bank.expected()
    rows = DeltaTable(str(tmp_path / "w" / "facts")).to_pyarrow_table().to_pylist()
    assert {row["order"]: row["account_customer_city"] for row in rows}[4] == "w"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda history: history["parents"][0].update(dimension="buyer"), "no dimension 'buyer'"),
        (lambda history: history.pop("partial"), "the child needs `partial` and `sequence`"),
        (lambda history: history["parents"][0]["carry"].update(name="town"), "the parent has no column 'town'"),
        (lambda history: history["parents"].append(history["parents"][0]), "repeats two columns"),
        (lambda history: history["parents"][0].update(dimension="account"), "parents of each other: account"),
        (lambda history: history.update(sequence_type="smallint"), "at least four bytes"),
    ],
)  # fmt: skip
def test_parents_that_do_not_fit_are_refused(tmp_path, change, says):
    document = copy.deepcopy(DOCUMENT)
    change(document["dimensions"]["account"]["history"])
    (tmp_path / "bank.yml").write_text(yaml.safe_dump(document))
    with pytest.raises(PipelineFileError, match=says):
        load_pipeline(tmp_path / "bank.yml")


def test_a_member_that_repeats_something_else_is_found(tmp_path):
    bank = Bank(tmp_path)
    for _ in two_loads(bank):
        steps_of(bank)
    assert check_history(bank.config, "account") == []
    damage(bank, "account", lambda row: row["account"] == 5 and row["is_current"], customer_city="elsewhere")
    rules = {finding.rule for finding in check_history(bank.config, "account")}
    assert "members repeat the columns of their parents' versions" in rules


def damage(bank, name, chosen, **values):
    history = history_of(bank.config, name)
    schema, path = delta_schema(history), str(bank.folder / "w" / name)
    (row,) = (each for each in bank.versions(name) if chosen(each))
    entries = [
        {**each, **{f"_recorded_{key}": value for key, value in values.items()}} for each in row["_entries"] or ()
    ]
    handle = DeltaHandle(path)
    handle.latest()
    repair = RowRepair(history, handle)
    new = {**row, **values, "_entries": entries or None}
    repair.add(pa.Table.from_pylist([row], schema), pa.Table.from_pylist([new], schema))
    repair.commit(handle.table.version(), {})


def test_an_attribute_that_entries_would_record_is_not_added(tmp_path):
    bank = Bank(tmp_path)
    for _ in two_loads(bank):
        steps_of(bank)
    document = copy.deepcopy(DOCUMENT)
    document["dimensions"]["account"]["columns"]["more"] = "string"
    (tmp_path / "bank.yml").write_text(yaml.safe_dump(document))
    config, path = load_pipeline(tmp_path / "bank.yml"), str(tmp_path / "w" / "account")
    version = open_table(path).version()
    with pytest.raises(DeltaTableError, match="make the dimension again from all changes"):
        add_column(config, "account", "more", "string")
    with pytest.raises(DeltaTableError, match=r"was made with types .* and the declaration says"):
        apply_files(config, "account", tmp_path / "accounts", again=True)
    document["dimensions"]["account"]["columns"].pop("more")
    document["dimensions"]["account"]["history"].pop("partial")
    document["dimensions"]["account"]["history"].pop("parents")
    (tmp_path / "bank.yml").write_text(yaml.safe_dump(document))
    with pytest.raises(DeltaTableError, match="was made with partial True, and the declaration says False"):
        apply_files(load_pipeline(tmp_path / "bank.yml"), "account", tmp_path / "accounts", again=True)
    assert open_table(path).version() == version
    assert check_history(bank.config, "account") == []


APPLYING = """
import sys
from pathlib import Path
from headrace.pipelines.changes import apply_files
from headrace.pipelines.config.model import load_pipeline

config = load_pipeline(sys.argv[1])
print("begins", flush=True)
for name, folder in zip(sys.argv[2::2], sys.argv[3::2]):
    for file in sorted(Path(folder).iterdir(), key=lambda path: int(path.stem)):
        apply_files(config, name, file)
"""


def applying(pipeline, *arguments):
    command = [sys.executable, "-c", APPLYING, str(pipeline), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_two_hosts_without_a_common_catalog_apply_parents_and_children_at_once(tmp_path, seed):
    rng, bank = random.Random(seed), Bank(tmp_path)
    for number in range(1, 7):
        bank.give(*random_load(rng, number))
    running = []
    for host, arguments in enumerate((("customer", tmp_path / "customers"), ("account", tmp_path / "accounts"))):
        own = {
            "replicas": f"replicas{host}",
            "catalog": f"sqlite:///{tmp_path}/{host}.db",
            "checkpoint": f"state{host}",
        }
        (tmp_path / f"{host}.yml").write_text(yaml.safe_dump({**DOCUMENT, **own}))
        running.append(applying(tmp_path / f"{host}.yml", *arguments))
    for process in running:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
    steps_of(bank)
    assert bank.found() == bank.expected()
    assert check_history(bank.config, "account") == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_processes_lose_and_double_nothing(tmp_path, seed):
    rng, bank = random.Random(seed), Bank(tmp_path)
    for number in range(1, 5):
        bank.give(*random_load(rng, number))
        for _ in range(3):
            both = ("customer", tmp_path / "customers", "account", tmp_path / "accounts")
            process = applying(tmp_path / "bank.yml", *both)
            process.stdout.readline()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=rng.uniform(0, 3))
            process.kill()
            process.communicate()
    steps_of(bank)
    assert bank.found() == bank.expected()
    assert check_history(bank.config, "account") == []
