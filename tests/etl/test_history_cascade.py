"""Cascades against an oracle that joins children with the versions of their parents one day at a time."""

import datetime as dt

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.etl import Dimension, KeyAllocator
from headrace.etl.errors import DeclarationError
from headrace.etl.history import Follow, History, HistoryDimension, Reference, apply_changes, cascade

CUSTOMER = History(
    Dimension("customer", ("id",), "customer_key", pa.schema([("id", pa.int64()), ("city", pa.string())])),
    effective="since",
    effective_type=pa.date32(),
    sequence="n",
    operation="op",
)
ACCOUNT = History(
    Dimension(
        "account",
        ("account",),
        "account_key",
        pa.schema(
            [
                ("account", pa.int64()),
                ("name", pa.string()),
                ("customer", pa.int64()),
                ("customer_key", pa.int64()),
                ("customer_from", pa.date32()),
                ("load", pa.int64()),
            ]
        ),
    ),
    effective="since",
    effective_type=pa.date32(),
    sequence="n",
    operation="op",
    partial="given",
    audit="load",
)
REFERENCE = Reference(
    ACCOUNT, CUSTOMER, {"customer": "id"}, {"customer_key": "customer_key", "customer_from": "valid_from"}
)
DAYS = [dt.date(2024, 1, day) for day in range(1, 7)]
CUSTOMERS = pa.schema(
    [("id", pa.int64()), ("city", pa.string()), ("since", pa.date32()), ("n", pa.int64()), ("op", pa.string())]
)
ACCOUNTS = pa.schema(
    [
        ("account", pa.int64()),
        ("name", pa.string()),
        ("customer", pa.int64()),
        ("load", pa.int64()),
        ("since", pa.date32()),
        ("n", pa.int64()),
        ("op", pa.string()),
        ("given", pa.list_(pa.string())),
    ]
)

common = {"since": st.sampled_from(DAYS), "n": st.integers(0, 3)}
parent = st.fixed_dictionaries(
    {"id": st.integers(0, 2), "city": st.sampled_from("xyz"), "op": st.sampled_from("UUUD"), **common}
)
child = st.fixed_dictionaries(
    {
        "account": st.integers(0, 2),
        "name": st.sampled_from("pq"),
        "customer": st.integers(0, 2),
        "load": st.just(0),
        "op": st.sampled_from("UUUD"),
        "given": st.none() | st.just(["name", "load"]),
        **common,
    }
)
loads = st.lists(st.tuples(st.lists(parent, max_size=4), st.lists(child, max_size=3)), min_size=1, max_size=4)


class Kept:
    """Entries of one dimension."""

    def __init__(self, history):
        self.history = history
        self.entries = history.entry_schema.empty_table()
        self.base = 0

    def apply(self, table):
        applied = apply_changes(self.history, self.entries, table, KeyAllocator(self.base))
        self.base += applied.new_keys
        key = self.history.entry_key
        entries = {tuple(row[name] for name in key): row for row in self.entries.to_pylist()}
        entries |= {tuple(row[name] for name in key): row for row in applied.upserts.to_pylist()}
        self.entries = pa.Table.from_pylist(list(entries.values()), self.history.entry_schema)
        return applied

    def versions(self):
        heads = [row for row in self.entries.to_pylist() if row["_at"] == row["valid_from"]]
        return pa.Table.from_pylist(heads, self.history.entry_schema).select(self.history.version_schema.names)


def load(customers, accounts, number, parents, children):
    customers.apply(pa.Table.from_pylist(parents, CUSTOMERS))
    changes = pa.Table.from_pylist([{**row, "load": number} for row in children], ACCOUNTS)
    caused = cascade(
        REFERENCE, accounts.entries, changes, customers.versions(), sequence=number, audit={"load": number}
    )
    return accounts.apply(caused)


def rank(row):
    return (row["op"] == "D", row["city"])


