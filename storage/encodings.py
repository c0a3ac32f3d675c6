"""Where a text file stops being UTF-8, for messages: what reads CSV tells it without the place, or not at all."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["not_utf8"]

_BLOCK_BYTES = 1 << 20


def not_utf8(file: Path) -> str | None:
    """Return where a file is not UTF-8 and what to do about it, or None if all of it is.

    Parameters
    ----------
    file
        May be compressed, as its name says.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    place, lines = 0, 1
    with pa.input_stream(str(file), compression="detect") as source:
        block = b"more"
        while block:
            block = source.read(_BLOCK_BYTES)
            held = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line = lines + error.object.count(b"\n", 0, error.start)
                byte = place - held + error.start
                return (
                    f"line {line} is not UTF-8 (byte {byte} of the file is 0x{error.object[error.start]:02x}); convert "
                    "it, for instance with: iconv -f WINDOWS-1252 -t UTF-8"
                )
            place += len(block)
            lines += block.count(b"\n")
    return None
