"""Tables written by earlier releases open for ever, can be changed, and newer ones are refused by name."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.storage.errors import FormatVersionError
from headrace.storage.superblock import FORMAT_VERSION, digest
from headrace.storage.table import Table

GOLDEN = sorted(Path(__file__).parent.glob("golden/*.table"))


@pytest.fixture(params=GOLDEN, ids=lambda path: path.stem)
def golden(request, tmp_path):
    shutil.copy(request.param, tmp_path / "t")
    return tmp_path / "t", json.loads(request.param.with_suffix(".json").read_text(encoding="utf-8"))


def content(table):
    rows = pa.Table.from_batches(list(table.scan()), schema=table.schema).to_pylist()
    return json.loads(json.dumps(rows, default=str))


def test_there_are_golden_tables_of_version_1():
    assert [path.stem for path in GOLDEN][:2] == ["v1-integers", "v1-texts"]


def test_a_golden_table_opens(golden):
    path, rows = golden
    with Table.open(path) as table:
        assert table.check().violations == ()
        assert content(table) == rows
        assert (table.app_version("golden"), table.app_version("other"), table.stats.txid) == (2, -7, 4)
        found = table.lookup(pa.Table.from_batches(list(table.scan(columns=table.key))))
        assert found.num_rows >= len(rows)


def test_a_golden_table_can_be_changed(golden):
    path, rows = golden
    with Table.open(path) as table:
        everything = pa.Table.from_batches(list(table.scan()), schema=table.schema)
        table.apply(deletes=everything.slice(0, 7).select(table.key))
        table.apply(everything.slice(0, 7))
        table.compact()
        assert table.check().violations == ()
        assert len(content(table)) <= len(rows)


def test_a_newer_format_is_refused(golden):
    path, _ = golden
    image = bytearray(path.read_bytes())
    for at in (0, 2048, 4096, 6144):
        image[at + 16] = FORMAT_VERSION + 1
        image[at + 8 : at + 16] = digest(image[at + 16 : at + 2048])
    path.write_bytes(image)
    with pytest.raises(FormatVersionError, match="install a newer release"):
        Table.open(path)
