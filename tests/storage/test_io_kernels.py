"""Compiled reading and writing: calls that do less than they were asked for, are interrupted, or fail."""

import ctypes
import errno

import numpy as np
import pytest

from headrace.storage._io_kernels import read_bytes, sync_file, write_bytes
from headrace.storage.backend import END_OF_FILE, PREAD, PWRITE, SYNC, FileBackend
from headrace.storage.errors import ClosedTableError, CorruptionError, StorageIOError

WORD = ctypes.c_ssize_t
TRANSFER = ctypes.CFUNCTYPE(WORD, ctypes.c_int, ctypes.c_void_p, WORD, WORD, use_errno=True)
CONTENT = bytes(range(100))


def address(function):
    return ctypes.cast(function, ctypes.c_void_p).value


def of_answers(answers, done):
    """Return a C function that gives these answers in turn: so many bytes at most, or the negative of an errno."""
    left = list(answers)

    def transfer(_descriptor, memory, length, offset):
        answer = min(left.pop(0), length)
        if answer < 0:
            ctypes.set_errno(-answer)
            return -1
        done(memory, offset, answer)
        return answer

    return TRANSFER(transfer)


@pytest.mark.parametrize("answers", [[10], [3, 3, 3, 3], [-errno.EINTR, 4, -errno.EINTR, 6]])
def test_what_is_left_is_transferred_too(answers):
    target, written = np.zeros(12, dtype=np.uint8), bytearray(100)

    def read(memory, offset, count):
        ctypes.memmove(memory, CONTENT[offset : offset + count], count)

    def write(memory, offset, count):
        written[offset : offset + count] = ctypes.string_at(memory, count)

    functions = of_answers(answers, read), of_answers(answers, write)
    calls = np.array([0, *map(address, functions), 0], dtype=np.int64)
    assert read_bytes(calls, target, 2, 10, 50) == 0
    assert target.tobytes() == bytes(2) + CONTENT[50:60]
    assert write_bytes(calls, target, 2, 10, 20) == 0
    assert written == bytes(20) + CONTENT[50:60] + bytes(70)


@pytest.mark.parametrize(
    ("answers", "read", "write"),
    [([4, 0], END_OF_FILE, errno.EIO), ([4, -errno.ENOSPC], errno.ENOSPC, errno.ENOSPC)],
)
def test_an_end_and_an_error_are_told(answers, read, write):
    functions = [of_answers(answers, lambda *_: None) for _ in range(2)]
    calls = np.array([0, *map(address, functions), 0], dtype=np.int64)
    buffer = np.zeros(10, dtype=np.uint8)
    assert read_bytes(calls, buffer, 0, 10, 0) == read
    assert write_bytes(calls, buffer, 0, 10, 0) == write


def test_a_failure_without_a_reason_is_one():
    functions = TRANSFER(lambda *_: -1), ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, use_errno=True)(lambda _: -1)
    ctypes.set_errno(0)
    calls = np.array([0, *map(address, (functions[0], functions[0], functions[1]))], dtype=np.int64)
    buffer = np.zeros(10, dtype=np.uint8)
    assert read_bytes(calls, buffer, 0, 10, 0) == errno.EIO
    assert write_bytes(calls, buffer, 0, 10, 0) == errno.EIO
    assert sync_file(calls) == errno.EIO


def test_a_file_is_read_and_written(tmp_path):
    path, buffer = tmp_path / "file", np.frombuffer(bytearray(CONTENT), dtype=np.uint8)
    backend = FileBackend(path, "x", direct=False)
    assert write_bytes(backend.calls, buffer, 10, 90, 5) == 0
    assert sync_file(backend.calls) == 0
    assert path.read_bytes() == bytes(5) + CONTENT[10:]
    again = np.zeros(100, dtype=np.uint8)
    assert read_bytes(backend.calls, again, 1, 20, 5) == 0
    assert again.tobytes() == bytes(1) + CONTENT[10:30] + bytes(79)
    assert read_bytes(backend.calls, again, 0, 20, 90) == END_OF_FILE
    with pytest.raises(CorruptionError, match="ends at byte 95, but bytes from 90 on"):
        raise backend.error_of(PREAD, END_OF_FILE, 90)
    backend.close()
    with pytest.raises(ClosedTableError):
        _ = backend.calls


def test_refusals_of_the_system_name_the_file_and_the_reason(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    backend, buffer = FileBackend(path, "r"), np.zeros(10, dtype=np.uint8)
    error = write_bytes(backend.calls, buffer, 0, 10, 0)
    assert error == errno.EBADF
    with pytest.raises(StorageIOError, match=r"cannot write .*file at byte 7: Bad file descriptor"):
        raise backend.error_of(PWRITE, error, 7)
    with pytest.raises(StorageIOError, match=r"cannot sync .*file: No space left on device; free space"):
        raise backend.error_of(SYNC, errno.ENOSPC, 0)
    backend.close()
