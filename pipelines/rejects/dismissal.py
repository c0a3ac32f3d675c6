"""Dismissal of rejected rows: they are not to be loaded, for a stated reason."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from headrace.pipelines.batch.resolutions import IDENTITY, RESOLUTION_SCHEMA, Action, resolution_rows
from headrace.pipelines.catalog import Catalog
from headrace.pipelines.delta.tables import create_table, first_cause, has_table, open_table
from headrace.pipelines.errors import DeltaTableError, RejectedRowsError
from headrace.pipelines.lease import Leases
from headrace.pipelines.rejects.rows import OPEN, Selection, rejects
from headrace.pipelines.source.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from headrace.pipelines.config.model import PipelineConfig

__all__ = ["dismiss_rows"]


def dismiss_rows(
    config: PipelineConfig, selection: Selection, reason: str, clock: Callable[[], float] = time.time
) -> int:
    """Mark open rejected rows as dismissed, and return their number.

    Parameters
    ----------
    config
        Configuration of the pipeline.
    selection
        Rows to dismiss. Rows that are not open are left out.
    reason
        Why the rows are not to be loaded.
    clock
        Function that returns seconds since 1970.

    Raises
    ------
    RejectedRowsError
        If the reason is blank, or a retry was interrupted.
    LeaseHeldError
        If a run of the pipeline is active.
    DeltaTableError
        If the tables cannot be read or written.
    """
    if not reason.strip():
        raise RejectedRowsError("a dismissal has a reason; say why the rows are not to be loaded")
    with (
        Catalog(str(config.catalog), clock) as catalog,
        Leases(catalog, [f"pipeline:{config.checkpoint}"], clock=clock) as leases,
    ):
        _refuse_interrupted(config)
        with rejects(config, selection, [OPEN], records=False) as found:
            names = ", ".join(IDENTITY.names)
            chosen = found.sql(f"SELECT {names} FROM found").to_arrow_table().cast(IDENTITY)  # noqa: S608 - constants
        if not chosen.num_rows:
            return 0
        given = {name: chosen.column(name) for name in IDENTITY.names}
        at = datetime.fromtimestamp(clock(), UTC)
        rows = resolution_rows(given, Action.DISMISSED, config.name, None, None, at, reason=reason.strip())
        leases.check()
        _append(config.resolutions_path, rows)
        return int(chosen.num_rows)


def _refuse_interrupted(config: PipelineConfig) -> None:
    """Raise an error if a retry was interrupted, which may have loaded rows that still seem to be open."""
    if not Ledger.exists(str(config.checkpoint)):
        return
    with Ledger(str(config.checkpoint)) as ledger:
        plan = ledger.pending()
    if plan is not None and plan.retried:
        raise RejectedRowsError(
            f"batch {plan.number}, a retry of {len(plan.retried)} rejected rows, was interrupted; run the pipeline or "
            "another retry first, which completes it"
        )


def _append(path: str, rows: pa.Table) -> None:
    from deltalake import write_deltalake  # noqa: PLC0415 - heavy
    from deltalake.exceptions import DeltaError  # noqa: PLC0415 - as above

    if not has_table(path):
        create_table(path, RESOLUTION_SCHEMA)
    try:
        write_deltalake(open_table(path), rows, mode="append")
    except (DeltaError, OSError) as error:
        raise DeltaTableError(f"{path} cannot be written: {first_cause(error)}; nothing was dismissed") from error
