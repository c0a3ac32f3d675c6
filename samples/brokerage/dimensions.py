"""The dimensions of the brokerage: their declarations, their changes in each batch, and their tables.

A version begins on the day of a change, so the day is an attribute of type 2: two changes of one day make one version,
and every day with a change makes one. Actions of the history are partial changes. A new version of a customer gives the
accounts of the customer new versions through the reference from accounts to customers.
"""

from __future__ import annotations

import datetime as dt
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F

from headrace.etl import Dimension
from headrace.etl.history import Follow, History, HistoryDimension, Reference
from headrace.pipelines.errors import QualityError
from headrace.samples.brokerage.sources import ACCOUNT, CUSTOMER, HISTORY, PHONE, POSITION, Source

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from pyspark.sql import Column, DataFrame

__all__ = ["Dimensions"]

ACTIVE: Final = "ACTV"
INACTIVE: Final = "INAC"
ACTIONS: Final = ("NEW", "ADDACCT", "UPDACCT", "CLOSEACCT", "UPDCUST", "INACT")
END: Final = dt.date(9999, 12, 31)
# Numbers of changes are unique over all batches: CDC_DSN has at most twelve digits.
CHANGES_PER_BATCH: Final = 10**13
TYPES: Final = {"bigint": pa.int64(), "int": pa.int32(), "date": pa.date32(), "string": pa.string()}
MONEY: Final = pa.decimal128(18, 2)


def _history(name: str, natural_key: str, attributes: dict[str, pa.DataType], *, partial: bool = False) -> History:
    columns = {**attributes, "changed_on": pa.date32(), "batch_id": pa.int64()}
    return History(
        Dimension(name, (natural_key,), f"{name}_key", pa.schema(list(columns.items()))),
        effective="changed_on",
        effective_type=pa.date32(),
        sequence="number",
        partial="given" if partial else None,
        audit=("batch_id",),
        valid_from="effective_date",
        valid_to="end_date",
        end=END,
    )


CUSTOMERS: Final = _history(
    "customer", "customer_id", {name: TYPES[kind] for name, kind in CUSTOMER.items()}, partial=True
)
ACCOUNTS: Final = _history(
    "account",
    "account_id",
    {
        "account_id": pa.int64(),
        "broker_id": pa.int64(),
        "account_desc": pa.string(),
        "tax_status": pa.int32(),
        "status_id": pa.string(),
        "customer_id": pa.int64(),
        "customer_key": pa.int64(),
        "customer_version": pa.int64(),
        "customer_effective_date": pa.date32(),
        "customer_status_id": pa.string(),
    },
    partial=True,
)
OWNER: Final = Reference(
    ACCOUNTS,
    CUSTOMERS,
    {"customer_id": "customer_id"},
    {
        "customer_key": "customer_key",
        "customer_version": "version",
        "customer_effective_date": "effective_date",
        "customer_status_id": "status_id",
    },
)
SECURITIES: Final = _history(
    "security",
    "symbol",
    {
        "symbol": pa.string(),
        "issue": pa.string(),
        "name": pa.string(),
        "exchange_id": pa.string(),
        "shares": pa.int64(),
        "dividend": MONEY,
    },
)
BROKERS: Final = _history(
    "broker",
    "broker_id",
    {
        "broker_id": pa.int64(),
        **dict.fromkeys(["first_name", "last_name", "mi", "branch", "office", "phone"], pa.string()),
    },
)


