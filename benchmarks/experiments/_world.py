"""Where experiments run: on a simulated disk with a simulated clock, or on the real ones.

The simulated disk charges each read the paper's ``C(N) = S + T * N`` (section IV-D), one read after the other; a page
stands for one of the paper's, or for several. The processor is charged a fixed time for each tuple whenever a phase
handles it, and for each phase what it takes to scan an index of 10 GB, scaled like the relation. Reading and joining do
not overlap. So time is a function of what the operator has counted and of nothing else, and the same seed gives the
same result on every machine.
"""

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.experiments._relations import MAX_SCAN
from headrace.joins import SSIJ
from headrace.storage import Table
from headrace.storage.file import FileBackend
from headrace.storage.read import DeviceModel, PageReader, measure, save_device

__all__ = ["Costs", "Run", "World"]


@dataclass(frozen=True)
class Costs:
    """Seconds that a disk and a processor of the paper's year take for a read, a page in it, a tuple, an index scan."""

    seek: float = 5e-3
    transfer: float = 8192 / 125e6
    tuple: float = 1e-6
    phase: float = 10e-3


class CountedDisk:
    """A file whose reads are counted. What they cost is for the clock."""

    def __init__(self, path, page_size):
        self._file = FileBackend(path, direct=False)
        self._page_size = page_size
        self.path = self._file.path
        self.reads = self.pages = 0

    def pread_into(self, offset, buffers):
        self.reads += 1
        self.pages += sum(memoryview(buffer).nbytes for buffer in buffers) // self._page_size
        self._file.pread_into(offset, buffers)

    def close(self):
        self._file.close()


class VirtualClock:
    """The time that the disk and the operator have worked, and that nothing happened."""

    def __init__(self, disk, costs):
        self._disk = disk
        self._costs = costs
        self._idle = 0.0
        self.counters = None

    def __call__(self):
        costs, disk = self._costs, self._disk
        return self._idle + costs.seek * disk.reads + costs.transfer * disk.pages + self._processor()

    def wait_until(self, moment):
        self._idle += max(0.0, moment - self())

    def _processor(self):
        """Return the seconds of joining: a tuple that has waited for a page was handled twice."""
        done = self.counters
        if done is None:
            return 0.0
        handled = 2 * done.rows_done - done.rows_cached
        return self._costs.tuple * handled + self._costs.phase * (done.online_phases + done.join_phases)


class RealClock:
    """The operators' own clock."""

    def __call__(self):
        return time.monotonic()

    def wait_until(self, moment):
        time.sleep(max(0.0, moment - self()))


@dataclass(frozen=True)
class Run:
    """An operator, the clock it works by, and how to give its file back."""

    operator: object
    clock: object
    close: object = lambda: None


class World:
    """Tables in a folder of their own, and operators over them.

    Parameters
    ----------
    device
        ``"simulated"`` or ``"real"``.
    folder
        Where the tables lie while the experiments run.
    least_memory
        Bytes that every operator has at least; more than nothing only where the relations are toys.
    """

    def __init__(self, device, folder, least_memory=0):
        self.device = device
        self.costs = Costs()
        self.least_memory = least_memory
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-experiments-", dir=folder)
        self._tables = {}

    @property
    def simulated(self):
        return self.device == "simulated"

    @property
    def trials(self):
        """Number of equal trials: rates on a real device scatter."""
        return 1 if self.simulated else 3

    def pace(self, relation):
        """Return what a scan of the relation costs, as a share of what it costs on the simulated disk."""
        if self.simulated:
            return 1.0
        device, pages = self.table(relation).reader().device, relation.pages
        reads = pages * relation.weight / MAX_SCAN
        simulated = self.costs.seek * reads + self.costs.transfer * relation.weight * pages
        return device.cost(reads, pages) / simulated

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for table in self._tables.values():
            table.close()
        self._folder.cleanup()

    def table(self, relation):
        """Return the table of a relation, built when it is first asked for."""
        if relation not in self._tables:
            path = Path(self._folder.name) / f"{len(self._tables)}.hdr"
            options = {"fill": relation.fill, "page_size": relation.page_size}
            table = Table.build(
                path, relation.content(), key=[relation.key], unique=relation.rows_per_key == 1, **options
            )
            if not self.simulated:
                table.close()
                save_device(path, measure(path, relation.page_size))
                table = Table.open(path)
            self._tables[relation] = table
        return self._tables[relation]

    def start(self, kind, relation, share, costs=None, **options):
        """Return a fresh operator with a memory of that share of the relation and an empty cache.

        `costs` replaces the costs of the simulated disk and processor.
        """
        table = self.table(relation)
        memory = max(int(table.stats.bytes * share), self.least_memory)
        options = {"on": [("key", relation.key)], "columns": ["value"], "memory": memory} | options
        if not self.simulated:
            return Run(kind(table, **options), RealClock())
        snapshot = table.snapshot()
        disk = CountedDisk(snapshot.path, snapshot.page_size)
        costs = costs or self.costs
        costs = replace(costs, transfer=costs.transfer * relation.weight, phase=costs.phase * relation.factor)
        clock = VirtualClock(disk, costs)
        model = DeviceModel(costs.seek, costs.transfer, snapshot.page_size, queue_depth=1)
        reader = PageReader(disk, snapshot.page_size, model, threads=1, clock=clock)
        if kind is SSIJ:
            options["threads"] = 1
        operator = kind(snapshot, reader=reader, clock=clock, **options)
        clock.counters = operator.algorithm.counters
        return Run(operator, clock, disk.close)
