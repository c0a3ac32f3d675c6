"""Spill files: what was written is read, and nothing else is; folders go with their owners."""

import errno
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from headrace.storage.errors import ClosedTableError, CorruptPageError, StorageIOError
from headrace.storage.file import FileBackend
from headrace.storage.spill import SPILL_PAGE, BlockRef, SpillFile, SpillFolder, block_nbytes

SIZES = [0, 1, 7, SPILL_PAGE - 25, SPILL_PAGE - 24, SPILL_PAGE - 23, 3 * SPILL_PAGE, 50_001]


@pytest.fixture
def folder(tmp_path):
    with SpillFolder(tmp_path) as folder:
        yield folder


def contents(sizes, seed=3):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size).astype(np.uint8) for size in sizes]


def test_blocks_are_read_as_they_were_written(folder):
    file, blocks = folder.file("left"), contents(SIZES)
    refs = [file.append(np.array_split(block, 3), tag=len(block)) for block in blocks]
    for at in np.random.default_rng(1).permutation(len(refs)):
        assert file.read(refs[at]).tobytes() == blocks[at].tobytes()
    assert list(file.scan()) == refs
    assert list(file.scan(3, refs[3].page)) == refs[3:]
    assert file.nbytes == sum(block_nbytes(len(block)) - 8 for block in blocks)
    assert (folder.stats.blocks_written, folder.stats.blocks_read) == (len(refs), len(refs))


def test_any_damaged_byte_is_found(folder):
    file, block = folder.file("left"), contents([5000])[0]
    file.append(contents([10])[0:1])
    ref = file.append([block])
    (path,) = folder.path.iterdir()
    good = path.read_bytes()
    used = 24 + 5000 + 8 * 3  # header, content, digests
    for at in {*range(0, used, 97), *range(24), *range(used - 24, used)}:
        bad = bytearray(good)
        bad[ref.page * SPILL_PAGE + at] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(CorruptPageError, match=r"block 1, page [12] is damaged"):
            file.read(ref)


def test_a_block_in_the_place_of_another_is_found(folder):
    file = folder.file("left")
    first, second = (file.append([block]) for block in contents([100, 100]))
    (path,) = folder.path.iterdir()
    bytes_of = path.read_bytes()
    path.write_bytes(bytes_of[SPILL_PAGE:] + bytes_of[:SPILL_PAGE])
    for ref in (first, second):
        with pytest.raises(CorruptPageError, match="damaged"):
            file.read(ref)
    with pytest.raises(CorruptPageError, match="damaged"):
        list(file.scan())


def test_a_header_that_leads_out_of_the_file_is_refused(folder):
    file = folder.file("left")
    file.append(contents([100]))
    (path,) = folder.path.iterdir()
    bad = bytearray(path.read_bytes())
    bad[8:16] = (2**40).to_bytes(8, "little")
    path.write_bytes(bad)
    with pytest.raises(CorruptPageError, match="block 0, page 0"):
        list(file.scan())


def test_a_cut_file_is_refused(folder):
    file = folder.file("left")
    ref = file.append(contents([9000]))
    (path,) = folder.path.iterdir()
    path.write_bytes(path.read_bytes()[:SPILL_PAGE])
    with pytest.raises(Exception, match="truncated"):
        file.read(ref)


def test_a_full_disk_leaves_the_earlier_blocks(tmp_path):
    class Full(FileBackend):
        full = False

        def pwrite(self, offset, data):
            if Full.full:
                raise StorageIOError(os.strerror(errno.ENOSPC))
            super().pwrite(offset, data)

    file, block = SpillFile(Full(tmp_path / "spill", "x")), contents([700])[0]
    ref = file.append([block])
    Full.full = True
    with pytest.raises(StorageIOError, match="No space"):
        file.append([block])
    Full.full = False
    assert file.read(ref).tobytes() == block.tobytes()
    assert file.append([block]) == BlockRef(1, 1, 700)


def test_the_folder_is_removed_at_close(tmp_path):
    folder = SpillFolder(tmp_path)
    folder.file("a / b").append(contents([10]))
    assert len(list(tmp_path.iterdir())) == 1
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ClosedTableError):
        folder.file("c")


def test_folders_of_living_owners_stay(tmp_path):
    with SpillFolder(tmp_path) as first:
        ref = (file := first.file("a")).append(contents([10]))
        with SpillFolder(tmp_path):
            assert file.read(ref).tobytes() == contents([10])[0].tobytes()
            assert first.path.exists()


def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path):
    script = (
        "import sys, numpy as np, pathlib\n"
        "from headrace.storage.spill import SpillFolder\n"
        f"folder = SpillFolder({str(tmp_path)!r})\n"
        "folder.file('left').append([np.zeros(9000, np.uint8)])\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        (left,) = tmp_path.iterdir()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert left.exists()
    with SpillFolder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder.path] != [left]


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(StorageIOError, match="name an existing folder"):
        SpillFolder(tmp_path / "missing")
