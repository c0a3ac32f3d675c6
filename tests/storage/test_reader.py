import itertools
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headrace.storage.errors import CorruptPageError, StorageIOError
from headrace.storage.file.backend import FileBackend
from headrace.storage.read.cache import page_buffer
from headrace.storage.read.device import DeviceModel
from headrace.storage.read.reader import PageReader, ReadReport

PAGE = 4096
PAGES = 300


def page(number):
    body = np.random.default_rng(number).integers(0, 256, PAGE - 8, dtype=np.uint8).tobytes()
    return xxhash.xxh64_intdigest(body, seed=number).to_bytes(8, "little") + body


CONTENT = b"".join(page(number) for number in range(PAGES))
CHECKSUMS = np.frombuffer(CONTENT, dtype="<u8")[:: PAGE // 8]


class Recording:
    """A backend in memory that notes the reads."""

    path = "recording"

    def __init__(self, content=CONTENT):
        self.content = bytearray(content)
        self.reads = []

    def pread_into(self, offset, buffers):
        self.reads.append((offset // PAGE, [len(buffer) // PAGE for buffer in buffers]))
        for buffer in buffers:
            buffer[:] = np.frombuffer(self.content, np.uint8, len(buffer), offset)
            offset += len(buffer)


def reader_of(backend, threads=4, max_scan=50, seek=3.0):
    return PageReader(backend, PAGE, DeviceModel(seek, 1.0, PAGE), threads=threads, max_scan=max_scan)


def frame(frames, at):
    return frames[at * PAGE : (at + 1) * PAGE].tobytes()


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table"
    path.write_bytes(CONTENT)
    return path


@given(
    pages=st.sets(st.integers(0, PAGES - 1), min_size=1, max_size=60),
    threads=st.sampled_from([1, 5]),
    max_scan=st.integers(1, 60),
    seed=st.integers(0, 5),
)
def test_every_page_lands_in_its_frame(pages, threads, max_scan, seed):
    pages = np.array(sorted(pages), np.int64)
    frames = page_buffer(80, PAGE)
    ids = np.random.default_rng(seed).permutation(80)[: len(pages)]
    if seed == 0:
        ids = np.arange(len(pages))
    reader = reader_of(Recording(), threads, max_scan)
    report = reader.read(pages, frames, ids, CHECKSUMS[pages])
    assert [frame(frames, at) for at in ids] == [page(number) for number in pages]
    untouched = np.setdiff1d(np.arange(80), ids)
    assert not any(frames[at * PAGE : (at + 1) * PAGE].any() for at in untouched)
    plan = reader.plan(pages)
    assert (report.pages_wanted, report.pages_read, report.seeks) == (len(pages), plan.pages_read, len(plan))
    reader.close()


def test_gaps_go_to_the_bounce_page_and_adjacent_frames_are_one_buffer():
    backend = Recording()
    reader = reader_of(backend, threads=1)
    reader.read(np.array([10, 11, 14, 40]), page_buffer(4, PAGE), np.arange(4))
    assert backend.reads == [(10, [2, 1, 1, 1]), (40, [1])]


@pytest.mark.parametrize("direct", [True, False])
def test_a_real_file_is_read_in_parallel(table, direct):
    backend = FileBackend(table, direct=direct)
    reader = reader_of(backend, threads=8, seek=0.0)
    pages = np.arange(0, PAGES, 2)
    frames = page_buffer(len(pages), PAGE)
    report = reader.read(pages, frames, np.arange(len(pages)), CHECKSUMS[pages])
    assert report.seeks == len(pages)
    assert [frame(frames, at) for at in range(len(pages))] == [page(number) for number in pages]
    reader.close()
    reader.close()
    backend.close()


def test_a_plan_can_be_read_in_parts():
    reader = reader_of(Recording(), seek=1.0)
    pages = np.array([1, 2, 20, 21, 50, 80])
    frames = page_buffer(6, PAGE)
    plan = reader.plan(pages)
    parts = [reader.read_plan(plan, slice(at, at + 1), pages, frames, np.arange(6)) for at in range(len(plan))]
    assert [(part.pages_wanted, part.seeks) for part in parts] == [(2, 1), (2, 1), (1, 1), (1, 1)]
    assert frame(frames, 5) == page(80)
    assert reader.read_plan(plan, slice(4, 4), pages, frames, np.arange(6)) == ReadReport()
    total = sum(parts, ReadReport())
    assert (total.pages_wanted, total.pages_read, total.seeks) == (6, 6, 4)
    reader.close()


def test_the_clock_is_an_argument():
    reader = PageReader(Recording(), PAGE, DeviceModel.default(PAGE), clock=itertools.count(5).__next__)
    assert reader.read(np.array([3]), page_buffer(1, PAGE), np.zeros(1, np.int64)).seconds == 1
    assert reader.nbytes > PAGE


@pytest.mark.parametrize("threads", [1, 4])
def test_a_damaged_page_is_named(threads):
    backend = Recording()
    backend.content[77 * PAGE + 100] ^= 1
    reader = reader_of(backend, threads)
    pages = np.arange(0, PAGES, 7)
    with pytest.raises(CorruptPageError, match="page 77 of recording"):
        reader.read(pages, page_buffer(len(pages), PAGE), np.arange(len(pages)), CHECKSUMS[pages])
    reader.close()


def test_a_stale_page_is_detected_by_its_parent():
    reader = reader_of(Recording())
    with pytest.raises(CorruptPageError, match="page 4 "):
        reader.read(np.array([4]), page_buffer(1, PAGE), np.array([0]), np.array([1], np.uint64))


def test_a_page_in_the_wrong_place_is_detected():
    backend = Recording()
    backend.content[5 * PAGE : 6 * PAGE] = page(6)
    with pytest.raises(CorruptPageError, match="page 5 "):
        reader_of(backend).read(np.array([5]), page_buffer(1, PAGE), np.array([0]))


def test_a_truncated_file_is_corrupt(table):
    table.write_bytes(CONTENT[: 10 * PAGE + 50])
    backend = FileBackend(table)
    reader = reader_of(backend)
    with pytest.raises(CorruptPageError, match=r"page 9 .*truncated"):
        reader.read(np.array([9, 10]), page_buffer(2, PAGE), np.arange(2))
    backend.close()


def test_a_failed_read_stops_the_others():
    class Failing(Recording):
        def pread_into(self, offset, buffers):
            super().pread_into(offset, buffers)
            raise StorageIOError("broken")

    backend = Failing()
    reader = reader_of(backend, threads=4, seek=0.0)
    pages = np.arange(0, PAGES, 2)
    with pytest.raises(StorageIOError, match="broken"):
        reader.read(pages, page_buffer(len(pages), PAGE), np.arange(len(pages)))
    assert len(backend.reads) <= 8
    reader.close()


def test_a_forked_process_reads_with_threads_of_its_own(tmp_path):
    """In a process of its own, since one with threads of Arrow must not be forked while tests run."""
    code = """
import os, sys
import numpy as np
from headrace.storage.file.backend import FileBackend
from headrace.storage.read.cache import page_buffer
from headrace.storage.read.device import DeviceModel
from headrace.storage.read.reader import PageReader

def read(reader):
    offsets = np.arange(8) * 4096
    frames = page_buffer(8, 4096)
    reader.fill(offsets, np.full(8, 4096), frames, offsets)
    return bytes(frames[::4096][:8])

with open(sys.argv[1], "wb") as file:
    file.write(b"".join(bytes([number]) * 4096 for number in range(8)))
reader = PageReader(FileBackend(sys.argv[1]), 4096, DeviceModel.default(4096))
assert read(reader) == bytes(range(8))
child = os.fork()
if child == 0:
    reader._starting.acquire(blocking=False)  # as if another thread had held it
    same = read(reader) == bytes(range(8))
    reader.close()
    os._exit(0 if same else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert read(reader) == bytes(range(8))
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], check=True, timeout=60)
