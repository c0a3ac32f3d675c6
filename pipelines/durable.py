"""Files and folders that survive a power failure once the function has returned."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["sync_folder", "write_new"]


def write_new(place: Path, content: bytes) -> None:
    """Write a file that does not exist yet; `sync_folder` makes its name durable, too.

    Raises
    ------
    OSError
        If it exists, or cannot be written.
    """
    with place.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the creation, renaming and removal of files in a folder durable.

    Raises
    ------
    OSError
        If the operating system refuses.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
