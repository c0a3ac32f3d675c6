"""Generates a brokerage's batches from a seed, in the shape of TPC-DI but without its data.

    python -m headrace.samples.brokerage.generate FOLDER --seed 1 --customers 40

The records are random, and the corners are frequent: several changes of a customer on one day, some of which take each
other back, elements that are there but blank, accounts that change hands, customers who become inactive, orders that
are created in one batch and end in a later one, watches placed again, events at midnight.
"""

from __future__ import annotations

import argparse
import datetime as dt
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape, quoteattr

__all__ = ["generate"]

BEGIN: Final = dt.datetime(2015, 1, 1)  # noqa: DTZ001 - the sources have no time zone
FIRST_DAY: Final = dt.date(2017, 7, 7)
FAMILY: Final = ("Okafor", "D'Souza", "Núñez", "van der Berg", "Smith & Co", "<Li>")
GIVEN: Final = ("Ada", "Zoë", "Tariq", "Mei", "Sven")
GENDERS: Final = ("M", "F", "m", "f", "X", "", "U")
BROKERS: Final = tuple(range(0, 60, 4))
STATUSES: Final = "ACTV|Active\nCMPT|Completed\nCNCL|Canceled\nPNDG|Pending\nSBMT|Submitted\nINAC|Inactive\n"
TRADE_TYPES: Final = (
    "TMB|Market Buy|0|1\nTMS|Market Sell|1|1\nTSL|Stop Loss|1|0\nTLS|Limit Sell|1|0\nTLB|Limit Buy|0|0\n"
)
PARTS: Final = {
    "tax_id": "C_TAX_ID",
    "gender": "C_GNDR",
    "tier": "C_TIER",
    "dob": "C_DOB",
    "last": "Name/C_L_NAME",
    "first": "Name/C_F_NAME",
    "middle": "Name/C_M_NAME",
    "line1": "Address/C_ADLINE1",
    "line2": "Address/C_ADLINE2",
    "zip": "Address/C_ZIPCODE",
    "city": "Address/C_CITY",
    "state": "Address/C_STATE_PROV",
    "country": "Address/C_CTRY",
    "email1": "ContactInfo/C_PRIM_EMAIL",
    "email2": "ContactInfo/C_ALT_EMAIL",
    **{
        f"{part}{n}": f"ContactInfo/C_PHONE_{n}/{tag}"
        for n in (1, 2, 3)
        for part, tag in (("cc", "C_CTRY_CODE"), ("area", "C_AREA_CODE"), ("local", "C_LOCAL"), ("ext", "C_EXT"))
    },
    "local_tax": "TaxInfo/C_LCL_TX_ID",
    "national_tax": "TaxInfo/C_NAT_TX_ID",
}
ROW: Final = (
    *("tax_id", "status", "last", "first", "middle", "gender", "tier", "dob", "line1", "line2", "zip", "city"),
    *("state", "country"),
    *(f"{part}{n}" for n in (1, 2, 3) for part in ("cc", "area", "local", "ext")),
    *("email1", "email2", "local_tax", "national_tax"),
)


@dataclass
class _Trade:
    number: int
    kind: str
    symbol: str
    account: int
    quantity: int
    bid: str
    by: str
    cash: str
    status: str


