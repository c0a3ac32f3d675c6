"""A result file appears whole or not at all."""

import errno
import os
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.cli.arguments.parts import PartsSink
from headrace.cli.arguments.sink import ParquetSink
from headrace.cli.reporting.errors import OutputFileError
from headrace.storage.file import remove_remains

SCHEMA = pa.schema([("k", pa.int64())])


def batch(*values):
    return pa.record_batch({"k": pa.array(values, pa.int64())})


def test_batches_are_collected_into_row_groups(tmp_path):
    with ParquetSink(tmp_path / "out.parquet", SCHEMA, group_bytes=80) as sink:
        for value in range(25):
            sink.write(batch(value))
    file = pq.ParquetFile(tmp_path / "out.parquet")
    assert file.metadata.num_row_groups == 3
    assert file.read()["k"].to_pylist() == list(range(25))
    assert sink.rows == 25


def test_no_rows_make_an_empty_file_with_the_schema(tmp_path):
    with ParquetSink(tmp_path / "out.parquet", SCHEMA):
        pass
    assert pq.read_table(tmp_path / "out.parquet").schema == SCHEMA


def test_a_failure_leaves_the_older_file_and_nothing_else(tmp_path):
    out = tmp_path / "out.parquet"
    out.write_text("older")

    def fail_half_way():
        with ParquetSink(out, SCHEMA) as sink:
            sink.write(batch(1))
            raise KeyError

    with pytest.raises(KeyError):
        fail_half_way()
    assert out.read_text() == "older"
    assert list(tmp_path.iterdir()) == [out]


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path):
    remains = tmp_path / ".out.parquet.1.partial"
    remains.write_text("left")
    other = tmp_path / ".other.parquet.1.partial"
    other.write_text("another's")
    with ParquetSink(tmp_path / "out.parquet", SCHEMA) as first:
        (partial,) = tmp_path.glob(".out.*")
        assert not remains.exists()
        partial.rename(remains)  # as if of another process
        remove_remains(tmp_path, re.compile(r"\.out\.parquet\.\d+\.partial"))
        remains.rename(partial)
        first.write(batch(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.parquet.1.partial", "out.parquet"]


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputFileError, match="pipe is no regular file and would be lost"):
        ParquetSink(tmp_path / "pipe", pa.schema([("k", pa.int64())]))
    assert (tmp_path / "pipe").is_fifo()


def test_a_place_that_cannot_be_written_is_refused_before_any_work(tmp_path):
    with pytest.raises(OutputFileError, match="there is no folder"):
        ParquetSink(tmp_path / "none" / "out.parquet", SCHEMA)
    with pytest.raises(OutputFileError, match="is a folder"):
        ParquetSink(tmp_path, SCHEMA)


def refuse(number):
    def refused(writer, *_, **__):
        if isinstance(writer, pq.ParquetWriter):
            writer.is_open = False  # it would be closed when it is collected
        raise OSError(number, "Error writing bytes to file")  # Arrow names neither the file nor the cause

    return refused


@pytest.mark.parametrize("step", ["__init__", "write_table", "close"])
@pytest.mark.parametrize(("number", "remedy"), [(errno.ENOSPC, "free space, or write"), (errno.EFBIG, "write")])
def test_a_place_that_refuses_more_is_named_and_nothing_is_left(tmp_path, monkeypatch, step, number, remedy):
    def write():
        with ParquetSink(tmp_path / "out.parquet", SCHEMA) as sink:
            sink.write(batch(1))

    monkeypatch.setattr(pq.ParquetWriter, step, refuse(number))
    message = f"cannot write {tmp_path}/out.parquet: {os.strerror(number)}; {remedy} elsewhere"
    with pytest.raises(OutputFileError, match=re.escape(message)):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_parts_that_refuses_more_is_named_and_stays_marked(tmp_path, monkeypatch):
    def write():
        with PartsSink(tmp_path / "parts", SCHEMA) as parts:
            parts.write(batch(1))

    monkeypatch.setattr(pq, "write_table", refuse(errno.ENOSPC))
    with pytest.raises(OutputFileError, match=r"cannot write .*parts: No space left on device; free space, or write"):
        write()
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["_incomplete"]
