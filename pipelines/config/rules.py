"""Rules of a pipeline file that span several fields: references must resolve, and names must not clash.

These rules need only the file, so a violation is reported before any table is created. The rules that depend on the
tables are in `headrace.pipelines.batch.preparation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.pipelines.config.column_types import arrow_schema, canonical, type_name
from headrace.pipelines.config.history import as_of_lookup, declared_history, parents_first, references_of
from headrace.pipelines.config.merge import merge_problems
from headrace.pipelines.config.problems import Problem
from headrace.pipelines.config.special_rules import special_problems
from headrace.pipelines.errors import PipelineFileError
from headrace.storage.errors import InputError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headrace.pipelines.config.model import DimensionConfig, LookupConfig, PipelineConfig
    from headrace.pipelines.config.problems import DocumentPath

__all__ = ["AUDIT_COLUMNS", "inconsistencies", "stream_problems"]

AUDIT_COLUMNS = ("_file", "_batch", "_loaded_at")
_OUTCOME = "_outcome"
_INFERRED_FLAG = "is_inferred"
_INEXACT = ("float", "double")
_OF_TIMES = ("before_first", "null_time")
_TIMES = ("date", "timestamp", "timestamp_ntz")


def inconsistencies(config: PipelineConfig) -> list[Problem]:
    """Return every inconsistency between the fields of a pipeline."""
    problems = [*_role_problems(config), *_source_problems(config), *_name_problems(config)]
    for name, dimension in config.dimensions.items():
        problems += [*_dimension_problems(config, name, dimension), *special_problems(config, name)]
    problems += [
        problem for place, lookup in enumerate(config.lookups) for problem in _on_problems(config, place, lookup)
    ]
    if not config.transform:
        problems += _column_problems(config, config.source.columns)
    if not problems and not config.transform:
        problems += _fact_problems(config, config.source.columns)
    return problems


def stream_problems(config: PipelineConfig, stream: Mapping[str, str]) -> list[Problem]:
    """Return every inconsistency with the columns that `transform` results in, given their names and types."""
    return _column_problems(config, stream) or _fact_problems(config, stream)


def _role_problems(config: PipelineConfig) -> list[Problem]:
    problems = []
    seen: dict[str, str] = {}
    for place, lookup in enumerate(config.lookups):
        if lookup.dimension not in config.dimensions:
            known = ", ".join(config.dimensions) or "none"
            near = nearest(lookup.dimension, list(config.dimensions))
            text = f"lookup {lookup.role!r} names dimension {lookup.dimension!r}{near}; the dimensions are {known}"
            problems.append(Problem(("lookups", place, "dimension"), text))
        first = seen.setdefault(lookup.role.lower(), lookup.role)
        if any(other.role.lower() == lookup.role.lower() for other in config.lookups[:place]):
            clash = f"the roles {first!r} and {lookup.role!r}, which differ only in case"
            text = f"two lookups have {f'the role {first!r}' if first == lookup.role else clash}; give each its own"
            problems.append(Problem(("lookups", place, "role"), text))
    return problems


def _source_problems(config: PipelineConfig) -> list[Problem]:
    """Return source columns whose names are reserved, or cannot pass through the stages of a batch."""
    problems = []
    for name in config.source.columns:
        if name[:1] == "_":
            text = f"source column {name!r} begins with '_', which is kept for Headrace"
            problems.append(Problem(("source", "schema", name), text))
        elif not config.transform and ("." in name or "`" in name):
            text = (
                f"source column {name!r} has a dot or a backtick, which Spark's stages do not take; rename it with a "
                "step `rename` of `transform`"
            )
            problems.append(Problem(("source", "schema", name), text))
    return problems


def _column_problems(config: PipelineConfig, stream: Mapping[str, str]) -> list[Problem]:
    """Return references to columns that the stream does not have."""
    where = "the stream after `transform`" if config.transform else config.source.title
    named: list[tuple[str, DocumentPath, Iterable[str]]] = [
        (f"lookup {lookup.role!r}", ("lookups", place, "on"), lookup.on) for place, lookup in enumerate(config.lookups)
    ]
    if config.duplicates is not None:
        named.append(("duplicates", ("duplicates", "key"), config.duplicates.key))
        named.append(("duplicates", ("duplicates", "order_by"), config.duplicates.order_by))
    problems = [
        Problem(
            (*location, column) if location[0] == "lookups" else location,
            f"{place} names column {column!r}, which {where} does not have{_near(config, column, stream)}; it has "
            f"{', '.join(stream)}",
        )
        for place, location, columns in named
        for column in columns
        if column not in stream
    ]
    return [*problems, *_inexact_keys(config, stream)] or _time_problems(config, stream)


def _time_problems(config: PipelineConfig, stream: Mapping[str, str]) -> list[Problem]:
    """Return lookups into dimensions with history that the columns of the stream do not suit."""
    problems = []
    for place, lookup in enumerate(config.lookups):
        dimension = config.dimensions.get(lookup.dimension)
        if dimension is None or dimension.history is None:
            continue
        try:
            history = declared_history(lookup.dimension, dimension, config.surrogate_key(lookup.dimension))
            declared = as_of_lookup(history, lookup)
        except InputError:
            continue  # reported at the dimension or at the lookup
        unsuitable = _unsuitable_time(lookup, type_name(history.instant_type), stream)
        if unsuitable:
            problems.append(Problem(("lookups", place, "event_time"), unsuitable))
            continue
        try:
            declared.check(arrow_schema(dict(stream)))
        except InputError as error:
            problems.append(Problem(("lookups", place), str(error)))
    return problems


def _unsuitable_time(lookup: LookupConfig, instant: str, stream: Mapping[str, str]) -> str:
    """Return why versions with such bounds cannot be found by the event time; an empty text if they can."""
    if lookup.event_time is None or lookup.event_time not in stream:
        return ""
    kind = canonical(stream[lookup.event_time])
    suitable = _TIMES if instant == "date" else ("date", instant)
    if kind in suitable:
        return ""
    bounds = f"is not comparable with {instant}, the type of the versions' bounds" if kind in _TIMES else "is no time"
    return (
        f"lookup {lookup.role!r}: `event_time` names column {lookup.event_time!r} of type {kind}, which {bounds}; name "
        f"a column of type {' or '.join(suitable)}, or derive one in `transform`"
    )


def _near(config: PipelineConfig, column: str, stream: Mapping[str, str]) -> str:
    return nearest(column, list(stream)) if config.transform else ""


def _inexact_keys(config: PipelineConfig, stream: Mapping[str, str]) -> list[Problem]:
    """Return duplicate keys that are floating-point columns."""
    if config.duplicates is None:
        return []
    return [
        Problem(("duplicates", "key"), f"duplicates: column {name!r} {_inexact(stream[name])}")
        for name in config.duplicates.key
        if canonical(stream.get(name, "string")) in _INEXACT
    ]


def _inexact(kind: str) -> str:
    return (
        f"is {canonical(kind)}, which cannot be a key, since equal numbers may differ in their last bit; declare it as "
        "decimal(p,s), bigint or string"
    )


def _name_problems(config: PipelineConfig) -> list[Problem]:
    return [
        Problem(("source", "schema", second), f"source.schema: {_clash(first, second)}")
        for first, second in _clashes(config.source.columns)
    ]


def _dimension_problems(config: PipelineConfig, name: str, dimension: DimensionConfig) -> list[Problem]:
    place: DocumentPath = ("dimensions", name)
    surrogate = config.surrogate_key(name)
    columns = list(dimension.columns if dimension.columns is not None else dimension.natural_key)
    own = [surrogate, *(column for column in columns if column not in {surrogate, _INFERRED_FLAG}), _INFERRED_FLAG]
    problems = [Problem(place, f"dimension {name!r}: {_clash(*pair)}") for pair in _clashes(own)]
    problems += [
        Problem((*place, "natural_key"), f"dimension {name!r} names the natural key column {column!r} twice")
        for column in dict.fromkeys(dimension.natural_key)
        if dimension.natural_key.count(column) > 1
    ]
    problems += [
        Problem(
            (*place, "rules", column), f"dimension {name!r} has rules for {column!r}, which is no natural key column"
        )
        for column in dimension.rules
        if column not in dimension.natural_key
    ]
    if dimension.columns is not None:
        problems += _declared_problems(name, dimension, dimension.columns)
    return problems or _history_problems(config, name, dimension)


def _history_problems(config: PipelineConfig, name: str, dimension: DimensionConfig) -> list[Problem]:
    if dimension.history is None and dimension.changes is not None:
        text = f"dimension {name!r} has `changes`, which need a history; declare dimensions.{name}.history"
        return [Problem(("dimensions", name, "changes"), text)]
    if dimension.history is None:
        return []
    place: DocumentPath = ("dimensions", name, "history")
    try:
        history = declared_history(name, dimension, config.surrogate_key(name))
    except InputError as error:
        return [Problem(place, str(error))]
    clashes = _clashes(history.entry_schema.names)
    problems = [Problem(place, f"history of dimension {name!r}: {_clash(*pair)}") for pair in clashes]
    return problems or _parent_problems(config, name)


def _parent_problems(config: PipelineConfig, name: str) -> list[Problem]:
    """Return mismatches between a dimension with history and its parents."""
    place: DocumentPath = ("dimensions", name, "history", "parents")
    try:
        parents_first(config)
        references = references_of(config, name)
    except (InputError, PipelineFileError) as error:
        return [Problem(place, str(error))]
    repeated = [attribute for each in references for attribute in (*each.carry, *each.audit)]
    twice = next((attribute for attribute in repeated if repeated.count(attribute) > 1), None)
    if twice is not None:
        text = f"attribute {twice!r} of dimension {name!r} repeats two columns of its parents; leave one out"
        return [Problem(place, text)]
    return []


def _declared_problems(name: str, dimension: DimensionConfig, columns: Mapping[str, str]) -> list[Problem]:
    place: DocumentPath = ("dimensions", name, "columns")
    problems = [
        Problem(
            place, f"dimension {name!r} has no column {column!r}, its natural key; its columns are {', '.join(columns)}"
        )
        for column in dimension.natural_key
        if column not in columns
    ]
    problems += [
        Problem((*place, column), f"dimension {name!r}: the natural key column {column!r} {_inexact(columns[column])}")
        for column in dimension.natural_key
        if column in columns and canonical(columns[column]) in _INEXACT
    ]
    return problems


def _on_problems(config: PipelineConfig, place: int, lookup: LookupConfig) -> list[Problem]:
    """Return mismatches between a lookup and its dimension."""
    dimension = config.dimensions.get(lookup.dimension)
    if dimension is None:
        return []
    problems = []
    if sorted(lookup.on.values()) != sorted(dimension.natural_key):
        unmet = [name for name in dimension.natural_key if name not in lookup.on.values()]
        wrong = next((name for name in lookup.on.values() if name not in dimension.natural_key), "")
        text = (
            f"lookup {lookup.role!r} compares {', '.join(lookup.on.values())}{nearest(wrong, unmet)}, but the natural "
            f"key of dimension {lookup.dimension!r} is {', '.join(dimension.natural_key)}; name each column once"
        )
        problems.append(Problem(("lookups", place, "on"), text))
    if dimension.history is not None:
        return problems or _as_of_problems(config, place, lookup, dimension)
    problems += [
        Problem(
            ("lookups", place, name),
            f"lookup {lookup.role!r} has `{name}`, but dimension {lookup.dimension!r} has no history; declare "
            f"dimensions.{lookup.dimension}.history, or leave `{name}` out",
        )
        for name in ("event_time", *_OF_TIMES)
        if name in lookup.model_fields_set
    ]
    if dimension.columns is not None:
        apart = {*dimension.natural_key, config.surrogate_key(lookup.dimension), _INFERRED_FLAG}
        attributes = [column for column in dimension.columns if column not in apart]
        problems += [
            Problem(
                ("lookups", place, "carry"),
                f"lookup {lookup.role!r}: dimension {lookup.dimension!r} has no attribute {column!r}; it has "
                f"{', '.join(attributes) or 'none'}",
            )
            for column in lookup.carry
            if column not in attributes
        ]
    return problems


def _as_of_problems(
    config: PipelineConfig, place: int, lookup: LookupConfig, dimension: DimensionConfig
) -> list[Problem]:
    """Return mismatches between a lookup and its dimension with history."""
    try:
        history = declared_history(lookup.dimension, dimension, config.surrogate_key(lookup.dimension))
    except InputError:
        return []  # reported at the dimension
    given = [name for name in _OF_TIMES if name in lookup.model_fields_set and lookup.event_time is None]
    if given:
        text = (
            f"lookup {lookup.role!r} has `{given[0]}` without `event_time`; name the column with the time of the fact"
        )
        return [Problem(("lookups", place, given[0]), text)]
    try:
        as_of_lookup(history, lookup)
    except InputError as error:
        return [Problem(("lookups", place), str(error))]
    return []


def _fact_problems(config: PipelineConfig, stream: Mapping[str, str]) -> list[Problem]:
    """Return fact columns that share a name, and partition columns that the facts do not have."""
    facts: list[tuple[str, DocumentPath]] = [(name, ("source", "schema", name)) for name in stream]
    for place, lookup in enumerate(config.lookups):
        facts.append((f"{lookup.role}_key", ("lookups", place, "role")))
        facts += [(f"{lookup.role}_{name}", ("lookups", place, "carry")) for name in lookup.carry]
    facts += [(name, ("sink",)) for name in (_OUTCOME, *(AUDIT_COLUMNS if config.sink.audit else ()))]
    problems = []
    seen: dict[str, str] = {}
    for name, location in facts:
        first = seen.setdefault(name.lower(), name)
        if location[0] == "lookups" and first is not name:
            text = (
                f"the facts would have two columns {first!r}" if first == name else f"the facts: {_clash(first, name)}"
            )
            problems.append(Problem(location, f"{text}; give the lookup another role, or rename the source column"))
    names = [name for name, _ in facts]
    problems += [
        Problem(
            ("sink", "partition_by"),
            f"sink.partition_by names {name!r}, which the facts do not have; they have {', '.join(names)}",
        )
        for name in config.sink.partition_by
        if name not in names
    ]
    return problems + merge_problems(config, stream, names)


def _clashes(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of names that Spark considers equal."""
    seen: dict[str, str] = {}
    return [(first, name) for name in names if (first := seen.setdefault(name.lower(), name)) is not name]


def _clash(first: str, second: str) -> str:
    if first == second:
        return f"the column {first!r} occurs twice; rename one"
    return f"the columns {first!r} and {second!r} differ only in case, and Spark treats them as one; rename one of them"
