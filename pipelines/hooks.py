"""Hooks: functions that are called with the name of each step, by which tests end a run there."""

from __future__ import annotations

__all__ = ["no_hook"]


def no_hook(_step: str) -> None:
    """Do nothing."""
