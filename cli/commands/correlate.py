"""`headrace correlate`: join two or more files or folders as streams, with results as early as possible."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.arguments.options import (
    COLUMNS,
    DURATION,
    NEW_FILE,
    PAIRING,
    SIZE,
    ReportingCommand,
    combined,
    csv_options,
    given_once,
    pass_console,
)
from headrace.cli.reporting.blocks import Pairs, counted
from headrace.cli.reporting.errors import ArgumentsError
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import pyarrow as pa

    from headrace.cli.arguments.inputs import Inputs
    from headrace.cli.arguments.parts import PartsSink
    from headrace.cli.arguments.streams import CsvFormat
    from headrace.cli.reporting.console import Console
    from headrace.joins.streams import StreamsJoin
    from headrace.joins.streams.arrivals import Arrival

__all__ = ["CorrelateReport", "CorrelateRequest", "correlate"]

_LEAST_INPUTS = 2
_LEAST_MEMORY = 1 << 20
_MOST_MEMORY = 1 << 32  # beyond it, the search for a memory that is enough ends
_MIB = 20
_WINDOW = 0.01  # seconds of a replay within which rows arrive as one batch


@dataclass(frozen=True)
class CorrelateRequest:
    """Options of `headrace correlate`."""

    inputs: tuple[tuple[str, Path], ...]
    out: Path | None
    parts: Path | None
    on: tuple[tuple[str, str], ...]
    near: tuple[tuple[str, str], ...]
    within: str | None
    how: str
    algorithm: str
    memory: int
    spill: Path | None
    time: tuple[str, ...]
    rate: tuple[str, ...]
    speed: float | None
    seed: int | None
    wait: float
    csv: CsvFormat

    @property
    def title(self) -> str:
        """Inputs, for messages."""
        *first, last = (name for name, _ in self.inputs)
        return f"{', '.join(first)} with {last}"


@dataclass(frozen=True)
class CorrelateReport:
    """Result of a join of streams.

    Attributes
    ----------
    rows_in
        Number of rows read from each input.
    rows_out
        Number of result rows.
    rows_early
        Result rows that came before all inputs had ended.
    seconds, first_result_seconds
        Time from the first row read to the last result, and to the first one; null if there was none.
    rows_spilled, bytes_spilled, bytes_read
        Rows and bytes written to spill files, and bytes read from them.
    rows_dropped
        Rows without a key, which match nothing.
    memory, memory_peak
        Memory budget and peak memory of the operator, in bytes.
    """

    algorithm: str
    out: str | None
    rows_in: dict[str, int]
    rows_out: int
    rows_early: int
    seconds: float
    first_result_seconds: float | None
    rows_per_second: float
    rows_spilled: int
    bytes_spilled: int
    bytes_read: int
    rows_dropped: int
    memory: int
    memory_peak: int


class InputPath(click.ParamType[Any]):
    """A file or folder, and the name of the input: PATH or NAME=PATH."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Path]:
        """Return name and path. The default name is the file name up to its first dot."""
        if isinstance(value, tuple):
            return value
        named = re.fullmatch(r"(\w[\w-]*)=(.+)", value)
        if named and not Path(value).exists():
            return named[1], Path(named[2])
        name = Path(value).absolute().name.split(".")[0]
        if not name:
            self.fail(f"{value!r} gives the input no name; write NAME={value}", param, ctx)
        return name, Path(value)


