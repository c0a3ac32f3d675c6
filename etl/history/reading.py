"""`StoredVersions`: lookups in a clustered table of entries that something else keeps up to date."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.etl.errors import DeclarationError
from headrace.etl.history.as_of import AsOfLookup, Operators
from headrace.etl.history.inferring import special_versions
from headrace.etl.history.store import NewestEntry, begins, resolved
from headrace.etl.lookup import Policy
from headrace.joins import SSIJ

if TYPE_CHECKING:
    from headrace.etl.history.declaration import History
    from headrace.storage import Table

__all__ = ["StoredVersions"]


class StoredVersions:
    """The versions of a dimension with history in a clustered table of its entries, for lookups only.

    Parameters
    ----------
    history
        The declaration.
    entries
        Clustered table of the entries, with the key `History.entry_key`.
    memory
        Memory budget of each join.
    """

    def __init__(self, history: History, entries: Table, memory: int | str = "64MiB") -> None:
        self.history = history
        self._entries = entries
        self._memory = memory

    def versions(self, *, special: bool = True) -> pa.Table:
        """Return all versions in the order of natural key and time, the special members first."""
        schema = self.history.version_schema
        found = [special_versions(self.history) if special else schema.empty_table()]
        for batch in self._entries.scan():
            heads = batch.filter(begins(self.history, batch)).select(schema.names)
            found.append(pa.Table.from_batches([heads]).cast(schema))
        return pa.concat_tables(found)

    def lookup(self, facts: pa.Table | pa.RecordBatch, on: dict[str, str], **options: Any) -> pa.Table:
        """Return facts with the surrogate keys of current versions; see `as_of`."""
        return self.as_of(facts, on, None, **options)

    def as_of(
        self,
        facts: pa.Table | pa.RecordBatch,
        on: dict[str, str],
        event_time: str | None,
        *,
        role: str | None = None,
        policy: Policy | str = Policy.UNKNOWN,
        carry: str | tuple[str, ...] = (),
        **targets: Any,
    ) -> pa.Table:
        """Return facts with the surrogate keys of the versions that were valid at their times.

        The parameters are those of `HistoryDimension.as_of`.

        Raises
        ------
        DeclarationError
            If the policy is ``infer``, which changes the dimension.
        """
        name = role or self.history.dimension.name
        declared = AsOfLookup(self.history, name, on, event_time, policy, carry, **targets)
        if declared.policy == Policy.INFER:
            raise DeclarationError(f"lookup {name!r}: a dimension that is read only cannot infer members")
        current_on, columns = declared.current.operator_on, declared.current.operator_columns
        kind = self.history.instant_type
        with NewestEntry(self._entries, current_on, columns, kind, self._memory) as current:
            if event_time is None:
                return resolved(declared, Operators(current), facts)
            with self._join(declared, backward=True) as older, self._join(declared, backward=False) as first:
                return resolved(declared, Operators(current, older, first), facts)

    def _join(self, lookup: AsOfLookup, *, backward: bool) -> SSIJ:
        on = lookup.entry_on(backward=backward)
        return SSIJ(self._entries, on=on, how="left", columns=lookup.entry_columns, memory=self._memory)
