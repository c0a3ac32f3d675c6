"""Loads the batches of a source, one after another.

A batch is loaded table by table, each in one commit that carries the number of the batch. A load that was killed is
repeated: the dimensions take the same changes without effect, and tables that hold the batch are left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headrace.pipelines.spark import session
from headrace.pipelines.spark.failures import explained
from headrace.samples.brokerage import TABLES
from headrace.samples.brokerage.delta import Warehouse
from headrace.samples.brokerage.dimensions import Dimensions
from headrace.samples.brokerage.facts import STATUS, Facts
from headrace.samples.brokerage.sources import HISTORY, Source
from headrace.storage.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["Loaded", "batches_of", "load"]

MARK: Final = "brokerage.json"
LOCK: Final = "brokerage.lock"
KEYS: Final = {
    "dim_account": "account_key",
    "dim_broker": "broker_key",
    "dim_customer": "customer_key",
    "dim_security": "security_key",
}
ONLY_HISTORY: Final = ("dim_broker", "dim_security")


@dataclass(frozen=True)
class Loaded:
    """Result of loading a batch.

    Parameters
    ----------
    batch
        Number of the batch.
    seconds
        Duration.
    rows
        Number of rows of each table after it; empty if the warehouse held the batch before.
    """

    batch: int
    seconds: float
    rows: dict[str, int]


def batches_of(source: Path) -> int:
    """Return the number of batches of a source: folders `Batch1`, `Batch2`, and so on.

    Raises
    ------
    InputError
        If there is none.
    """
    count = 0
    while (source / f"Batch{count + 1}").is_dir():
        count += 1
    if not count:
        raise InputError(f"{source} has no folder Batch1; name the folder of a brokerage's batches with --source")
    return count


def _require_plain(source: Path) -> None:
    """Raise an error if Spark's readers would take the path of the source for a pattern."""
    odd = sorted({*str(source.absolute())} & {*"[]{}*?\\,"})
    if odd:
        raise InputError(
            f"the path of the source {source.absolute()} holds {odd[0]!r}, which Spark's readers take for a pattern; "
            "rename the folder, or name it through a link with a plain path"
        )


def load(
    source: Path, folder: Path, batches: int | None = None, on_batch: Callable[[Loaded], None] = lambda _: None
) -> list[Loaded]:
    """Load the batches of a source into the warehouse of a folder.

    Parameters
    ----------
    source
        Folder of the batches.
    folder
        Folder of the warehouse and the dimensions; created if it does not exist.
    batches
        Number of the last batch to load; None for all.
    on_batch
        Function that is called with each batch.

    Raises
    ------
    InputError
        If the source lacks a batch, or the folder holds something else.
    """
    there = batches_of(source)
    _require_plain(source)
    wanted = there if batches is None else batches
    if wanted > there:
        raise InputError(f"{source} has {there} batches, so --batches is at most {there}, not {wanted}")
    with _opened(folder) as mark:
        spark = session()
        with Dimensions(folder) as dimensions:
            results = []
            for batch in range(1, wanted + 1):
                loader = _Loader(Source(spark, source, batch), dimensions, Warehouse(folder / "warehouse"))
                mark.check(loader.source)
                with explained(f"loading batch {batch} of {source}"):
                    results.append(loader.run())
                on_batch(results[-1])
    return results


@dataclass(frozen=True)
class _Loader:
    source: Source
    dimensions: Dimensions
    warehouse: Warehouse

    def run(self) -> Loaded:
        started = time.monotonic()
        needed = [table for table in TABLES if not self._holds(table)]
        if not needed:
            return Loaded(self.source.batch, time.monotonic() - started, {})
        self.dimensions.apply(self.source)
        names = {row["status_id"]: row["status_name"] for row in self._status_names()}
        for table, rows in self.dimensions.tables(names).items():
            if not self._holds(table):
                self.warehouse.replace(table, self.source.batch, rows, KEYS[table])
        facts = Facts(self.source, self.dimensions, self.warehouse)
        steps = {
            "dim_trade": facts.trades,
            "fact_holdings": facts.holdings,
            "fact_watches": facts.watches,
            "fact_cash_balances": facts.cash,
        }
        for table, step in steps.items():
            if not self._holds(table):
                step()
        rows = {table: self.warehouse.rows(table) for table in TABLES}
        return Loaded(self.source.batch, time.monotonic() - started, rows)

    def _holds(self, table: str) -> bool:
        batch = HISTORY if table in ONLY_HISTORY else self.source.batch
        return self.warehouse.loaded(table) >= batch

    def _status_names(self) -> list[Any]:
        found: list[Any] = self.source.names("StatusType.txt", STATUS).collect()
        return found


@dataclass(frozen=True)
class _Mark:
    """File that tells that a folder is a warehouse of this program, and what its batches were loaded from."""

    path: Path

    def check(self, source: Source) -> None:
        """Record the files of a batch before it is loaded, or compare them with those it was loaded from."""
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        batch, digest = str(source.batch), source.fingerprint
        if known.setdefault(batch, digest) != digest:
            raise InputError(
                f"{self.path.parent} holds batch {batch} of other files; load {source.folder} into another folder with "
                "--dir"
            )
        draft = self.path.with_suffix(".new")
        draft.write_text(json.dumps(known, indent=1) + "\n")
        draft.replace(self.path)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[_Mark]:
    """Create the folder or check that it is one of this program, and keep other loads out of it."""
    mark = _Mark(folder / MARK)
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if there - {LOCK} and MARK not in there:
        raise InputError(f"{folder} holds files that no load of the brokerage wrote; name another folder with --dir")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another process is loading {folder}; wait for it, or name another folder") from None
        yield mark
