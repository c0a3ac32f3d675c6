"""What `headrace table build|info|check|scan|compact|filter` does."""

from __future__ import annotations

import csv
import io
import itertools
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
import pyarrow as pa
import pyarrow.csv as pc

from headrace.cli.blocks import Grid, Pairs, Text
from headrace.cli.exits import ExitCode
from headrace.cli.sink import check_place
from headrace.cli.streams import CsvFormat, FileStream, open_stream
from headrace.storage import Table
from headrace.storage.errors import InputError
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.cli.blocks import Block
    from headrace.cli.console import Console

__all__ = ["BuildRequest", "ScanRequest", "run_build", "run_check", "run_compact", "run_filter", "run_info", "run_scan"]


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
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        return value.cast(pa.string()).as_py()


def _in_known_zones(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with instants in UTC where their time zone is not in this system's database."""
    columns = [
        column if _zone_is_known(column.type) else column.cast(pa.timestamp(column.type.unit, "UTC"))
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _zone_is_known(dtype: pa.DataType) -> bool:
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
