"""Every error of the etl layer: bad declarations, keys that are missing, row counts that do not reconcile."""

from __future__ import annotations

from headrace.storage.errors import HeadraceError, InputError

__all__ = [
    "ConservationError",
    "DeclarationError",
    "DimensionError",
    "EtlError",
    "MissingMembersError",
]


class EtlError(HeadraceError):
    """Root of the errors of the etl layer."""


class DeclarationError(EtlError, InputError):
    """A dimension, lookup or duplicate rule names a column or option that is not there. Raised before the first row."""


class DimensionError(EtlError, InputError):
    """The rows of a dimension break its rules: a natural key that is null or occurs twice, a wrong surrogate key."""


class MissingMembersError(EtlError, InputError):
    """A lookup with the policy `fail` met keys that are not in its dimension. Raised when the input has been read."""


class ConservationError(EtlError):
    """Rows that came in are not the rows loaded, dropped, routed and rejected. A defect, never the input's fault."""