@click.command(
    "correlate",
    cls=ReportingCommand,
    short_help="Join streams of files with each other.",
    epilog="Example: headrace correlate orders.csv payments.csv --on orders.id=payments.order -o joined.parquet",
)
@click.argument("inputs", metavar="INPUT INPUT...", type=InputPath(), nargs=-1)
@click.option(
    "--on", type=PAIRING, multiple=True, callback=combined, help="A.COL=B.COL[,...]: columns to match by equality."
)
@click.option(
    "--near",
    type=PAIRING,
    multiple=True,
    callback=combined,
    help="A.COL=B.COL[,...]: columns that may differ by --within.",
)
@click.option(
    "--within", multiple=True, callback=given_once, help="Greatest difference for --near, such as 10, 2.5, or 5s."
)
@click.option(
    "--how",
    type=click.Choice(["inner", "left", "right", "full"]),
    default="inner",
    show_default=True,
    help="Keep unmatched rows of the left, the right, or both of two inputs.",
)
@click.option(
    "--algorithm",
    default="auto",
    show_default=True,
    help="Join operator, such as diner; docs/streams.md compares them.",
)
@click.option("--memory", type=SIZE, default="64MiB", show_default=True, help="Memory budget of the operator.")
@click.option("--spill", type=click.Path(path_type=Path), help="Folder for spill files; by default that of the result.")
@click.option(
    "--time", type=COLUMNS, multiple=True, callback=combined, help="Replay by this column, or by A.COL,B.COL,..."
)
@click.option("--rate", multiple=True, metavar="[INPUT=]N", help="Simulate the arrival of N rows per second.")
@click.option("--speed", type=click.FloatRange(min=0, min_open=True), help="Seconds of --time or --rate per second.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the arrivals of --rate; 0 by default.")
@click.option(
    "--wait", type=DURATION, default="25ms", show_default=True, help="Silence after which inputs are blocked."
)
@click.option("-o", "--out", type=NEW_FILE, help="Parquet file to write, which appears when it is complete.")
@click.option(
    "--parts", type=click.Path(path_type=Path), help="Folder to which Parquet files are added as results come."
)
@csv_options
@pass_console
def correlate(console: Console, /, **choices: Any) -> None:
    """Join the rows of two or more INPUTs with each other.

    An INPUT is PATH or NAME=PATH, a file or folder of CSV, JSON lines or Parquet. Its name is the file name up to the
    first dot. The result has the columns of all inputs in order.

    Results are printed as they come, as CSV or with --json as one JSON object per line, unless -o or --parts is given.
    The inputs are read as fast as they come, or replayed by --time or --rate: in that order, and with --speed at that
    speed. --speed 1 is real time.
    """
    request = CorrelateRequest(**choices)
    _check_usage(request)
    with console.step(f"correlating {request.title}", left="nothing; no result was written"):
        _correlate(request, console)


def _check_usage(request: CorrelateRequest) -> None:
    names = [name for name, _ in request.inputs]
    double = next((name for name in names if names.count(name) > 1), None)
    if len(names) < _LEAST_INPUTS:
        raise click.UsageError("give two or more inputs")
    if double is not None:
        raise click.UsageError(f"two inputs have the name {double!r}; name them, as in NAME=PATH")
    if not request.on and not request.near:
        raise click.UsageError("say which rows match: --on or --near")
    if bool(request.near) != (request.within is not None):
        raise click.UsageError("--near and --within belong together")
    if request.out and request.parts:
        raise click.UsageError("-o and --parts do not go together; leave one out")
    if request.time and request.rate:
        raise click.UsageError("--time and --rate do not go together; leave one out")
    if request.speed is not None and not (request.time or request.rate):
        raise click.UsageError("--speed belongs to --time or --rate")
    if request.seed is not None and not request.rate:
        raise click.UsageError("--seed belongs to --rate")


def _left(request: CorrelateRequest, printed: int) -> str:
    if request.out:
        return f"nothing; {request.out} was not written or changed"
    if request.parts:
        return f"the results so far in {request.parts}, marked as incomplete; the next run replaces them"
    return "the results that were printed, which are not complete" if printed else "nothing; no result was printed"


def _correlate(request: CorrelateRequest, console: Console) -> None:
    from headrace.cli.arguments.inputs import open_inputs
    from headrace.joins.streams.catalog import choose_algorithm

    _check_places(request)
    inputs = open_inputs(request.inputs, request.on, request.near, request.within, request.csv)
    algorithm = choose_algorithm(request.algorithm, len(inputs.schemas), inputs.conditions, request.how)
    with _enough_memory(request, inputs, algorithm), _join(request, inputs, algorithm, request.memory) as join:
        run = _Run(request, inputs, join, console)
        with console.step(f"correlating {request.title}", left=lambda: _left(request, run.rows_out)):
            run.write()
        report = run.report(algorithm)
    if request.out or request.parts:
        console.result(asdict(report), _block(report))
    else:
        rows = sum(report.rows_in.values())
        console.note(
            f"correlated {counted(rows, 'row')} with {algorithm}: {counted(report.rows_out, 'result')} in "
            f"{report.seconds:.2f} s"
        )


def _join(request: CorrelateRequest, inputs: Inputs, algorithm: str, memory: int) -> StreamsJoin[Any]:
    from headrace.joins.streams.catalog import make_join

    spill, schemas = _spill(request), inputs.schemas
    return make_join(algorithm, schemas, inputs.conditions, request.how, memory, spill=spill, wait=request.wait)


