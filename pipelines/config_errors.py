"""What is wrong with a pipeline file, in words: each place, what was found, the valid names and the nearest one."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from headrace.pipelines.column_types import nearest

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import ValidationError

__all__ = ["describe"]


def describe(error: ValidationError, file: Path, model: type[BaseModel]) -> str:
    """Return the message for everything that pydantic found in a file.

    Parameters
    ----------
    error
        What validation raised.
    file
        The file, for the message.
    model
        The model of the whole document, from which the valid names are read.
    """
    problems = [_problem(item, model) for item in error.errors(include_url=False)]
    listed = "; ".join(dict.fromkeys(problems))
    return f"{file}: {listed}"


def _problem(item: Any, model: type[BaseModel]) -> str:
    location = item["loc"]
    place = ".".join(str(part) for part in location) or "the pipeline"
    if item["type"] == "extra_forbidden":
        names = _names(_model_at(model, location[:-1]))
        wrong = str(location[-1])
        return f"{place}: unknown field{nearest(wrong, names)}; valid here: {', '.join(names)}"
    if item["type"] == "missing":
        return f"{place}: is missing"
    if item["type"] == "literal_error":
        return f"{place}: {item['input']!r} is not one of {item['ctx']['expected']}"
    if item["type"] == "value_error":
        return f"{place}: {item['ctx']['error']}"
    return f"{place}: {item['msg'][:1].lower()}{item['msg'][1:]}, not {item['input']!r}"


def _names(model: type[BaseModel] | None) -> list[str]:
    if model is None:
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_at(model: type[BaseModel], location: tuple[Any, ...]) -> type[BaseModel] | None:
    """Return the model that describes the place at `location` in the document."""
    current: Any = model
    for part in location:
        if isinstance(current, type) and issubclass(current, BaseModel):
            fields = {field.alias or name: field for name, field in current.model_fields.items()}
            current = fields[str(part)].annotation if str(part) in fields else None
        else:
            current = _inner(current)
        current = _first_model(current)
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None


def _inner(annotation: Any) -> Any:
    """Return what a list or mapping holds."""
    arguments = typing.get_args(annotation)
    return arguments[-1] if arguments else None


def _first_model(annotation: Any) -> Any:
    """Return the model of an optional field; other annotations as they are."""
    for argument in typing.get_args(annotation):
        if (
            isinstance(argument, type)
            and issubclass(argument, BaseModel)
            and typing.get_origin(annotation) not in {list, dict}
        ):
            return argument
    return annotation
