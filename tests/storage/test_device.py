import itertools
import json

import numpy as np
import pytest

from headrace.storage.errors import InputError, StorageIOError
from headrace.storage.read import device as device_module
from headrace.storage.read.device import DeviceModel, device_path, fit, load_device, measure, save_device


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(device_module, "_MEASURED_BYTES", 8 * 2**20)
    monkeypatch.setattr(device_module, "_ROUND_BYTES", 2**20)


@pytest.mark.parametrize("page_size", [4096, 65536])
@pytest.mark.usefixtures("small")
def test_a_folder_is_measured_and_left_clean(tmp_path, page_size):
    model = measure(tmp_path, page_size, queue_depth=4)
    assert model.seek > 0
    assert model.transfer > 0
    assert (model.page_size, model.queue_depth, model.measured) == (page_size, 4, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small")
def test_a_large_file_is_measured_in_place(tmp_path):
    path = tmp_path / "table"
    path.write_bytes(bytes(9 * 2**20))
    tmp_path.chmod(0o500)
    assert measure(path).measured
    tmp_path.chmod(0o700)


@pytest.mark.usefixtures("small")
def test_the_clock_decides(tmp_path):
    clock = itertools.count().__next__
    model = measure(tmp_path, 8192, queue_depth=4, clock=clock)
    reads = [2**20 // (length * 8192) for length in (1, 4, 16, 64)]
    expected = fit(np.array([1.0, 4, 16, 64]), np.array([1 / max(8, n) for n in reads]))
    assert (model.seek, model.transfer) == pytest.approx(expected)


def test_the_fit_recovers_the_line():
    lengths = np.array([1.0, 4, 16, 64])
    assert fit(lengths, 20e-6 + 5e-6 * lengths) == pytest.approx((20e-6, 5e-6))
    assert fit(lengths, np.array([1e-5, 1e-5, 1e-5, 1e-5]))[1] > 0


def test_costs_scale_with_the_page():
    model = DeviceModel(seek=30e-6, transfer=10e-6, page_size=8192)
    assert model.max_distance == pytest.approx(4)
    assert model.for_page_size(16384).transfer == pytest.approx(20e-6)
    assert model.cost(reads=2, pages=10) == pytest.approx(160e-6)


def test_a_measured_model_is_kept_beside_the_table(tmp_path):
    table = tmp_path / "dim.table"
    assert load_device(table, 4096) == DeviceModel.default(4096)
    assert not load_device(table, 4096).measured
    model = DeviceModel(1e-5, 2e-6, 8192, 16, direct=False)
    save_device(table, model)
    assert load_device(table, 8192) == model
    assert load_device(table, 16384) == model.for_page_size(16384)
    assert [path.name for path in tmp_path.iterdir()] == ["dim.table.device.json"]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"seek": 1}', json.dumps({"seek": -1, "transfer": 1, "page_size": 8192})]
)
def test_a_damaged_file_is_named(tmp_path, content):
    device_path(tmp_path / "t").write_text(content)
    with pytest.raises(InputError, match=r"t\.device\.json .*measure again"):
        load_device(tmp_path / "t", 8192)


def test_folders_that_are_missing(tmp_path):
    with pytest.raises(StorageIOError, match="cannot measure"):
        measure(tmp_path / "absent" / "table")
    with pytest.raises(StorageIOError, match="cannot write the costs"):
        save_device(tmp_path / "absent" / "table", DeviceModel.default(8192))
