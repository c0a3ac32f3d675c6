"""The kernel's asynchronous reads: what they bring, and who waits when a queue is given back."""

import threading

import numpy as np
import pytest

from headrace.storage.file import async_reads as kernel_reads
from headrace.storage.file.backend import FileBackend
from headrace.storage.read.cache import page_buffer

PAGE, PAGES = 4096, 16


@pytest.fixture
def backend(tmp_path):
    path = tmp_path / "pages"
    path.write_bytes(np.repeat(np.arange(PAGES, dtype=np.uint8), PAGE).tobytes())
    backend = FileBackend(path)
    yield backend
    backend.close()


@pytest.fixture
def queue(backend):
    descriptor = backend.direct_descriptor
    queue = None if descriptor is None else kernel_reads.open_kernel_queue(descriptor, 8)
    if queue is None:
        pytest.skip("the kernel gives no queue here")
    return queue


def submit(queue, pages):
    """Begin to read these pages; return their frames and the lengths of the reads."""
    frames = page_buffer(len(pages), PAGE)
    lengths = np.full(len(pages), PAGE)
    queue.submit(np.array(pages) * PAGE, lengths, frames.ctypes.data + PAGE * np.arange(len(pages)))
    return frames, lengths


def test_reads_bring_the_pages_that_were_asked_for(queue):
    frames, lengths = submit(queue, [5, 0, 15])
    assert queue.wait(lengths).tolist() == []
    assert frames[: 3 * PAGE].reshape(3, PAGE).tolist() == [[page] * PAGE for page in (5, 0, 15)]
    queue.close()


def test_a_read_beyond_the_end_is_named(queue):
    _, lengths = submit(queue, [3, PAGES + 1, 4])
    assert queue.wait(lengths).tolist() == [1]
    queue.close()


@pytest.mark.parametrize("in_flight", [False, True])
def test_only_reads_in_flight_make_it_wait_until_a_queue_is_given_back(queue, monkeypatch, in_flight):
    call, done, by = kernel_reads._call, threading.Event(), []

    def watched(function, *arguments):
        result = call(function, *arguments)
        if function == kernel_reads._DESTROY:
            by.append(threading.get_ident())
            done.set()
        return result

    _, lengths = submit(queue, [1, 2])
    if not in_flight:
        queue.wait(lengths)
    monkeypatch.setattr(kernel_reads, "_call", watched)
    queue.close()
    assert done.wait(60)
    assert (by == [threading.get_ident()]) == in_flight
