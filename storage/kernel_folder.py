"""A folder for compiled kernels, for systems where neither the package nor the home folder is writable.

Numba stores compiled code beside the sources or in the user's cache folder, and refuses to work if neither is writable,
as in a container with a read-only file system. A temporary folder of this process is used then, and each process
compiles the kernels again.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.storage.errors import StorageIOError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ensure_kernel_folder", "usual_folders"]

_SETTING = "NUMBA_CACHE_DIR"


def ensure_kernel_folder(usual: Iterable[Path]) -> None:
    """Set ``NUMBA_CACHE_DIR`` to a temporary folder if it is not set and none of the usual folders is writable.

    Raises
    ------
    StorageIOError
        If no temporary folder can be created either.
    """
    if os.environ.get(_SETTING) or any(map(_writable, usual)):
        return
    try:
        folder = tempfile.mkdtemp(prefix="headrace-kernels-")
    except OSError as error:
        raise StorageIOError(
            f"there is no folder for compiled kernels: set {_SETTING} to a writable folder ({error})"
        ) from error
    os.environ[_SETTING] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def usual_folders() -> tuple[Path, ...]:
    """Return the folders that numba would use: beside the sources, and the user's cache folder if there is a home."""
    beside = Path(__file__).parent / "__pycache__"
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        return (beside,)
    return beside, cache / "numba"


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True
