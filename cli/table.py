"""`headrace table`: build, inspect, check, dump and read a clustered table."""

from __future__ import annotations

import csv
import io
import itertools
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from headrace.cli.blocks import Grid, Pairs, Text
from headrace.cli.exits import ExitCode
from headrace.cli.options import COLUMNS, NEW_FILE, PATH, SIZE, ReportingCommand, csv_options, pass_console
from headrace.storage.errors import InputError
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    import numpy as np
    import pyarrow as pa

    from headrace.cli.blocks import Block
    from headrace.cli.console import Console
    from headrace.cli.streams import CsvFormat, FileStream
    from headrace.storage import Table
    from headrace.storage.format import Superblock

__all__ = [
    "BuildRequest",
    "ScanRequest",
    "run_build",
    "run_check",
    "run_compact",
    "run_dump",
    "run_filter",
    "run_info",
    "run_scan",
    "table",
]

FILTER_BITS = click.FloatRange(4, 16)


@click.group("table", short_help="Build, inspect, check and read a table.")
def table() -> None:
    """Build, inspect, check and read a clustered table."""


@table.command(
    "build",
    cls=ReportingCommand,
    epilog="Example: headrace table build planes.csv --key tailnum --unique -o planes.tbl",
)
@click.argument("source", type=PATH)
@click.option("--key", type=COLUMNS, required=True, help="The column or columns to cluster by, COL[,COL].")
@click.option("--unique", is_flag=True, help="Refuse two rows with one key.")
@click.option("--page-size", type=SIZE, default="8KiB", show_default=True, help="From 4KiB to 64KiB.")
@click.option(
    "--fill", type=click.FloatRange(0.1, 1.0), default=0.8, show_default=True, help="How full pages are made."
)
@click.option("--memory", type=SIZE, default="1GiB", show_default=True, help="Most that sorting may hold.")
@click.option("--overwrite", is_flag=True, help="Replace a table that is already there.")
@click.option("--filter-bits", type=FILTER_BITS, help="Give it a filter of so many bits a key; see `table filter`.")
@click.option("-o", "--out", type=NEW_FILE, required=True, help="The table to make.")
@csv_options
@pass_console
def build(console: Console, /, source: Path, out: Path, **choices: Any) -> None:
    """Build a clustered table from SOURCE: CSV, JSON lines or Parquet, a file or a folder.

    The rows may be in any order and more than fit in memory. The table appears when all of it is on disk.
    """
    run_build(BuildRequest(source=source, out=out, **choices), console)


@table.command("info", cls=ReportingCommand)
@click.argument("path", metavar="TABLE", type=PATH)
@pass_console
def info(console: Console, /, path: Path) -> None:
    """Show schema, key and size of TABLE."""
    run_info(path, console)


@table.command("check", cls=ReportingCommand)
@click.argument("path", metavar="TABLE", type=PATH)
@pass_console
@click.pass_context
def check(ctx: click.Context, console: Console, /, path: Path) -> None:
    """Verify every page of TABLE; exit code 0 when it is sound, 3 when it is damaged."""
    ctx.exit(run_check(path, console))


@table.command("scan", cls=ReportingCommand)
@click.argument("path", metavar="TABLE", type=PATH)
@click.option("--low", help="First key, VALUE[,VALUE]; itself included.")
@click.option("--high", help="Last key, VALUE[,VALUE]; itself included.")
@click.option("--columns", type=COLUMNS, help="Show only these columns.")
@click.option("--limit", type=click.IntRange(min=0), help="Stop after so many rows.")
@pass_console
def scan(console: Console, /, path: Path, **choices: Any) -> None:
    """Print rows of TABLE in key order: as CSV, or with --json as one JSON object a line."""
    run_scan(ScanRequest(path=path, **choices), console)


@table.command("dump", cls=ReportingCommand)
@click.argument("path", metavar="TABLE", type=PATH)
@click.option("--page", type=click.IntRange(min=0), help="Show this page alone, byte by byte where it matters.")
@pass_console
def dump(console: Console, /, path: Path, page: int | None) -> None:
    """Show what TABLE is made of, page by page, even when it is damaged."""
    run_dump(path, page, console)


@table.command("compact", cls=ReportingCommand)
@click.argument("path", metavar="TABLE", type=PATH)
@pass_console
def compact(console: Console, /, path: Path) -> None:
    """Bring TABLE back into key order on disk and give space back, while readers go on."""
    run_compact(path, console)


