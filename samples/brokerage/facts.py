"""The facts of the brokerage: Spark reads, groups and orders the records, Headrace looks up the versions.

A fact is looked up once, in the versions of its day. Its later records change other columns only. The pipeline file
loads the watches. The other facts repeat columns of an account's customer under names of their own, which `carry`
cannot give, so this program looks them up.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from pyspark.sql import Window
from pyspark.sql import functions as F

from headrace.pipelines import run
from headrace.pipelines.errors import QualityError
from headrace.samples.brokerage.dimensions import stage
from headrace.samples.brokerage.sources import CASH, HISTORY, HOLDING, POSITION, TRADE, TRADE_HISTORY, WATCH

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from headrace.etl.history.reading import StoredVersions
    from headrace.samples.brokerage.delta import Warehouse
    from headrace.samples.brokerage.dimensions import Dimensions
    from headrace.samples.brokerage.sources import Source

__all__ = ["STATUS", "TRADE_TYPE", "Facts"]

STATUS: Final = {"status_id": "string", "status_name": "string"}
TRADE_TYPE: Final = {"type_id": "string", "type_name": "string", "is_sell": "int", "is_market": "int"}
VERSIONS: Final = ("customer_key", "customer_id", "customer_version", "account_key", "account_id", "account_version")
SECURITY: Final = ("security_key", "symbol", "security_version")


@dataclass(frozen=True)
class Facts:
    """The facts of one batch.

    Parameters
    ----------
    source
        Files of the batch.
    dimensions
        Dimensions with the changes of the batch.
    warehouse
        Tables that hold the batches before.
    """

    source: Source
    dimensions: Dimensions
    warehouse: Warehouse

    def trades(self) -> None:
        """Load the trades: new ones with their versions, and the later states of those that are there."""
        states, steps = self._trade_states()
        types = self.source.names("TradeType.txt", TRADE_TYPE)
        statuses = self.source.names("StatusType.txt", STATUS)
        times = _trade_times(states, steps, types)
        rows = (
            states.join(times, "trade_id", "left")
            .join(F.broadcast(types), "type_id", "left")
            .join(F.broadcast(statuses), "status_id", "left")
            .join(self._stored("dim_trade", "trade_id"), "trade_id", "left")
            .select(
                "trade_id",
                "create_ts",
                "close_ts",
                _named("status_id", "status_name").alias("status"),
                _named("type_id", "type_name").alias("type"),
                (F.col("is_cash") == 1).alias("cash_flag"),
                *("symbol", "quantity", "bid_price", "account_id", "executed_by"),
                *("trade_price", "fee", "commission", "tax"),
                *self._batches(),
                F.col("stored").isNotNull().alias("stored"),
            )
        )
        table = rows.toArrow()
        self._merge("dim_trade", self._with_versions(table, "create_ts"), ["trade_id"], _TRADE_UPDATE)

    def _trade_states(self) -> tuple[DataFrame, DataFrame]:
        """Return the last state of each trade of the batch, and the steps that trades took."""
        records = self.source.records("Trade.txt", TRADE)
        columns = [name for name in TRADE if name not in {"trade_id", "at"}]
        states = records.groupBy("trade_id").agg(F.max_by(F.struct(*columns), POSITION).alias("state"))
        history = self.source.records("TradeHistory.txt", TRADE_HISTORY) if self._is_history else records
        steps = history.select("trade_id", "at", F.col("status_id").alias("step"))
        return states.select("trade_id", "state.*"), steps

    def holdings(self) -> None:
        """Load the changes of holdings, with the versions of the trade that made each."""
        trades = self._spark_table("dim_trade").withColumnRenamed("trade_id", "current_trade_id")
        rows = self.source.records("HoldingHistory.txt", HOLDING).join(trades, "current_trade_id", "left")
        unknown = F.raise_error(
            F.concat(F.lit("HoldingHistory.txt names a trade that is not there: "), F.col("current_trade_id"))
        )
        rows = rows.select(
            "trade_id",
            F.when(F.col("account_key").isNotNull(), F.col("current_trade_id"))
            .otherwise(unknown.cast("bigint"))
            .alias("current_trade_id"),
            *VERSIONS,
            *SECURITY,
            F.col("close_ts").cast("date").alias("date"),
            F.col("trade_price").alias("current_price"),
            "current_holding",
            F.lit(self.source.batch).cast("bigint").alias("batch_id"),
        )
        self._merge("fact_holdings", rows.toArrow(), ["trade_id", "current_trade_id"])

    def watches(self) -> None:
        """Load the watches with the pipeline file: those that are placed, and the removal of those that are there.

        Each watch of a customer and a symbol has a number; a cancellation removes the last one before it.
        """
        config, batch = self.dimensions.config, self.source.batch
        stage(Path(config.source.path), batch, self._watches())
        run(config)
        rejected = DeltaTable(config.errors_path).to_pyarrow_table(columns=["reason"])
        if rejected.num_rows:
            raise QualityError(
                f"{rejected.num_rows} watches have no versions, the first because "
                f"{rejected.column('reason')[0].as_py()}; see {config.errors_path}"
            )
        self.warehouse.mark("fact_watches", batch)

    def _watches(self) -> DataFrame:
        pair = ("customer_id", "symbol")
        before = Window.partitionBy(*pair).orderBy("at", POSITION)
        placed = F.when(F.col("action") == "ACTV", F.col("at").cast("date"))
        removed = F.when(F.col("action") == "CNCL", F.col("at").cast("date"))
        events = self.source.records("WatchHistory.txt", WATCH)
        stored = self._stored_watches()
        unplaced = F.raise_error(
            F.concat_ws(" ", F.lit("WatchHistory.txt cancels a watch that was never placed: customer"), *pair)
        )
        number = F.coalesce("count", F.lit(0)) + F.col("place")
        return (
            events.withColumn("place", F.count(F.when(F.col("action") == "ACTV", 1)).over(before))
            .groupBy(*pair, "place")
            .agg(F.min(placed).alias("date_placed"), F.max_by(removed, F.struct("at", POSITION)).alias("date_removed"))
            .join(stored, list(pair), "left")
            .select(
                *pair,
                F.when(number > 0, number).otherwise(unplaced.cast("bigint")).alias("watch_number"),
                "date_placed",
                "date_removed",
                *self._batches(),
            )
        )

    def _stored_watches(self) -> DataFrame:
        if self.warehouse.exists("fact_watches"):
            return (
                self._spark_table("fact_watches")
                .groupBy("customer_id", "symbol")
                .agg(F.max("watch_number").alias("count"))
            )
        return self.source.spark.createDataFrame([], "customer_id bigint, symbol string, count bigint")

    def cash(self) -> None:
        """Load the balances: the sum of all transactions of an account up to each day with one."""
        days = self.source.records("CashTransaction.txt", CASH).groupBy(
            "account_id", F.col("at").cast("date").alias("date")
        )
        sums = days.agg(F.sum("amount").cast("decimal(18,2)").alias("day_amount")).withColumn("stored", F.expr("false"))
        if self.warehouse.exists("fact_cash_balances"):
            stored = self._spark_table("fact_cash_balances").join(
                sums.select("account_id").distinct(), "account_id", "left_semi"
            )
            sums = sums.unionByName(stored.select("account_id", "date", "day_amount", F.expr("true").alias("stored")))
        until = Window.partitionBy("account_id").orderBy("date")
        balances = (
            sums.groupBy("account_id", "date")
            .agg(F.sum("day_amount").cast("decimal(18,2)").alias("day_amount"), F.bool_or("stored").alias("stored"))
            .withColumn("cash", F.sum("day_amount").over(until).cast("decimal(18,2)"))
            .withColumn("batch_id", F.lit(self.source.batch).cast("bigint"))
        )
        table = balances.toArrow()
        new = self._with_accounts(table.filter(pc.invert(table.column("stored"))), "date")
        rows = pa.concat_tables([new, table.filter(table.column("stored"))], promote_options="default")
        self._merge("fact_cash_balances", rows.drop_columns(["stored"]), ["account_id", "date"], _CASH_UPDATE)

    # Look-ups

    def _with_versions(self, trades: pa.Table, at: str) -> pa.Table:
        """Look up new trades; those that are stored keep their versions."""
        new = self._with_accounts(trades.filter(pc.invert(trades.column("stored"))), at)
        new = _look_up(
            self.dimensions.securities, new, "security", {"symbol": "symbol"}, at, {"security_version": "version"}
        )
        found = self.dimensions.brokers.lookup(new.select(["broker_id"]), {"broker_id": "broker_id"})
        new = new.append_column("broker_key", found.column("broker_key"))
        old = trades.filter(trades.column("stored"))
        return pa.concat_tables([new, old], promote_options="default").drop_columns(["stored"])

    def _with_accounts(self, facts: pa.Table, at: str) -> pa.Table:
        carried = {
            "account_version": "version",
            "account_effective_date": "effective_date",
            **{
                name: name
                for name in (
                    *("customer_id", "customer_key", "customer_version", "customer_effective_date"),
                    "broker_id",
                )
            },
        }
        return _look_up(self.dimensions.accounts, facts, "account", {"account_id": "account_id"}, at, carried)

    # Tables

    @property
    def _is_history(self) -> bool:
        return self.source.batch == HISTORY

    def _merge(
        self, table: str, rows: pa.Table, key: list[str] | tuple[str, ...], update: dict[str, str] | None = None
    ) -> None:
        self.warehouse.merge(table, self.source.batch, rows, key, update)

    def _spark_table(self, table: str) -> DataFrame:
        return self.source.spark.read.format("delta").load(self.warehouse.path(table))

    def _stored(self, table: str, key: str) -> DataFrame:
        """Return the keys of a table, with a column `stored`."""
        if self.warehouse.exists(table):
            return self._spark_table(table).select(key, F.expr("true").alias("stored"))
        return self.source.spark.createDataFrame([], f"{key} bigint, stored boolean")

    def _batches(self) -> list[Column]:
        return [F.lit(self.source.batch).cast("bigint").alias(name) for name in ("first_batch", "last_batch")]


_TRADE_UPDATE: Final = {
    "create_ts": "coalesce(old.create_ts, new.create_ts)",
    "close_ts": "coalesce(new.close_ts, old.close_ts)",
    **{
        name: f"new.{name}"
        for name in (
            *("status", "type", "cash_flag", "quantity", "bid_price", "executed_by"),
            *("trade_price", "fee", "commission", "tax", "last_batch"),
        )
    },
}
_CASH_UPDATE: Final = {"cash": "new.cash", "day_amount": "new.day_amount"}


def _trade_times(states: DataFrame, steps: DataFrame, types: DataFrame) -> DataFrame:
    """Return when each trade was created, and when it ended."""
    created = (F.col("step") == "PNDG") | ((F.col("step") == "SBMT") & (F.col("is_market") == 1))
    kinds = states.select("trade_id", "type_id").join(F.broadcast(types), "type_id")
    return (
        steps.join(kinds, "trade_id")
        .groupBy("trade_id")
        .agg(
            F.min(F.when(created, F.col("at"))).alias("create_ts"),
            F.max(F.when(F.col("step").isin("CMPT", "CNCL"), F.col("at"))).alias("close_ts"),
        )
    )


def _named(key: str, name: str) -> Column:
    """Return the name of an id; an id without a name is an error."""
    unknown = F.raise_error(F.concat(F.lit(f"a {key} has no name: "), F.coalesce(key, F.lit("null"))))
    return F.when(F.col(name).isNotNull(), F.col(name)).otherwise(unknown)


def _look_up(
    dimension: StoredVersions, facts: pa.Table, role: str, on: dict[str, str], at: str, carried: dict[str, str]
) -> pa.Table:
    """Add the surrogate key, and columns of the version that was valid at the day of a fact.

    Raises
    ------
    QualityError
        If a fact has no day, or no member is valid on its day.
    """
    found = dimension.as_of(
        facts,
        on,
        at,
        role=role,
        policy="reject",
        carry=tuple(carried.values()),
        before_first="reject",
        null_time="reject",
        null_key="reject",
    )
    rejected = found.filter(pc.equal(found.column(f"_{role}_outcome"), "rejected"))
    if rejected.num_rows:
        fact = {name: rejected.column(name)[0].as_py() for name in (*on, at)}
        raise QualityError(
            f"{rejected.num_rows} facts have no version of the {role}; the first is {fact}, because "
            f"{rejected.column(f'_{role}_reason')[0].as_py()}"
        )
    added = {name: found.column(f"{role}_{column}") for name, column in carried.items()}
    result = found.select([*facts.column_names, f"{role}_key"])
    for name, column in added.items():
        result = result.append_column(name, column)
    return result
