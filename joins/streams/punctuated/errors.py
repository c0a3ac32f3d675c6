"""Errors of the punctuated join: input that breaks what was promised about it."""

from __future__ import annotations

from headrace.joins.errors import JoinError
from headrace.storage.errors import InputError

__all__ = ["PromiseError", "PunctuationError", "UniqueKeyError"]


class PromiseError(JoinError, InputError):
    """Input broke a promise about it. The results are incomplete; start over with a new operator."""


class PunctuationError(PromiseError):
    """A tuple arrived after a punctuation that excludes it, or after its cluster was over."""


class UniqueKeyError(PromiseError):
    """An input that was said to have each key once has one twice."""
