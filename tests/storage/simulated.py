"""A disk in memory that keeps, drops or garbles what was not synced, and fails on request; and tables on it."""

from dataclasses import dataclass, field

import pyarrow as pa

from headrace.storage.check import check_backend
from headrace.storage.commit.writer import Writer
from headrace.storage.errors import CorruptionError, StorageIOError
from headrace.storage.format.columns import stored_schema
from headrace.storage.load.build import BuildOptions, TableWriter
from headrace.storage.read.device import DeviceModel
from headrace.storage.read.lookup import scan
from headrace.storage.read.reader import PageReader
from headrace.storage.tree.snapshot import open_snapshot

SECTOR = 512


class NoLocks:
    """Locks of a file that no other handle can reach, such as one that lives in memory."""

    def take_writer(self, wait=0.0):
        """Do nothing: there is no other writer."""

    def release_writer(self):
        """Do nothing."""

    def claim(self, txid):
        """Do nothing: no writer but the holder of this object looks for claims."""

    def release(self, txid):
        """Do nothing."""

    def oldest_claim(self, before):
        """Return None: there are no readers."""


@dataclass(frozen=True)
class Write:
    offset: int
    data: bytes


@dataclass(frozen=True)
class Truncate:
    size: int


class Sync:
    pass


@dataclass
class SimulatedDisk:
    """A file in memory. Every write, sync and truncation is an operation in `log`.

    `fail(operation number)` may raise to refuse an operation, or return how many bytes of a write are done before it
    is refused.
    """

    image: bytearray = field(default_factory=bytearray)
    path: str = "simulated"
    log: list = field(default_factory=list)
    fail: object = None

    def pread_into(self, offset, buffers):
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if offset + len(view) > len(self.image):
                raise CorruptionError(f"{self.path} has been truncated")
            view[:] = memoryview(self.image)[offset : offset + len(view)]
            offset += len(view)

    def pwrite(self, offset, data):
        data = bytes(data)
        short = self.fail(len(self.log)) if self.fail else None
        if short is not None:
            data = data[:short]
        self.log.append(Write(offset, data))
        apply(self.image, self.log[-1])
        if short is not None:
            raise StorageIOError(f"cannot write {self.path} at byte {offset}: No space left on device")

    def sync(self):
        if self.fail and self.fail(len(self.log)) is not None:
            raise StorageIOError(f"cannot sync {self.path}: Input/output error")
        self.log.append(Sync())

    def truncate(self, size):
        self.log.append(Truncate(size))
        apply(self.image, self.log[-1])

    def size(self):
        return len(self.image)

    def close(self):
        pass


def apply(image, operation):
    if isinstance(operation, Write):
        end = operation.offset + len(operation.data)
        if end > len(image):
            image.extend(bytes(end - len(image)))
        image[operation.offset : end] = operation.data
    elif isinstance(operation, Truncate):
        if operation.size < len(image):
            del image[operation.size :]
        else:
            image.extend(bytes(operation.size - len(image)))


def crash_images(start, log, rng):
    """Yield (operations done, image after a crash) for a crash before every operation, the last one included."""
    durable, pending = bytearray(start), []
    for at, operation in enumerate(log):
        yield at, crash(durable, pending, rng)
        if isinstance(operation, Sync):
            for done in pending:
                apply(durable, done)
            pending = []
        else:
            pending.append(operation)
    yield len(log), crash(durable, pending, rng)


def crash(durable, pending, rng):
    """Return what a crash leaves: each unsynced write is kept, dropped, torn at sectors, or garbled."""
    image = bytearray(durable)
    for operation in pending:
        fate = rng.integers(0, 5)
        if fate == 0:
            continue
        if fate == 1 or isinstance(operation, Truncate):
            apply(image, operation)
            continue
        sectors = range(0, len(operation.data), SECTOR)
        for begin, kept in zip(sectors, rng.integers(0, 3 if fate == 4 else 2, len(sectors)).tolist(), strict=True):
            if kept:
                part = operation.data[begin : begin + SECTOR]
                apply(image, Write(operation.offset + begin, rng.bytes(len(part)) if kept == 2 else part))
    if len(image) > len(durable) and rng.integers(0, 3) == 0:
        del image[rng.integers(len(durable), len(image) + 1) :]
    return image


def build(table, key, *, unique, page_size=4096, fill=0.8):
    """Return a disk that holds a table of these rows."""
    schema = stored_schema(table.schema, key)
    disk = SimulatedDisk()
    writer = TableWriter(disk, schema, BuildOptions(tuple(key), unique, page_size, fill))
    rows = table.cast(schema).sort_by([(name, "ascending") for name in key])
    for batch in rows.combine_chunks().to_batches():
        writer.write(batch)
    writer.finish()
    writer.close()
    disk.log.clear()
    return disk


def reader_of(disk, page_size=4096):
    return PageReader(disk, page_size, DeviceModel.default(page_size), threads=1)


def writer_of(disk, page_size=4096, locks=None):
    writer = Writer(disk, locks or NoLocks(), reader_of(disk, page_size))
    writer.acquire()
    return writer


def rows_of(disk, page_size=4096):
    """Return all rows of the newest commit, after a check that must be clean."""
    report = check_backend(disk)
    assert report.violations == ()
    return rows_at(disk, open_snapshot(disk), page_size)


def rows_at(disk, snapshot, page_size=4096):
    batches = list(scan(snapshot, reader_of(disk, page_size), None, None, None))
    return pa.Table.from_batches(batches, schema=snapshot.schema).to_pylist()


class Model:
    """A table as a sorted dict: key -> rows."""

    def __init__(self, key, rows=()):
        self.key = key
        self.rows = {}
        for row in rows:
            self.rows.setdefault(self.key_of(row), []).append(row)

    def key_of(self, row):
        return tuple(row[name] for name in self.key)

    def copy(self):
        other = Model(self.key)
        other.rows = {key: list(rows) for key, rows in self.rows.items()}
        return other

    def apply(self, upserts=(), deletes=(), inserts=()):
        """Change the rows and return (inserted, updated, deleted)."""
        inserted = updated = deleted = 0
        replaced = {self.key_of(row) for row in upserts}
        existed = replaced & self.rows.keys()
        for key in {self.key_of(row) for row in deletes} - replaced:
            deleted += len(self.rows.pop(key, []))
        for key in replaced:
            self.rows.pop(key, None)
        for row in upserts:
            updated += self.key_of(row) in existed
            inserted += self.key_of(row) not in existed
            self.rows.setdefault(self.key_of(row), []).append(row)
        for row in inserts:
            self.rows.setdefault(self.key_of(row), []).append(row)
        return inserted + len(inserts), updated, deleted

    def sorted(self):
        return [row for key in sorted(self.rows) for row in self.rows[key]]
