"""`headrace errors`: list, show, retry, and dismiss the rejected rows of a pipeline."""

from __future__ import annotations

import functools
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from headrace.cli.arguments.options import ReportingCommand, pass_console, pipeline_option
from headrace.cli.reporting.begun import Begun, in_spark
from headrace.cli.reporting.blocks import Block, Grid, Pairs, Text, counted
from headrace.cli.reporting.exits import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from headrace.cli.reporting.console import Console
    from headrace.pipelines import RetryResult
    from headrace.pipelines.config import PipelineConfig
    from headrace.pipelines.rejects import RejectedRecord, RejectGroup, Selection

    Function = TypeVar("Function", bound=Callable[..., Any])

__all__ = ["changes_blocks", "errors", "pipeline_words"]

UNCHANGED = "the rejected rows as they were"
STATUSES = ("open", "retried", "dismissed")
SHOWN = 100


def selecting(function: Function) -> Function:
    """Add the options that select rows; the function receives them as one argument `choice`."""

    @functools.wraps(function)
    def gather(
        *args: Any,
        ids: tuple[str, ...] = (),
        rules: tuple[str, ...],
        batches: tuple[int, ...],
        files: tuple[str, ...],
        streams: tuple[str, ...],
        **kwargs: Any,
    ) -> Any:
        from headrace.pipelines.rejects import RowId, Selection

        choice = Selection(tuple(map(RowId.parse, ids)), rules, batches, files, streams)
        return function(*args, choice=choice, **kwargs)

    for option in (
        click.option("--stream", "streams", multiple=True, help="Stream that rejected the rows; a prefix is enough."),
        click.option("--file", "files", multiple=True, help="File of the rows, as `errors list` shows it."),
        click.option(
            "--batch", "batches", multiple=True, type=click.IntRange(min=0), help="Batch that rejected the rows."
        ),
        click.option(
            "--rule", "rules", multiple=True, help="Text in the cause: a role, a column, or part of the reason."
        ),
    ):
        gather = option(gather)
    return cast("Function", gather)


dimension_option = click.option(
    "--dimension", metavar="NAME", help="Changes of dimension NAME that did not apply, instead of the facts' rows."
)


def status_option(default: str) -> Callable[[Function], Function]:
    """Return the option that selects rows by status."""
    return click.option(
        "--status",
        type=click.Choice([*STATUSES, "all"]),
        default=default,
        show_default=True,
        help="Status of the rows.",
    )


@click.group("errors", short_help="List, show, retry, and dismiss rejected rows.")
def errors() -> None:
    """List, show, retry, and dismiss the rejected rows of a pipeline.

    A row is open until a retry loads it or it is dismissed. An ID has the form BATCH/FILE:RECORD, as `errors show`
    prints it. Several options narrow the selection; a repeated option widens it. With --dimension, the rows are
    the changes of a dimension with history that did not apply.
    """


@errors.command("list", cls=ReportingCommand, short_help="Count rejected rows by status, rule, batch, and file.")
@pipeline_option
@dimension_option
@selecting
@status_option("all")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Number of lines to show.")
@pass_console
def list_(
    console: Console, /, pipeline: Path, dimension: str | None, choice: Selection, status: str, limit: int
) -> None:
    """Count rejected rows by status, rule, batch, and file; and by stream, if several streams rejected them.

    With --json, all lines are printed.
    """
    from headrace.pipelines.changes import changes_not_applied
    from headrace.pipelines.rejects import list_rejects

    with console.step(f"reading the rejected rows of {pipeline}", left=UNCHANGED, pipeline=pipeline):
        config = _rejecting(pipeline, dimension)
        groups = list_rejects(config, choice, _statuses(status))
        changes = {} if dimension else changes_not_applied(config)
    counts = {name: sum(group.rows for group in groups if group.status == name) for name in STATUSES}
    document = {
        "pipeline": config.name,
        "errors": config.errors_path,
        "counts": counts,
        "groups": list(map(asdict, groups)),
        "changes": changes,
    }
    others = changes_blocks(changes, pipeline)
    if not groups:
        such = "" if choice.is_empty and status == "all" else "such "
        console.result(document, Text(f"{config.name} has no {such}{_what(dimension)}"), *others)
        return
    of = "" if dimension else f" of {config.name}"
    title = f"{_what(dimension).capitalize()}{of}: {config.errors_path}"
    console.result(document, Pairs(title, counts), *_groups(groups, limit), *others)


