"""Special members: unknown, not applicable, and invalid. They have fixed surrogate keys and no natural key."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from headrace.etl.errors import DeclarationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pyarrow as pa

__all__ = ["REJECT", "Special", "SpecialMembers", "as_names", "check_target", "exact_scalar", "member_of"]

REJECT: Final = "reject"


class Special(IntEnum):
    """Surrogate key of a special member."""

    UNKNOWN = -1
    NOT_APPLICABLE = -2
    INVALID = -3

    @property
    def text(self) -> str:
        """Name of the member in declarations."""
        return self.name.lower()


@dataclass(frozen=True)
class SpecialMembers:
    """The special members of a dimension and the values of their attributes. Omitted attributes are null.

    Parameters
    ----------
    unknown
        Attributes of member -1, which every dimension has.
    not_applicable, invalid
        Attributes of members -2 and -3; None if the dimension does not have them.

    Examples
    --------
    >>> SpecialMembers(unknown={"city": "Unknown"}, invalid={"city": "Invalid"}).present
    (<Special.UNKNOWN: -1>, <Special.INVALID: -3>)
    """

    unknown: Mapping[str, Any] = field(default_factory=dict)
    not_applicable: Mapping[str, Any] | None = None
    invalid: Mapping[str, Any] | None = None

    @property
    def present(self) -> tuple[Special, ...]:
        """The special members of the dimension."""
        return tuple(member for member in Special if self.values(member) is not None)

    def values(self, member: Special) -> Mapping[str, Any] | None:
        """Return the attributes of a special member, or None if the dimension does not have it."""
        given: Mapping[str, Any] | None = getattr(self, member.text)
        return given

    def check(self, attributes: pa.Schema, where: str) -> None:
        """Raise `DeclarationError` if a value is given for an unknown attribute, or does not fit its type."""
        for member in self.present:
            for name, value in (self.values(member) or {}).items():
                if name not in attributes.names:
                    known = ", ".join(attributes.names) or "none"
                    raise DeclarationError(f"{where}: {member.text!r} names {name!r}; the attributes are {known}")
                try:
                    exact_scalar(value, attributes.field(name).type)
                except (TypeError, ValueError) as error:
                    raise DeclarationError(
                        f"{where}: {value!r} of member {member.text!r} does not fit {name!r}: {error}"
                    ) from error


def as_names(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return one or several names as a tuple."""
    return (given,) if isinstance(given, str) else tuple(given)


def exact_scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    """Return a Python value as a value of an attribute; a float is rounded if the attribute holds shorter floats.

    Raises
    ------
    TypeError, ValueError
        If the value would change, or is of another kind.

    Examples
    --------
    >>> import pyarrow as pa
    >>> exact_scalar(5, pa.decimal128(3, 1))
    <pyarrow.Decimal128Scalar: Decimal('5.0')>
    """
    import pyarrow as pa  # noqa: PLC0415 - declarations are imported without it

    from headrace.storage.format import plain  # noqa: PLC0415 - as above

    try:
        if isinstance(value, float) and pa.types.is_floating(kind):
            return _finite(pa.scalar(value, kind), value)
        if value is None or pa.types.is_nested(kind):
            return pa.scalar(value, kind)
        return plain(pa.array([value]), kind)[0]
    except (pa.ArrowNotImplementedError, OverflowError) as error:
        raise ValueError(str(error)) from error


def _finite(number: pa.Scalar, given: float) -> pa.Scalar:
    if math.isinf(number.as_py()) and not math.isinf(given):
        raise ValueError(f"it is beyond the numbers of {number.type}")
    return number


def check_target(target: str, where: str, also: str = "") -> None:
    """Raise `DeclarationError` unless a target is the name of a special member, ``"reject"``, or `also`."""
    valid = [*([also] if also else []), *(member.text for member in Special), REJECT]
    if target not in valid:
        raise DeclarationError(f"{where}: {target!r} is not a valid target; the valid ones are {', '.join(valid)}")


def member_of(target: str) -> Special | None:
    """Return the special member that a target names; None for ``"reject"``."""
    return None if target == REJECT else Special[target.upper()]