@table.command("filter", cls=ReportingCommand, epilog="Example: headrace table filter planes.tbl --bits 8")
@click.argument("path", metavar="TABLE", type=PATH)
@click.option("--bits", type=FILTER_BITS, default=8, show_default=True, help="For each key.")
@click.option("--drop", is_flag=True, help="Remove it instead.")
@pass_console
def make_filter(console: Console, /, path: Path, bits: float, *, drop: bool) -> None:
    """Make a filter beside TABLE, by which joins know most absent keys without reading a page."""
    run_filter(path, bits, drop=drop, console=console)


@dataclass(frozen=True)
class BuildRequest:
    """What was asked for; see the options of `headrace table build`."""

    source: Path
    out: Path
    key: tuple[str, ...]
    unique: bool
    page_size: int
    fill: float
    memory: int
    overwrite: bool
    filter_bits: float | None
    csv: CsvFormat


@dataclass(frozen=True)
class ScanRequest:
    """What was asked for; see the options of `headrace table scan`."""

    path: Path
    low: str | None
    high: str | None
    columns: tuple[str, ...] | None
    limit: int | None


def run_build(request: BuildRequest, console: Console) -> None:
    """Build the table and print what it became."""
    import pyarrow as pa

    from headrace.cli.sink import check_place
    from headrace.cli.streams import open_stream
    from headrace.storage import Table

    with console.step(
        f"building {request.out} from {request.source}", left=f"nothing; {request.out} was not written or changed"
    ):
        check_place(request.out)
        stream = open_stream(request.source, csv=request.csv)
        check_place(request.out, stream.files)
        started = console.clock()
        with console.progress("read", total=stream.rows) as progress:
            table = Table.build(
                request.out,
                pa.RecordBatchReader.from_batches(stream.schema, _counted(stream, progress)),
                key=list(request.key),
                unique=request.unique,
                page_size=request.page_size,
                fill=request.fill,
                memory=request.memory,
                overwrite=request.overwrite,
                filter_bits=request.filter_bits,
            )
        with table:
            document = _describe(request.out, table)
    seconds = console.clock() - started
    console.result({**document, "seconds": seconds}, *_info_blocks(document), Text(f"Built in {seconds:.2f} s"))


def _counted(stream: FileStream, progress: Any) -> Iterator[pa.RecordBatch]:
    for batch in stream.batches():
        yield batch
        progress.advance(batch.num_rows)


def run_info(path: Path, console: Console) -> None:
    """Print schema, key and size."""
    from headrace.storage import Table

    with (
        console.step(f"opening {path}", left="the table as it was", repair=_after_damage(path)),
        Table.open(path) as table,
    ):
        document = _describe(path, table)
    console.result(document, *_info_blocks(document))


def run_check(path: Path, console: Console) -> ExitCode:
    """Verify the table, print what is wrong, and return the exit code."""
    from headrace.storage.check import check_file

    with console.step(
        f"checking {path}",
        left="the table as it was",
        repair="build the table again from its source: headrace table build ... --overwrite",
    ):
        report = check_file(path)
    violations = [asdict(violation) for violation in report.violations]
    document = {"table": str(path), "ok": report.ok, "violations": violations, "unfiltered": report.unfiltered}
    if report.ok:
        remark = f"Its filter knows nothing of {report.unfiltered} leaves; make it again: headrace table filter {path}"
        console.result(document, Text(f"{path} is sound"), *([Text(remark)] if report.unfiltered else []))
        return ExitCode.OK
    rows = [tuple(violation.values()) for violation in violations]
    console.result(
        document,
        Grid(f"{path} is damaged", list(violations[0]), rows),
        Text("Build it again from its source: headrace table build ... --overwrite"),
    )
    return ExitCode.DAMAGED


def run_compact(path: Path, console: Console) -> None:
    """Restore key order on disk, and print what that gave back."""
    from headrace.storage import Table

    with (
        console.step(f"compacting {path}", left="the table with all its rows", repair=_after_damage(path)),
        Table.open(path, mode="w") as table,
    ):
        done, size = table.compact(), table.stats.page_size
    before, after = done.pages_before * size, done.pages_after * size
    document = {"table": str(path), "bytes_before": before, "bytes_after": after, "shrunk": done.shrunk}
    text = f"{path} is in key order: {format_size(before)} became {format_size(after)}"
    later = Text("A reader still needs an earlier state: compact again when it is done, to give its space back")
    console.result(document, Text(text), *([] if done.shrunk else [later]))


