"""The bytes of a text file: unpacked, in UTF-8, in blocks that end where the caller stops.

Text in another encoding is translated; a byte that the encoding does not know becomes a byte that is not UTF-8, so that
the record it is in is refused later. A file that cannot be read is a `RecordFileError` that names it.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace.storage.errors import RecordFileError
from headrace.storage.records.formats import compression_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.storage.records.formats import RecordFormat, StrPath

__all__ = ["BlockReader", "is_utf8", "open_text", "reading", "unpacked"]

_BOM = b"\xef\xbb\xbf"
_TITLES = {"csv": "CSV", "json": "JSON lines", "parquet": "Parquet"}
_UNKNOWN = "headrace-unknown"
_BLOCK_BYTES = 1 << 20
_MOST_BYTES = (1 << 31) - (1 << 16)


def _mark(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace what an encoding does not know by a surrogate, and on the way to UTF-8 each surrogate by a byte 0xff."""
    if isinstance(error, UnicodeDecodeError):
        return "\udcff", error.end
    if isinstance(error, UnicodeEncodeError):
        return b"\xff" * (error.end - error.start), error.end
    raise error


codecs.register_error(_UNKNOWN, _mark)


def is_utf8(encoding: str) -> bool:
    """Return whether text in an encoding need not be translated."""
    return codecs.lookup(encoding).name in {"utf-8", "utf-8-sig"}


@contextlib.contextmanager
def reading(path: StrPath, kind: str) -> Iterator[None]:
    """Name the file in whatever is said of its bytes.

    Raises
    ------
    RecordFileError
        In place of any error of the operating system or of what unpacks the file.
    """
    try:
        yield
    except RecordFileError:
        raise
    except FileNotFoundError as error:
        raise RecordFileError(f"there is no file {path}; it was moved or removed") from error
    except PermissionError as error:
        raise RecordFileError(f"{path} may not be read; change its permissions") from error
    except OverflowError as error:
        raise RecordFileError(f"cannot read {path} as {_TITLES[kind]}: {error}") from error
    except UnicodeError as error:  # a codec gives up: it finds no byte order mark
        raise RecordFileError(
            f"cannot read {path} as {_TITLES[kind]}: {error}; declare the encoding that the file has, such as "
            "utf-16-le if it has no byte order mark, or deliver it again in the declared one"
        ) from error
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        cause = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise RecordFileError(
            f"cannot read {path} as {_TITLES[kind]}: {cause}; it is cut or damaged, so deliver it again, whole"
        ) from error


def _opened(path: Path) -> Any:
    """Open a file's bytes, unpacked."""
    compression = compression_of(path)
    if compression is not None and path.stat().st_size == 0:
        raise EOFError("the archive is empty")
    if compression == ".gz":
        import gzip  # noqa: PLC0415 - loaded only for archives

        return gzip.open(path)
    if compression == ".bz2":
        return _Bzip2(path)
    if compression == ".zst":
        return pa.input_stream(str(path), compression="zstd")
    return path.open("rb", buffering=0)


def unpacked(path: StrPath) -> bytes:
    """Return all bytes of a file, unpacked."""
    with _opened(Path(path)) as source:
        return bytes(source.read())


class _Bzip2(io.RawIOBase):
    """The unpacked bytes of a bzip2 file, all of its streams; `bz2.open` takes a damaged later stream for the end."""

    def __init__(self, path: Path) -> None:
        import bz2  # noqa: PLC0415 - loaded only for archives

        self._begin = bz2.BZ2Decompressor
        self._stream = self._begin()
        self._source = path.open("rb", buffering=0)
        self._packed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        if not len(target):
            return 0
        while not self._stream.eof or self._next_stream():
            if self._stream.needs_input and not self._packed:
                self._packed = self._source.read(_BLOCK_BYTES)
                if not self._packed:
                    raise EOFError("the archive ends in the middle of a stream")
            found = self._stream.decompress(self._packed, len(target))
            self._packed = b""
            if found:
                target[: len(found)] = found
                return len(found)
        return 0

    def _next_stream(self) -> bool:
        """Begin the stream that follows, if there is one; zeros behind a stream are padding."""
        packed = self._stream.unused_data.lstrip(b"\0")
        while not packed:
            taken = self._source.read(_BLOCK_BYTES)
            if not taken:
                return False
            packed = taken.lstrip(b"\0")
        self._stream, self._packed = self._begin(), packed
        return True

    def close(self) -> None:
        self._source.close()
        super().close()


class _Translated(io.RawIOBase):
    """Bytes in another encoding, read as UTF-8."""

    def __init__(self, source: Any, encoding: str) -> None:
        self._source = source
        self._decoder = codecs.getincrementaldecoder(encoding)(_UNKNOWN)
        self._held = memoryview(b"")
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._held and not self._ended:
            taken = self._source.read(_BLOCK_BYTES)
            self._ended = not taken
            text = self._decoder.decode(taken, final=self._ended)
            self._held = memoryview(text.encode("utf-8", _UNKNOWN))
        count = min(len(target), len(self._held))
        target[:count] = self._held[:count]
        self._held = self._held[count:]
        return count

    def close(self) -> None:
        self._source.close()
        super().close()


def open_text(path: StrPath, form: RecordFormat) -> Any:
    """Open a file as unpacked UTF-8; what is returned has `readinto`, `read` and `close`."""
    source = _opened(Path(path))
    return source if is_utf8(form.encoding) else _Translated(source, form.encoding)


class BlockReader:
    """A buffer over a file: `data[position:size]` is what has been read and not yet taken.

    Parameters
    ----------
    source
        What `open_text` returned.
    start, stop
        Bytes to read; `stop` is None for all that follow.
    """

    def __init__(self, source: Any, start: int = 0, stop: int | None = None) -> None:
        self._source = source
        if start:
            source.seek(start)
        self._left = stop - start if stop is not None else None
        self.data: NDArray[np.uint8] = np.empty(_BLOCK_BYTES, dtype=np.uint8)
        self._marks = np.empty(0, dtype=np.int32)
        self.position = self.size = 0
        self.final = False
        self.fill()
        if start == 0 and bytes(self.data[: len(_BOM)]) == _BOM and self.size >= len(_BOM):
            self.position = len(_BOM)

    @property
    def marks(self) -> NDArray[np.int32]:
        """Room for the places of bytes in the buffer."""
        if len(self._marks) < len(self.data) + 3:
            self._marks = np.empty(len(self.data) + 3, dtype=np.int32)
        return self._marks

    def fill(self) -> None:
        """Read on behind what has not been taken; the buffer grows if that takes up most of it.

        Raises
        ------
        OverflowError
            If a single record is larger than 1 GiB.
        """
        held = self.size - self.position
        room = self.data
        if 2 * held > len(self.data):
            if 2 * len(self.data) > _MOST_BYTES:
                raise OverflowError("a record is larger than 1 GiB; a quote or the end of a line may be missing")
            room = np.empty(2 * len(self.data), dtype=np.uint8)
        room[:held] = self.data[self.position : self.size]
        self.data, self.position, self.size = room, 0, held
        view = room.data
        while self.size < len(room) and not self.final:
            wanted = len(room) - self.size if self._left is None else min(len(room) - self.size, self._left)
            taken = self._source.readinto(view[self.size : self.size + wanted]) if wanted else 0
            self.size += taken
            if self._left is not None:
                self._left -= taken
            self.final = not taken
