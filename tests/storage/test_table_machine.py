"""A table on a real file against a sorted dict, with readers held open over many commits."""

import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated import Model

from headrace.storage.commit import page_writer
from headrace.storage.errors import UniqueViolationError
from headrace.storage.format import superblock
from headrace.storage.table import Table

SCHEMA = pa.schema(
    [pa.field("a", pa.int16()), pa.field("t", pa.string()), pa.field("v", pa.int64()), pa.field("s", pa.string())]
)
KEYS = {"integer": ["a"], "text": ["t"], "composite": ["t", "a"], "reversed": ["a", "t"]}

numbers = st.integers(-40, 40)
texts = st.text(alphabet="ab\x00\xff", max_size=5)
payload = st.one_of(st.none(), st.text(alphabet="xyz", max_size=4), st.integers(0, 1500).map(lambda n: "p" * n))
row = st.fixed_dictionaries({"a": numbers, "t": texts, "v": st.none() | st.integers(-(2**63), 2**63 - 1), "s": payload})
many = st.lists(row, max_size=30)


def batch(rows):
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)


def as_set(rows):
    return sorted(repr([row[name] for name in SCHEMA.names]) for row in rows)


def content(table):
    return pa.Table.from_batches(list(table.scan()), schema=table.schema).to_pylist()


class TableMachine(RuleBasedStateMachine):
    @initialize(
        key=st.sampled_from(sorted(KEYS)), unique=st.booleans(), rows=many, fill=st.sampled_from([0.5, 0.8, 1.0])
    )
    def build(self, key, unique, rows, fill):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.path = Path(self.folder.name) / "t"
        self.key, self.unique = KEYS[key], unique
        self.model = Model(self.key, self.storable(rows))
        source = batch(self.model.sorted())
        self.table = Table.build(self.path, source, key=self.key, unique=unique, page_size=4096, fill=fill)
        self.limits = pytest.MonkeyPatch()
        self.readers = []
        self.versions = {}

    def storable(self, rows):
        return list({tuple(r[name] for name in self.key): r for r in rows}.values()) if self.unique else rows

    def key_batch(self, rows):
        return batch(rows).select(self.key)

    @rule(upserts=many, deletes=many)
    def change(self, upserts, deletes):
        upserts = self.storable(upserts)
        result = self.table.apply(batch(upserts), self.key_batch(deletes))
        assert (result.inserted, result.updated, result.deleted) == self.model.apply(upserts, deletes)

    @rule(rows=many)
    def insert(self, rows):
        rows = self.storable(rows)
        taken = self.unique and any(self.model.key_of(r) in self.model.rows for r in rows)
        try:
            self.table.apply(inserts=batch(rows))
        except UniqueViolationError:
            assert taken
        else:
            assert not taken
            self.model.apply(inserts=rows)

    @rule(low=numbers, width=st.integers(1, 60))
    def delete_a_range(self, low, width):
        gone = [r for rows in self.model.rows.values() for r in rows if low <= r["a"] < low + width]
        self.table.apply(deletes=self.key_batch(gone))
        self.model.apply(deletes=gone)

    @rule(parts=st.lists(st.tuples(many, many), max_size=4), fails=st.booleans())
    def transaction(self, parts, fails):
        after = self.model.copy()
        try:
            with self.table.transaction() as change:
                for upserts, deletes in parts:
                    change.apply(batch(self.storable(upserts)), self.key_batch(deletes))
                    after.apply(self.storable(upserts), deletes)
                if fails:
                    raise ZeroDivisionError  # noqa: TRY301 - what makes the block fail
        except ZeroDivisionError:
            return
        self.model = after

    @rule(app=st.sampled_from(["x", "y"]), version=st.integers(0, 3), upserts=many)
    def versioned(self, app, version, upserts):
        upserts = self.storable(upserts)
        result = self.table.apply(batch(upserts), app=(app, version))
        assert result.skipped == (version <= self.versions.get(app, -1))
        if not result.skipped:
            self.versions[app] = version
            self.model.apply(upserts)
        assert self.table.app_version(app) == self.versions[app]

    @rule()
    def open_a_reader(self):
        self.readers.append((Table.open(self.path), as_set(self.model.sorted())))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), refresh=st.booleans())
    def use_a_reader(self, data, refresh):
        at = data.draw(st.integers(0, len(self.readers) - 1))
        table, expected = self.readers.pop(at)
        assert as_set(content(table)) == expected
        if refresh:
            table.refresh()
            assert as_set(content(table)) == as_set(self.model.sorted())
        table.close()

    @rule(rows=many)
    def look_up(self, rows):
        found = self.table.lookup(self.key_batch(rows)).to_pylist()
        expected = [r for asked in rows for r in self.model.rows.get(self.model.key_of(asked), [])]
        assert as_set(found) == as_set(expected)

    @rule()
    def compact(self):
        result = self.table.compact()
        assert result.shrunk or self.readers
        if result.shrunk:
            assert self.path.stat().st_size == result.pages_after * 4096

    @rule(pages=st.sampled_from([0, 3, page_writer.PROOF_PAGES]))
    def commit_at_once_up_to(self, pages):
        self.limits.setattr(page_writer, "PROOF_PAGES", pages)

    @rule(leaves=st.sampled_from([0, 2, superblock.MOST_RELOCATIONS]))
    def move_up_to(self, leaves):
        self.limits.setattr(superblock, "MOST_RELOCATIONS", leaves)

    @rule(rows=st.lists(row, min_size=1, max_size=2))
    def change_few(self, rows):
        rows = self.storable(rows)
        result = self.table.apply(batch(rows))
        assert (result.inserted, result.updated, result.deleted) == self.model.apply(rows)

    @rule()
    def reopen(self):
        self.table.close()
        self.table = Table.open(self.path)

    @invariant()
    def holds_the_rows_and_is_sound(self):
        if not hasattr(self, "table"):
            return
        report = self.table.check()
        assert report.violations == ()
        assert report.rows == self.table.stats.rows == len(self.model.sorted())
        assert as_set(content(self.table)) == as_set(self.model.sorted())

    def teardown(self):
        if hasattr(self, "table"):
            self.limits.undo()
            for table, expected in self.readers:
                assert as_set(content(table)) == expected
                table.close()
            self.table.close()
            self.folder.cleanup()


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


class LongTableMachine(TableMachine):
    """The same rules, more of them."""


TestLongTableMachine = pytest.mark.slow(LongTableMachine.TestCase)
TestLongTableMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
