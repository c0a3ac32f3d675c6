"""Parsers and formatters for sizes and durations as text."""

from __future__ import annotations

import re
import sys
from decimal import Decimal
from fractions import Fraction

from headrace.storage.errors import InputError

__all__ = ["format_size", "parse_duration", "parse_exact_duration", "parse_memory"]

_SIZES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_STEP = 1024
_SECONDS: dict[str, int | Fraction] = {
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": 1,
    "m": 60,
    "min": 60,
    "h": 3600,
    "d": 86_400,
}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_memory(value: int | str) -> int:
    """Return a size in bytes.

    Parameters
    ----------
    value
        A number of bytes, or text such as ``"32MiB"`` or ``"1.5GB"``.

    Raises
    ------
    InputError
        If the text is not a positive number followed by a known unit.

    Examples
    --------
    >>> parse_memory("32MiB")
    33554432
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = _QUANTITY.fullmatch(str(value))
        if match is None or match[2].upper() not in _SIZES:
            raise InputError(
                f"not a size: {value!r}; write a number and a unit, as in '32MiB' (units: B, KB, MB, GB, KiB, MiB, GiB)"
            )
        size = int(Decimal(match[1]) * _SIZES[match[2].upper()])
    if size <= 0:
        raise InputError(f"a size must be positive, not {value!r}")
    return size


def parse_duration(value: float | str) -> float:
    """Return a duration in seconds.

    Parameters
    ----------
    value
        A number of seconds, or text such as ``"500ms"``, ``"2s"`` or ``"1.5m"``.

    Raises
    ------
    InputError
        If the text is not a positive number followed by a known unit.

    Examples
    --------
    >>> parse_duration("500ms")
    0.5
    """
    seconds: float | Fraction
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value
    else:
        seconds = parse_exact_duration(str(value))
    if not 0 < seconds <= sys.float_info.max:
        raise InputError(f"a duration must be positive and finite, not {value!r}")
    return float(seconds)


def parse_exact_duration(text: str) -> Fraction:
    """Return a duration in seconds that is given as text, without rounding; it may be 0.

    Raises
    ------
    InputError
        If the text is not a number followed by a known unit.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in _SECONDS:
        raise InputError(
            f"not a duration: {text!r}; write a number and a unit, as in '500ms' (units: us, ms, s, m, h, d)"
        )
    return Fraction(match[1]) * _SECONDS[match[2].lower()]


def format_size(size: int) -> str:
    """Return a size as text, rounded up, so that the text as a budget is enough.

    Examples
    --------
    >>> format_size(33554432), format_size(33554433)
    ('32.0 MiB', '32.1 MiB')
    """
    if size < _STEP:
        return f"{size} B"
    unit = next(unit for unit in ("KiB", "MiB", "GiB") if unit == "GiB" or _tenths(size, unit) < 10 * _STEP)
    return f"{_tenths(size, unit) / 10:.1f} {unit}"


def _tenths(size: int, unit: str) -> int:
    return -(-10 * size // _SIZES[unit.upper()])
