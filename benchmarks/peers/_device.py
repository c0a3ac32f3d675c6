"""Disk performance without any engine: sequential and random reads of a file that bypass the system's cache."""

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

__all__ = ["measure_device"]

LARGE, PAGE = 2 << 20, 8 << 10
SECONDS = 0.7


def measure_device(path):
    """Return bytes a second of large reads side by side, by two threads, and pages of 8 KiB a second, by sixteen."""
    size = path.stat().st_size
    large = np.arange(0, size - LARGE + 1, LARGE)
    small = np.random.default_rng(1).permutation(np.arange(0, size - PAGE + 1, PAGE))
    return {
        "sequential_bytes": _reads(path, large, LARGE, 2) * LARGE,
        "random_pages": _reads(path, small, PAGE, 16),
    }


def _reads(path, offsets, nbytes, threads):
    """Return the reads per second."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    end = time.perf_counter() + SECONDS

    def work(part):
        buffer, done = mmap.mmap(-1, nbytes), 0
        for offset in offsets[part::threads].tolist():
            if time.perf_counter() > end:
                break
            os.preadv(descriptor, [buffer], offset)
            done += 1
        return done

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(work, range(threads)))
    seconds = time.perf_counter() - began
    os.close(descriptor)
    return done / seconds
