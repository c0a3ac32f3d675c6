"""The declaration of a lookup: one role of a dimension in a stream, and the policy for missing keys.

Contains the declaration and its checks. `surrogate` executes lookups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.etl.errors import DeclarationError
from headrace.etl.inputs import check_names
from headrace.etl.special import Special, as_names, check_target
from headrace.joins.handle import check_takeable

if TYPE_CHECKING:
    from headrace.etl.dimension import Dimension

__all__ = ["Lookup", "Policy"]


class Policy(StrEnum):
    """Policy for natural keys that are not in the dimension."""

    INFER = "infer"
    UNKNOWN = "unknown"
    REJECT = "reject"
    FAIL = "fail"


@dataclass(frozen=True)
class Lookup:
    """One role of a dimension in a stream.

    Parameters
    ----------
    dimension
        Dimension to look up.
    role
        Name of the role, unique in a stream (``"origin"``, ``"destination"``). The key column is ``<role>_key``.
    on
        Natural key column for each stream column: ``{"tail": "tailnum"}``.
    policy
        Policy for keys that are not in the dimension.
    carry
        Attributes of the member to add to the fact, as ``<role>_<attribute>``. For a special member these are the
        values that the dimension declares.
    null_key
        Target of facts whose key is null: ``"unknown"``, ``"not_applicable"``, ``"invalid"`` or ``"reject"``.
    unfit_key
        Target of facts whose value is out of range for the key's type, with the values of `null_key`; None to apply
        `policy`.

    Raises
    ------
    DeclarationError
        If `on` does not name every natural key column once, `carry` names a column that is not an attribute, or a
        policy or target is not valid.

    Examples
    --------
    >>> from headrace.etl import Dimension
    >>> airport = Dimension("airport", ("faa",), "airport_key", pa.schema({"faa": pa.string()}))
    >>> Lookup(airport, "origin", {"origin_code": "faa"}, "infer").key_column
    'origin_key'
    """

    dimension: Dimension
    role: str
    on: dict[str, str]
    policy: Policy | str = Policy.UNKNOWN
    carry: tuple[str, ...] = ()
    null_key: str = Special.UNKNOWN.text
    unfit_key: str | None = None

    def __post_init__(self) -> None:
        if self.policy not in set(Policy):
            raise DeclarationError(
                f"lookup {self.role!r}: unknown policy {self.policy!r}; the valid ones are {', '.join(Policy)}"
            )
        object.__setattr__(self, "policy", Policy(self.policy))
        object.__setattr__(self, "carry", as_names(self.carry))
        if not isinstance(self.on, Mapping):
            raise DeclarationError(
                f"lookup {self.role!r}: `on` maps stream columns to natural key columns, as in {{'tail': 'tailnum'}}, "
                f"and is not {self.on!r}"
            )
        if sorted(self.on.values()) != sorted(self.dimension.natural_key):
            raise DeclarationError(
                f"lookup {self.role!r} compares {', '.join(self.on.values())}, but the natural key of dimension "
                f"{self.dimension.name!r} is {', '.join(self.dimension.natural_key)}; name each column once"
            )
        for target in (self.null_key, self.unfit_key):
            if target is not None:
                check_target(target, f"lookup {self.role!r}")
        attributes = self.dimension.attributes.names
        unknown = [name for name in self.carry if name not in attributes]
        if unknown:
            raise DeclarationError(
                f"lookup {self.role!r}: dimension {self.dimension.name!r} has no attribute {unknown[0]!r}; "
                f"it has {', '.join(attributes) or 'none'}"
            )
        added = self.added_schema().names
        twice = next((name for name in added if added.count(name) > 1), None)
        if twice is not None:
            raise DeclarationError(
                f"lookup {self.role!r} adds two columns {twice!r}; carry each attribute once, and give the lookup "
                "another role if the name of an attribute makes two columns the same"
            )

    @property
    def stream_columns(self) -> tuple[str, ...]:
        """Stream columns in natural key order."""
        by_key = {key: column for column, key in self.on.items()}
        return tuple(by_key[name] for name in self.dimension.natural_key)

    @property
    def key_column(self) -> str:
        """Name of the column with the surrogate key."""
        return f"{self.role}_key"

    @property
    def outcome_column(self) -> str:
        """Name of the column with this lookup's outcome for each row."""
        return f"_{self.role}_outcome"

    @property
    def reason_column(self) -> str:
        """Name of the column with the reason for a rejection by this lookup, null otherwise."""
        return f"_{self.role}_reason"

    @property
    def operator_on(self) -> list[tuple[str, str]]:
        """Argument `on` of the operator for `resolve`: the normalized key columns that `resolve` adds."""
        return [(f"_{self.role}_{name}", name) for name in self.dimension.natural_key]

    @property
    def operator_columns(self) -> list[str]:
        """Argument `columns` of that operator: the table columns that `resolve` needs."""
        return [self.dimension.surrogate_key, *self.carry]

    def added_schema(self) -> pa.Schema:
        """Return the columns that `resolve` appends to the stream."""
        carried = [pa.field(f"{self.role}_{name}", self.dimension.attributes.field(name).type) for name in self.carry]
        names = [pa.field(name, pa.string()) for name in (self.outcome_column, self.reason_column)]
        return pa.schema([pa.field(self.key_column, pa.int64()), *carried, *names])

    def check(self, stream: pa.Schema) -> None:
        """Raise unless this lookup can run over a stream.

        Raises
        ------
        DeclarationError
            If a column is missing or there twice, or a column to be added already exists.
        KeyInputError
            If a column can never equal its key.
        StreamSchemaError
            If the stream has a column that Arrow cannot take rows from.
        """
        check_names(stream.names, self.stream_columns, f"lookup {self.role!r}: the stream", DeclarationError)
        check_takeable(stream)
        added = [*self.added_schema().names, *(name for name, _ in self.operator_on)]
        taken = [name for name in added if name in stream.names]
        if taken:
            raise DeclarationError(
                f"lookup {self.role!r} adds a column {taken[0]!r}, but the stream has one; rename it"
            )
        self.dimension.check_stream({column: stream.field(column).type for column in self.stream_columns})
