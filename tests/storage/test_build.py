import contextlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated import SimulatedDisk

from headrace.storage import Table
from headrace.storage.errors import InputError, StorageIOError
from headrace.storage.file.backend import FileBackend
from headrace.storage.format.columns import stored_schema
from headrace.storage.load import build
from headrace.storage.read.lookup import scan
from headrace.storage.read.reader import PageReader
from headrace.storage.tree.snapshot import open_snapshot


def write(path, batches, options, monkeypatch=None, chunk=None):
    if chunk is not None:
        monkeypatch.setattr(build, "_CHUNK_ROWS", chunk)
    backend = FileBackend(path, "x")
    writer = build.TableWriter(backend, batches[0].schema, options)
    try:
        for batch in batches:
            writer.write(batch)
        writer.finish()
    finally:
        writer.close()
        backend.close()
    return path.read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.data())
def test_the_file_does_not_depend_on_how_rows_are_cut_into_batches(tmp_path, monkeypatch, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    rows = pa.record_batch({"k": np.sort(rng.integers(0, 500, 3000)), "v": rng.integers(0, 10**9, 3000)})
    cuts = sorted(data.draw(st.sets(st.integers(1, 2999), max_size=8)))
    batches = [rows.slice(a, b - a) for a, b in zip([0, *cuts], [*cuts, 3000], strict=True)]
    options = build.BuildOptions(("k",), page_size=4096)
    for name in ("whole", "cut"):
        (tmp_path / name).unlink(missing_ok=True)
    whole = write(tmp_path / "whole", [rows], options)
    assert (
        write(tmp_path / "cut", batches, options, monkeypatch, data.draw(st.sampled_from([1, 7, 100, 5000]))) == whole
    )


def test_wide_rows_are_encoded_in_small_chunks(tmp_path):
    rows = pa.record_batch({"k": range(3000), "v": [str(n) * 1500 for n in range(3000)]})
    path = tmp_path / "t"
    write(path, [rows], build.BuildOptions(("k",)))
    backend = FileBackend(path)
    snapshot = open_snapshot(backend)
    found = pa.Table.from_batches(scan(snapshot, PageReader(backend, 8192, _device()), None, None, None))
    backend.close()
    assert found.to_pylist() == rows.to_pylist()


def _device():
    from headrace.storage.read.device import DeviceModel  # noqa: PLC0415 - only here

    return DeviceModel.default(8192)


def test_rows_out_of_order_are_refused(tmp_path):
    batches = [pa.record_batch({"k": [1, 5]}), pa.record_batch({"k": [4]})]
    with pytest.raises(InputError, match=r"row 2 \(key k=4\) is out of key order"):
        write(tmp_path / "t", batches, build.BuildOptions(("k",)))


def test_a_single_name_is_a_key_of_one_column(tmp_path):
    with Table.build(tmp_path / "t", pa.table({"ab": [2, 1], "a": [1, 2], "b": [1, 2]}), key="ab") as table:
        assert table.key == ("ab",)


def test_a_sync_that_fails_while_a_load_goes_on_fails_the_load(monkeypatch):
    monkeypatch.setattr(build, "_SYNC_BYTES", 4096)
    disk = SimulatedDisk()
    sync = disk.sync

    def fail_once():
        disk.sync = sync
        raise StorageIOError("cannot sync")

    disk.sync = fail_once
    rows = pa.table({"k": np.arange(20_000), "v": np.arange(20_000) % 977 * 2**40})
    schema = stored_schema(rows.schema, ["k"])
    writer = build.TableWriter(disk, schema, build.BuildOptions(("k",), page_size=4096))
    with contextlib.closing(writer):
        writer.write(rows.cast(schema).to_batches()[0])
        with pytest.raises(StorageIOError, match="cannot sync"):
            writer.finish()
