"""A folder for compiled kernels, where neither the package nor the home can be written to. Knows no kernel.

Numba keeps what it compiled beside the sources or in the user's cache folder, and refuses to work if it can write to
neither, as in a container with a read-only file system. Then a folder of this process serves, and kernels are compiled
anew by each process.
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
    """Set ``NUMBA_CACHE_DIR`` to a temporary folder if it is not set and none of the usual folders can be written to.

    Raises
    ------
    StorageIOError
        If there can be no temporary folder either.
    """
    if os.environ.get(_SETTING) or any(map(_writable, usual)):
        return
    try:
        folder = tempfile.mkdtemp(prefix="headrace-kernels-")
    except OSError as error:
        raise StorageIOError(
            f"there is no folder to keep compiled kernels in: set {_SETTING} to one that can be written to ({error})"
        ) from error
    os.environ[_SETTING] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def usual_folders() -> tuple[Path, ...]:
    """Return where numba would look: beside the sources, and the user's cache folder if there is a home."""
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