def customer_versions(changes, member):
    """Return (start, deleted, city) of the versions of a customer."""
    by_day = {}
    for row in (row for row in changes if row["id"] == member):
        best = by_day.get(row["since"])
        if best is None or (-row["n"], rank(row)) < (-best["n"], rank(best)):
            by_day[row["since"]] = row
    runs = []
    for day in sorted(by_day):
        state = "D" if by_day[day]["op"] == "D" else by_day[day]["city"]
        if not runs or runs[-1][1] != state:
            runs.append((day, state))
    return runs


def own_states(changes, account):
    """Return (day, deleted, name, customer) after each day on which the account itself changes."""
    days = {}
    for row in (row for row in changes if row["account"] == account):
        said = {"deleted": row["op"] == "D"}
        if row["op"] != "D":
            said |= {"name": row["name"]} | ({"customer": row["customer"]} if row["given"] is None else {})
        registers = days.setdefault(row["since"], {})
        for name, value in said.items():
            if name not in registers or (-row["n"], value) < (-registers[name][0], registers[name][1]):
                registers[name] = (row["n"], value)
    state, found = {"deleted": False, "name": None, "customer": None}, []
    for day in sorted(days):
        state = state | {name: value for name, (_, value) in days[day].items()}
        found.append((day, state))
    return found


def expected_accounts(parents, children):
    expected = []
    for account in sorted({row["account"] for row in children}):
        own = own_states(children, account)
        shown = []
        for day in (day for day in DAYS if day >= own[0][0]):
            state = [state for since, state in own if since <= day][-1]
            starts = [start for start, _ in customer_versions(parents, state["customer"]) if start <= day]
            changed = day in [since for since, _ in own] or (starts and starts[-1] == day)
            refers = starts[-1] if starts else None
            visible = "deleted" if state["deleted"] else (state["name"], state["customer"], refers)
            if changed and (not shown or shown[-1][0] != visible):
                shown.append((visible, day, state, refers))
        for number, (_, day, state, refers) in enumerate(shown):
            expected.append((account, number + 1, day, state["deleted"], state["name"], state["customer"], refers))
    return expected


def found_accounts(versions):
    names = ["account", "version", "valid_from", "is_deleted", "name", "customer", "customer_from"]
    return sorted(tuple(row[name] for name in names) for row in versions.to_pylist())


def check_keys(accounts, customers):
    """Check that each account refers to the surrogate key of the version that it names."""
    key_of = {(row["id"], row["valid_from"]): row["customer_key"] for row in customers.to_pylist()}
    for row in accounts.to_pylist():
        assert row["customer_key"] == key_of.get((row["customer"], row["customer_from"]))


@settings(deadline=None, max_examples=30)
@given(loads)
def test_versions_of_children_are_those_of_the_oracle(given_loads):
    customers, accounts = Kept(CUSTOMER), Kept(ACCOUNT)
    for number, (parents, children) in enumerate(given_loads):
        load(customers, accounts, number, parents, children)
    parents = [row for batch, _ in given_loads for row in batch]
    children = [row for _, batch in given_loads for row in batch]
    assert found_accounts(accounts.versions()) == expected_accounts(parents, children)
    check_keys(accounts.versions(), customers.versions())


@settings(deadline=None, max_examples=20)
@given(loads)
def test_a_load_repeated_changes_nothing(given_loads):
    customers, accounts = Kept(CUSTOMER), Kept(ACCOUNT)
    for number, (parents, children) in enumerate(given_loads):
        load(customers, accounts, number, parents, children)
        again = load(customers, accounts, number, parents, children)
        assert again.upserts.num_rows == again.retired.num_rows == 0


