"""Golden tables of the current format version open, keep their bytes, can be changed; other versions are refused."""

import json
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.storage.errors import FormatVersionError
from headrace.storage.format.constants import FORMAT_VERSION, INNER_PAGE, LEAF_PAGE
from headrace.storage.format.superblock import hash_bytes
from headrace.storage.table import Table

GOLDEN_FOLDER = Path(__file__).parent / "golden"
GOLDEN = sorted(GOLDEN_FOLDER.glob("*.table"))

sys.path.insert(0, str(GOLDEN_FOLDER))

import make  # noqa: E402 - after the path is set


@pytest.fixture(params=GOLDEN, ids=lambda path: path.stem)
def golden(request, tmp_path):
    shutil.copy(request.param, tmp_path / "t")
    return tmp_path / "t", json.loads(request.param.with_suffix(".json").read_text(encoding="utf-8"))


def content(table):
    rows = pa.Table.from_batches(list(table.scan()), schema=table.schema).to_pylist()
    return json.loads(json.dumps(rows, default=str))


def test_there_are_golden_tables_of_the_current_version_only():
    assert [path.stem for path in GOLDEN] == [f"v{FORMAT_VERSION}-integers", f"v{FORMAT_VERSION}-texts"]


def test_a_golden_table_opens(golden):
    path, rows = golden
    with Table.open(path) as table:
        assert table.check().violations == ()
        assert content(table) == rows
        assert (table.app_version("golden"), table.app_version("other"), table.stats.txid) == (2, -7, 4)
        found = table.lookup(pa.Table.from_batches(list(table.scan(columns=table.key))))
        assert found.num_rows >= len(rows)


def nodes(path):
    """Return leaves and inner nodes; the metadata is a message of Arrow, whose releases may encode it differently."""
    image = path.read_bytes()
    pages = [image[at : at + 4096] for at in range(2 * 4096, len(image), 4096)]
    return [page for page in pages if page[16] in (LEAF_PAGE, INNER_PAGE)]


@pytest.mark.parametrize("name", make.GOLDEN)
def test_a_table_is_written_byte_for_byte_as_the_golden_one(name, tmp_path):
    again = make.write(tmp_path, name)
    assert nodes(again) == nodes(GOLDEN_FOLDER / again.name)


def test_a_golden_table_can_be_changed(golden):
    path, rows = golden
    with Table.open(path) as table:
        everything = pa.Table.from_batches(list(table.scan()), schema=table.schema)
        table.apply(deletes=everything.slice(0, 7).select(table.key))
        table.apply(everything.slice(0, 7))
        table.compact()
        assert table.check().violations == ()
        assert len(content(table)) <= len(rows)


def test_another_format_version_is_refused(golden):
    path, _ = golden
    image = bytearray(path.read_bytes())
    for at in (0, 2048, 4096, 6144):
        image[at + 16] = FORMAT_VERSION + 1
        image[at + 8 : at + 16] = hash_bytes(image[at + 16 : at + 2048], at // 4096).to_bytes(8, "little")
    path.write_bytes(image)
    with pytest.raises(FormatVersionError, match="install a newer release"):
        Table.open(path)
