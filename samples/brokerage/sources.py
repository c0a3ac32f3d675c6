"""The files of a batch as Spark frames: typed columns, blank fields as null, and the order of the records.

A value that does not fit its type fails the load: Spark's casts raise, and a rounded amount or a record with too many
or too few fields is an error.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Window
from pyspark.sql import functions as F

from headrace.storage.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["POSITION", "Source"]

POSITION: Final = "position"
HISTORY: Final = 1
MONEY: Final = "decimal(18,2)"

ACCOUNT: Final = {
    "account_id": "bigint",
    "broker_id": "bigint",
    "customer_id": "bigint",
    "account_desc": "string",
    "tax_status": "int",
    "status_id": "string",
}
PHONE: Final = ("country_code", "area_code", "local", "extension")
PHONES: Final = {f"{part}{n}": "string" for n in (1, 2, 3) for part in PHONE}
CUSTOMER: Final = {
    "customer_id": "bigint",
    "tax_id": "string",
    "status_id": "string",
    "last_name": "string",
    "first_name": "string",
    "middle_initial": "string",
    "gender": "string",
    "tier": "int",
    "dob": "date",
    "address1": "string",
    "address2": "string",
    "postal_code": "string",
    "city": "string",
    "state": "string",
    "country": "string",
    **PHONES,
    "email1": "string",
    "email2": "string",
    "local_tax_id": "string",
    "national_tax_id": "string",
}
TRADE: Final = {
    "trade_id": "bigint",
    "at": "timestamp_ntz",
    "status_id": "string",
    "type_id": "string",
    "is_cash": "int",
    "symbol": "string",
    "quantity": "bigint",
    "bid_price": MONEY,
    "account_id": "bigint",
    "executed_by": "string",
    "trade_price": MONEY,
    "fee": MONEY,
    "commission": MONEY,
    "tax": MONEY,
}
TRADE_HISTORY: Final = {"trade_id": "bigint", "at": "timestamp_ntz", "status_id": "string"}
HOLDING: Final = {
    "trade_id": "bigint",
    "current_trade_id": "bigint",
    "previous_holding": "bigint",
    "current_holding": "bigint",
}
WATCH: Final = {"customer_id": "bigint", "symbol": "string", "at": "timestamp_ntz", "action": "string"}
CASH: Final = {"account_id": "bigint", "at": "timestamp_ntz", "amount": MONEY, "description": "string"}
EMPLOYEE: Final = {
    "broker_id": "bigint",
    "manager_id": "bigint",
    "first_name": "string",
    "last_name": "string",
    "mi": "string",
    "job": "string",
    "branch": "string",
    "office": "string",
    "phone": "string",
}
# First and last character of each field of a SEC record in a FINWIRE file.
SECURITY: Final = {
    "symbol": (19, 33, "string"),
    "issue": (34, 39, "string"),
    "name": (44, 113, "string"),
    "exchange_id": (114, 119, "string"),
    "shares": (120, 132, "bigint"),
    "dividend": (149, 160, MONEY),
}
# Where the attributes of customers and accounts are in an action of CustomerMgmt.xml, below `Customer`.
CUSTOMER_PLACES: Final = {
    "tax_id": "_C_TAX_ID",
    "gender": "_C_GNDR",
    "tier": "_C_TIER",
    "dob": "_C_DOB",
    "last_name": "Name.C_L_NAME",
    "first_name": "Name.C_F_NAME",
    "middle_initial": "Name.C_M_NAME",
    "address1": "Address.C_ADLINE1",
    "address2": "Address.C_ADLINE2",
    "postal_code": "Address.C_ZIPCODE",
    "city": "Address.C_CITY",
    "state": "Address.C_STATE_PROV",
    "country": "Address.C_CTRY",
    **{
        f"{part}{n}": f"ContactInfo.C_PHONE_{n}.{tag}"
        for n in (1, 2, 3)
        for part, tag in zip(PHONE, ("C_CTRY_CODE", "C_AREA_CODE", "C_LOCAL", "C_EXT"), strict=True)
    },
    "email1": "ContactInfo.C_PRIM_EMAIL",
    "email2": "ContactInfo.C_ALT_EMAIL",
    "local_tax_id": "TaxInfo.C_LCL_TX_ID",
    "national_tax_id": "TaxInfo.C_NAT_TX_ID",
}
ACCOUNT_PLACES: Final = {
    "account_id": "_CA_ID",
    "tax_status": "_CA_TAX_ST",
    "broker_id": "CA_B_ID",
    "account_desc": "CA_NAME",
}


@dataclass(frozen=True)
class Source:
    """The files of one batch.

    Parameters
    ----------
    spark
        Session that reads the files.
    folder
        Folder with the folders of all batches.
    batch
        Number of the batch; the first one is the history.
    """

    spark: SparkSession
    folder: Path
    batch: int

    @property
    def day(self) -> dt.date:
        """Day of the batch."""
        path = self._path("BatchDate.txt")
        text = path.read_text(encoding="utf-8").strip()
        try:
            return dt.date.fromisoformat(text)
        except ValueError:
            raise InputError(f"{path} holds {text[:40]!r}, which is no date such as 2017-07-08") from None

    @property
    def fingerprint(self) -> str:
        """Digest of the batch's files, by name and content."""
        digest = hashlib.sha256()
        for path in sorted(self._path("").iterdir()):
            with path.open("rb") as file:
                digest.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode())
        return digest.hexdigest()

    def records(self, name: str, columns: Mapping[str, str], mark: str = "|") -> DataFrame:
        """Return the records of a file with separated fields, with their order in `POSITION`.

        In the batches after the history, the two fields of change data capture are in front, and `CDC_DSN` is the
        order.
        """
        captured = {} if self.batch == HISTORY else {"_flag": "string", "_number": "bigint"}
        fields = {**captured, **columns}
        parts = F.split("value", F.lit(f"\\{mark}"))
        whole = F.when(F.size(parts) == len(fields), parts).otherwise(
            F.raise_error(
                F.concat(F.lit(f"{self._path(name)}: a record has not {len(fields)} fields: "), F.col("value"))
            )
        )
        lines = self._lines(str(self._path(name))).where("value != ''").withColumn("parts", whole)
        typed = [_typed(F.col("parts")[at], kind).alias(column) for at, (column, kind) in enumerate(fields.items())]
        order = F.struct("_start", "_id") if self.batch == HISTORY else F.col("_number")
        found = lines.select(*typed, "_start", "_id").withColumn(POSITION, order)
        return found.drop("_flag", "_number", "_start", "_id")

    def securities(self) -> DataFrame:
        """Return the SEC records of the history's FINWIRE files, with their time in `at` and their order."""
        text = F.col("value")
        lines = self._lines(str(self._path("")) + "/FINWIRE[0-9][0-9][0-9][0-9]Q[1-4]")
        fields = [
            _typed(text.substr(first, last - first + 1), kind, padded=True).alias(name)
            for name, (first, last, kind) in SECURITY.items()
        ]
        time = F.to_timestamp_ntz(text.substr(1, 15), F.lit("yyyyMMdd-HHmmss"))
        records = lines.where(text.substr(16, 3) == "SEC").select(time.alias("at"), *fields, "_file", "_start", "_id")
        return _numbered(records, "at", "_file", "_start", "_id").drop("_file", "_start", "_id")

    def actions(self) -> DataFrame:
        """Return the actions on customers and accounts in the history.

        An element or attribute that is there gives a value, and null if it is blank. The columns `customer_given` and
        `account_given` list the attributes that an action gives.
        """
        frame = self.spark.read.format("xml").option("rowTag", "TPCDI:Action").option("attributePrefix", "_")
        frame = (
            frame.option("mode", "FAILFAST")
            .option("nullValue", "\0")
            .option("ignoreSurroundingSpaces", "false")
            .schema(_action_schema())
        )
        read = frame.load(str(self._path("CustomerMgmt.xml"))).select("*", *_place())
        accounts = F.explode_outer("Customer.Account").alias("account")
        read = _numbered(read, "_ActionTS", "_start", "_id").select("*", accounts)
        customer = {name: F.col(f"Customer.{place}") for name, place in CUSTOMER_PLACES.items()}
        account = {name: F.col(f"account.{place}") for name, place in ACCOUNT_PLACES.items()}
        return read.select(
            F.col("_ActionType").alias("action"),
            F.col("_ActionTS").cast("timestamp_ntz").alias("at"),
            POSITION,
            F.col("Customer._C_ID").cast("bigint").alias("customer_id"),
            *(_typed(column, CUSTOMER[name]).alias(name) for name, column in customer.items()),
            _given(customer).alias("customer_given"),
            *(_typed(column, ACCOUNT[name]).alias(name) for name, column in account.items()),
            _given(account).alias("account_given"),
        )

    def brokers(self) -> DataFrame:
        """Return the brokers among the employees of the history."""
        return self.records("HR.csv", EMPLOYEE, ",").where("job = '314'").drop("job", "manager_id", POSITION)

    def names(self, name: str, columns: Mapping[str, str]) -> DataFrame:
        """Return a table of names, which only the history has."""
        return Source(self.spark, self.folder, HISTORY).records(name, columns).drop(POSITION)

    def _path(self, name: str) -> Path:
        path = self.folder / f"Batch{self.batch}" / name
        if not path.exists():
            raise InputError(f"{path} is missing; the source has a folder for each batch, with all of its files")
        return path

    def _lines(self, path: str) -> DataFrame:
        return self.spark.read.text(path).select("value", *_place())


