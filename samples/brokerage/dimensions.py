"""The dimensions of the brokerage: the changes of each batch as files, and the tables of the warehouse.

`brokerage.yml` declares the dimensions. Spark writes the changes of a batch to one Parquet file for each dimension, and
Headrace applies it. Actions of the history are partial changes. A new version of a customer gives the accounts of the
customer new versions, because the accounts declare customers as their parents.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import functions as F

from headrace.pipelines.changes import apply_files, open_versions
from headrace.pipelines.config import load_pipeline
from headrace.pipelines.errors import QualityError
from headrace.samples.brokerage.sources import ACCOUNT, CUSTOMER, HISTORY, PHONE, POSITION, Source

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from pyspark.sql import Column, DataFrame

    from headrace.etl.history.reading import StoredVersions
    from headrace.pipelines.config import PipelineConfig

__all__ = ["Dimensions", "stage"]

ACTIVE: Final = "ACTV"
INACTIVE: Final = "INAC"
ACTIONS: Final = ("NEW", "ADDACCT", "UPDACCT", "CLOSEACCT", "UPDCUST", "INACT")
# Numbers of changes are unique over all batches: CDC_DSN has at most twelve digits.
CHANGES_PER_BATCH: Final = 10**13
PIPELINE: Final = "brokerage.yml"


class Dimensions:
    """The four dimensions of a folder.

    Parameters
    ----------
    folder
        Folder of the warehouse, which receives a copy of the pipeline file.
    """

    customers: StoredVersions
    accounts: StoredVersions
    securities: StoredVersions
    brokers: StoredVersions

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _pipeline(folder)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def apply(self, source: Source) -> None:
        """Apply the changes of a batch, each once, and open the versions for lookups."""
        self._open.close()
        for name, changes in _changes(source).items():
            stage(self.folder / "staged" / name, source.batch, changes)
            apply_files(self.config, name, self.folder / "staged" / name)
            _require_applied(self.config, name)
        with ExitStack() as stack:
            self.customers, self.accounts, self.securities, self.brokers = (
                stack.enter_context(open_versions(self.config, name))
                for name in ("customer", "account", "security", "broker")
            )
            self._open = stack.pop_all()

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


def stage(folder: Path, batch: int, rows: DataFrame) -> None:
    """Write the rows of a batch to a file, once: a batch that is loaded again has the same file."""
    file = folder / f"batch{batch}.parquet"
    if file.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{file.name}"
    pq.write_table(rows.toArrow(), draft)
    draft.replace(file)


def _pipeline(folder: Path) -> PipelineConfig:
    """Copy the pipeline file to a folder, and return its configuration."""
    (folder / "staged" / "watches").mkdir(parents=True, exist_ok=True)
    text = files("headrace.samples.brokerage").joinpath(PIPELINE).read_text(encoding="utf-8")
    draft = folder / f".{PIPELINE}"
    draft.write_text(text, encoding="utf-8")
    draft.replace(folder / PIPELINE)
    return load_pipeline(folder / PIPELINE)


def _require_applied(config: PipelineConfig, name: str) -> None:
    """Raise an error if changes were rejected, now or before."""
    path = f"{config.dimensions[name].path}_errors"
    rejected = DeltaTable(path).to_pyarrow_table(columns=["reason"])
    if rejected.num_rows:
        raise QualityError(
            f"{rejected.num_rows} changes of dimension {name!r} were rejected, the first because "
            f"{rejected.column('reason')[0].as_py()}; see {path}"
        )


def _changes(source: Source) -> dict[str, DataFrame]:
    """Return the changes of a batch by dimension, parents first."""
    if source.batch == HISTORY:
        actions = source.actions().cache()
        found = {
            "broker": (_on(source.brokers(), source), F.lit(0)),
            "security": (_dated(source.securities()), F.col(POSITION)),
            "customer": (_customer_actions(actions), F.col(POSITION)),
            "account": (_account_actions(actions), F.col(POSITION)),
        }
    else:
        given = F.lit(None).cast("string").alias("given")  # a full row
        customers, accounts = _customer_rows(source), source.records("Account.txt", ACCOUNT)
        found = {
            "customer": (_on(customers.select("*", given), source), F.col(POSITION)),
            "account": (_on(accounts.select("*", given), source), F.col(POSITION)),
        }
    return {name: _numbered(rows, position, source) for name, (rows, position) in found.items()}


def _numbered(changes: DataFrame, position: Column, source: Source) -> DataFrame:
    """Add the number of each change and of its batch."""
    number = F.lit(source.batch * CHANGES_PER_BATCH) + position
    numbered = changes.withColumns({"number": number, "batch_id": F.lit(source.batch).cast("bigint")})
    return numbered.drop(POSITION)


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
    more = F.array_compact(F.array(*names, F.when(status.isNotNull(), F.lit("status_id"))))
    return F.concat_ws(",", listed, more).alias("given")


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
