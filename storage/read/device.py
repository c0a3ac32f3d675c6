"""Cost of reads on the disk of a table: the model ``C(N) = S + T * N``, its measurement, and its file.

S and T are measured with the calls and the number of reads in flight that the page reader uses, because a disk that
serves sixteen reads at once charges each of them a fraction of the cost of a single read. They are seconds
of wall-clock time per read and per page at that depth. Planning with them is for `headrace.storage.read.plan`.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.errors import InputError, StorageIOError
from headrace.storage.file.backend import FileBackend
from headrace.storage.file.temporary_files import claimed, remove_remains, removed
from headrace.storage.read.cache import page_buffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from headrace.storage.file.backend import StorageBackend

__all__ = ["DEFAULT_QUEUE_DEPTH", "DeviceModel", "device_path", "fit", "load_device", "measure", "save_device"]

DEFAULT_QUEUE_DEPTH = 16
_LENGTHS = (1, 4, 16, 64)
_MEASURED_BYTES = 64 * 2**20
_ROUND_BYTES = 16 * 2**20
_READS_PER_ROUND = 768
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Cost of reads on one device: ``C(N) = seek + transfer * N`` seconds for `N` consecutive pages.

    Attributes
    ----------
    seek
        Seconds that a read costs, however short: the paper's S.
    transfer
        Seconds that each page in it adds: the paper's T.
    page_size
        Page size in bytes.
    queue_depth
        Reads in flight that the costs are valid for.
    direct
        Whether the reads bypassed the page cache.
    measured
        False for the documented default.
    """

    seek: float
    transfer: float
    page_size: int
    queue_depth: int = DEFAULT_QUEUE_DEPTH
    direct: bool = True
    measured: bool = True

    @classmethod
    def default(cls, page_size: int) -> DeviceModel:
        """Return the model of a common NVMe disk, for a table whose disk was never measured.

        Fifty thousand random reads and 1.6 GB a second: a seek costs as much as three pages of 8 KiB.
        """
        return cls(seek=15e-6, transfer=page_size / 1.6e9, page_size=page_size, measured=False)

    def cost(self, reads: int, pages: int) -> float:
        """Return the seconds that `reads` reads of `pages` pages in all take."""
        return self.seek * reads + self.transfer * pages

    @property
    def max_distance(self) -> float:
        """Distance in pages up to which two wanted pages are read together: the paper's maxDist, 1 + S/T."""
        return 1 + self.seek / self.transfer if self.transfer else float("inf")

    def for_page_size(self, page_size: int) -> DeviceModel:
        """Return the model for pages of another size on the same device."""
        return replace(self, transfer=self.transfer * page_size / self.page_size, page_size=page_size)


