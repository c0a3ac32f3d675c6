"""Rooms of the joins import in one direction."""

import ast
from pathlib import Path

import pytest

JOINS = Path(__file__).parents[2] / "joins"
STREAM_OPERATORS = ("hashing", "merging", "diner", "miner", "punctuated")
FORBIDDEN = {
    "memory": [
        "base",
        "handle",
        "emitter",
        "input_buffer",
        "relation",
        "predicates",
        "inlj",
        "meshjoin",
        "ssij",
        "streams",
    ],
    "predicates": [
        "base",
        "handle",
        "emitter",
        "input_buffer",
        "relation",
        "memory",
        "inlj",
        "meshjoin",
        "ssij",
        "streams",
    ],
    "inlj": ["meshjoin", "ssij", "streams"],
    "meshjoin": ["inlj", "ssij", "streams"],
    "ssij": ["inlj", "meshjoin", "streams"],
    "streams": ["base", "emitter", "input_buffer", "relation", "inlj", "meshjoin", "ssij"],
    "streams/tuples": ["streams.base", *(f"streams.{room}" for room in STREAM_OPERATORS)],
    "streams/base": [f"streams.{room}" for room in STREAM_OPERATORS],
    **{
        f"streams/{room}": [
            f"streams.{other}" for other in STREAM_OPERATORS if other != room and (room, other) != ("miner", "diner")
        ]
        for room in STREAM_OPERATORS
    },
    "ssij/memory": ["ssij.phases", "ssij.operator", "ssij.context", "ssij.schedule"],
    "ssij/phases": ["ssij.operator", "ssij.schedule"],
}


def modules_imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("headrace.joins"):
            yield from (f"{node.module}.{alias.name}".removeprefix("headrace.joins.") for alias in node.names)


def modules_of(room):
    paths = sorted((JOINS / room).rglob("*.py"))
    assert paths
    return paths


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_does_not_import_what_is_built_on_it(room):
    found = [
        f"{path.relative_to(JOINS)} imports {module}"
        for path in modules_of(room)
        for module in modules_imported(path)
        if any(f"{module}.".startswith(f"{name}.") for name in FORBIDDEN[room])
    ]
    assert found == []


def test_only_the_package_names_its_operators():
    found = [
        f"{path.name} imports {module}"
        for path in sorted(JOINS.glob("*.py"))
        if path.name != "__init__.py"
        for module in modules_imported(path)
        if module.startswith(("inlj.", "meshjoin.", "ssij.", "streams."))
    ]
    assert found == []


def test_every_folder_of_the_joins_of_streams_has_rules():
    folders = {path.parent.name for path in (JOINS / "streams").glob("*/__init__.py")}
    assert folders == {"tuples", "base", *STREAM_OPERATORS}
