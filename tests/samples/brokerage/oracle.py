"""The tables of the brokerage, computed one record at a time from the sources and the written rules.

Shares no code with the package. Values are text as in the expected CSV files; an absent value is the empty text.
"""

import datetime as dt
import xml.etree.ElementTree as ET
from decimal import Decimal
from pathlib import Path

END = "9999-12-31"
TABLES = {
    "dim_account": (
        "account_id version effective_date end_date is_current batch_id customer_id customer_version "
        "customer_effective_date broker_id status account_desc tax_status"
    ),
    "dim_broker": "broker_id first_name last_name mi branch office phone",
    "dim_customer": (
        "customer_id version effective_date end_date is_current batch_id status tax_id last_name first_name "
        "middle_initial gender tier dob address1 address2 postal_code city state country phone1 phone2 phone3 "
        "email1 email2 local_tax_id national_tax_id"
    ),
    "dim_security": "symbol version effective_date end_date is_current issue name exchange_id shares dividend",
    "dim_trade": (
        "trade_id create_ts close_ts status type cash_flag symbol security_version quantity bid_price account_id "
        "account_version account_effective_date customer_id customer_version customer_effective_date broker_id "
        "executed_by trade_price fee commission tax first_batch last_batch"
    ),
    "fact_cash_balances": "account_id account_version customer_id customer_version date cash batch_id",
    "fact_holdings": (
        "trade_id current_trade_id customer_id customer_version account_id account_version symbol security_version "
        "date current_price current_holding batch_id"
    ),
    "fact_watches": (
        "customer_id customer_version symbol security_version date_placed date_removed first_batch last_batch"
    ),
}
TABLES = {name: columns.split() for name, columns in TABLES.items()}
PHONE = {"C_CTRY_CODE": "country", "C_AREA_CODE": "area", "C_LOCAL": "local", "C_EXT": "ext"}
ELEMENTS = {
    "Name/C_L_NAME": "last_name",
    "Name/C_F_NAME": "first_name",
    "Name/C_M_NAME": "middle_initial",
    "Address/C_ADLINE1": "address1",
    "Address/C_ADLINE2": "address2",
    "Address/C_ZIPCODE": "postal_code",
    "Address/C_CITY": "city",
    "Address/C_STATE_PROV": "state",
    "Address/C_CTRY": "country",
    "ContactInfo/C_PRIM_EMAIL": "email1",
    "ContactInfo/C_ALT_EMAIL": "email2",
    "TaxInfo/C_LCL_TX_ID": "local_tax_id",
    "TaxInfo/C_NAT_TX_ID": "national_tax_id",
    **{f"ContactInfo/C_PHONE_{n}/{tag}": f"{part}_{n}" for n in (1, 2, 3) for tag, part in PHONE.items()},
}
ROW = """
    tax_id status_id last_name first_name middle_initial gender tier dob address1 address2 postal_code city state
    country country_1 area_1 local_1 ext_1 country_2 area_2 local_2 ext_2 country_3 area_3 local_3 ext_3 email1
    email2 local_tax_id national_tax_id
""".split()  # noqa: SIM905 - reads better


