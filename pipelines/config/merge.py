"""The rules of `sink.mode: merge` in a pipeline file, without Spark or tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.pipelines.config.column_types import canonical
from headrace.pipelines.config.problems import DocumentPath, Problem
from headrace.storage.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from headrace.pipelines.config.model import LookupConfig, PipelineConfig

__all__ = ["kept_columns", "lookup_columns", "lookup_inputs", "merge_problems", "mixed_lookup"]

_INEXACT: Final = ("float", "double")
_MERGE_ONLY: Final = ("key", "order_by", "update", "keep")


def kept_columns(config: PipelineConfig, facts: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of a stored fact that a later record of its key does not change.

    Parameters
    ----------
    config
        Configuration of the pipeline.
    facts
        Columns of the fact table.
    """
    sink = config.sink
    always = {*sink.key, *sink.order_by}
    if sink.update:
        return tuple(name for name in facts if name not in {*always, *sink.update})
    return tuple(name for name in facts if name in sink.keep)


def lookup_inputs(lookup: LookupConfig) -> list[str]:
    """Return the columns of the stream that the result of a lookup follows from."""
    return [*lookup.on, *([] if lookup.event_time is None else [lookup.event_time])]


def lookup_columns(lookup: LookupConfig) -> list[str]:
    """Return the columns of the facts that a lookup adds."""
    return [f"{lookup.role}_key", *(f"{lookup.role}_{name}" for name in lookup.carry)]


def mixed_lookup(config: PipelineConfig, lookup: LookupConfig) -> str | None:
    """Return how merged facts mix the columns of a lookup; None if the key of a fact is that of its other columns.

    A fact whose key is of its first record, and whose natural key or time is of its last, was never looked up.
    """
    if config.sink.mode != "merge":
        return None
    inputs, added = lookup_inputs(lookup), lookup_columns(lookup)
    kept = kept_columns(config, [*inputs, *added])
    first = [name for name in (*inputs, *added) if name in kept]
    last = [name for name in (*inputs, *added) if name not in {*kept, *config.sink.key}]
    if not first or not last:
        return None
    return f"the facts have {', '.join(first)} of the first record of their key, and {', '.join(last)} of the last"


def merge_problems(config: PipelineConfig, stream: Mapping[str, str], facts: Sequence[str]) -> list[Problem]:
    """Return every inconsistency of the merge, or of its fields without a merge.

    Parameters
    ----------
    config
        Configuration of the pipeline.
    stream
        Names and types of the stream's columns.
    facts
        Columns of the fact table.
    """
    if config.sink.mode != "merge":
        return list(_unused_problems(config))
    if not config.sink.key:
        text = "sink.mode merge needs sink.key, the columns that identify a fact; add it"
        return [Problem(("sink", "mode"), text)]
    return [
        *_declaration_problems(config), *_column_problems(config, stream, facts), *_lookup_problems(config, facts)
    ]  # fmt: skip


def _unused_problems(config: PipelineConfig) -> Iterator[Problem]:
    for name in _MERGE_ONLY:
        if getattr(config.sink, name):
            yield Problem(("sink", name), f"sink.{name} applies to `mode: merge`; add that, or remove sink.{name}")
    if config.sink.nulls != "overwrite":
        yield Problem(("sink", "nulls"), "sink.nulls applies to `mode: merge`; add that, or remove sink.nulls")


def _declaration_problems(config: PipelineConfig) -> Iterator[Problem]:
    if config.sink.update and config.sink.keep:
        yield Problem(("sink", "keep"), "sink.update and sink.keep exclude each other; remove one")
    if config.duplicates is not None:
        text = (
            "duplicates and `sink.mode: merge` exclude each other: in a merge, a repeated record updates its fact with "
            "the same values; remove duplicates, or use `mode: append`"
        )
        yield Problem(("duplicates",), text)


def _column_problems(config: PipelineConfig, stream: Mapping[str, str], facts: Sequence[str]) -> Iterator[Problem]:
    sink = config.sink
    own = {*sink.key, *sink.order_by}
    for field, columns, known in (
        ("key", sink.key, list(stream)),
        ("order_by", sink.order_by, list(stream)),
        ("update", sink.update, [name for name in facts if name not in own]),
        ("keep", sink.keep, [name for name in facts if name not in own]),
    ):
        for at, name in enumerate(columns):
            place: DocumentPath = ("sink", field, at)
            if columns.index(name) < at:
                yield Problem(place, f"sink.{field} names {name!r} twice; remove one")
            elif name in own and field in {"update", "keep"}:
                yield Problem(place, f"sink.{field} names {name!r}, which is in sink.key or sink.order_by; remove it")
            elif name not in known:
                what = "the stream" if field in {"key", "order_by"} else "the facts"
                text = f"sink.{field} names {name!r}, which {what} does not have{nearest(name, known)}"
                yield Problem(place, f"{text}; the columns are {', '.join(known)}")
            elif field == "key" and canonical(stream[name]) in _INEXACT:
                text = f"sink.key: column {name!r} is {canonical(stream[name])}, which cannot be a key"
                yield Problem(place, f"{text}; declare it as decimal(p,s), bigint or string")


def _lookup_problems(config: PipelineConfig, facts: Sequence[str]) -> Iterator[Problem]:
    """Yield the lookups whose columns in a merged fact could come from several records, so that no lookup gave its key.

    With `nulls: keep`, a record that gives only some of these columns changes only these.
    """
    if config.sink.nulls != "keep":
        return
    still = {*config.sink.key, *kept_columns(config, facts)}
    for at, lookup in enumerate(config.lookups):
        inputs = [name for name in lookup_inputs(lookup) if name not in still]
        added = [name for name in lookup_columns(lookup) if name not in still]
        if len(inputs) > 1 and added:
            text = (
                f"sink.nulls: keep may take {', '.join(inputs)} of a fact from several records, but {', '.join(added)} "
                "follows from all of them together; name these columns in sink.keep, or remove `nulls: keep`"
            )
            yield Problem(("lookups", at), text)