def fit(lengths: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Return (S, T) of the least-squares line through the relative costs of reads of `lengths` pages.

    Each residual is divided by its cost, so that a long read does not outweigh a short one. Neither S nor T is ever
    less than a nanosecond.

    Examples
    --------
    >>> import numpy as np
    >>> seek, transfer = fit(np.array([1.0, 10.0]), np.array([3.0, 12.0]))
    >>> round(seek, 6), round(transfer, 6)
    (2.0, 1.0)
    """
    design = np.column_stack([np.ones(len(lengths)), lengths]) / seconds[:, None]
    (seek, transfer), *_ = np.linalg.lstsq(design, np.ones(len(lengths)), rcond=None)
    return max(float(seek), 1e-9), max(float(transfer), 1e-9)


def measure(
    path: str | os.PathLike[str],
    page_size: int = 8192,
    queue_depth: int = DEFAULT_QUEUE_DEPTH,
    *,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
) -> DeviceModel:
    """Measure S and T on the disk that holds `path`, at the queue depth that is used.

    Parameters
    ----------
    path
        A file of at least 64 MiB, read in place, or a folder (a smaller file: its folder), where a temporary file of
        64 MiB is written and removed.
    page_size
        Page size in bytes.
    queue_depth
        Reads in flight.
    clock, seed
        Clock in seconds, and seed of the random positions.

    Raises
    ------
    StorageIOError
        If the operating system refuses to read, or to write the temporary file.
    """
    target = Path(path)
    if target.is_file() and target.stat().st_size >= _MEASURED_BYTES:
        return _measure_file(target, page_size, queue_depth, clock, seed)
    folder = target if target.is_dir() else target.parent
    try:
        handle, name = tempfile.mkstemp(prefix=".headrace-device-", dir=folder)
    except OSError as error:
        raise StorageIOError(
            f"cannot measure the disk of {folder}: {error.strerror}; name a writable folder"
        ) from error
    try:
        _fill(handle, name, seed)
        return _measure_file(Path(name), page_size, queue_depth, clock, seed)
    finally:
        Path(name).unlink()


def _fill(handle: int, name: str, seed: int) -> None:
    block = np.random.default_rng(seed).integers(0, 256, 2**20, dtype=np.uint8).tobytes()
    try:
        with os.fdopen(handle, "wb") as file:
            for _ in range(_MEASURED_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageIOError(f"cannot write {name} to measure the disk: {error.strerror}") from error


def _measure_file(path: Path, page_size: int, queue_depth: int, clock: Callable[[], float], seed: int) -> DeviceModel:
    backend = FileBackend(path)
    try:
        with ThreadPoolExecutor(queue_depth, thread_name_prefix="headrace-measure") as pool:
            probe = _Probe(backend, pool, page_size, queue_depth, clock, np.random.default_rng(seed))
            seconds = [probe.seconds_per_read(length) for length in _LENGTHS]
        seek, transfer = fit(np.array(_LENGTHS, dtype=np.float64), np.array(seconds))
        return DeviceModel(seek, transfer, page_size, queue_depth, direct=backend.direct)
    finally:
        backend.close()


@dataclass(frozen=True)
class _Probe:
    """Times reads of one file through a pool of `queue_depth` threads."""

    backend: StorageBackend
    pool: ThreadPoolExecutor
    page_size: int
    queue_depth: int
    clock: Callable[[], float]
    rng: np.random.Generator

    def seconds_per_read(self, length: int) -> float:
        """Return the median over the rounds of the seconds per read of `length` pages at random places."""
        places = self.backend.size() // self.page_size - length + 1
        reads = max(2 * self.queue_depth, min(_READS_PER_ROUND, _ROUND_BYTES // (length * self.page_size)))
        rounds = [self.rng.integers(0, places, reads) * self.page_size for _ in range(_ROUNDS)]
        return float(np.median([self._seconds(offsets, length * self.page_size) for offsets in rounds])) / reads

    def _seconds(self, offsets: NDArray[np.int64], nbytes: int) -> float:
        todo = iter(offsets.tolist())

        def work() -> None:
            buffer = page_buffer(1, nbytes)[:nbytes]
            for offset in todo:
                self.backend.pread_into(offset, [buffer])

        begin = self.clock()
        for worker in [self.pool.submit(work) for _ in range(self.queue_depth)]:
            worker.result()
        return self.clock() - begin


def device_path(table: str | os.PathLike[str]) -> Path:
    """Return the path of the file beside a table with the costs of its disk."""
    return Path(f"{os.fspath(table)}.device.json")


def save_device(table: str | os.PathLike[str], model: DeviceModel) -> None:
    """Write a measured model to a file beside a table.

    Raises
    ------
    StorageIOError
        If the file cannot be written.
    """
    path = device_path(table)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{threading.get_ident()}")
    try:
        remove_remains(path.parent, re.compile(re.escape(path.name) + r"\.tmp-\d+-\d+"))
        with claimed(lambda: _created(temporary)):
            temporary.write_text(json.dumps(asdict(model), indent=1) + "\n", encoding="utf-8")
            temporary.replace(path)
    except OSError as error:
        raise StorageIOError(f"cannot write the costs of the disk to {path}: {error.strerror}") from error
    finally:
        removed(temporary)


def _created(path: Path) -> Path:
    path.touch(exist_ok=False)
    return path


def load_device(table: str | os.PathLike[str], page_size: int) -> DeviceModel:
    """Return the model from the file beside a table, or the default if its disk was never measured.

    Raises
    ------
    InputError
        If the file exists but `save_device` did not write it; remove it or measure again.
    """
    path = device_path(table)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        model = DeviceModel(**fields)
        if not (0 < model.seek < np.inf and 0 < model.transfer < np.inf and model.page_size > 0):
            raise ValueError("costs must be positive")  # noqa: TRY301 - one message for all that is wrong with the file
    except FileNotFoundError:
        return DeviceModel.default(page_size)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} does not hold the costs of a disk ({error}); remove it or measure again") from error
    return model.for_page_size(page_size)