@contextlib.contextmanager
def _enough_memory(request: CorrelateRequest, inputs: Inputs, algorithm: str) -> Iterator[None]:
    """Name a generous memory when the join refuses its own, since the least that it names may not do for later rows."""
    from headrace.storage.errors import MemoryBudgetError

    try:
        yield
    except MemoryBudgetError as error:
        if error.cause is None:
            raise
        amount = 1 << (4 * max(request.memory, error.least or 0, _LEAST_MEMORY) - 1).bit_length()
        while not _begins(request, inputs, algorithm, amount):
            amount *= 2
        if algorithm == "symmetric-hash":
            error.otherwise = _spilling(request, inputs)
        raise ArgumentsError(error.advising(f"give the join more, as in --memory {amount >> _MIB}MiB")) from error


def _spilling(request: CorrelateRequest, inputs: Inputs) -> str:
    """Return the advice to use an algorithm that spills in place of a symmetric hash join; empty if none fits."""
    from headrace.joins.streams.catalog import AUTO, choose_algorithm

    first = choose_algorithm(AUTO, len(inputs.schemas), inputs.conditions, request.how)
    return "" if first == "symmetric-hash" else f"use an algorithm that spills, as in --algorithm {first}"


def _begins(request: CorrelateRequest, inputs: Inputs, algorithm: str, memory: int) -> bool:
    """Return whether a quarter of a memory is enough for what the join holds before the first row."""
    from headrace.storage.errors import MemoryBudgetError

    try:
        with _join(request, inputs, algorithm, memory // 4):
            return True
    except MemoryBudgetError:
        return memory >= _MOST_MEMORY


def _check_places(request: CorrelateRequest) -> None:
    from headrace.cli.arguments.parts import check_folder
    from headrace.cli.arguments.sink import check_place
    from headrace.cli.arguments.streams import kind_of

    out = request.out or request.parts
    if request.out:
        check_place(request.out, [path for _, path in request.inputs])
        if kind_of(request.out) in {"csv", "json"}:
            parquet = request.out.with_suffix(".parquet")
            raise ArgumentsError(f"{request.out} is not named as Parquet, but the result is; write to {parquet}")
    if request.parts:
        check_folder(request.parts)
    for _, path in request.inputs:
        if out and path.is_dir() and out.resolve().is_relative_to(path.resolve()):
            raise ArgumentsError(f"{out} lies in the folder {path} and would be read as part of it; write elsewhere")


def _spill(request: CorrelateRequest) -> Path:
    """Return the folder for spill files. The system's temporary folder may be in memory, so it comes last."""
    import tempfile

    place = request.out or request.parts
    folder = request.spill or (place.absolute().parent if place else Path(tempfile.gettempdir()))
    if not folder.is_dir():
        raise ArgumentsError(
            f"there is no folder {folder} for spill files; make it first, or name another with --spill"
        )
    return folder


class _Run:
    """One run: arrivals go through the join into the output, and are counted."""

    def __init__(self, request: CorrelateRequest, inputs: Inputs, join: StreamsJoin[Any], console: Console) -> None:
        self._request = request
        self._inputs = inputs
        self._join = join
        self._console = console
        self._rows_in = dict.fromkeys(inputs.schemas, 0)
        self.rows_out = self._early = 0
        self._first: float | None = None
        self._open = len(inputs.schemas)
        self._started = console.clock()
        self._seconds = 0.0

    def write(self) -> None:
        """Write all results to the output that the request names."""
        from headrace.cli.arguments.parts import PartsSink
        from headrace.cli.arguments.sink import ParquetSink

        request, schema = self._request, self._join.schema
        if request.out:
            with ParquetSink(request.out, schema) as sink:
                for batch in self._results(time.sleep):
                    sink.write(batch)
        elif request.parts:
            with PartsSink(request.parts, schema) as parts:
                for batch in self._results(_sleeping(parts)):
                    parts.write(batch)
        else:
            with self._console.streaming():
                self._print()
        self._seconds = self._console.clock() - self._started

    def _print(self) -> None:
        from headrace.cli.arguments.rows import objects, print_csv

        results = self._results(time.sleep)
        if not self._console.json_mode:
            print_csv(results, self._join.schema.names)
            return
        for batch in results:
            self._console.rows(objects(batch))

    def _results(self, sleep: Callable[[float], None]) -> Iterator[pa.RecordBatch]:
        from headrace.joins.streams.arrivals import replay

        shows = bool(self._request.out or self._request.parts or not sys.stdout.isatty())
        with (
            contextlib.ExitStack() as stack,
            self._console.progress("correlated", total=self._inputs.rows) as progress,
        ):
            count = progress.advance if shows else _uncounted
            arrivals = self._counted(self._arrivals(stack), count)
            for batch in replay(self._join, arrivals, speed=self._request.speed, sleep=sleep):
                if self._first is None:
                    self._first = self._console.clock() - self._started
                self.rows_out += len(batch)
                self._early += len(batch) if self._open else 0
                yield batch
                count(0, self.rows_out)

    def _counted(self, arrivals: Iterable[Arrival], count: Callable[[int, int], None]) -> Iterator[Arrival]:
        for arrival in arrivals:
            if arrival.batch is None:
                self._open -= 1
            else:
                self._rows_in[arrival.side] += len(arrival.batch)
            yield arrival
            count(len(arrival.batch or ()), self.rows_out)

    def _arrivals(self, stack: contextlib.ExitStack) -> Iterator[Arrival]:
        from headrace.joins.streams.arrivals import arrivals_at_rates, arrivals_by_time, arrivals_in_turn

        request, inputs = self._request, self._inputs
        streams = {
            name: stack.enter_context(contextlib.closing(stream.batches())) for name, stream in inputs.streams.items()
        }
        window = math.inf if request.speed is None else _WINDOW * request.speed
        if request.time:
            return arrivals_by_time(streams, inputs.columns_named(request.time, "--time"), window=window)
        if request.rate:
            return arrivals_at_rates(streams, _rates(request.rate, inputs.streams), request.seed or 0, window=window)
        return arrivals_in_turn(streams)

    def report(self, algorithm: str) -> CorrelateReport:
        """Return the report of a run that is complete."""
        stats, place = self._join.stats, self._request.out or self._request.parts
        rows = sum(self._rows_in.values())
        return CorrelateReport(
            algorithm=algorithm,
            out=None if place is None else str(place),
            rows_in=self._rows_in,
            rows_out=self.rows_out,
            rows_early=self._early,
            seconds=self._seconds,
            first_result_seconds=self._first,
            rows_per_second=rows / self._seconds if self._seconds else 0.0,
            rows_spilled=stats.rows_spilled,
            bytes_spilled=stats.bytes_spilled,
            bytes_read=stats.bytes_read,
            rows_dropped=stats.rows_dropped,
            memory=self._request.memory,
            memory_peak=stats.memory.peak,
        )


def _uncounted(rows: int, results: int) -> None:
    """Show no progress: it would mix with the results on the terminal."""


def _sleeping(parts: PartsSink) -> Callable[[float], None]:
    """Return a function that waits, and writes results that have waited long enough first."""

    def sleep(seconds: float) -> None:
        parts.settle()
        time.sleep(seconds)

    return sleep


def _rates(texts: Iterable[str], inputs: Mapping[str, object]) -> dict[str, float]:
    """Return the rate of each input, given as N for all others or as INPUT=N."""
    rates: dict[str, float] = {}
    general: float | None = None
    for text in texts:
        name, equals, number = text.rpartition("=")
        try:
            rate = float(number)
        except ValueError:
            raise ArgumentsError(f"--rate {text} is not a number of rows per second; write N or INPUT=N") from None
        if equals and name not in inputs:
            raise ArgumentsError(f"--rate {text} names no input; the inputs are {', '.join(inputs)}")
        if equals:
            rates[name] = rate
        else:
            general = rate
    missing = [name for name in inputs if name not in rates and general is None]
    if missing:
        raise ArgumentsError(
            f"--rate says nothing of {missing[0]}; add --rate {missing[0]}=N, or --rate N for all others"
        )
    return {name: rates.get(name, general or 0.0) for name in inputs}


def _block(report: CorrelateReport) -> Pairs:
    first = "none" if report.first_result_seconds is None else f"after {report.first_result_seconds:.2f} s"
    return Pairs(
        f"Wrote {report.out}",
        {
            "algorithm": report.algorithm,
            "rows in": ", ".join(f"{name} {rows:,}" for name, rows in report.rows_in.items()),
            "rows out": report.rows_out,
            "early": f"{report.rows_early:,} before all inputs had ended; first result {first}",
            "rate": f"{report.rows_per_second:,.0f} rows/s, {report.seconds:.2f} s",
            "spilled": f"{report.rows_spilled:,} rows, {format_size(report.bytes_spilled)} written, "
            f"{format_size(report.bytes_read)} read",
            "dropped": f"{report.rows_dropped:,} rows without a key",
            "memory": f"{format_size(report.memory_peak)} at most of {format_size(report.memory)}",
        },
    )