class Warehouse:
    """The state of the warehouse after some batches."""

    def __init__(self, source):
        self.source = Path(source)
        self.customers = {}  # id -> [{"from": day, "batch": n, "state": {...}}]
        self.accounts = {}  # id -> own states, in the same form
        self.securities = {}
        self.trades = {}
        self.holdings = []
        self.watches = []
        self.cash = {}  # (account, day) -> [amount, batch]
        self.batch = 0
        self.account_versions = {}

    def load(self, batch):
        """Load a batch; batches are loaded in order."""
        self.batch = batch
        self.day = self.rows("BatchDate.txt")[0][0]
        if batch == 1:
            self.names = {row[0]: row[1] for row in self.rows("StatusType.txt")}
            self.types = {row[0]: (row[1], row[3] == "1") for row in self.rows("TradeType.txt")}
            self.read_actions()
            self.read_securities()
        else:
            self.read_customers()
            self.read_accounts()
        self.account_versions = {number: self.versions_of_account(number) for number in self.accounts}
        self.read_trades()
        self.read_holdings()
        self.read_watches()
        self.read_cash()

    def rows(self, name, mark="|"):
        path = self.source / f"Batch{self.batch}" / name
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [line.split(mark) for line in lines]

    def events(self, name):
        """Return the rows of a file without the columns of change data capture, in the order of CDC_DSN."""
        rows = self.rows(name)
        return rows if self.batch == 1 else [row[2:] for row in sorted(rows, key=lambda row: int(row[1]))]

    # Customers and accounts

    def put(self, versions, day, state):
        if versions and versions[-1]["from"] == day:
            versions[-1]["state"] = state
        else:
            versions.append({"from": day, "batch": self.batch, "state": state})

    def read_actions(self):
        for action in ET.parse(self.source / "Batch1" / "CustomerMgmt.xml").getroot():
            kind, day = action.get("ActionType"), action.get("ActionTS")[:10]
            customer = action.find("Customer")
            number = int(customer.get("C_ID"))
            if kind in {"NEW", "UPDCUST", "INACT"}:
                versions = self.customers.setdefault(number, [])
                state = dict(versions[-1]["state"]) if versions else {"status_id": "ACTV"}
                state |= self.given(customer)
                if kind == "INACT":
                    state["status_id"] = "INAC"
                self.put(versions, day, state)
            if customer.find("Account") is not None:
                self.act_on_account(kind, day, number, customer.find("Account"))

    def given(self, customer):
        names = {"C_TAX_ID": "tax_id", "C_GNDR": "gender", "C_TIER": "tier", "C_DOB": "dob"}
        found = {name: customer.get(attribute) for attribute, name in names.items() if attribute in customer.attrib}
        for path, name in ELEMENTS.items():
            if customer.find(path) is not None:
                found[name] = customer.find(path).text or ""
        return found

    def act_on_account(self, kind, day, customer, account):
        versions = self.accounts.setdefault(int(account.get("CA_ID")), [])
        state = dict(versions[-1]["state"]) if versions else {"status_id": "ACTV"}
        state["customer"] = customer
        if "CA_TAX_ST" in account.attrib:
            state["tax_status"] = account.get("CA_TAX_ST")
        for tag, name in (("CA_B_ID", "broker"), ("CA_NAME", "desc")):
            if account.find(tag) is not None:
                state[name] = account.find(tag).text or ""
        if kind == "CLOSEACCT":
            state["status_id"] = "INAC"
        self.put(versions, day, state)

    def read_customers(self):
        for number, *row in self.events("Customer.txt"):
            self.put(self.customers.setdefault(int(number), []), self.day, dict(zip(ROW, row, strict=True)))

    def read_accounts(self):
        for number, broker, customer, desc, tax, status in self.events("Account.txt"):
            state = {"customer": int(customer), "broker": broker, "desc": desc, "tax_status": tax, "status_id": status}
            self.put(self.accounts.setdefault(int(number), []), self.day, state)

    def versions_of_account(self, number):
        """Return the versions of an account: a day of its own changes, or on which its customer has a new version."""
        own, versions = self.accounts[number], []
        days = {version["from"] for version in own}
        days |= {version["from"] for change in own for version in self.customers[change["state"]["customer"]]}
        for day in sorted(days):
            if day < own[0]["from"]:
                continue
            mine = last(own, day)
            customer = mine["state"]["customer"]
            theirs = last(self.customers[customer], day)
            if mine["from"] != day and theirs["from"] != day:
                continue
            batch = max(version["batch"] for version in (mine, theirs) if version["from"] == day)
            inactive = "INAC" in {mine["state"]["status_id"], theirs["state"]["status_id"]}
            state = {**mine["state"], "status_id": "INAC" if inactive else mine["state"]["status_id"]}
            place = self.customers[customer].index(theirs) + 1
            versions.append(
                {
                    "from": day,
                    "batch": batch,
                    "state": state,
                    "customer_version": place,
                    "customer_from": theirs["from"],
                }
            )
        return versions

    def account_at(self, number, day):
        """Return what a fact takes from the account at a day."""
        versions = self.account_versions[number]
        found = last(versions, day)
        return {
            "account_id": number,
            "account_version": versions.index(found) + 1,
            "account_effective_date": found["from"],
            "customer_id": found["state"]["customer"],
            "customer_version": found["customer_version"],
            "customer_effective_date": found["customer_from"],
            "broker_id": found["state"]["broker"],
        }

    # Securities

    def read_securities(self):
        records = []
        for path in sorted((self.source / "Batch1").glob("FINWIRE[0-9][0-9][0-9][0-9]Q[1-4]")):
            records += [line for line in path.read_text(encoding="utf-8").splitlines() if line[15:18] == "SEC"]
        for line in sorted(records, key=lambda line: line[:15]):
            state = {
                "issue": line[33:39].strip(),
                "name": line[43:113].strip(),
                "exchange_id": line[113:119].strip(),
                "shares": line[119:132].strip(),
                "dividend": line[148:160].strip(),
            }
            day = f"{line[:4]}-{line[4:6]}-{line[6:8]}"
            self.put(self.securities.setdefault(line[18:33].strip(), []), day, state)

    # Facts

    def read_trades(self):
        if self.batch == 1:
            steps = {}
            for number, when, status in self.rows("TradeHistory.txt"):
                steps.setdefault(int(number), []).append((when, status))
            for number, _, *row in self.rows("Trade.txt"):
                for when, status in sorted(steps.get(int(number), [])):
                    self.step(int(number), when, status, row)
                self.describe(int(number), row)
        else:
            for number, when, *row in self.events("Trade.txt"):
                self.step(int(number), when, row[0], row)
                self.describe(int(number), row)

    def step(self, number, when, status, row):
        _, kind, _, symbol, _, _, account, *_ = row
        trade = self.trades.setdefault(number, {"create_ts": "", "close_ts": "", "first_batch": self.batch})
        if not trade["create_ts"] and (status == "PNDG" or (status == "SBMT" and self.types[kind][1])):
            trade["create_ts"] = when
            trade |= self.account_at(int(account), when[:10])
            trade |= {"symbol": symbol, "security_version": self.security_at(symbol, when[:10])}
        if status in {"CMPT", "CNCL"}:
            trade["close_ts"] = when

    def describe(self, number, row):
        status, kind, cash, _, quantity, bid, _, by, price, charge, commission, tax = row
        self.trades[number] |= {
            "trade_id": number,
            "status": self.names[status],
            "type": self.types[kind][0],
            "cash_flag": "true" if cash == "1" else "false",
            "quantity": quantity,
            "bid_price": bid,
            "executed_by": by,
            "trade_price": price,
            "fee": charge,
            "commission": commission,
            "tax": tax,
            "last_batch": self.batch,
        }

    def read_holdings(self):
        taken = ("customer_id", "customer_version", "account_id", "account_version", "symbol", "security_version")
        for lot, number, _, after in self.events("HoldingHistory.txt"):
            trade = self.trades[int(number)]
            self.holdings.append(
                {name: trade[name] for name in taken}
                | {
                    "trade_id": int(lot),
                    "current_trade_id": int(number),
                    "date": trade["close_ts"][:10],
                    "current_price": trade["trade_price"],
                    "current_holding": after,
                    "batch_id": self.batch,
                }
            )

    def read_watches(self):
        for customer, symbol, when, action in sorted(self.events("WatchHistory.txt"), key=lambda row: row[2]):
            day = when[:10]
            if action == "ACTV":
                versions = self.customers[int(customer)]
                watch = {
                    "customer_id": int(customer),
                    "customer_version": versions.index(last(versions, day)) + 1,
                    "symbol": symbol,
                    "security_version": self.security_at(symbol, day),
                    "date_placed": day,
                    "date_removed": "",
                    "first_batch": self.batch,
                    "last_batch": self.batch,
                }
                self.watches.append(watch)
            else:
                watch = next(
                    w for w in self.watches[::-1] if (w["customer_id"], w["symbol"]) == (int(customer), symbol)
                )
                watch |= {"date_removed": day, "last_batch": self.batch}

    def read_cash(self):
        for account, when, amount, _ in self.events("CashTransaction.txt"):
            sums = self.cash.setdefault((int(account), when[:10]), [Decimal(0), self.batch])
            sums[0] += Decimal(amount)

    def security_at(self, symbol, day):
        versions = self.securities[symbol]
        return versions.index(last(versions, day)) + 1

    # Tables

    def tables(self):
        """Return the rows of the eight tables, as text."""
        found = {name: getattr(self, name)() for name in TABLES}
        return {
            name: sorted(tuple(str(row[column]) for column in TABLES[name]) for row in rows)
            for name, rows in found.items()
        }

    def dim_account(self):
        for number, versions in self.account_versions.items():
            for version, bounds in numbered(versions):
                state = version["state"]
                yield {
                    **bounds,
                    "account_id": number,
                    "customer_id": state["customer"],
                    "customer_version": version["customer_version"],
                    "customer_effective_date": version["customer_from"],
                    "broker_id": state["broker"],
                    "status": self.names[state["status_id"]],
                    "account_desc": state["desc"],
                    "tax_status": state["tax_status"],
                }

    def dim_broker(self):
        names = ["broker_id", "", "first_name", "last_name", "mi", "job", "branch", "office", "phone"]
        text = (self.source / "Batch1" / "HR.csv").read_text(encoding="utf-8")
        people = [dict(zip(names, line.split(","), strict=True)) for line in text.splitlines()]
        return [row for row in people if row["job"] == "314"]

    def dim_customer(self):
        for number, versions in self.customers.items():
            for version, bounds in numbered(versions):
                state = version["state"]
                gender = state["gender"].upper()
                yield {
                    **{name: state[name] for name in TABLES["dim_customer"] if name in state},
                    **bounds,
                    "customer_id": number,
                    "status": self.names[state["status_id"]],
                    "gender": gender if gender in {"M", "F"} else "U",
                    **{f"phone{n}": phone(*(state[f"{part}_{n}"] for part in PHONE.values())) for n in (1, 2, 3)},
                }

    def dim_security(self):
        for symbol, versions in self.securities.items():
            for version, bounds in numbered(versions):
                yield {**bounds, **version["state"], "symbol": symbol}

    def dim_trade(self):
        return self.trades.values()

    def fact_holdings(self):
        return self.holdings

    def fact_watches(self):
        return self.watches

    def fact_cash_balances(self):
        balance = {}
        for (account, day), (amount, batch) in sorted(self.cash.items()):
            balance[account] = balance.get(account, Decimal(0)) + amount
            yield {**self.account_at(account, day), "date": day, "cash": balance[account], "batch_id": batch}


def last(versions, day):
    """Return the version that is valid at a day."""
    return [version for version in versions if version["from"] <= day][-1]


def numbered(versions):
    for place, version in enumerate(versions):
        final = place + 1 == len(versions)
        yield (
            version,
            {
                "version": place + 1,
                "effective_date": version["from"],
                "end_date": END if final else versions[place + 1]["from"],
                "is_current": "true" if final else "false",
                "batch_id": version["batch"],
            },
        )


def phone(country, area, local, ext):
    if not local:
        return ""
    if area and country:
        return f"+{country} ({area}) {local}{ext}"
    return f"({area}) {local}{ext}" if area else f"{local}{ext}"


def as_text(value):
    """Return a value of the warehouse as the expected files spell it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dt.datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    return str(value)
