"""Declared patterns of dates and timestamps, compiled to codes for `_value_kernels.parse_patterns`.

Directives mean what they mean to Python's `strptime`, with three differences: names of months are English whatever the
locale, ``%Y`` is four digits, and ``%d%m`` without anything between them are two digits each.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MONTHS", "SHORT_MONTHS", "Pattern", "compile_pattern"]

_NAMES = (
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
)
_NUMBERS = "YymdHIMS"
_DIRECTIVES = _NUMBERS + "fzbBp"
_CLOCK = set("HIMSfzp")
_LITERAL, _FIXED = 256, 512


def _table(names: tuple[str, ...]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(name.encode() + b"\0" for name in names), dtype=np.uint8)


MONTHS = _table(_NAMES)
SHORT_MONTHS = _table(tuple(name[:3] for name in _NAMES))


@dataclass(frozen=True)
class Pattern:
    """A compiled pattern: its text, its codes, and whether it has a zone."""

    text: str
    codes: NDArray[np.int32]
    zoned: bool


@functools.lru_cache(maxsize=64)
def compile_pattern(field: str, text: str) -> Pattern:
    """Return a pattern as codes.

    Parameters
    ----------
    field
        Name of the option, for messages; a `date_format` has no time of day.

    Raises
    ------
    InputError
        If a directive is not known, or the pattern does not tell year, month and day.
    """
    tokens = _tokens(field, text)
    letters = [token[1] for token in tokens if len(token) > 1]
    days = [[letter for letter in letters if letter in kind] for kind in ("Yy", "mbB", "d")]
    twice = len(set(letters)) != len(letters) or any(len(found) > 1 for found in days)
    if twice or not all(days) or (field == "date_format" and _CLOCK & set(letters)):
        needs = "the year, the month and the day" + (" and no time of day" if field == "date_format" else "")
        raise InputError(f"{field} is {text!r}; it tells {needs}, each once, as in '%d.%m.%Y'")
    codes: list[int] = []
    for place, token in enumerate(tokens):
        if len(token) == 1:
            codes.extend(_LITERAL + byte for byte in token.encode())
            continue
        beside = any(_is_number(other) for other in (*tokens[place - 1 : place], *tokens[place + 1 : place + 2]))
        codes.append(ord(token[1]) + (_FIXED if beside and token[1] in _NUMBERS else 0))
    return Pattern(text, np.array(codes, dtype=np.int32), "z" in letters)


def _is_number(token: str) -> bool:
    return token.isdigit() or (len(token) > 1 and token[1] in _NUMBERS + "f")


def _tokens(field: str, text: str) -> list[str]:
    """Return the directives, with their percent sign, and the literal characters."""
    tokens: list[str] = []
    position = 0
    while position < len(text):
        if text[position] != "%":
            tokens.append(text[position])
            position += 1
            continue
        letter = text[position + 1 : position + 2]
        if letter == "%":
            tokens.append("%")
        elif letter and letter in _DIRECTIVES:
            tokens.append("%" + letter)
        else:
            known = ", ".join("%" + name for name in _DIRECTIVES)
            raise InputError(f"{field} is {text!r}: %{letter} is not known; the directives are {known}, %%")
        position += 2
    return tokens
