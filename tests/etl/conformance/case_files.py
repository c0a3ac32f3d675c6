"""Reads the files of the conformance suite: YAML, in which tables are drawn with bars. `README.md` describes them."""

import datetime as dt
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import yaml

from headrace.etl import Dimension, KeyRule
from headrace.etl.history import History, Reference, SpecialMembers

FOLDER = Path(__file__).parent / "cases"
TYPES = {
    "int": pa.int64(),
    "text": pa.string(),
    "date": pa.date32(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "money": pa.decimal128(10, 2),
    "time": pa.timestamp("us", "UTC"),
}
STEPS = {"changes", "versions", "facts", "moved", "ensure", "snapshot", "parents"}
CARRIED = "..."


def case_names():
    return sorted(path.stem for path in FOLDER.glob("*.yml"))


def read_case(name):
    case = yaml.safe_load((FOLDER / f"{name}.yml").read_text())
    assert set(case) <= {"about", "dimension", "parent", "steps"}, f"{name}: {sorted(case)}"
    for step in case["steps"]:
        assert set(step) & STEPS, f"{name}: a step is one of {sorted(STEPS)}"
    return case


def declaration(given):
    """Return the declaration of a dimension: by default an id, a city with history, changes by date."""
    given = dict(given or {})
    key = given.pop("key", {"id": "int"})
    attributes = given.pop("attributes", {"city": "text"})
    rules = {
        name: KeyRule(tuple(rule.get("normalise", ())), convert=rule.get("convert", False))
        for name, rule in given.pop("rules", {}).items()
    }
    schema = pa.schema([(name, TYPES[kind]) for name, kind in {**key, **attributes}.items()])
    dimension = Dimension(given.pop("name", "customer"), tuple(key), "key", schema, rules)
    given["effective_type"] = TYPES[given.pop("effective_type", "date")]
    if "special" in given:
        given["special"] = SpecialMembers(**given["special"])
    for name in ("type_0", "type_1", "type_1_current", "type_2", "audit"):
        if name in given:
            given[name] = tuple(given[name])
    return History(dimension, effective="since", **given)


def reference(given, history):
    """Return the declaration of a parent dimension, and the reference of the children to it."""
    given = dict(given)
    on, carry = given.pop("match"), given.pop("carry")
    return Reference(history, declaration(given), on, carry)


def changes_of_text(text, history):
    """Return drawn changes, and the columns with expectations; three dots are a value that is carried."""
    kinds = change_types(history)
    table, expected = table_of(text.replace(CARRIED, "-"), kinds)
    if history.partial is None:
        return table, expected
    header, rows = drawn(text)
    attributes = [name for name in history.dimension.attributes.names if name in header]
    given = [[name for name in attributes if row[header.index(name)] != CARRIED] for row in rows]
    return table.append_column(history.partial, pa.array(given, pa.list_(pa.string()))), expected


def change_types(history):
    kinds = {field.name: field.type for field in history.dimension.schema}
    kinds |= {"since": history.effective_type, "op": pa.string()}
    if history.sequence:
        kinds[history.sequence] = history.sequence_type
    return kinds


def drawn(text):
    """Return the header and the rows of a drawn table, cells as text."""
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.strip()]
    header, *rows = lines
    for row in rows:
        assert len(row) == len(header), f"{row} has not the columns {header}"
    return header, rows


READERS = (
    (pa.types.is_integer, int),
    (pa.types.is_floating, float),
    (pa.types.is_boolean, {"yes": True, "no": False}.__getitem__),
    (pa.types.is_decimal, Decimal),
    (pa.types.is_date, dt.date.fromisoformat),
    (pa.types.is_timestamp, lambda cell: dt.datetime.fromisoformat(cell).replace(tzinfo=dt.UTC)),
)


def value_of(cell, kind):
    if cell in {"-", ""}:
        return None
    if cell[0] == cell[-1] == "'":
        return cell[1:-1].encode().decode("unicode_escape") if "\\" in cell else cell[1:-1]
    return next((read(cell) for test, read in READERS if test(kind)), cell)


def table_of(text, kinds):
    """Return the columns of a drawn table whose types are known as a pyarrow table, the others as lists of cells."""
    header, rows = drawn(text)
    columns, others = {}, {}
    for position, name in enumerate(header):
        cells = [row[position] for row in rows]
        if name in kinds:
            columns[name] = pa.array([value_of(cell, kinds[name]) for cell in cells], kinds[name])
        else:
            others[name] = cells
    return pa.table(columns), others
