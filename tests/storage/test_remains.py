"""Builds that are killed, and what the next build does with what they left."""

import re
import subprocess
import sys

import pyarrow as pa
import pytest

from headrace.storage import Table
from headrace.storage.file.temporary_files import claimed, remove_remains, scratch_folder
from headrace.storage.read.device import DeviceModel, save_device

BUILD = """
import sys, pyarrow as pa
from headrace.storage import Table

def rows():
    for at in range(3):
        yield pa.record_batch({"k": range(at, 600_000, 3)})
    print("held", flush=True)
    sys.stdin.read()

Table.build(sys.argv[1], rows(), "k", memory=int(sys.argv[2]))
"""


@pytest.fixture
def stuck(tmp_path):
    """A process that builds `t`, needs a folder to sort in, and has come to the end of its source."""
    command = [sys.executable, "-c", BUILD, str(tmp_path / "t"), "1000"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def names(folder):
    return sorted(re.sub(r"-.*", "", path.name) for path in folder.iterdir())


def build(folder):
    return Table.build(folder / "t", iter([pa.record_batch({"k": [2]}), pa.record_batch({"k": [1]})]), "k", memory=1)


def test_a_build_removes_what_killed_ones_left(tmp_path, stuck):
    assert names(tmp_path) == [".headrace", "t.tmp"]
    stuck.kill()
    stuck.wait()
    assert names(tmp_path) == [".headrace", "t.tmp"]
    with build(tmp_path) as table:
        assert table.stats.rows == 2
    assert names(tmp_path) == ["t"]


def test_a_build_removes_what_killed_makers_of_its_other_files_left(tmp_path):
    for name in ("t.filter.tmp-1-2", "t.device.json.tmp-1-2"):
        (tmp_path / name).touch()
    build(tmp_path).close()
    assert names(tmp_path) == ["t"]


def test_saved_costs_of_a_disk_leave_one_file_and_remove_what_was_left(tmp_path):
    (tmp_path / "t.device.json.tmp-1-2").touch()
    save_device(tmp_path / "t", DeviceModel.default(8192))
    assert names(tmp_path) == ["t.device.json"]


def test_a_build_leaves_alone_what_a_live_one_works_on(tmp_path, stuck):
    build(tmp_path).close()
    assert names(tmp_path) == [".headrace", "t", "t.tmp"]
    stuck.stdin.close()
    assert stuck.wait() == 0
    assert names(tmp_path) == ["t"]
    with Table.open(tmp_path / "t") as table:
        assert table.stats.rows == 600_000


def test_files_of_similar_names_are_no_remains(tmp_path):
    for name in ("t.tmp-mine", "tt.tmp-1-2", "t.tmp-1-2x", "t.tmp-1"):
        (tmp_path / name).write_text("mine")
    build(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {"t", "t.tmp-mine", "tt.tmp-1-2", "t.tmp-1-2x", "t.tmp-1"}


def test_what_is_taken_for_remains_before_it_is_claimed_is_made_again(tmp_path):
    made = []

    def make():
        made.append(tmp_path / "x")
        made[-1].touch()
        if len(made) == 1:
            remove_remains(tmp_path, re.compile("x"))
        return made[-1]

    with claimed(make) as path:
        remove_remains(tmp_path, re.compile("x"))
        assert path.exists()
    assert len(made) == 2


def test_a_scratch_folder_goes_with_its_context(tmp_path):
    with scratch_folder(tmp_path) as folder:
        (folder / "part").write_text("rows")
        with scratch_folder(tmp_path) as other:
            assert folder.exists()
            assert other != folder
    assert not list(tmp_path.iterdir())
