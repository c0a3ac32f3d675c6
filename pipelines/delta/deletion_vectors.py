"""Deletion vectors: the rows of a data file that were removed, without a new file (Delta protocol, "Deletion Vectors").

A vector is a set of row positions in a file. Its bytes are a magic number and a 64-bit Roaring bitmap in the portable
format. Vectors are in files of their own next to the data files, several in one file, each with its length and its
checksum; a short vector is in the log entry itself.
"""

from __future__ import annotations

import base64
import struct
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import unquote, urlsplit

import numpy as np

from headrace.pipelines.durable import write_new
from headrace.pipelines.errors import DeltaTableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["DeletionVector", "write_vectors"]

_MAGIC: Final = 1681511377
_VERSION: Final = b"\x01"
_INLINE_BYTES: Final = 256
_UUID_TEXT: Final = 20
_PYTHON_85: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_TO_Z85: Final = str.maketrans(_PYTHON_85, _Z85)
_FROM_Z85: Final = str.maketrans(_Z85, _PYTHON_85)


@dataclass(frozen=True)
class DeletionVector:
    """A deletion vector as Delta's log describes it.

    Parameters
    ----------
    storage
        Place of the bytes: ``u`` for a file of the table that is named by a UUID, ``i`` for the text itself, ``p`` for
        an absolute path.
    text
        The UUID with an optional folder before it, the bytes, or the path.
    offset
        Offset of the vector in its file; None for an inline vector.
    size
        Bytes of the vector, without length and checksum.
    cardinality
        Number of removed rows.
    """

    storage: str
    text: str
    offset: int | None
    size: int
    cardinality: int

    @classmethod
    def of(cls, descriptor: Mapping[str, Any]) -> Self:
        """Return the vector of a descriptor in Delta's log."""
        return cls(
            descriptor["storageType"],
            descriptor["pathOrInlineDv"],
            descriptor.get("offset"),
            descriptor["sizeInBytes"],
            descriptor["cardinality"],
        )

    def descriptor(self) -> dict[str, Any]:
        """Return the descriptor for Delta's log."""
        given = {"storageType": self.storage, "pathOrInlineDv": self.text, "offset": self.offset}
        given |= {"sizeInBytes": self.size, "cardinality": self.cardinality}
        return {name: value for name, value in given.items() if value is not None}

    def positions(self, table: str) -> NDArray[np.uint64]:
        """Return the positions of removed rows in their data file, ascending.

        Raises
        ------
        DeltaTableError
            If the vector cannot be read, or is damaged.
        """
        from pyroaring import BitMap64  # noqa: PLC0415 - few tables have deletion vectors

        data = self._bytes(table)
        if len(data) < struct.calcsize("<i") or struct.unpack_from("<i", data)[0] != _MAGIC:
            raise DeltaTableError(f"{self._named(table)} is damaged: it does not begin as a deletion vector does")
        try:
            found = BitMap64.deserialize(data[struct.calcsize("<i") :])
        except ValueError as error:
            raise DeltaTableError(f"{self._named(table)} is damaged: {error}") from error
        if len(found) != self.cardinality:
            raise DeltaTableError(
                f"{self._named(table)} is damaged: it has {len(found)} rows, and the log says {self.cardinality}"
            )
        return np.fromiter(found, np.uint64, len(found)) if len(found) else np.empty(0, np.uint64)

    def _bytes(self, table: str) -> bytes:
        if self.storage == "i":
            return base64.b85decode(self.text.translate(_FROM_Z85))[: self.size]
        try:
            with self._file(table).open("rb") as file:
                file.seek(self.offset or 0)
                (size,) = struct.unpack(">i", file.read(4))
                data = file.read(self.size)
                (checksum,) = struct.unpack(">I", file.read(4))
        except (OSError, struct.error) as error:
            raise DeltaTableError(f"{self._named(table)} cannot be read: {error}") from error
        if size != self.size or zlib.crc32(data) != checksum:
            raise DeltaTableError(f"{self._named(table)} is damaged: its length or its checksum is wrong")
        return data

    def _file(self, table: str) -> Path:
        if self.storage == "p":
            return Path(unquote(urlsplit(self.text).path))
        folder, text = self.text[:-_UUID_TEXT], self.text[-_UUID_TEXT:]
        name = uuid.UUID(bytes=base64.b85decode(text.translate(_FROM_Z85)))
        return Path(table) / folder / f"deletion_vector_{name}.bin"

    def _named(self, table: str) -> str:
        where = "in the log" if self.storage == "i" else str(self._file(table))
        return f"the deletion vector {where} of the Delta table {table}"


def write_vectors(table: str, removed: Sequence[NDArray[np.integer[Any]]]) -> list[DeletionVector]:
    """Write deletion vectors, and return their descriptions.

    Parameters
    ----------
    table
        Path of the table.
    removed
        Positions of removed rows, for each data file.

    Raises
    ------
    DeltaTableError
        If the file cannot be written.
    """
    name = uuid.uuid4()
    packed = [_packed(positions) for positions in removed]
    vectors, parts, offset = [], [_VERSION], len(_VERSION)
    for data, positions in zip(packed, removed, strict=True):
        if len(data) <= _INLINE_BYTES:
            text = base64.b85encode(data + b"\0" * (-len(data) % 4)).decode().translate(_TO_Z85)
            vectors.append(DeletionVector("i", text, None, len(data), len(positions)))
            continue
        text = base64.b85encode(name.bytes).decode().translate(_TO_Z85)
        vectors.append(DeletionVector("u", text, offset, len(data), len(positions)))
        parts += [struct.pack(">i", len(data)), data, struct.pack(">I", zlib.crc32(data))]
        offset += len(data) + 8
    if len(parts) > 1:
        _write(Path(table) / f"deletion_vector_{name}.bin", b"".join(parts))
    return vectors


def _packed(positions: NDArray[np.integer[Any]]) -> bytes:
    from pyroaring import BitMap64  # noqa: PLC0415 - few tables have deletion vectors

    found = BitMap64(positions.astype(np.uint64))
    found.run_optimize()
    return struct.pack("<i", _MAGIC) + bytes(found.serialize())


def _write(path: Path, data: bytes) -> None:
    try:
        write_new(path, data)
    except OSError as error:
        raise DeltaTableError(f"{path} cannot be written: {error}; correct the cause and run again") from error
