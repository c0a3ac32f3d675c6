"""Runs a case against a backend.

A backend is made of a declaration and has `apply(changes)`, which returns `outcomes` and `moved` as
`headrace.etl.history.Applied` has them, `ensure(keys)`, `versions()`, `facts(facts, lookup)` and `close()`. Another
layer runs the same files with a backend of its own: `run_case(case, make_backend)`.
"""

import math

import pyarrow as pa
from case_files import change_types, changes_of_text, declaration, reference, table_of, value_of

from headrace.etl import KeyAllocator
from headrace.etl.history import Follow, HistoryDimension, apply_changes, snapshot_changes

EXPECTED_OF_CHANGES = ("outcome", "cause", "late")


class LocalBackend:
    """The local API on clustered tables."""

    def __init__(self, history, folder):
        self.dimension = HistoryDimension.create(folder / history.dimension.name, history, memory="16MiB")

    def apply(self, changes):
        return self.dimension.apply_changes(changes)

    def apply_with_parents(self, changes, refers, parent, parents, sequence):
        """Apply changes of children, and what the changes of their parents cause."""
        follow = Follow(refers, parent.dimension, parents, sequence)
        return self.dimension.apply_changes(changes, follow=follow)

    def ensure(self, keys):
        return self.dimension.ensure(keys)

    def versions(self):
        return self.dimension.versions()

    def facts(self, facts, lookup):
        return self.dimension.as_of(facts, **lookup)

    def close(self):
        assert self.dimension.check() == ()
        self.dimension.close()


class MemoryBackend:
    """The functions alone, over entries in memory; for changes only."""

    def __init__(self, history):
        self.history = history
        self.base = 0
        self.entries = history.entry_schema.empty_table()

    def apply(self, changes):
        applied = apply_changes(self.history, self.entries, changes, KeyAllocator(self.base))
        self.base += applied.new_keys
        key = self.history.entry_key
        rows = {tuple(row[name] for name in key): row for row in self.entries.to_pylist()}
        for row in applied.deletes.to_pylist():
            del rows[tuple(row[name] for name in key)]
        rows |= {tuple(row[name] for name in key): row for row in applied.upserts.to_pylist()}
        self.entries = pa.Table.from_pylist(list(rows.values()), self.history.entry_schema)
        return applied

    def versions(self):
        rows = [row for row in self.entries.to_pylist() if row["_at"] == row["valid_from"]]
        schema = self.history.version_schema
        return pa.Table.from_pylist([{name: row[name] for name in schema.names} for row in rows], schema)


class Labels:
    """Names that a case gives to surrogate keys; one name stands for one key, and the other way round."""

    def __init__(self):
        self._key_of = {}

    def check(self, label, key):
        if label.lstrip("-").isdigit():
            assert key == int(label)
            return
        assert key > 0
        assert self._key_of.setdefault(label, key) == key, f"{label} was {self._key_of[label]} and is {key}"
        assert list(self._key_of.values()).count(key) == 1, f"{key} has two names"


def run_case(case, make_backend):
    history = declaration(case.get("dimension"))
    backend, labels = make_backend(history), Labels()
    refers = reference(case["parent"], history) if "parent" in case else None
    parent = make_backend(refers.parent) if refers else None
    applied = None
    for number, step in enumerate(case["steps"]):
        if refers is not None and {"parents", "changes"} & set(step):
            applied = _load(backend, parent, refers, step, number)
        elif "snapshot" in step:
            applied = _snapshot(backend, history, step)
        elif "changes" in step:
            applied = _changes(backend, history, step["changes"])
        elif "ensure" in step:
            backend.ensure(table_of(step["ensure"], change_types(history))[0])
        elif "facts" in step:
            _facts(backend, history, step, labels)
        elif "versions" in step:
            _versions(backend.versions(), history, step["versions"], labels)
        else:
            _compare(step["moved"], applied.moved, {f.name: f.type for f in applied.moved.schema}, labels)
    backend.close()
    if parent:
        parent.close()


