"""A simulated clock, and a disk that moves it on by what the cost model says."""

from headrace.storage.file import FileBackend
from headrace.storage.read import DeviceModel, PageReader

SEEK, TRANSFER = 0.010, 0.001
READ = SEEK + TRANSFER


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class SlowReader(PageReader):
    """Reads the file at once, and moves the clock on by what the cost model says, times `slowness`."""

    def __init__(self, table, clock, seek=SEEK, slowness=1.0):
        page_size = table.snapshot().page_size
        backend = FileBackend(table.snapshot().path, direct=False)
        super().__init__(backend, page_size, DeviceModel(seek, TRANSFER, page_size), clock=clock)
        self.clock, self.seek, self.slowness = clock, seek, slowness

    def fill(self, offsets, lengths, *arrays):
        super().fill(offsets, lengths, *arrays)
        seconds = self.seek * len(offsets) + TRANSFER * int(lengths.sum()) / self.page_size
        self.clock.now += self.slowness * seconds
