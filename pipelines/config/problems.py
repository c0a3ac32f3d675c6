"""Problems of a pipeline file as messages: line, position, value found, valid names and the nearest one.

`model` parses the file. `rules` holds the rules that span several fields.
"""

from __future__ import annotations

import re
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel

from headrace.storage.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pydantic import ValidationError

__all__ = ["DocumentPath", "InconsistentError", "Places", "Problem", "describe", "described"]

DocumentPath = tuple[str | int, ...]
_UNLIKE = re.compile(r"([a-z]+)(?:_attributes)?_(?:type|parsing|from)")  # pydantic's names, such as int_parsing
_EXPECTED = {
    "bool": "true or false",
    "date": "a date, such as 9999-12-31",
    "dict": "fields of its own",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "mapping": "fields of its own",
    "model": "fields of its own",
    "string": "text",
}
NAME_RULE = "a name starts with a letter (a to z), a digit or '_', then takes these and"


@dataclass(frozen=True)
class Problem:
    """One problem: its position in the document, as keys and indexes from the root, and its description."""

    location: DocumentPath
    text: str


class InconsistentError(ValueError):
    """Fields that are each valid are not consistent with each other."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = tuple(problems)


class Places:
    """Positions of the nodes of a YAML document in its file.

    Parameters
    ----------
    file
        Path of the file, for messages.
    root
        Root node of the document; None for a document without nodes.
    """

    def __init__(self, file: Path, root: yaml.Node | None = None) -> None:
        self.file = file
        self._root = root

    def mark(self, location: DocumentPath) -> tuple[int, int]:
        """Return line and column, counted from 1, of the node at a location, or of its nearest enclosing node."""
        if self._root is None:
            return 1, 1
        node, mark = self._root, self._root.start_mark
        for part in location:
            found = _entry(node, part)
            if found is None:
                break
            mark, node = found
        return mark.line + 1, mark.column + 1

    def written(self, location: DocumentPath) -> str:
        """Return the text of the scalar at a location; an empty text if another node or nothing is there."""
        node = self._root
        for part in location:
            found = None if node is None else _entry(node, part)
            if found is None:
                break
            node = found[1]
        return str(node.value) if isinstance(node, yaml.ScalarNode) else ""


def _entry(node: yaml.Node, part: str | int) -> tuple[yaml.Mark, yaml.Node] | None:
    """Return the start mark of an entry of a node, and the entry's value node."""
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part].start_mark, node.value[part]
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == str(part):
                return key.start_mark, value
    return None


def described(problems: Sequence[Problem], places: Places) -> str:
    """Return the message for the problems of one file, each with its line."""
    marked = sorted(((places.mark(problem.location), problem.text) for problem in problems), key=lambda pair: pair[0])
    texts = [f"line {line}, column {column}: {text}" for (line, column), text in marked]
    return f"{places.file}, {'; '.join(dict.fromkeys(texts))}"


def describe(error: ValidationError, places: Places, model: type[BaseModel]) -> str:
    """Return the message for every error that pydantic found in a file.

    Parameters
    ----------
    error
        Validation error that pydantic raised.
    places
        Positions of the nodes in the file.
    model
        Model of the whole document, the source of the valid names.
    """
    return described(
        [problem for item in error.errors(include_url=False) for problem in _problems(item, places, model)], places
    )


def _problems(item: Any, places: Places, model: type[BaseModel]) -> Sequence[Problem]:
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, InconsistentError):
        return cause.problems
    location = tuple(part for part in item["loc"] if part != "[key]")
    place = ".".join(str(part) for part in location) or "the pipeline"
    return [Problem(location, f"{place}: {_reason(item, model)}{_quoted(item, location, places)}")]


def _quoted(item: Any, location: DocumentPath, places: Places) -> str:
    """Return the remedy for a plain scalar that YAML reads as another value than text."""
    written = str(item["input"]) if item["loc"][-1:] == ("[key]",) else places.written(location)
    return f"; if this is text, write it in quotes: '{written}'" if item["type"] == "string_type" and written else ""


def _reason(item: Any, model: type[BaseModel]) -> str:
    location = item["loc"]
    match item["type"]:
        case "extra_forbidden":
            names = _names(_model_at(model, location[:-1]))
            return f"unknown field{nearest(str(location[-1]), names)}; valid here: {', '.join(names)}"
        case "missing":
            return "is missing"
        case "literal_error":
            return f"{item['input']!r} is not one of {item['ctx']['expected']}"
        case "value_error":
            return str(item["ctx"]["error"])
        case "string_pattern_mismatch":
            return f"{NAME_RULE} {_marks_of(item['ctx']['pattern'])}; {item['input']!r} does not"
        case kind:
            match = _UNLIKE.match(kind)
            expected = match and _EXPECTED.get(match[1])
            told = f"needs {expected}" if expected else f"{item['msg'][:1].lower()}{item['msg'][1:]}"
            return f"{told}, not {item['input']!r}"


def _marks_of(pattern: str) -> str:
    return "'.' and '-'" if "." in pattern else "'-'"


def _names(model: type[BaseModel] | None) -> list[str]:
    if model is None:
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_at(model: type[BaseModel], location: tuple[Any, ...]) -> type[BaseModel] | None:
    """Return the model for the given `location` in the document."""
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
    """Return the element type of a list or mapping."""
    arguments = typing.get_args(annotation)
    return arguments[-1] if arguments else None


def _first_model(annotation: Any) -> Any:
    """Return the model of an optional field; return any other annotation unchanged."""
    for argument in typing.get_args(annotation):
        if (
            isinstance(argument, type)
            and issubclass(argument, BaseModel)
            and typing.get_origin(annotation) not in {list, dict}
        ):
            return argument
    return annotation