def run_filter(path: Path, bits: float, *, drop: bool, console: Console) -> None:
    """Make or remove the filter, and print what it takes."""
    from headrace.storage import Table

    with (
        console.step(f"making a filter for {path}", left="the table as it was", repair=_after_damage(path)),
        Table.open(path) as table,
    ):
        dropped = drop and table.drop_filter()
        if not drop:
            table.build_filter(bits)
        stats = table.stats
    document = {"table": str(path), "filter_bits": stats.filter_bits, "filter_bytes": stats.filter_bytes}
    made = f"{path} has a filter of {stats.filter_bits:.1f} bits a key, {format_size(stats.filter_bytes)}"
    gone = f"{path} has no filter any more" if dropped else f"{path} had no filter"
    console.result(document, Text(gone if drop else made))


def run_scan(request: ScanRequest, console: Console) -> None:
    """Print rows in key order."""
    from headrace.storage import Table

    with (
        console.step(f"reading {request.path}", left="the table as it was", repair=_after_damage(request.path)),
        Table.open(request.path) as table,
        console.streaming(),
    ):
        key = [table.schema.field(name) for name in table.key]
        batches = table.scan(
            _bound(request.low, key), _bound(request.high, key), list(request.columns) if request.columns else None
        )
        limited = _limited(iter(batches), request.limit)
        if console.json_mode:
            for batch in limited:
                console.rows(_objects(batch))
        else:
            _print_csv(limited, list(request.columns or table.schema.names))


def _after_damage(path: Path) -> str:
    return f"see what is damaged with: headrace table check {path}"


def _bound(text: str | None, key: list[pa.Field]) -> tuple[Any, ...] | None:
    """Return one key as values of the key's types."""
    if text is None:
        return None
    parts = _fields(text) if len(key) > 1 or text.startswith('"') else [text]
    if len(parts) != len(key):
        raise InputError(
            f"the key has {len(key)} columns ({', '.join(f.name for f in key)}), but {text!r} {len(parts)}; "
            "give a value for each"
        )
    return tuple(_parsed(part, field) for part, field in zip(parts, key, strict=True))


def _fields(text: str) -> list[str]:
    try:
        return next(csv.reader(io.StringIO(text, newline=""), strict=True), [])
    except csv.Error as error:
        raise InputError(f"{text!r} is not quoted as in CSV: {error}") from error


def _parsed(text: str, field: pa.Field) -> Any:
    import pyarrow as pa

    try:
        if pa.types.is_binary(field.type):
            return bytes.fromhex(text)
        if pa.types.is_time(field.type):
            return pa.array([f"1970-01-01T{text}"]).cast(pa.timestamp(field.type.unit)).cast(field.type)[0]
        if pa.types.is_duration(field.type):
            return pa.array([int(text)], pa.int64()).cast(field.type)[0]
        return pa.array([text]).cast(field.type)[0]
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise InputError(
            f"{text!r} is no {field.type}, the type of key column {field.name!r}; "
            "write it as `headrace table scan` prints it"
        ) from error