def _groups(groups: Sequence[RejectGroup], limit: int) -> list[Block]:
    streams = len({group.stream for group in groups}) > 1
    columns = ("status", "rows", *(("stream",) if streams else ()), "batch", "file", "rule")
    rows = [tuple(getattr(group, column) for column in columns) for group in groups[:limit]]
    blocks: list[Block] = [Grid(f"By rule, {'stream, ' if streams else ''}batch and file", columns, rows)]
    if len(groups) > limit:
        blocks.append(Text(f"and {len(groups) - limit:,} more lines; --limit shows more, --json all"))
    return blocks


@errors.command("show", cls=ReportingCommand, short_help="Show rejected rows with the record and the cause.")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@pipeline_option
@dimension_option
@selecting
@status_option("open")
@click.option("--limit", type=click.IntRange(min=1), default=SHOWN, show_default=True, help="Number of rows to show.")
@pass_console
def show(
    console: Console, /, pipeline: Path, dimension: str | None, choice: Selection, status: str, limit: int
) -> None:
    """Show rejected rows with the original record, the cause of the last rejection, and what was done."""
    from headrace.pipelines.changes import changes_not_applied
    from headrace.pipelines.rejects import show_rejects

    with console.step(f"reading the rejected rows of {pipeline}", left=UNCHANGED, pipeline=pipeline):
        config = _rejecting(pipeline, dimension)
        statuses = STATUSES if choice.ids else _statuses(status)
        records, total = show_rejects(config, choice, statuses, limit)
        changes = {} if dimension or not choice.is_empty else changes_not_applied(config)
    others = changes_blocks(changes, pipeline)
    if not records:
        console.result([], Text(f"{config.name} has no such {_what(dimension)}"), *others)
        return
    others += [Text(_way_on(dimension, pipeline))] if dimension else []
    streams = len({record.stream for record in records}) > 1
    blocks = [Pairs(record.id, _told(record, stream=streams)) for record in records]
    more = [Text(f"and {total - len(records):,} more; --limit shows more")] if total > len(records) else []
    console.result([asdict(record) for record in records], *blocks, *more, *others)


def _rejecting(pipeline: Path, dimension: str | None) -> PipelineConfig:
    """Return the pipeline whose rejected rows are those of the facts, or the changes of a dimension."""
    from headrace.pipelines.changes import changes_of
    from headrace.pipelines.config import load_steps

    config = load_steps(pipeline)
    return changes_of(config, dimension) if dimension else config


def _what(dimension: str | None) -> str:
    return "rejected rows" if dimension is None else f"changes of dimension {dimension} that did not apply"


def _way_on(dimension: str, pipeline: Path) -> str:
    of = pipeline_words(pipeline)
    return (
        f"Changes are not retried. Write the corrected records to a new file, and apply it: `headrace dimension apply "
        f"{dimension} FILE{of}`. If the pipeline file was wrong, correct that, and apply the same file with --again. "
        f"Then mark these: `headrace errors dismiss --dimension {dimension}{of} --all --reason TEXT`."
    )


def pipeline_words(pipeline: Path) -> str:
    """Return the option that names a pipeline file, after a space."""
    return f" --pipeline {shlex.quote(str(pipeline))}"


def changes_blocks(changes: Mapping[str, int], pipeline: Path) -> list[Block]:
    """Return a note for each dimension with changes that did not apply, with the command that shows them."""
    of = pipeline_words(pipeline)
    return [
        Text(
            f"{counted(rows, 'change')} of dimension {name} did not apply; see `headrace errors show --dimension "
            f"{name}{of}`"
        )
        for name, rows in changes.items()
    ]