class Dimensions:
    """The four dimensions on local disk.

    Parameters
    ----------
    folder
        Folder of the dimensions; created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        with ExitStack() as stack:
            self.customers, self.accounts, self.securities, self.brokers = (
                stack.enter_context(_opened(folder, history)) for history in (CUSTOMERS, ACCOUNTS, SECURITIES, BROKERS)
            )
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def apply(self, source: Source) -> None:
        """Apply the changes of a batch, in one commit for each dimension. Repeated changes have no effect."""
        if source.batch == HISTORY:
            actions = source.actions().cache()
            customers, accounts = _customer_actions(actions), _account_actions(actions)
            _apply(self.brokers, _numbered(_on(source.brokers(), source), F.lit(0), source))
            securities = source.securities()
            _apply(self.securities, _numbered(_dated(securities), F.col(POSITION), source))
        else:
            customers = _on(_customer_rows(source), source)
            accounts = _on(source.records("Account.txt", ACCOUNT), source)
        changed = _numbered(customers, F.col(POSITION), source).toArrow()
        _require_applied(self.customers, self.customers.apply_changes(changed).outcomes)
        follow = Follow(OWNER, self.customers, changed, source.batch * CHANGES_PER_BATCH, {"batch_id": source.batch})
        _apply(self.accounts, _numbered(accounts, F.col(POSITION), source), follow)

    def tables(self, status_names: dict[str, str]) -> dict[str, pa.Table]:
        """Return the tables of the dimensions for the warehouse.

        Parameters
        ----------
        status_names
            Name of each status, by its id.
        """
        customers = self.customers.versions(special=False)
        for n in (1, 2, 3):
            parts = [customers.column(f"{part}{n}") for part in PHONE]
            customers = customers.append_column(f"phone{n}", _phone(*parts))
        accounts = self.accounts.versions(special=False)
        closed = pc.equal(accounts.column("customer_status_id"), INACTIVE)
        status = pc.if_else(pc.fill_null(closed, fill_value=False), INACTIVE, accounts.column("status_id"))
        accounts = accounts.append_column("status", named(status, status_names))
        return {
            "dim_broker": self.brokers.versions(special=False),
            "dim_security": self.securities.versions(special=False),
            "dim_customer": customers.append_column("status", named(customers.column("status_id"), status_names)),
            "dim_account": self._with_brokers(accounts),
        }

    def _with_brokers(self, accounts: pa.Table) -> pa.Table:
        found = self.brokers.lookup(accounts.select(["broker_id"]), {"broker_id": "broker_id"})
        return accounts.append_column("broker_key", found.column("broker_key"))


def named(ids: pa.ChunkedArray, names: dict[str, str]) -> pa.ChunkedArray:
    """Return the names of ids; null for null.

    Raises
    ------
    QualityError
        If an id has no name.
    """
    known = pa.array(list(names), pa.string())
    place = pc.index_in(ids, value_set=known)
    unknown = pc.unique(ids.filter(pc.and_(ids.is_valid(), place.is_null()))).to_pylist()
    if unknown:
        raise QualityError(f"the id {unknown[0]!r} has no name; the source names {', '.join(names)}")
    return pa.chunked_array([pa.array(list(names.values()), pa.string())]).take(place)


def _opened(folder: Path, history: History) -> HistoryDimension:
    place = folder / history.dimension.name
    if (place / "declaration.json").exists():
        return HistoryDimension.open(place, history)
    return HistoryDimension.create(place, history)


def _apply(dimension: HistoryDimension, changes: DataFrame, follow: Follow | None = None) -> None:
    _require_applied(dimension, dimension.apply_changes(changes.toArrow(), follow=follow).outcomes)


def _require_applied(dimension: HistoryDimension, outcomes: pa.Table) -> None:
    rejected = outcomes.filter(pc.equal(outcomes.column("outcome"), "rejected"))
    if rejected.num_rows:
        raise QualityError(
            f"{rejected.num_rows} changes of dimension {dimension.history.dimension.name!r} were rejected, the first "
            f"because {rejected.column('cause')[0].as_py()}"
        )


def _numbered(changes: DataFrame, position: Column, source: Source) -> DataFrame:
    """Add the number of each change and of its batch."""
    number = F.lit(source.batch * CHANGES_PER_BATCH) + position
    return changes.withColumns({"number": number, "batch_id": F.lit(source.batch).cast("bigint")})


def _on(changes: DataFrame, source: Source) -> DataFrame:
    """Let changes begin on the day of the batch."""
    return changes.withColumn("changed_on", F.lit(source.day))


def _dated(changes: DataFrame) -> DataFrame:
    return changes.withColumn("changed_on", F.col("at").cast("date"))


def _customer_actions(actions: DataFrame) -> DataFrame:
    """Return the actions that change customers, as partial changes."""
    action = _known_action()
    status = F.when(action == "NEW", ACTIVE).when(action == "INACT", INACTIVE)
    changes = _dated(actions).where(action.isin("NEW", "UPDCUST", "INACT"))
    changes = changes.withColumns({"status_id": status, "gender": _gender()})
    columns = [name for name in CUSTOMER if name != "status_id"]
    return changes.select(*columns, "status_id", "changed_on", POSITION, _given("customer_given", status))


def _account_actions(actions: DataFrame) -> DataFrame:
    """Return the actions that change accounts, as partial changes."""
    action = _known_action()
    status = F.when(action.isin("NEW", "ADDACCT"), ACTIVE).when(action == "CLOSEACCT", INACTIVE)
    changes = _dated(actions).where(F.col("account_id").isNotNull()).withColumn("status_id", status)
    given = _given("account_given", status, "customer_id")
    return changes.select(*ACCOUNT, "changed_on", POSITION, given)


def _given(column: str, status: Column, *also: str) -> Column:
    names = [F.lit(name) for name in ("changed_on", "batch_id", *also)]
    listed = F.array_except(F.col(column), F.array(F.lit("account_id")))
    return F.concat(listed, F.array_compact(F.array(*names, F.when(status.isNotNull(), F.lit("status_id"))))).alias(
        "given"
    )


def _known_action() -> Column:
    action = F.col("action")
    unknown = F.raise_error(
        F.concat(F.lit("CustomerMgmt.xml has an unknown action: "), F.coalesce(action, F.lit("none")))
    )
    return F.when(action.isin(*ACTIONS), action).otherwise(unknown)


def _customer_rows(source: Source) -> DataFrame:
    return source.records("Customer.txt", CUSTOMER).withColumn("gender", _gender())


def _gender() -> Column:
    given = F.upper("gender")
    return F.when(given.isin("M", "F"), given).otherwise("U")


def _phone(country: pa.ChunkedArray, area: pa.ChunkedArray, local: pa.ChunkedArray, ext: pa.ChunkedArray) -> Any:
    """Format phone numbers as ``+1 (555) 123-4567``, with the extension behind; null without a local number."""
    in_area = pc.binary_join_element_wise("(", area, ") ", local, "")
    abroad = pc.binary_join_element_wise("+", country, " ", in_area, "")
    return pc.binary_join_element_wise(pc.coalesce(abroad, in_area, local), pc.coalesce(ext, ""), "")
