"""Leases in the run catalog: only one live run at a time loads a pipeline, or compares the keys of a fact table.

A thread renews a lease while its holder is alive. Another run can take a lease over when it expires, or immediately if
the holder was a process of this machine that has ended. `check`, which is called before each write, reports a lost
lease to its former holder (a process that was suspended for a long time).
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import RowMapping, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from headrace.pipelines.catalog import LEASES, holder, lease_is_live
from headrace.pipelines.errors import CatalogError, LeaseHeldError
from headrace.pipelines.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from headrace.pipelines.catalog import Catalog

__all__ = ["Leases"]

_LOG = logging.getLogger(__name__)
_ATTEMPTS = 10


class Leases:
    """The leases of one run, which holds all or none of them; a context manager.

    Parameters
    ----------
    catalog
        Run catalog that stores the leases.
    names
        Names of the resources to lease, such as ``pipeline:/shop/.headrace/orders/checkpoint`` or
        ``facts:/shop/warehouse/orders``.
    seconds
        Duration of a lease in seconds. It is renewed three times in that period.
    clock
        Function that returns seconds since 1970. Machines that share the catalog must agree within a few seconds.

    Raises
    ------
    LeaseHeldError
        On entry, if a live run holds one of the leases. The message names it.
    """

    def __init__(
        self, catalog: Catalog, names: Iterable[str], seconds: float = 60.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._catalog = catalog
        self._names = sorted(set(names))
        self._seconds = seconds
        self._clock = clock
        self.token = str(uuid.uuid4())
        self._own = ProcessIdentity.own()
        self._stop = threading.Event()
        self._renewer = threading.Thread(target=self._renew_until_stopped, name="headrace-lease", daemon=True)

    def __enter__(self) -> Self:
        taken: list[str] = []
        try:
            for name in self._names:
                self._take(name)
                taken.append(name)
        except BaseException:
            self._release(taken)
            raise
        self._renewer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._renewer.join()
        self._release(self._names)

    def check(self) -> None:
        """Renew all leases.

        Raises
        ------
        LeaseHeldError
            If another run took over one of the leases. This run must not write any more.
        """
        with self._catalog.transaction() as connection:
            self._catalog.note_alive(connection, self.token)
            for name in self._names:
                mine = (LEASES.c.name == name, LEASES.c.token == self.token)
                done = connection.execute(update(LEASES).where(*mine).values(expires=self._clock() + self._seconds))
                if done.rowcount != 1:
                    raise LeaseHeldError(
                        f"the lease of {name} has been taken over, since this process did not renew it for "
                        f"{self._seconds:.0f} s; nothing was written since; start the run again"
                    )

    def _take(self, name: str) -> None:
        """Insert the lease, or replace the dead lease if it has not changed since it was read."""
        for _ in range(_ATTEMPTS):
            with self._catalog.transaction() as connection:
                seen = connection.execute(select(LEASES).where(LEASES.c.name == name)).mappings().one_or_none()
            if seen is None:
                if self._insert(name):
                    return
            elif lease_is_live(seen, self._clock()):
                raise LeaseHeldError(_held(name, seen, self._clock()))
            elif self._exchange(name, str(seen["token"])):
                _LOG.warning("took over the lease of %s from process %s, which has ended", name, seen["pid"])
                return
        raise CatalogError(f"the lease of {name} changed hands {_ATTEMPTS} times while it was being taken; try again")

    def _insert(self, name: str) -> bool:
        try:
            with self._catalog.transaction() as connection:
                connection.execute(insert(LEASES).values(name=name, **self._identity()))
        except CatalogError as error:
            if isinstance(error.__cause__, IntegrityError):
                return False
            raise
        return True

    def _exchange(self, name: str, token: str) -> bool:
        with self._catalog.transaction() as connection:
            seen = (LEASES.c.name == name, LEASES.c.token == token)
            done = connection.execute(update(LEASES).where(*seen).values(**self._identity()))
        return bool(done.rowcount == 1)

    def _release(self, names: Iterable[str]) -> None:
        with self._catalog.transaction() as connection:
            for name in names:
                connection.execute(delete(LEASES).where(LEASES.c.name == name, LEASES.c.token == self.token))

    def _identity(self) -> dict[str, Any]:
        return {"token": self.token, **asdict(self._own), "expires": self._clock() + self._seconds}

    def _renew_until_stopped(self) -> None:
        while not self._stop.wait(self._seconds / 3):
            try:
                self.check()
            except CatalogError as error:
                _LOG.warning("the lease could not be renewed and will be tried again: %s", error)
            except LeaseHeldError as error:
                _LOG.error("%s", error)
                return


def _held(name: str, seen: RowMapping, now: float) -> str:
    left = max(0.0, seen["expires"] - now)
    return (
        f"{name} is in use by process {seen['pid']} on {holder(seen).host}; wait for it or stop it (its lease ends by "
        f"itself {left:.0f} s after it dies)"
    )
