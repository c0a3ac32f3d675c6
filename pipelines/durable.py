"""Files and folders that survive a power failure once the function has returned."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["create_whole", "sync_file", "sync_folder", "write_new"]


def create_whole(place: Path, content: bytes) -> None:
    """Create a file that has all of its content from the moment on at which it has its name.

    A process that is killed meanwhile leaves at most a file `.<uuid>.tmp` beside it.

    Raises
    ------
    OSError
        If it exists, or cannot be written.
    """
    written = place.with_name(f".{uuid.uuid4()}.tmp")
    try:
        write_new(written, content)
        place.hardlink_to(written)
        sync_folder(place.parent)
    finally:
        written.unlink(missing_ok=True)


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


def sync_file(place: Path) -> None:
    """Make the content of a file durable that was written before.

    Raises
    ------
    OSError
        If the operating system refuses.
    """
    with place.open("rb") as file:
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