@dataclass
class _Brokerage:
    """State of the brokerage while its batches are generated."""

    rng: random.Random
    customers: dict[int, dict[str, str]] = field(default_factory=dict)
    accounts: dict[int, dict[str, Any]] = field(default_factory=dict)
    securities: list[str] = field(default_factory=list)
    trades: dict[int, _Trade] = field(default_factory=dict)
    watched: set[tuple[int, str]] = field(default_factory=set)
    holdings: int = 0
    files: dict[str, list[str]] = field(default_factory=dict)
    batch: int = 1
    number: int = 0

    def write(self, name: str, *fields: Any, flag: str = "I") -> None:
        """Write a record, after the history with the fields of change data capture."""
        self.number += 1
        captured = [] if self.batch == 1 else [flag, self.number]
        self.files.setdefault(name, []).append("|".join(map(str, [*captured, *fields])))

    # Customers and accounts

    def blank(self, value: str) -> str:
        return "" if self.rng.random() < 0.3 else value

    def new_value(self, name: str) -> str:
        rng, number = self.rng, self.rng.randrange(10**5)
        values = {
            "gender": rng.choice(GENDERS),
            "tier": str(rng.randint(1, 3)),
            "dob": str(dt.date(1930, 1, 1) + dt.timedelta(rng.randrange(25_000))),
            "last": f"{rng.choice(FAMILY)}-{number}",
            "first": rng.choice(GIVEN),
            "zip": f"{number:05}",
            "line1": f"{number} Main St",
        }
        if name in values:
            return values[name]
        return self.blank(f"{number:05}" if name[:-1] in {"cc", "area", "local", "ext"} else f"{name} {number}")

    def new_customer(self) -> int:
        customer = len(self.customers)
        self.customers[customer] = {name: self.new_value(name) for name in ROW} | {"status": "ACTV"}
        return customer

    def new_account(self, customer: int) -> int:
        account = len(self.accounts)
        self.accounts[account] = {
            "customer": customer,
            "broker": self.rng.choice(BROKERS),
            "name": f"Acct {account} <{self.rng.choice(GIVEN)}> & Co",
            "tax": self.rng.randrange(3),
            "status": "ACTV",
        }
        return account

    def action(self, kind: str, at: dt.datetime, customer: int, given: dict[str, str], account: str = "") -> None:
        tree: dict[str, Any] = {}
        attributes = f" C_ID={quoteattr(str(customer))}"
        for name, value in given.items():
            *path, tag = PARTS[name].split("/")
            if not path:
                attributes += f" {tag}={quoteattr(value)}"
                continue
            node = tree
            for step in path:
                node = node.setdefault(step, {})
            node[tag] = value
        self.files["CustomerMgmt.xml"].append(
            f"<TPCDI:Action ActionType={quoteattr(kind)} ActionTS={quoteattr(at.isoformat())}>"
            f"<Customer{attributes}>{_elements(tree)}{account}</Customer></TPCDI:Action>"
        )

    def account_element(self, account: int, *given: str) -> str:
        row = self.accounts[account]
        tax = f' CA_TAX_ST="{row["tax"]}"' if "tax" in given else ""
        tags = {"broker": "CA_B_ID", "name": "CA_NAME"}
        inner = _elements({tag: str(row[name]) for name, tag in tags.items() if name in given})
        return f'<Account CA_ID="{account}"{tax}>{inner}</Account>'

    def open_customer(self, at: dt.datetime) -> None:
        customer = self.new_customer()
        account = self.account_element(self.new_account(customer), "tax", "broker", "name")
        given = {name: value for name, value in self.customers[customer].items() if name != "status"}
        self.action("NEW", at, customer, given, account)

    def update_customer(self, at: dt.datetime, customer: int) -> None:
        """Change some attributes; a second change of the day may take the first one back."""
        state = self.customers[customer]
        names = self.rng.sample(sorted(PARTS), self.rng.randint(1, 4))
        before = {name: state[name] for name in names}
        given = {name: self.new_value(name) for name in names}
        state |= given
        self.action("UPDCUST", at, customer, given)
        if self.rng.random() < 0.2 and at.time() < dt.time(23, 0):
            state |= before
            self.action("UPDCUST", at + dt.timedelta(minutes=self.rng.randrange(2)), customer, before)

    def act(self, at: dt.datetime) -> None:
        """Write one action of the history."""
        rng = self.rng
        customer = rng.choice([number for number, state in self.customers.items() if state["status"] == "ACTV"])
        mine = [n for n, row in self.accounts.items() if row["customer"] == customer and row["status"] == "ACTV"]
        kind = rng.choices(["UPDCUST", "ADDACCT", "UPDACCT", "CLOSEACCT", "INACT"], [50, 15, 25, 6, 3])[0]
        if kind == "UPDCUST":
            self.update_customer(at, customer)
        elif kind == "ADDACCT":
            account = self.new_account(customer)
            self.action(kind, at, customer, {}, self.account_element(account, "tax", "broker", "name"))
        elif kind == "INACT" and sum(state["status"] == "ACTV" for state in self.customers.values()) > 3:
            self.customers[customer]["status"] = "INAC"
            self.action(kind, at, customer, {})
        elif kind == "UPDACCT" and mine:
            account = rng.choice(mine)
            self.accounts[account] |= {"tax": rng.randrange(3), "broker": rng.choice(BROKERS), "name": f"Renamed {at}"}
            given = rng.sample(["tax", "broker", "name"], rng.randint(1, 3))
            self.settle_account(account, given)
            self.action(kind, at, customer, {}, self.account_element(account, *given))
        elif kind == "CLOSEACCT" and mine:
            account = rng.choice(mine)
            self.accounts[account]["status"] = "INAC"
            self.action(kind, at, customer, {}, self.account_element(account))

    def settle_account(self, account: int, given: list[str]) -> None:
        """Keep only the given new values of an account, so that later full rows start from what was said."""
        row = self.accounts[account]
        said = row.setdefault("said", {"tax": row["tax"], "broker": row["broker"], "name": row["name"]})
        said |= {name: row[name] for name in given}
        row |= said

    def change_rows(self, count: int) -> None:
        """Write full rows of customers and accounts after the history."""
        rng = self.rng
        for _ in range(count):
            active = [number for number, state in self.customers.items() if state["status"] == "ACTV"]
            if rng.random() < 0.15:
                customer, flag = self.new_customer(), "I"
                self.write_account(self.new_account(customer), "I")
            else:
                customer, flag = rng.choice(active), "U"
                state = self.customers[customer]
                state |= {name: self.new_value(name) for name in rng.sample(sorted(PARTS), 3)}
                state["last"] = f"{rng.choice(FAMILY)}-{self.number}"
                if rng.random() < 0.15 and len(active) > 3:
                    state["status"] = "INAC"
            self.write("Customer.txt", customer, *(self.customers[customer][name] for name in ROW), flag=flag)
            if rng.random() < 0.7:
                account = rng.choice(list(self.accounts))
                row = self.accounts[account]
                row |= {"name": f"Renamed {self.number}", "broker": rng.choice(BROKERS)}
                if rng.random() < 0.2:
                    row["customer"] = rng.choice(list(self.customers))
                if rng.random() < 0.2:
                    row["status"] = "INAC"
                self.write_account(account, "U")

    def write_account(self, account: int, flag: str) -> None:
        row = self.accounts[account]
        fields = (row["broker"], row["customer"], row["name"], row["tax"], row["status"])
        self.write("Account.txt", account, *fields, flag=flag)

    # Facts

    def trade_events(self, at: dt.datetime) -> None:
        """Create a trade, and let some of the open ones go on."""
        rng = self.rng
        number = len(self.trades)
        kind = rng.choice(["TMB", "TMS", "TSL", "TLS", "TLB"])
        trade = _Trade(
            number,
            kind,
            rng.choice(self.securities),
            rng.choice(list(self.accounts)),
            rng.randint(1, 80) * 10,
            f"{rng.uniform(10, 900):.2f}",
            rng.choice(GIVEN),
            str(rng.randint(0, 1)),
            "SBMT" if kind in {"TMB", "TMS"} else "PNDG",
        )
        self.trades[number] = trade
        self.step(trade, at, trade.status, flag="I")
        for other in rng.sample(list(self.trades.values()), min(len(self.trades), 3)):
            if other.status == "PNDG":
                self.step(other, at, rng.choice(["SBMT", "CNCL"]))
            elif other.status == "SBMT" and other is not trade:
                self.step(other, at, rng.choice(["CMPT", "CMPT", "CNCL"]))

    def step(self, trade: _Trade, at: dt.datetime, status: str, flag: str = "U") -> None:
        rng, trade.status = self.rng, status
        prices = [f"{rng.uniform(1, 900):.2f}" for _ in range(4)] if status == "CMPT" else [""] * 4
        row = [
            *(trade.number, at.isoformat(" "), status, trade.kind, trade.cash, trade.symbol, trade.quantity),
            *(trade.bid, trade.account, trade.by, *prices),
        ]
        if self.batch == 1:
            self.write("TradeHistory.txt", trade.number, at.isoformat(" "), status)
            self.files.setdefault("states", []).append("|".join(map(str, row)))
        else:
            self.write("Trade.txt", *row, flag=flag)
        if status == "CMPT":
            lot = trade.number if rng.random() < 0.7 else rng.randrange(trade.number + 1)
            self.write("HoldingHistory.txt", lot, trade.number, 0, rng.randint(-500, 500))

    def other_events(self, at: dt.datetime) -> None:
        rng, time = self.rng, at.isoformat(" ")
        pair = (rng.choice(list(self.customers)), rng.choice(self.securities))
        if rng.random() < 0.4 and self.watched:
            pair = rng.choice(sorted(self.watched))
            self.watched.remove(pair)
            self.write("WatchHistory.txt", *pair, time, "CNCL")
        elif pair not in self.watched:
            self.watched.add(pair)
            self.write("WatchHistory.txt", *pair, time, "ACTV")
        account = rng.choice(list(self.accounts))
        self.write("CashTransaction.txt", account, time, f"{rng.uniform(-9999, 9999):.2f}", "wire")