def _place() -> list[Column]:
    """Return the columns with the place of a record: file, start of the part of the file, number in the task."""
    return [
        F.col("_metadata.file_name").alias("_file"),
        F.col("_metadata.file_block_start").alias("_start"),
        F.monotonically_increasing_id().alias("_id"),
    ]


def _numbered(frame: DataFrame, *order: str) -> DataFrame:
    """Add the numbers of records in an order. One task computes them, which is enough for changes of dimensions."""
    return frame.withColumn(POSITION, F.row_number().over(Window.orderBy(*order)).cast("bigint"))


def _typed(text: Column, kind: str, *, padded: bool = False) -> Column:
    """Return text as a type; blank text is null, and an amount that would be rounded is an error."""
    blank = F.trim(text) == ""
    value = F.when(~blank, F.trim(text) if padded or kind != "string" else text)
    if kind != MONEY:
        return value.cast(kind)
    exact = value.cast("decimal(38,12)")
    rounded = exact.cast(MONEY)
    return F.when(value.isNull() | (exact == rounded), rounded).otherwise(
        F.raise_error(F.concat(F.lit("an amount has more than two decimals: "), value))
    )


def _given(columns: Mapping[str, Column]) -> Column:
    return F.array_compact(F.array(*(F.when(column.isNotNull(), F.lit(name)) for name, column in columns.items())))


def _action_schema() -> Any:
    """Return the schema of actions: all text, so that nothing is lost before it is typed."""
    customer: dict[str, Any] = {"_C_ID": None}
    for place in CUSTOMER_PLACES.values():
        at = customer
        *path, final = place.split(".")
        for step in path:
            at = at.setdefault(step, {})
        at[final] = None
    account = ", ".join(f"`{place}`: string" for place in ACCOUNT_PLACES.values())
    return (
        f"_ActionType string, _ActionTS string, Customer struct<{_fields(customer)}, Account: array<struct<{account}>>>"
    )


def _fields(tree: Mapping[str, Any]) -> str:
    parts = (
        f"`{name}`: " + ("string" if below is None else f"struct<{_fields(below)}>") for name, below in tree.items()
    )
    return ", ".join(parts)
