"""A brokerage: a history and daily loads in the shape of TPC-DI, loaded with Spark and Headrace.

A user's program, not part of the library: `headrace demo brokerage` runs it. Read the modules in this order.

==============  ======================================================================================================
`sources`       Spark reads the files of a batch: fixed width, XML, separated fields
`dimensions`    changes of customers, accounts, brokers, securities; `brokerage.yml` declares the dimensions
`facts`         trades, holdings, cash: Spark windows, Headrace look-ups; `brokerage.yml` loads the watches
`delta`         Delta tables that take each batch exactly once
`loading`       the order of the steps, and what makes a killed load safe to repeat
==============  ======================================================================================================
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.samples.brokerage.loading import Loaded, batches_of, load

__all__ = ["TABLES", "Loaded", "batches_of", "load"]

TABLES = (
    "dim_account",
    "dim_broker",
    "dim_customer",
    "dim_security",
    "dim_trade",
    "fact_cash_balances",
    "fact_holdings",
    "fact_watches",
)


def __getattr__(name: str) -> Any:
    if name in __all__:  # Spark and the tables are heavy
        return getattr(import_module("headrace.samples.brokerage.loading"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
