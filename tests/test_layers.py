"""A layer imports only those to its left, and asking for help imports nothing heavy."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("storage", "joins", "etl", "pipelines", "cli")
FIRST_PARTY = (*LAYERS, "samples")
ALLOWED = {layer: {*LAYERS[: rank + 1]} for rank, layer in enumerate(LAYERS)}
ALLOWED["cli"].add("samples")
ROOMS = ("file", "format", "leaf", "tree", "read", "filter", "probe", "commit", "records", "load", "spill")
"""Rooms of storage: a room imports only those to its left, and of the modules on top only the errors."""
PIPELINE_ROOMS = (
    "config",
    "spark",
    "delta",
    "history",
    "replica",
    "source",
    "dimension",
    "batch",
    "rejects",
    "changes",
    "restate",
    "correlate",
    "database",
)
"""Rooms of pipelines: a room imports only those to its left, and of the modules on top only those that know no room."""
PIPELINE_TOP = {"_lazy", "errors", "paths", "catalog", "durable", "hooks", "lease", "process_identity"}
CLI_ROOMS = ("reporting", "arguments", "commands")
"""Rooms of the cli: a room imports only those to its left."""
SPARK_FREE = ("storage", "joins", "etl")
HEAVY = (
    "numba",
    "pyspark",
    "pyarrow",
    "pandas",
    "duckdb",
    "matplotlib",
    "deltalake",
    "sqlalchemy",
    "pydantic",
    "numpy",
)


def imported_packages(path):
    """Yield line and package of every absolute import in a module; for Headrace's own, the layer."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, package_of(alias.name)) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [alias.name for alias in node.names] if node.module == "headrace" else [""]
            yield from ((node.lineno, package_of(f"{node.module}.{name}")) for name in names)


def package_of(module):
    top, _, rest = module.partition(".")
    return rest.split(".")[0] if top == "headrace" else top


def imported_parts(path, layer):
    """Yield line and dotted name below a layer of every import from there."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[:2] == ["headrace", layer]:
            below = node.module.split(".")[2:]
            for name in node.names:
                yield node.lineno, ".".join([*below, name.name])


def imports_of(layer, wanted):
    return [
        f"{path.relative_to(ROOT)}:{line} imports {package}"
        for path in sorted((ROOT / layer).rglob("*.py"))
        for line, package in imported_packages(path)
        if package in wanted
    ]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_those_to_its_left(layer):
    assert imports_of(layer, set(FIRST_PARTY) - ALLOWED[layer] | {"benchmarks", "tests"}) == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_of_storage_imports_only_those_to_its_left(room):
    allowed = {*ROOMS[: ROOMS.index(room) + 1], "errors"}
    assert [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / "storage" / room).rglob("*.py"))
        for line, name in imported_parts(path, "storage")
        if name.split(".")[0] not in allowed
    ] == []


def test_every_folder_of_storage_is_a_room():
    folders = {path.parent.name for path in (ROOT / "storage").glob("*/__init__.py")}
    assert folders == set(ROOMS)


@pytest.mark.parametrize("room", PIPELINE_ROOMS)
def test_a_room_of_pipelines_imports_only_those_to_its_left(room):
    allowed = {*PIPELINE_ROOMS[: PIPELINE_ROOMS.index(room) + 1], *PIPELINE_TOP}
    assert [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / "pipelines" / room).rglob("*.py"))
        for line, name in imported_parts(path, "pipelines")
        if name.split(".")[0] not in allowed
    ] == []


@pytest.mark.parametrize("module", sorted(PIPELINE_TOP))
def test_what_the_rooms_share_knows_no_room(module):
    path = ROOT / "pipelines" / f"{module}.py"
    assert {name.split(".")[0] for _, name in imported_parts(path, "pipelines")} <= PIPELINE_TOP


def test_every_folder_of_pipelines_is_a_room():
    assert {path.parent.name for path in (ROOT / "pipelines").glob("*/__init__.py")} == set(PIPELINE_ROOMS)


@pytest.mark.parametrize("room", CLI_ROOMS)
def test_a_room_of_the_cli_imports_only_those_to_its_left(room):
    allowed = set(CLI_ROOMS[: CLI_ROOMS.index(room) + 1])
    assert [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / "cli" / room).glob("*.py"))
        for line, name in imported_parts(path, "cli")
        if name.split(".")[0] not in allowed
    ] == []


def test_every_folder_of_the_cli_is_a_room():
    assert {path.parent.name for path in (ROOT / "cli").glob("*/__init__.py")} == set(CLI_ROOMS)


@pytest.mark.parametrize(
    "package", [*(f"storage.{room}" for room in ROOMS), *(f"pipelines.{room}" for room in PIPELINE_ROOMS)]
)
def test_a_room_exports_what_it_lists(package):
    room = importlib.import_module(f"headrace.{package}")
    assert sorted(set(room.__all__)) == sorted(room.__all__)
    assert [name for name in room.__all__ if not hasattr(room, name)] == []


@pytest.mark.parametrize(("owner", "rooms"), [("storage", ROOMS), ("pipelines", PIPELINE_ROOMS)])
def test_other_layers_import_from_the_rooms(owner, rooms):
    assert [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for layer in LAYERS
        if layer != owner
        for path in sorted((ROOT / layer).rglob("*.py"))
        for line, name in imported_parts(path, owner)
        if name.split(".")[0] in rooms and name.count(".") > 1
    ] == []


@pytest.mark.parametrize("layer", SPARK_FREE)
def test_spark_stays_in_the_pipelines(layer):
    assert imports_of(layer, {"pyspark", "delta"}) == []


@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "cli"])
def test_the_terminal_stays_in_the_cli(layer):
    assert imports_of(layer, {"click"}) == []


def test_help_imports_nothing_heavy():
    script = (
        "import sys\n"
        "from headrace.cli.main import entry_point\n"
        "sys.argv = ['headrace', '--help']\n"
        "try:\n    entry_point()\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"print('HEAVY', sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("HEAVY []\n")
    assert "Usage: headrace" in result.stdout
