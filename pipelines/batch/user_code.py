"""Functions of the user that a pipeline file names as `module:function`.

A module in the folder of the pipeline file takes precedence over the installed environment. Such modules do not stay in
`sys.modules`, so two projects in one process may each have a module `rules`, and Spark sends their functions to the
workers by value: the workers need no access to the folder.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.storage.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["UserCodeError", "imported_from", "user_function"]


class UserCodeError(Exception):
    """The named function cannot be imported; the message is the reason and the remedy."""


def user_function(name: str, folder: Path | None) -> Callable[..., Any]:
    """Import a function.

    Parameters
    ----------
    name
        Name of the function as `module:function`.
    folder
        Folder of the pipeline file, which is searched first; None to search only the installed environment.

    Raises
    ------
    UserCodeError
        If the module cannot be imported or does not have the function.
    """
    module_name, _, function_name = name.partition(":")
    with imported_from(folder):
        module = _module(module_name, folder)
    found = getattr(module, function_name, None)
    if not callable(found):
        names = [each for each in vars(module) if callable(getattr(module, each)) and not each.startswith("_")]
        raise UserCodeError(
            f"{module.__file__} has no function {function_name!r}{nearest(function_name, names)}; it has "
            f"{', '.join(names) or 'none'}"
        )
    return found


@contextmanager
def imported_from(folder: Path | None) -> Iterator[None]:
    """Let imports in the block find modules in a folder first; afterward, remove these modules from `sys.modules`."""
    if folder is None:
        yield
        return
    before = dict(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name, module in sys.modules.items() if before.get(name) is not module]:
            if _lies_in(sys.modules[name], folder):
                del sys.modules[name]
                sys.modules.update({name: before[name]} if name in before else {})


def _module(name: str, folder: Path | None) -> Any:
    top = name.partition(".")[0]
    if folder is not None and PathFinder.find_spec(top, [str(folder)]) is not None:
        for known in [known for known in sys.modules if known == top or known.startswith(f"{top}.")]:
            del sys.modules[known]  # `imported_from` restores them
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(name, error) from error
        there = [] if folder is None else sorted(path.stem for path in folder.glob("*.py"))
        where = "the installed environment" if folder is None else f"{folder} and the installed environment"
        raise UserCodeError(
            f"there is no module {name!r}{nearest(name, there)}; {where} were searched; write {name}.py, or correct "
            "the name"
        ) from error
    except Exception as error:
        raise _failed(name, error) from error


def _failed(name: str, error: Exception) -> UserCodeError:
    return UserCodeError(f"the import of module {name!r} failed: {type(error).__name__}: {error}; correct the module")


def _lies_in(module: Any, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(folder.resolve())
