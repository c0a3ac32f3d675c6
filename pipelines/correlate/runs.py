"""Runs: immutable files with the rows of an input that may still match, in the order of their hashes.

A run consists of blocks with checksums (`headrace.storage.spill`). Each block but the last holds rows as an Arrow
stream; the last one says which hashes, and which values of the columns of bands, are in each of them. Every block
begins with the identity of its run, so a block of another file is found too.
"""

from __future__ import annotations

import contextlib
import io
import uuid
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import pyarrow as pa

from headrace.pipelines.correlate.rows import HASH
from headrace.pipelines.errors import StateDamagedError
from headrace.storage.errors import CorruptionError, StorageIOError, TableNotFoundError
from headrace.storage.file import FileBackend, StorageBackend
from headrace.storage.spill import BlockRef, SpillFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.joins.streams.tuples.keys import KeySpec

__all__ = ["RunDirectory", "RunFiles", "RunPlace", "RunRef", "RunWriter", "ZoneRule"]

BLOCK_BYTES: Final = 256 << 10
_IDENTITY: Final = 16
_SUFFIX: Final = ".run"
_FIELDS: Final = ("pages", "nbytes", "rows", "first", "last")

Backends = Callable[[Path, str], StorageBackend]


@dataclass(frozen=True)
class RunRef:
    """A run, as a manifest names it.

    Parameters
    ----------
    file
        Name of the file in the state folder.
    nbytes, rows
        Bytes of the file, and number of its rows.
    stage, side
        Join and input that the rows belong to.
    low, high
        Upper halves of the hashes of the shard that wrote it: from `low` up to, but not including, `high`.
    first, last
        First and last batch that the rows came in.
    directory
        Number, first page and bytes of the last block.
    newest
        For each band, the greatest key word of the rows.
    """

    file: str
    nbytes: int
    rows: int
    stage: int
    side: int
    low: int
    high: int
    first: int
    last: int
    directory: tuple[int, int, int]
    newest: tuple[int, ...] = ()

    @classmethod
    def of(cls, document: dict[str, Any]) -> RunRef:
        """Return the run of an entry of a manifest."""
        lists = {name: tuple(document[name]) for name in ("directory", "newest")}
        return cls(**{**document, **lists})

    def document(self) -> dict[str, Any]:
        """Return the entry of a manifest."""
        return asdict(self)


@dataclass(frozen=True)
class ZoneRule:
    """The columns of an input whose least and greatest values each block notes: those of its bands."""

    keys: Sequence[KeySpec]

    def words(self, batch: pa.RecordBatch) -> list[NDArray[np.uint64]]:
        """Return the key words of stored rows, all of which have keys, for each band."""
        plain = batch.drop_columns([HASH])
        return [key.encode(plain)[0].prefix for key in self.keys]


@dataclass(frozen=True)
class RunDirectory:
    """The blocks of a run.

    Parameters
    ----------
    pages, nbytes, rows : int64[n]
        First page, bytes and number of rows of each block.
    first, last : uint64[n]
        Least and greatest hash of each block.
    least, greatest : uint64[bands, n]
        Least and greatest key word of each block for each band.
    """

    pages: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    rows: NDArray[np.int64]
    first: NDArray[np.uint64]
    last: NDArray[np.uint64]
    least: NDArray[np.uint64]
    greatest: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.pages)


@dataclass(frozen=True)
class RunPlace:
    """What is known of a run before it is written; see `RunRef`. `name` begins the name of its file."""

    stage: int
    side: int
    low: int
    high: int
    first: int
    last: int
    name: str


