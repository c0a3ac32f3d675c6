import os

import numpy as np
import pytest

from headrace.storage.errors import CorruptionError, StorageIOError, TableExistsError, TableNotFoundError
from headrace.storage.file import backend as backend_module
from headrace.storage.file.backend import FileBackend, sync_folder


def aligned(size, alignment=4096):
    room = np.zeros(size + alignment, dtype=np.uint8)
    start = -room.ctypes.data % alignment
    return room[start : start + size]


@pytest.fixture
def pages(tmp_path):
    path = tmp_path / "pages"
    path.write_bytes(np.random.default_rng(1).integers(0, 256, 16 * 4096, dtype=np.uint8).tobytes())
    return path


@pytest.mark.parametrize("direct", [True, False])
def test_reads_scattered_buffers_from_one_offset(pages, direct):
    backend = FileBackend(pages, direct=direct)
    first, second = aligned(4096), aligned(8192)
    backend.pread_into(4096, [first, memoryview(second)])
    assert first.tobytes() + second.tobytes() == pages.read_bytes()[4096 : 4 * 4096]
    backend.close()


def test_unaligned_reads_fall_back_to_the_page_cache(pages):
    backend = FileBackend(pages)
    buffer = np.zeros(100, dtype=np.uint8)
    backend.pread_into(13, [buffer])
    assert buffer.tobytes() == pages.read_bytes()[13:113]
    backend.close()


def test_reads_more_buffers_than_one_call_takes(tmp_path):
    path = tmp_path / "many"
    path.write_bytes(bytes(range(256)) * 12)
    backend = FileBackend(path)
    buffers = [np.zeros(1, dtype=np.uint8) for _ in range(3000)]
    backend.pread_into(0, buffers)
    assert b"".join(buffer.tobytes() for buffer in buffers) == path.read_bytes()[:3000]
    backend.close()


def test_short_reads_are_continued(pages, monkeypatch):
    whole = os.preadv

    def short(fd, buffers, offset):
        return whole(fd, [buffers[0][: max(1, buffers[0].nbytes // 2)]], offset)

    monkeypatch.setattr(backend_module.os, "preadv", short)
    backend = FileBackend(pages, direct=False)
    buffers = [np.zeros(4096, dtype=np.uint8) for _ in range(3)]
    backend.pread_into(0, buffers)
    assert b"".join(buffer.tobytes() for buffer in buffers) == pages.read_bytes()[: 3 * 4096]
    backend.close()


def test_short_writes_are_continued(tmp_path, monkeypatch):
    whole = os.pwrite
    monkeypatch.setattr(backend_module.os, "pwrite", lambda fd, data, offset: whole(fd, data[:7], offset))
    backend = FileBackend(tmp_path / "new", "x")
    backend.pwrite(5, b"abcdefghijklmnopqrstuvwxyz")
    backend.close()
    assert (tmp_path / "new").read_bytes() == bytes(5) + b"abcdefghijklmnopqrstuvwxyz"


def test_reading_past_the_end_says_truncated(pages):
    backend = FileBackend(pages)
    with pytest.raises(CorruptionError, match="truncated"):
        backend.pread_into(15 * 4096, [aligned(8192)])
    backend.close()


def test_direct_reads_see_buffered_writes(pages):
    backend = FileBackend(pages, "w")
    backend.pwrite(4096, b"x" * 4096)
    buffer = aligned(4096)
    backend.pread_into(4096, [buffer])
    assert buffer.tobytes() == b"x" * 4096
    backend.truncate(4096)
    assert backend.size() == 4096
    backend.sync()
    backend.close()
    backend.close()


def test_missing_file(tmp_path):
    with pytest.raises(TableNotFoundError, match="no table at"):
        FileBackend(tmp_path / "absent")


def test_missing_folder(tmp_path):
    with pytest.raises(TableNotFoundError, match=r"folder .* does not exist"):
        FileBackend(tmp_path / "absent" / "table", "x")


def test_existing_file_is_not_overwritten(pages):
    with pytest.raises(TableExistsError, match="exists already"):
        FileBackend(pages, "x")


def test_folder_is_not_a_table(tmp_path):
    with pytest.raises(StorageIOError, match="not a regular file"):
        FileBackend(tmp_path)


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageIOError, match="not a regular file"):
        FileBackend(tmp_path / "pipe")


def test_refusals_name_the_file_and_the_reason(pages):
    backend = FileBackend(pages, "r")
    with pytest.raises(StorageIOError, match=r"cannot write .*pages at byte 0: "):
        backend.pwrite(0, b"x")
    backend.close()
    with pytest.raises(StorageIOError, match="cannot sync"):
        sync_folder(pages)


def test_a_path_that_leads_elsewhere_is_noticed(tmp_path):
    def opened(*parts):
        path = tmp_path.joinpath(*parts)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"old")
        return path, FileBackend(path)

    path, replaced = opened("replaced")
    assert replaced.has_its_name()
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").replace(path)
    assert not replaced.has_its_name()

    path, removed = opened("removed")
    path.unlink()
    assert not removed.has_its_name()

    path, renamed = opened("renamed")
    path.rename(tmp_path / "other")
    assert not renamed.has_its_name()

    path, in_folder = opened("folder", "file")
    path.parent.rename(tmp_path / "moved")
    path.parent.mkdir()
    path.write_bytes(b"new")
    assert not in_folder.has_its_name()


def test_a_link_that_leads_elsewhere_is_noticed(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"0")
    link = tmp_path / "link"
    for target, path in (("one/file", link), ("one", link / "file")):
        link.symlink_to(tmp_path / target)
        linked = FileBackend(path)
        assert linked.has_its_name()
        link.unlink()
        link.symlink_to(tmp_path / target.replace("one", "two"))
        assert not linked.has_its_name()
        link.unlink()
        linked.close()


def test_a_removed_file_does_not_pass_for_one_whose_name_says_so(tmp_path):
    path = tmp_path / "t (deleted)"
    path.write_bytes(b"x")
    backend = FileBackend(path)
    assert backend.has_its_name()
    path.rename(tmp_path / "t").unlink()
    path.write_bytes(b"x")
    assert not backend.has_its_name()
    backend.close()
