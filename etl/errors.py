"""Errors of the etl layer: invalid declarations, missing keys, and row counts that do not reconcile."""

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
    """Base class of the errors of the etl layer."""


class DeclarationError(EtlError, InputError):
    """A dimension, lookup, or duplicate rule names an unknown column or option. Raised before the first row."""


class DimensionError(EtlError, InputError):
    """Rows violate the rules of their dimension: a null or duplicate natural key, or an invalid surrogate key."""


class MissingMembersError(EtlError, InputError):
    """A lookup with the policy `fail` found missing keys. Raised after the input has been read."""


class ConservationError(EtlError):
    """Input rows do not equal the rows loaded, dropped, routed, and rejected. A bug, never caused by the input."""