class RunFiles:
    """The runs of a state folder.

    Parameters
    ----------
    folder
        The state folder.
    remedy
        What to do when a run is damaged, for messages.
    backend
        Opens the storage backend of a file.
    """

    def __init__(self, folder: str | Path, remedy: str, backend: Backends | None = None) -> None:
        self.folder = Path(folder)
        self._remedy = remedy
        self._backend = backend or _buffered

    def writer(self, zones: ZoneRule, place: RunPlace) -> RunWriter:
        """Return a writer of a new run, with the columns of its bands."""
        return RunWriter(self, zones, place)

    def create(self, file: str) -> StorageBackend:
        """Create a file."""
        return self._backend(self.folder / file, "x")

    def remove(self, file: str) -> None:
        """Remove a file that no manifest names."""
        with contextlib.suppress(OSError):
            (self.folder / file).unlink(missing_ok=True)

    @contextmanager
    def reading(self, ref: RunRef) -> Iterator[SpillFile]:
        """Open a run.

        Raises
        ------
        StateDamagedError
            In the block, if the run is missing or damaged.
        """
        try:
            backend = self._backend(self.folder / ref.file, "r")
            try:
                if backend.size() != ref.nbytes:
                    raise CorruptionError(f"it has {backend.size():,} bytes, but {ref.nbytes:,} were written")
                yield SpillFile(backend)
            finally:
                backend.close()
        except TableNotFoundError as error:
            raise self._damaged(ref, "it is missing") from error
        except (CorruptionError, StorageIOError, pa.ArrowException) as error:
            raise self._damaged(ref, str(error).split("; ")[0]) from error

    def directory(self, ref: RunRef, file: SpillFile) -> RunDirectory:
        """Return the blocks of an open run."""
        number, page, nbytes = ref.directory
        (table,) = pa.ipc.open_stream(_content(ref, file.read(BlockRef(number, page, nbytes))))
        columns = {name: np.asarray(table.column(name)) for name in table.schema.names}
        bands = len(ref.newest)
        none = np.zeros((0, number), dtype=np.uint64)
        least = np.stack([columns[f"least_{at}"] for at in range(bands)]) if bands else none
        greatest = np.stack([columns[f"greatest_{at}"] for at in range(bands)]) if bands else none
        pages, sizes, rows, first, last = (columns[name] for name in _FIELDS)
        return RunDirectory(pages, sizes, rows, first, last, least, greatest)

    def block(
        self, ref: RunRef, file: SpillFile, directory: RunDirectory, at: int, schema: pa.Schema
    ) -> pa.RecordBatch:
        """Return the rows of a block of an open run."""
        place = BlockRef(at, int(directory.pages[at]), int(directory.nbytes[at]))
        (batch,) = pa.ipc.open_stream(_content(ref, file.read(place)))
        if batch.schema.names != schema.names or batch.num_rows != directory.rows[at]:
            raise CorruptionError(f"block {at} does not hold the rows that its directory names")
        return batch.cast(schema)

    def _damaged(self, ref: RunRef, cause: str) -> StateDamagedError:
        return StateDamagedError(
            f"the state cannot be read: {self.folder / ref.file}, {ref.rows:,} rows of join {ref.stage + 1}, "
            f"{'left' if ref.side == 0 else 'right'} input: {cause}; {self._remedy}"
        )


class RunWriter:
    """Writes a run: batches of stored rows in the order of their hashes. An error in the block removes the file."""

    def __init__(self, files: RunFiles, zones: ZoneRule, place: RunPlace) -> None:
        self._files = files
        self._zones = zones
        self._place = place
        identity = uuid.uuid4()
        self._identity = np.frombuffer(identity.bytes, dtype=np.uint8)
        self.file = f"{place.name}-{identity.hex}{_SUFFIX}"
        self._backend = files.create(self.file)
        self._blocks = SpillFile(self._backend)
        self._entries: list[list[int]] = []
        self._rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._backend.close()
        if kind is not None:
            self._files.remove(self.file)

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows, whose hashes are not less than those before them."""
        each = max(1, batch.num_rows * BLOCK_BYTES // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, each):
            self._write_block(batch.slice(start, each))

    def close(self) -> RunRef:
        """Make the run durable, and return its description. It has rows."""
        entries = np.array(self._entries, dtype=np.uint64)
        bands = len(self._zones.keys)
        names = [*_FIELDS, *(f"{end}_{at}" for at in range(bands) for end in ("least", "greatest"))]
        kinds = [np.int64] * 3 + [np.uint64] * (len(names) - 3)
        columns = [pa.array(entries[:, at].astype(kind)) for at, kind in enumerate(kinds)]
        directory = self._append(pa.RecordBatch.from_arrays(columns, names=names))
        self._backend.sync()
        newest = tuple(int(entries[:, 6 + 2 * at].max()) for at in range(bands))
        place = self._place
        return RunRef(
            self.file, self._backend.size(), self._rows,
            place.stage, place.side, place.low, place.high, place.first, place.last,
            (directory.number, directory.page, directory.nbytes), newest,
        )  # fmt: skip

    def _write_block(self, batch: pa.RecordBatch) -> None:
        ref = self._append(batch)
        hashes = np.asarray(batch.column(HASH))
        zones = [int(bound) for words in self._zones.words(batch) for bound in (words.min(), words.max())]
        self._entries.append([ref.page, ref.nbytes, batch.num_rows, int(hashes[0]), int(hashes[-1]), *zones])
        self._rows += batch.num_rows

    def _append(self, batch: pa.RecordBatch) -> BlockRef:
        sink = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
            stream.write_batch(batch)
        return self._blocks.append([self._identity, np.frombuffer(sink.getbuffer(), dtype=np.uint8)])


def _content(ref: RunRef, block: NDArray[np.uint8]) -> pa.Buffer:
    """Return the content of a block.

    Raises
    ------
    CorruptionError
        If it belongs to another run.
    """
    identity = uuid.UUID(bytes=block[:_IDENTITY].tobytes())
    if not ref.file.endswith(f"{identity.hex}{_SUFFIX}"):
        raise CorruptionError(f"a block belongs to run {identity.hex}")
    return pa.py_buffer(block[_IDENTITY:])


def _buffered(path: Path, mode: Any) -> StorageBackend:
    return FileBackend(path, mode, direct=False)