def _told(record: RejectedRecord, *, stream: bool) -> dict[str, Any]:
    of = {"stream": record.stream} if stream else {}
    note = {} if record.note is None else {"note": record.note}
    return {"status": record.status, **of, **note, "cause": record.reason, "record": record.record}


@errors.command("retry", cls=ReportingCommand, short_help="Load rejected rows again.")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@pipeline_option
@dimension_option
@selecting
@click.option("--all", "everything", is_flag=True, help="Retry all open rows.")
@pass_console
@click.pass_context
def retry(
    ctx: click.Context,
    console: Console,
    /,
    *,
    pipeline: Path,
    dimension: str | None,
    choice: Selection,
    everything: bool,
) -> None:
    """Load the original records of selected open rows again, by the present rules of the pipeline.

    No row is loaded twice. If the command is killed, the next run or retry completes it. A row that is rejected again
    stays open with the new cause.
    """
    from headrace.cli.commands.run import LEFT, note_batch
    from headrace.pipelines import retry as retry_rows
    from headrace.pipelines.changes import changes_not_applied
    from headrace.pipelines.config import load_any, load_steps

    if dimension:
        raise click.UsageError(_way_on(dimension, pipeline))
    _require_choice(choice, everything=everything)
    begun = Begun(UNCHANGED, LEFT)
    with console.step(f"retrying rejected rows of {pipeline}", left=begun.left, pipeline=pipeline):
        config = load_any(pipeline)
        with in_spark(console, begun) as hook:
            result = retry_rows(config, choice, on_batch=note_batch(console), hook=hook)
        changes = changes_not_applied(load_steps(pipeline)) if everything else {}
    document = {"selected": result.selected, **result.run.as_dict()}
    console.result(document, *_retried(result), *changes_blocks(changes, pipeline))
    ctx.exit(ExitCode.OK if result.run.signal is None else ExitCode.INTERRUPTED)


def _retried(result: RetryResult) -> list[Block]:
    run = result.run
    if not result.selected and not run.batches:
        return [Text(f"{run.pipeline} has no such open rows; nothing was retried"), *map(Text, run.notices)]
    pairs = {
        "open rows selected": result.selected,
        "rows in": run.total("rows_in"),
        "loaded": run.total("loaded"),
        "duplicates dropped": run.total("dropped"),
        "duplicates routed": run.total("routed"),
        "rejected again": run.total("rejected"),
        "new members": run.total("new_members"),
        "batch" if len(run.batches) == 1 else "batches": ", ".join(str(batch.batch) for batch in run.batches),
        "facts": run.facts,
        "run": run.run,
    }
    return [Pairs(f"{run.pipeline}: {run.state}", pairs), *map(Text, run.notices)]


@errors.command("dismiss", cls=ReportingCommand)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@pipeline_option
@dimension_option
@selecting
@click.option("--all", "everything", is_flag=True, help="Dismiss all open rows.")
@click.option("--reason", required=True, help="Why the rows are not to be loaded.")
@pass_console
def dismiss(
    console: Console,
    /,
    *,
    pipeline: Path,
    dimension: str | None,
    choice: Selection,
    everything: bool,
    reason: str,
) -> None:
    """Mark selected open rows as not to be loaded, with a reason. They stay in the error table."""
    from headrace.pipelines.rejects import dismiss_rows

    _require_choice(choice, everything=everything)
    with console.step(f"dismissing rejected rows of {pipeline}", left=UNCHANGED, pipeline=pipeline):
        config = _rejecting(pipeline, dimension)
        rows = dismiss_rows(config, choice, reason)
    text = (
        f"{counted(rows, 'change' if dimension else 'row')} dismissed"
        if rows
        else "no such open rows; nothing was dismissed"
    )
    console.result({"pipeline": config.name, "dismissed": rows, "reason": reason}, Text(f"{config.name}: {text}"))


def _require_choice(choice: Selection, *, everything: bool) -> None:
    if choice.is_empty != everything:
        both = "--all excludes a selection; " if everything else ""
        raise click.UsageError(f"{both}select rows by ID, --rule, --batch, --file or --stream, or say --all")


def _statuses(status: str) -> tuple[str, ...]:
    return STATUSES if status == "all" else (status,)