def _load(backend, parent, refers, step, number):
    """Apply the changes of parents and of children of one load."""
    types = change_types(refers.parent)
    parents = table_of(step["parents"], types)[0] if "parents" in step else pa.schema(list(types.items())).empty_table()
    parent.apply(parents)
    own = pa.schema(list(change_types(refers.child).items())).empty_table().drop_columns(list(refers.carry))
    changes, expected = changes_of_text(step["changes"], refers.child) if "changes" in step else (own, {})
    return _expected(backend.apply_with_parents(changes, refers, parent, parents, number), expected)


def _snapshot(backend, history, step):
    table, expected = table_of(step["snapshot"], change_types(history))
    at = value_of(str(step["at"]), history.effective_type)
    options = {name: step[name] for name in ("sequence", "missing") if name in step}
    return _expected(backend.apply(snapshot_changes(history, backend.versions(), table, at, **options)), expected)


def _changes(backend, history, text):
    table, expected = changes_of_text(text, history)
    return _expected(backend.apply(table), expected)


def _expected(applied, expected):
    assert set(expected) <= set(EXPECTED_OF_CHANGES), f"not a column of changes: {sorted(expected)}"
    for name, cells in expected.items():
        kind = applied.outcomes.schema.field(name).type
        wanted = [value_of(cell, kind) for cell in cells]
        assert applied.outcomes.column(name).to_pylist() == wanted, name
    return applied


def _versions(found, history, text, labels):
    kinds = {field.name: field.type for field in history.version_schema if field.name != "key"}
    if not any(cell.startswith("-") and cell != "-" for line in text.splitlines() for cell in line.split("|")[:1]):
        found = found.filter(pa.compute.greater(found["key"], 0))
    _compare(text, found, kinds, labels)


def _facts(backend, history, step, labels):
    types = change_types(history)
    lookup = dict(step.get("lookup", {}))
    on = lookup["on"] = lookup.pop("match", {"customer": "id"})  # YAML reads "on" as true
    kinds = {stream: types[key] for stream, key in on.items()} | {"day": pa.date32(), "time": pa.timestamp("us", "UTC")}
    kinds |= {name: pa.int64() for name in ("n",)}
    kinds |= {name: {"text": pa.string(), "int": pa.int64()}[kind] for name, kind in step.get("types", {}).items()}
    table, expected = table_of(step["facts"], kinds)
    role = lookup.setdefault("role", "customer")
    shown = {field.name: field.type for field in history.version_schema}
    lookup["carry"] = tuple(name for name in expected if name in shown and name != "key")
    found = backend.facts(table, lookup)
    for name, cells in expected.items():
        if name == "key":
            for label, key in zip(cells, found.column(f"{role}_key").to_pylist(), strict=True):
                labels.check(label, key)
        elif name in {"outcome", "reason"}:
            wanted = [value_of(cell, pa.string()) for cell in cells]
            assert found.column(f"_{role}_{name}").to_pylist() == wanted, name
        else:
            wanted = [value_of(cell, shown[name]) for cell in cells]
            assert comparable(found.column(f"{role}_{name}").to_pylist()) == comparable(wanted), name


def _compare(text, found, kinds, labels):
    wanted, others = table_of(text, kinds)
    assert set(others) <= {"key"}, f"not a column: {sorted(others)}"
    order = [n for n in found.column_names if n in wanted.column_names]
    rows = found.to_pylist()
    expected = wanted.to_pylist()
    assert sorted(map(_row(order), rows), key=repr) == sorted(map(_row(order), expected), key=repr)
    for label, row in zip(others.get("key", ()), expected, strict=False):
        matches = [other for other in rows if _row(order)(other) == _row(order)(row)]
        assert len(matches) == 1, "a row with a label is not one row"
        labels.check(label, matches[0]["key"])


def _row(names):
    return lambda row: [comparable(row[name]) for name in names]


def comparable(value):
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return "NaN" if isinstance(value, float) and math.isnan(value) else value
