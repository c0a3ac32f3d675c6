"""Errors that the command line raises. `headrace.cli.exits` maps every error family to its exit code."""

from __future__ import annotations

from headrace.storage.errors import HeadraceError, InputError

__all__ = ["CliError", "InputFileError", "OutputFileError"]


class CliError(HeadraceError):
    """Base class of the errors of the command line."""


class InputFileError(CliError, InputError):
    """An input file or folder is missing, empty, of an unknown kind, or not readable in its format."""


class OutputFileError(CliError, InputError):
    """The output path is in use, or its folder does not exist."""