def generate(folder: Path, seed: int, customers: int = 40, batches: int = 3) -> None:
    """Write the batches of a brokerage.

    Parameters
    ----------
    folder
        Folder of the batches; created if it does not exist.
    seed
        Seed of the random numbers: the same seed gives the same files.
    customers
        Number of customers in the history.
    batches
        Number of batches, the history included.
    """
    brokerage = _Brokerage(random.Random(seed))  # noqa: S311 - not for secrets
    for batch in range(1, batches + 1):
        day = FIRST_DAY + dt.timedelta(batch - 1)
        brokerage.batch, brokerage.files = batch, {"BatchDate.txt": [str(day)]}
        if batch == 1:
            _history(brokerage, customers)
        else:
            _daily(brokerage, day, max(customers // 4, 4))
        _write_files(folder / f"Batch{batch}", brokerage.files)


def _history(brokerage: _Brokerage, customers: int) -> None:
    rng = brokerage.rng
    brokerage.files["CustomerMgmt.xml"] = []
    _write_securities(brokerage, max(customers // 2, 3))
    steps = customers * 8
    times = _times(rng, steps)
    newcomers = {0, *rng.sample(range(steps), customers)}
    for place, at in enumerate(times):
        if place in newcomers:
            brokerage.open_customer(at)
        else:
            brokerage.act(at)
        brokerage.trade_events(at)
        brokerage.other_events(at)
    last = {row.split("|", 1)[0]: row for row in brokerage.files.pop("states")}
    brokerage.files["Trade.txt"] = list(last.values())
    brokerage.files["StatusType.txt"] = STATUSES.splitlines()
    brokerage.files["TradeType.txt"] = TRADE_TYPES.splitlines()
    brokerage.files["HR.csv"] = [
        f"{n},0,{rng.choice(GIVEN)},Emp{n},{rng.choice('AB')},{314 if n in BROKERS else 101},Branch{n % 7},OFF{n % 9},"
        f"(555) {n:07}"
        for n in range(60)
    ]
    actions = brokerage.files["CustomerMgmt.xml"]
    head = ['<?xml version="1.0" encoding="UTF-8"?>', '<TPCDI:Actions xmlns:TPCDI="http://www.tpc.org/tpc-di">']
    brokerage.files["CustomerMgmt.xml"] = [*head, *actions, "</TPCDI:Actions>"]


def _times(rng: random.Random, count: int) -> list[dt.datetime]:
    """Return ascending times: several on some days, and some of them at midnight."""
    days = sorted(rng.randrange((FIRST_DAY - BEGIN.date()).days + 1) for _ in range(max(count // 2, 1)))
    times = []
    for _ in range(count):
        midnight = rng.random() < 0.1
        seconds = 0 if midnight else rng.randrange(86_400)
        times.append(BEGIN + dt.timedelta(days=rng.choice(days), seconds=seconds))
    return sorted(times)


def _daily(brokerage: _Brokerage, day: dt.date, count: int) -> None:
    brokerage.files |= {name: [] for name in ("Customer.txt", "Account.txt", "Trade.txt", "HoldingHistory.txt")}
    brokerage.files |= {name: [] for name in ("WatchHistory.txt", "CashTransaction.txt")}
    midnight = dt.datetime.combine(day, dt.time())
    brokerage.change_rows(count)
    for step in range(count):
        at = midnight + dt.timedelta(minutes=step)
        brokerage.trade_events(at)
        brokerage.other_events(at)


def _write_securities(brokerage: _Brokerage, count: int) -> None:
    """Write SEC records: one of each security before all else, then changes, several of some on one day."""
    rng = brokerage.rng
    brokerage.securities = [f"SYM{number:03}" for number in range(count)]
    records = [(BEGIN - dt.timedelta(days=30), symbol) for symbol in brokerage.securities]
    for at in _times(rng, count * 3):
        symbol = rng.choice(brokerage.securities)
        records += [(at, symbol)] + [(at + dt.timedelta(seconds=1), symbol)] * (rng.random() < 0.2)
    for at, symbol in sorted(records):
        name = f"{symbol} é rev {rng.randrange(10**6)}"
        line = (
            f"{at:%Y%m%d-%H%M%S}SEC{symbol:<15}{'COMMON':<6}ACTV{name:<70}{'NYSE':<6}{rng.randrange(10**10):>13}"
            f"{'19900101'}{'19950101'}{rng.uniform(0, 10):>12.2f}{rng.randrange(99):010}"
        )
        quarter = (at.month - 1) // 3 + 1
        brokerage.files.setdefault(f"FINWIRE{at.year}Q{quarter}", []).append(line)


def _elements(tree: dict[str, Any]) -> str:
    return "".join(
        f"<{tag}>{_elements(value) if isinstance(value, dict) else escape(value)}</{tag}>" if value else f"<{tag}/>"
        for tag, value in tree.items()
    )


def _write_files(folder: Path, files: dict[str, list[str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--customers", type=int, default=40)
    parser.add_argument("--batches", type=int, default=3)
    given = parser.parse_args()
    generate(given.folder, given.seed, given.customers, given.batches)
