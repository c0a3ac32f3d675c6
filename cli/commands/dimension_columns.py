"""`headrace dimension add-column | widen-column | drop-column | inferred | complete`: columns and inferred members."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from headrace.cli.arguments.options import PATH, ReportingCommand, member_options, pass_console, pipeline_option
from headrace.cli.commands.rejects import pipeline_words
from headrace.cli.reporting.begun import Begun
from headrace.cli.reporting.blocks import Block, Grid, Pairs, Text, counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace.cli.arguments.options import Members
    from headrace.cli.reporting.console import Console
    from headrace.pipelines.dimension import ColumnChange

__all__ = ["add_column", "complete", "drop_column", "inferred", "widen_column"]

UNCHANGED = "the columns as they were"


@click.command("add-column", cls=ReportingCommand, short_help="Add an attribute to a dimension.")
@click.argument("name")
@click.argument("column")
@click.argument("kind", metavar="TYPE")
@click.option("--from", "source", type=PATH, help="Files with natural keys and COLUMN: CSV, JSON lines, or Parquet.")
@pipeline_option
@member_options
@pass_console
def add_column(
    console: Console, /, name: str, column: str, kind: str, *, source: Path | None, pipeline: Path, members: Members
) -> None:
    """Add the attribute COLUMN of TYPE to dimension NAME, and fill it from files with --from.

    Existing members have no value in a new column. With --from, each member in the files gets their value; this also
    works for a column that exists. The files must have the natural key and COLUMN; other columns are left out. Text is
    read as that of the pipeline's source; options override this.
    """
    import pyarrow as pa

    from headrace.cli.arguments.streams import Settings, read_whole
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import add_column as add
    from headrace.pipelines.dimension import source_types

    with console.step(f"reading the values of {column}", left=UNCHANGED, pipeline=pipeline):
        config = load_pipeline(pipeline)
        rows = stream = None
        if source is not None:
            columns = pa.schema(list(source_types(config, name, column, kind).items()))
            settings = Settings(config.source, columns, chosen=True, declared_in="the command, or the table,")
            stream, rows = read_whole(source, members(settings), console)
    begun = Begun(UNCHANGED, "the new column, in which members have no value yet; repeat the command to fill it")
    with (
        console.step(f"adding {column} to dimension {name}", left=begun.left, pipeline=pipeline),
        nullcontext() if stream is None else stream.placing(),
    ):
        change = add(config, name, column, kind, rows, hook=begun.note)
    _show(change, console, stream.left_out if stream is not None else ())


@click.command("widen-column", cls=ReportingCommand, short_help="Give a column of a dimension a wider type.")
@click.argument("name")
@click.argument("column")
@click.argument("kind", metavar="TYPE")
@pipeline_option
@pass_console
def widen_column(console: Console, /, name: str, column: str, kind: str, *, pipeline: Path) -> None:
    """Give COLUMN of dimension NAME a wider TYPE, such as bigint for int. The table is rewritten in one commit."""
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import widen_column as widen

    with console.step(f"widening {column} of dimension {name}", left=UNCHANGED, pipeline=pipeline):
        change = widen(load_pipeline(pipeline), name, column, kind)
    _show(change, console)


@click.command("drop-column", cls=ReportingCommand)
@click.argument("name")
@click.argument("column")
@pipeline_option
@pass_console
def drop_column(console: Console, /, name: str, column: str, *, pipeline: Path) -> None:
    """Remove the attribute COLUMN from dimension NAME. Earlier versions of the table keep it until VACUUM."""
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import drop_column as drop

    with console.step(f"removing {column} from dimension {name}", left=UNCHANGED, pipeline=pipeline):
        change = drop(load_pipeline(pipeline), name, column)
    _show(change, console)


def _show(change: ColumnChange, console: Console, left_out: Sequence[str] = ()) -> None:
    blocks: list[Block] = [Text(change.done)]
    if change.filled is not None:
        counts = {
            "members filled": change.filled,
            "members that the source does not have": change.without_value,
            "rows of the source without a member": change.without_member,
        }
        blocks.append(Pairs(f"{change.column} of dimension {change.dimension}", counts))
    if left_out:
        blocks.append(Text(f"columns of the source that were not read: {', '.join(left_out)}"))
    console.result(asdict(change) | {"columns_left_out": list(left_out)}, *blocks)


@click.command("inferred", cls=ReportingCommand, short_help="Count and list the inferred members of a dimension.")
@click.argument("name")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Number of members to show.")
@pipeline_option
@pass_console
def inferred(console: Console, /, name: str, *, limit: int, pipeline: Path) -> None:
    """Count and list the inferred members of dimension NAME, whose own records have not arrived.

    With --json, all of them are printed.
    """
    from headrace.cli.arguments.rows import table_objects, table_rows
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import inferred_members

    with console.step(f"reading dimension {name}", left="the dimension as it was", pipeline=pipeline):
        config = load_pipeline(pipeline)
        found = inferred_members(config, name, None if console.json_mode else limit)
        history = config.dimensions[name].history is not None
    members = table_objects(found.members)
    document = {"dimension": name, "version": found.version, "inferred": found.total, "members": members}
    if not found.total:
        console.result(document, Text(f"dimension {name} has no inferred members"))
        return
    rows = table_rows(found.members)
    completing = "apply" if history else "complete"
    advice = Text(
        f"Their records complete them: headrace dimension {completing} {name} SOURCE{pipeline_words(pipeline)}"
    )
    title = f"{counted(found.total, 'inferred member')} of dimension {name}"
    more = (
        [Text(f"and {found.total - len(rows):,} more; --limit shows more, --json all")]
        if found.total > len(rows)
        else []
    )
    console.result(document, Grid(title, found.members.column_names, rows), *more, advice)


@click.command("complete", cls=ReportingCommand, short_help="Give inferred members their records.")
@click.argument("name")
@click.argument("source", type=PATH)
@pipeline_option
@member_options
@pass_console
def complete(console: Console, /, name: str, source: Path, *, pipeline: Path, members: Members) -> None:
    """Give the inferred members of dimension NAME, which has no history, their records from SOURCE, in one commit.

    SOURCE has the natural key and all attributes, like that of `create`. A record without a member is refused, and so
    is one that differs from a member that is not inferred; one that its member has already changes nothing.
    """
    from headrace.cli.arguments.streams import Settings, read_whole
    from headrace.pipelines.config import load_pipeline
    from headrace.pipelines.dimension import complete_members, completing_columns

    with console.step(f"completing members of dimension {name}", left="the dimension as it was", pipeline=pipeline):
        config = load_pipeline(pipeline)
        settings = Settings(
            config.source, completing_columns(config, name), declared_in="the pipeline file, or the table,"
        )
        stream, rows = read_whole(source, members(settings), console)
        with stream.placing():
            done = complete_members(config, name, rows)
    counts = {key.replace("_", " "): value for key, value in asdict(done).items() if key != "dimension"}
    carried = any(item.carry for item in config.lookups if item.dimension == name)
    check = f"`headrace dimension check {name}{pipeline_words(pipeline)}` counts facts that carry earlier values"
    notes = [Text(check)] if carried and done.completed else []
    console.result(asdict(done), Pairs(f"Dimension {name}", counts), *notes)