@settings(deadline=None, max_examples=10)
@given(given_loads=loads)
def test_the_store_finds_the_children_of_changed_parents(tmp_path_factory, given_loads):
    folder = tmp_path_factory.mktemp("store")
    options = {"memory": "16MiB"}
    with (
        HistoryDimension.create(folder / "customer", CUSTOMER, **options) as customers,
        HistoryDimension.create(folder / "account", ACCOUNT, **options) as accounts,
    ):
        for number, (parents, children) in enumerate(given_loads):
            changed = pa.Table.from_pylist(parents, CUSTOMERS)
            customers.apply_changes(changed)
            own = pa.Table.from_pylist([{**row, "load": number} for row in children], ACCOUNTS)
            accounts.apply_changes(own, follow=Follow(REFERENCE, customers, changed, number, {"load": number}))
        parents = [row for batch, _ in given_loads for row in batch]
        children = [row for _, batch in given_loads for row in batch]
        versions = accounts.versions(special=False)
        assert found_accounts(versions) == expected_accounts(parents, children)
        check_keys(versions, customers.versions(special=False))
        assert accounts.check() == ()


def test_a_change_on_the_day_of_the_parents_version_makes_one_version():
    customers, accounts = Kept(CUSTOMER), Kept(ACCOUNT)
    first = {"id": 1, "city": "x", "since": DAYS[0], "n": 1, "op": "U"}
    account = {"account": 5, "name": "p", "customer": 1, "since": DAYS[0], "n": 1, "op": "U", "given": None}
    load(customers, accounts, 1, [first], [account])
    moved, renamed = first | {"city": "y", "since": DAYS[3], "n": 2}, account | {"name": "q", "since": DAYS[3], "n": 9}
    load(customers, accounts, 2, [moved], [renamed])
    rows = accounts.versions().sort_by("valid_from").to_pylist()
    assert [(row["valid_from"], row["name"], row["customer_from"], row["load"]) for row in rows] == [
        (DAYS[0], "p", DAYS[0], 1),
        (DAYS[3], "q", DAYS[3], 2),
    ]


def test_a_version_that_only_the_cascade_opens_has_its_audit_values():
    customers, accounts = Kept(CUSTOMER), Kept(ACCOUNT)
    first = {"id": 1, "city": "x", "since": DAYS[0], "n": 1, "op": "U"}
    account = {"account": 5, "name": "p", "customer": 1, "since": DAYS[0], "n": 1, "op": "U", "given": None}
    load(customers, accounts, 1, [first], [account])
    load(customers, accounts, 2, [first | {"city": "y", "since": DAYS[3], "n": 2}], [])
    assert accounts.versions().sort_by("valid_from").column("load").to_pylist() == [1, 2]


def test_changes_do_not_set_what_follows_from_the_parent():
    changes = pa.table({"account": [1], "customer_key": [4], "since": [DAYS[0]], "n": [1], "op": ["U"]})
    with pytest.raises(DeclarationError, match="'customer_key', which follows from 'customer'"):
        cascade(
            REFERENCE, ACCOUNT.entry_schema.empty_table(), changes, CUSTOMER.version_schema.empty_table(), sequence=1
        )


def test_a_cascade_with_an_old_sequence_is_refused():
    customers, accounts = Kept(CUSTOMER), Kept(ACCOUNT)
    first = {"id": 1, "city": "x", "since": DAYS[1], "n": 1, "op": "U"}
    account = {"account": 5, "name": "p", "customer": 1, "since": DAYS[1], "n": 1, "op": "U", "given": None}
    load(customers, accounts, 2, [first], [account])
    with pytest.raises(DeclarationError, match="an earlier cascade has the sequence 2"):
        load(customers, accounts, 2, [first | {"since": DAYS[0], "n": 2}], [])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"on": {"customer": "city"}}, "all columns of the parent's natural key"),
        ({"carry": {"customer_key": "colour"}}, "the parent has no column 'colour'"),
        ({"carry": {"load": "customer_key"}}, "no attribute 'load' of type 2"),
        ({"carry": {"customer_key": "valid_from"}}, "has type int64"),
        ({"child": CUSTOMER}, "needs `partial` and `sequence`"),
    ],
)
def test_a_reference_that_does_not_fit_is_refused(changed, message):
    fields = {"child": ACCOUNT, "parent": CUSTOMER, "on": REFERENCE.on, "carry": REFERENCE.carry}
    with pytest.raises(DeclarationError, match=message):
        Reference(**(fields | changed))
