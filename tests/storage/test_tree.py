import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.storage.errors import CorruptPageError
from headrace.storage.format.keys import KeyCodec, Keys
from headrace.storage.tree import _tree_kernels
from headrace.storage.tree.nodes import Entries, read_tree, separators_between
from headrace.storage.tree.rewrite import Placed, rewrite_inner

PAGE = 4096


class Memory:
    """A file in memory."""

    path = "memory"

    def __init__(self):
        self.content = bytearray()

    def pread_into(self, offset, buffers):
        for buffer in buffers:
            buffer[:] = np.frombuffer(self.content, np.uint8, len(buffer), offset)
            offset += len(buffer)

    def pwrite(self, offset, data):
        self.content.extend(bytes(max(offset + len(data) - len(self.content), 0)))
        self.content[offset : offset + len(data)] = bytes(data)

    def size(self):
        return len(self.content)


def keys_of(values):
    if values and isinstance(values[0], str):
        return KeyCodec(pa.schema([("k", pa.string())]), ("k",)).encode([pa.array(values)])
    return KeyCodec(pa.schema([("k", pa.uint64())]), ("k",)).encode([pa.array(values, pa.uint64())])


def entries_of(keys):
    count = len(keys)
    return Entries(
        np.arange(count, dtype=np.int64) * 3 + 7,
        np.arange(count, dtype=np.uint64) * np.uint64(11),
        np.arange(count, dtype=np.int64) + 1,
        (np.arange(count) % 3 == 0).astype(np.uint8),
        keys,
    )


class Sink:
    """New pages one after the other in a file in memory."""

    page_size, txid = PAGE, 1

    def __init__(self):
        self.backend = Memory()
        self.backend.pwrite(0, bytes(2 * PAGE))

    def place(self, hints):
        return self.backend.size() // PAGE + np.arange(len(hints))

    def put(self, pages, numbers, _):
        self.backend.pwrite(int(numbers[0]) * PAGE, pages[:-8].tobytes())


def write_tree(entries):
    sink = Sink()
    tree = rewrite_inner(Placed(entries, np.zeros(0, np.int64)), [], 1.0, sink)
    return sink.backend, tree.root, tree.height


def same(left, right):
    fields = ("pages", "checksums", "rows", "continued")
    keys = [[e.separators.comparable(row) for row in range(len(e))] for e in (left, right)]
    return all((getattr(left, f) == getattr(right, f)).all() for f in fields) and keys[0] == keys[1]


@pytest.mark.parametrize("count", [1, 2, 3, 123, 124, 125, 5_000, 20_000])
def test_what_is_written_is_read_back(count):
    for keys in (keys_of(list(range(count))), keys_of([f"{n:06}" + "x" * (n % 50) for n in range(count)])):
        entries = entries_of(keys)
        backend, root, height = write_tree(entries)
        read, levels = read_tree(backend, PAGE, keys.kind, root, height)
        assert same(read, entries)
        assert len(levels) == height - 1
        assert [int(level.first[-1]) for level in levels] == [len(level.pages) for level in levels[1:]] + [count] * (
            height > 1
        )


def test_rows_add_up_to_the_root():
    entries = entries_of(keys_of(list(range(1000))))
    _, root, _ = write_tree(entries)
    assert root.rows.tolist() == [1000 * 1001 // 2]


def test_the_longest_separators_still_make_a_tree():
    keys = keys_of([f"{n:03}".ljust(1024, "y") for n in range(100)])
    backend, root, height = write_tree(entries_of(keys))
    assert same(read_tree(backend, PAGE, "bytes", root, height)[0], entries_of(keys))


@pytest.mark.parametrize("at", [0, 9, 16, 18, 20, 30, 3000])
def test_a_changed_inner_page_is_named(at):
    backend, root, height = write_tree(entries_of(keys_of(list(range(1000)))))
    backend.content[3 * PAGE + at] ^= 4
    with pytest.raises(CorruptPageError, match="page 3 is damaged"):
        read_tree(backend, PAGE, "u64", root, height)


def test_a_pointer_outside_the_file_is_named():
    backend, root, height = write_tree(entries_of(keys_of(list(range(1000)))))
    del backend.content[5 * PAGE :]
    with pytest.raises(CorruptPageError, match="lies outside the file"):
        read_tree(backend, PAGE, "u64", root, height)


def test_a_leaf_where_an_inner_node_should_be_is_named():
    backend, root, _ = write_tree(entries_of(keys_of(list(range(100)))))
    with pytest.raises(CorruptPageError, match="should be an inner node of level 2"):
        read_tree(backend, PAGE, "u64", root, 3)


words = st.text("ab\0", max_size=4)


@given(st.lists(st.tuples(words, words).map(sorted), max_size=10))
def test_separators_are_above_the_left_key_and_not_above_the_right_one(pairs):
    left, right = keys_of([""] + [a for a, _ in pairs]), keys_of([""] + [b for _, b in pairs])
    separators, continued = separators_between(left, right)
    for row, (a, b) in enumerate([("", ""), *pairs]):
        separator = separators.comparable(row)
        assert separator <= b.encode()
        assert separator > a.encode() if a != b else separator == a.encode()
        assert continued[row] == (a == b)


def test_separators_are_as_short_as_can_be():
    separators, _ = separators_between(keys_of(["Miller", "a"]), keys_of(["Mister", "ab"]))
    assert [separators.comparable(row) for row in range(2)] == [b"Mis", b"ab"]


def locate_twin(separators, continued, key):
    """Return the leaves that may hold a key, one by one."""
    count = len(separators)
    may = [
        leaf
        for leaf in range(count)
        if (leaf == 0 or separators[leaf] <= key)
        and (leaf + 1 == count or key < separators[leaf + 1] or (continued[leaf + 1] and key == separators[leaf + 1]))
    ]
    return may[0], may[-1]


def runs_of(values, draw):
    """Repeat values as separators of runs: a repeated one continues the leaf before."""
    separators, continued = [None], [0]
    for value in sorted(values):
        times = draw(st.integers(1, 4))
        separators += [value] * times
        continued += [draw(st.integers(0, 1))] + [1] * (times - 1)
    return separators, continued


@settings(max_examples=200)
@given(st.data(), st.booleans())
def test_locate_finds_what_a_list_finds(data, text):
    domain = st.text("abc", min_size=1, max_size=9) if text else st.integers(1, 40) | st.integers(1, 2**64 - 1)
    separators, continued = runs_of(data.draw(st.sets(domain, max_size=60)), data.draw)
    separators[0] = "" if text else 0
    keys = keys_of(separators)
    asked = data.draw(st.lists(domain | st.sampled_from(separators), min_size=1, max_size=40))
    asked = sorted(asked) if data.draw(st.booleans()) else asked
    wanted = keys_of(asked)
    first, last = np.empty(len(asked), np.int32), np.empty(len(asked), np.int32)
    _tree_kernels.locate(keys.parts, np.array(continued, np.uint8), wanted.parts, keys.wide, first, last)
    raw = [keys.comparable(row) for row in range(len(keys))]
    expected = [locate_twin(raw, continued, wanted.comparable(row)) for row in range(len(wanted))]
    assert list(zip(first.tolist(), last.tolist(), strict=True)) == expected


def test_empty_entries_of_both_kinds_concatenate():
    for kind in ("u64", "bytes"):
        assert len(Entries.concat([Entries.empty(kind), Entries.empty(kind)])) == 0
        assert len(Keys.empty(kind)) == 0
