"""Errors that the command line raises itself; `headrace.cli.exits` maps every family to its exit code."""

from __future__ import annotations

from headrace.storage.errors import HeadraceError, InputError

__all__ = ["CliError", "InputFileError", "OutputFileError"]


class CliError(HeadraceError):
    """Root of what the command line raises on purpose."""


class InputFileError(CliError, InputError):
    """A file or folder given as input is missing, empty, of an unknown kind, or cannot be read as what it is."""


class OutputFileError(CliError, InputError):
    """The place for the result is taken or does not exist."""