def _limited(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    left = limit
    for batch in batches:
        if left is None:
            yield batch
            continue
        if left <= 0:
            return
        yield batch.slice(0, min(left, batch.num_rows))
        left -= batch.num_rows


def _print_csv(batches: Iterator[pa.RecordBatch], names: list[str]) -> None:
    """Print a header and rows; text is quoted, a missing value is an empty field, bytes are hexadecimal.

    What fails at once, such as an unknown column, has printed nothing.
    """
    import pyarrow.csv as pc

    first = next(batches, None)
    heading = io.StringIO()
    csv.writer(heading, lineterminator="\n").writerow(names)
    click.echo(heading.getvalue(), nl=False)
    for batch in itertools.chain([] if first is None else [first], batches):
        lines = io.BytesIO()
        pc.write_csv(_hexadecimal(_in_known_zones(batch)), lines, pc.WriteOptions(include_header=False))
        click.echo(lines.getvalue(), nl=False)


def _objects(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows as Python holds them; a value beyond its calendar is text."""
    batch = _in_known_zones(batch)
    try:
        columns = [column.to_pylist() for column in batch.columns]
    except (OverflowError, ValueError):
        columns = [[_object(value) for value in column] for column in batch.columns]
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _object(value: pa.Scalar) -> Any:
    import pyarrow as pa

    try:
        return value.as_py()
    except (OverflowError, ValueError):
        return value.cast(pa.string()).as_py()


def _in_known_zones(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with instants in UTC where their time zone is not in this system's database."""
    import pyarrow as pa

    columns = [
        column if _zone_is_known(column.type) else column.cast(pa.timestamp(column.type.unit, "UTC"))
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _zone_is_known(dtype: pa.DataType) -> bool:
    import pyarrow as pa

    if not pa.types.is_timestamp(dtype) or dtype.tz is None:
        return True
    instant = pa.array([0], pa.int64()).cast(dtype)
    try:
        instant.cast(pa.string())
        instant.to_pylist()
    except (pa.ArrowException, KeyError, ValueError):
        return False
    return True


def _hexadecimal(batch: pa.RecordBatch) -> pa.RecordBatch:
    import pyarrow as pa

    columns = [
        pa.array([value and value.hex() for value in column.to_pylist()], pa.string())
        if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _describe(path: Path, table: Table) -> dict[str, Any]:
    return {
        "table": str(path),
        "key": list(table.key),
        "columns": {field.name: str(field.type) for field in table.schema},
        "stats": asdict(table.stats),
    }


def _info_blocks(document: dict[str, Any]) -> list[Block]:
    stats = {name.replace("_", " "): _readable(name, value) for name, value in document["stats"].items()}
    columns = [(name, kind, "key" if name in document["key"] else "") for name, kind in document["columns"].items()]
    return [Pairs(document["table"], stats), Grid("Columns", ("name", "type", ""), columns)]


def _readable(name: str, value: Any) -> Any:
    return format_size(value) if (isinstance(value, int) and name.endswith("bytes")) or name == "page_size" else value


CHUNK_PAGES = 256
SLACK = 8
SHOWN = 50
ENCODINGS = {0: "frame of reference", 1: "text", 2: "text dictionary"}
PAGE_HEAD = struct.Struct("<QQBBHI")
ENTRY = struct.Struct("<qHHHBB")


@dataclass(frozen=True)
class PageHead:
    """The header of one page and whether its checksum is right."""

    page: int
    type: str
    level: int
    count: int
    txid: int
    sound: bool


def run_dump(path: Path, page: int | None, console: Console) -> None:
    """Print superblock and page headers, or one page in full."""
    from headrace.storage.file import FileBackend
    from headrace.storage.format import damaged_copies, read_superblock

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
    return [Pairs(str(path), {**_header_pairs(superblock), **whole}), *relocated, grid, *more]


def _relocations(superblock: Superblock) -> list[tuple[int, int, int, str]]:
    """Return number, rows, page and checksum of leaves that are not where the inner nodes say."""
    from headrace.storage.tree import relocation_columns

    entries = zip(*(column.tolist() for column in relocation_columns(superblock.relocations)), strict=True)
    return sorted((leaf, rows, page, f"{checksum:016x}") for leaf, rows, page, checksum in entries)


def _header_pairs(superblock: Superblock) -> dict[str, Any]:
    return {
        name.replace("_", " "): f"{value:016x}" if name.endswith("checksum") else value
        for name, value in asdict(superblock).items()
        if name != "relocations"
    }


def _chunks(path: Path, page_size: int) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Yield page numbers and their bytes, superblocks left out; the last page may be cut and is then padded."""
    import numpy as np

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
    import numpy as np

    from headrace.storage.format import INNER_PAGE, LEAF_PAGE, METADATA_PAGE
    from headrace.storage.leaf import verify

    types = {LEAF_PAGE: "leaf", INNER_PAGE: "inner", METADATA_PAGE: "metadata"}
    page_size = (len(frames) - SLACK) // len(numbers)
    for at, number in enumerate(numbers.tolist()):
        _, txid, kind, _, level, count = PAGE_HEAD.unpack_from(frames.data, at * page_size)
        alone = np.array([at], dtype=np.int64)
        sound = verify(frames, page_size, numbers[at : at + 1], None, alone) < 0
        yield PageHead(number, types.get(kind, f"unknown ({kind})" if txid else "free"), level, count, txid, sound)


def _show_page(path: Path, superblock: Superblock, page: int, console: Console) -> None:
    import numpy as np

    page_size = superblock.page_size
    pages = path.stat().st_size // page_size
    if not 2 <= page < pages:  # noqa: PLR2004 - the superblocks are pages 0 and 1
        raise InputError(f"{path} has pages 2 to {pages - 1}, not page {page}")
    with path.open("rb") as file:
        file.seek(page * page_size)
        content = file.read(page_size)
    frames = np.frombuffer(content + bytes(SLACK), dtype=np.uint8)
    head = next(_heads(np.array([page], dtype=np.int64), frames))
    entries = _directory(content, head)
    columns = ("entry", "encoding", "width", "base", "data", "aux", "nulls")
    document = {**asdict(head), "directory": [dict(zip(columns, entry, strict=True)) for entry in entries]}
    blocks: list[Block] = [Pairs(f"{path}, page {page}", asdict(head))]
    console.result(document, *blocks, *([Grid("Directory", columns, entries)] if entries else []))


def _directory(content: bytes, head: PageHead) -> list[tuple[Any, ...]]:
    """Return the directory of a leaf: it ends where the first block of data begins."""
    from headrace.storage.format import DIRECTORY_ENTRY, HEADER

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
