"""Implementation of `headrace table dump`: shows the pages of a table in file order, even if they are damaged."""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.cli.reporting.blocks import Grid, Pairs, Text
from headrace.cli.reporting.errors import ArgumentsError
from headrace.storage.file import FileBackend
from headrace.storage.format import (
    DIRECTORY_ENTRY,
    HEADER,
    INNER_PAGE,
    LEAF_PAGE,
    METADATA_PAGE,
    damaged_copies,
    read_superblock,
)
from headrace.storage.leaf import verify
from headrace.storage.tree import relocation_columns

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.cli.reporting.blocks import Block
    from headrace.cli.reporting.console import Console
    from headrace.storage.format import Superblock

__all__ = ["run_dump"]

CHUNK_PAGES = 256
SLACK = 8
SHOWN = 50
TYPES = {LEAF_PAGE: "leaf", INNER_PAGE: "inner", METADATA_PAGE: "metadata"}
ENCODINGS = {0: "frame of reference", 1: "text", 2: "text dictionary"}
PAGE_HEAD = struct.Struct("<QQBBHI")
ENTRY = struct.Struct("<qHHHBB")


@dataclass(frozen=True)
class PageHead:
    """The header of one page and whether its checksum is valid."""

    page: int
    type: str
    level: int
    count: int
    txid: int
    sound: bool


def run_dump(path: Path, page: int | None, console: Console) -> None:
    """Print the superblock and the page headers, or one page in full."""
    with console.step(f"dumping {path}", left="the table as it was"):
        backend = FileBackend(path, "r")
        try:
            superblock = read_superblock(backend)
            damaged = damaged_copies(backend, superblock.page_size)
        finally:
            backend.close()
        if page is not None:
            _show_page(path, superblock, page, console)
            return
        heads = [head for numbers, frames in _chunks(path, superblock.page_size) for head in _heads(numbers, frames)]
    document = {
        "superblock": {**asdict(superblock), "relocations": _relocations(superblock)},
        "damaged_copies": damaged,
        "pages": [asdict(head) for head in heads],
    }
    console.result(document, *_blocks(path, superblock, damaged, heads))


def _blocks(path: Path, superblock: Superblock, damaged: list[tuple[int, int]], heads: list[PageHead]) -> list[Block]:
    whole = {"superblock copies damaged": ", ".join(f"slot {s} copy {c}" for s, c in damaged) or "none"}
    shown = heads[:SHOWN]
    grid = Grid(
        "Pages", ("page", "type", "level", "count", "txid", "sound"), [tuple(asdict(h).values()) for h in shown]
    )
    more = [Text(f"... and {len(heads) - SHOWN:,} more; --json shows all")] if len(heads) > SHOWN else []
    columns = ("leaf", "rows", "page", "checksum")
    relocated = [Grid("Relocated leaves", columns, _relocations(superblock))] if superblock.relocations else []
    return [Pairs(str(path), {**_readable(superblock), **whole}), *relocated, grid, *more]


def _relocations(superblock: Superblock) -> list[tuple[int, int, int, str]]:
    """Return the number, rows, page, and checksum of leaves that were relocated."""
    entries = zip(*(column.tolist() for column in relocation_columns(superblock.relocations)), strict=True)
    return sorted((leaf, rows, page, f"{checksum:016x}") for leaf, rows, page, checksum in entries)


def _readable(superblock: Superblock) -> dict[str, Any]:
    return {
        name.replace("_", " "): f"{value:016x}" if name.endswith("checksum") else value
        for name, value in asdict(superblock).items()
        if name != "relocations"
    }


def _chunks(path: Path, page_size: int) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Yield page numbers and their bytes without the superblocks. A truncated last page is padded."""
    with path.open("rb") as file:
        file.seek(2 * page_size)
        first = 2
        while content := file.read(CHUNK_PAGES * page_size):
            count = -(-len(content) // page_size)
            frames = np.zeros(count * page_size + SLACK, dtype=np.uint8)
            frames[: len(content)] = np.frombuffer(content, dtype=np.uint8)
            yield first + np.arange(count, dtype=np.int64), frames
            first += count


def _heads(numbers: np.ndarray[Any, Any], frames: np.ndarray[Any, Any]) -> Iterator[PageHead]:
    page_size = (len(frames) - SLACK) // len(numbers)
    for at, number in enumerate(numbers.tolist()):
        _, txid, kind, _, level, count = PAGE_HEAD.unpack_from(frames.data, at * page_size)
        alone = np.array([at], dtype=np.int64)
        sound = verify(frames, page_size, numbers[at : at + 1], None, alone) < 0
        yield PageHead(number, TYPES.get(kind, f"unknown ({kind})" if txid else "free"), level, count, txid, sound)


def _show_page(path: Path, superblock: Superblock, page: int, console: Console) -> None:
    page_size = superblock.page_size
    pages = path.stat().st_size // page_size
    if not 2 <= page < pages:  # noqa: PLR2004 - the superblocks are pages 0 and 1
        raise ArgumentsError(f"{path} has pages 2 to {pages - 1}, not page {page}")
    with path.open("rb") as file:
        file.seek(page * page_size)
        content = file.read(page_size)
    frames = np.frombuffer(bytearray(content + bytes(SLACK)), dtype=np.uint8)  # writable, as other frames are
    head = next(_heads(np.array([page], dtype=np.int64), frames))
    entries = _directory(content, head)
    columns = ("entry", "encoding", "width", "base", "data", "aux", "nulls")
    document = {**asdict(head), "directory": [dict(zip(columns, entry, strict=True)) for entry in entries]}
    blocks: list[Block] = [Pairs(f"{path}, page {page}", asdict(head))]
    console.result(document, *blocks, *([Grid("Directory", columns, entries)] if entries else []))


def _directory(content: bytes, head: PageHead) -> list[tuple[Any, ...]]:
    """Return the directory of a leaf, which ends where the first data block begins."""
    if head.type != "leaf" or not head.sound:
        return []
    entries: list[tuple[Any, ...]] = []
    end = len(content)
    for start in range(HEADER, len(content), DIRECTORY_ENTRY):
        if start >= end:
            break
        base, data, aux, nulls, width, encoding = ENTRY.unpack_from(content, start)
        entries.append((len(entries), ENCODINGS.get(encoding, encoding), width, base, data, aux, nulls or None))
        end = min([end, *(offset for offset in (data, aux, nulls) if offset)])
    return entries
