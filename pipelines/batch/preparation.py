"""Preparation of a pipeline: checks all of it against the Delta tables before the first row is read or any change made.

It then creates missing dimensions, changes the columns of existing ones as declared, and adds missing special members.
`headrace.pipelines.delta.support` lists the supported table features.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from headrace.etl import Dimension, DuplicateAction, Duplicates, Lookup
from headrace.pipelines.batch.error_rows import ERROR_SCHEMA
from headrace.pipelines.batch.merge import MERGE_KEY, check_merge
from headrace.pipelines.batch.stages import DUPLICATES_ROLE, Prepared
from headrace.pipelines.batch.storable import ColumnRule, ConstraintRule, KeyLimit, MergeKeyRule
from headrace.pipelines.batch.transform import Transform, check_transform
from headrace.pipelines.config.column_types import arrow_schema, arrow_type, type_name
from headrace.pipelines.config.declared import key_rules, special_members, spellings
from headrace.pipelines.config.history import as_of_lookup, history_of
from headrace.pipelines.config.rules import stream_problems
from headrace.pipelines.delta.columns import added_columns_statement
from headrace.pipelines.delta.constraints import constraint_columns
from headrace.pipelines.delta.merges import set_properties
from headrace.pipelines.delta.support import (
    Described,
    Role,
    Use,
    describe,
    refuse_float_keys,
    refuse_twins,
    require_support,
)
from headrace.pipelines.delta.tables import DeltaHandle, create_dimension, create_table, has_table, open_table
from headrace.pipelines.dimension.carried_numbers import refuse_numbering_again
from headrace.pipelines.dimension.schema_changes import (
    SchemaChange,
    change_schema,
    changed_schema,
    planned_changes,
    refuse_changes,
)
from headrace.pipelines.dimension.special_members import add_special_members
from headrace.pipelines.errors import DeltaTableError, PipelineFileError, telling
from headrace.pipelines.history.layout import delta_schema
from headrace.pipelines.history.tables import add_special_members as add_special_versions
from headrace.pipelines.history.tables import check_declaration, create_history
from headrace.pipelines.paths import same_table
from headrace.pipelines.source.ledger import Ledger
from headrace.pipelines.spark.frame import FILE, RECORD_NUMBER
from headrace.storage.format import PAGE_SIZES, key_limit, stored_type

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace.etl import KeyRule
    from headrace.etl.history import AsOfLookup, History
    from headrace.pipelines.batch.merge import MergeRule
    from headrace.pipelines.batch.storable import StorableRule
    from headrace.pipelines.config.correlation import CorrelationConfig
    from headrace.pipelines.config.model import DimensionConfig, LookupConfig, PipelineConfig

__all__ = ["CheckedPipeline", "another_table", "check_pipeline", "described_table", "prepare", "require_columns"]

ANOTHER: Final = ", or name another table"

_INFERRED_FLAG = "is_inferred"
_NEVER_NULL_ERRORS = frozenset({"pipeline", "stream", "batch", FILE, "_record_number", "reason"})


def prepare(config: PipelineConfig, parallelism: int) -> Prepared:
    """Check a pipeline as `check_pipeline` does, and create the missing tables and members."""
    return check_pipeline(config, parallelism).create()


def check_pipeline(config: PipelineConfig, parallelism: int) -> CheckedPipeline:
    """Check a pipeline against its Delta tables. This function writes nothing.

    Parameters
    ----------
    config
        Configuration of the pipeline.
    parallelism
        Default number of shards.

    Raises
    ------
    DeltaTableError
        If a table does not exist or cannot be used.
    DeclarationError, KeyInputError, PipelineFileError
        If a lookup or the duplicates cannot use these columns.
    """
    transform = _transform(config)
    stream = arrow_schema(config.source.columns) if transform is None else transform.schema
    found = {name: _dimension(config, name) for name in config.dimensions}
    for name, each in found.items():
        if each.table is None:
            _refuse_shared(config, name)
            refuse_numbering_again(config, name)
    lookups = {item.role: _lookup(item, found[item.dimension]) for item in config.lookups}
    for lookup in lookups.values():
        lookup.check(stream)
    duplicates = _duplicates(config, stream)
    shards = {
        item.role: config.dimensions[item.dimension].shards or parallelism
        for item in config.lookups
        if item.policy == "infer"
    }
    if config.duplicates is not None:
        shards[DUPLICATES_ROLE] = config.duplicates.shards or parallelism
    prepared = Prepared(config, stream, lookups, duplicates, shards, transform=transform)
    _check_names(prepared)
    tables = _checked_tables(prepared, found)
    return CheckedPipeline(_with_rules(prepared, tables, found), found)


def _refuse_shared(config: PipelineConfig, name: str) -> None:
    """Raise an error if a table that does not exist is that of several dimensions: no fact would find a member."""
    path = config.dimensions[name].path
    sharing = [other for other, each in config.dimensions.items() if same_table(each.path, path)]
    if len(sharing) > 1:
        raise DeltaTableError(
            f"the table {path} that the dimensions {' and '.join(map(repr, sharing))} share does not exist; create it "
            f"from a source with the natural keys of all: `headrace dimension create {name} SOURCE --pipeline PIPELINE`"
        )


def _transform(config: PipelineConfig) -> Transform | None:
    """Return the checked transformations, whose columns are those that the rest of the pipeline names; or None."""
    if not config.transform:
        return None
    transform = check_transform(config, arrow_schema(config.source.columns))
    problems = stream_problems(config, {field.name: type_name(field.type) for field in transform.schema})
    if problems:
        raise config.error(problems)
    return transform


@dataclass(frozen=True)
class CheckedPipeline:
    """A checked pipeline, and the current state of its dimensions."""

    prepared: Prepared
    _found: Mapping[str, _Found]

    def create(self) -> Prepared:
        """Create missing tables, make the planned changes of existing ones, and return the prepared pipeline."""
        notices: list[str] = []
        with telling(lambda: notices):
            self._create(notices)
        return replace(self.prepared, notices=tuple(notices))

    def _create(self, notices: list[str]) -> None:
        prepared, config = self.prepared, self.prepared.config
        for name, each in self._found.items():
            path = config.dimensions[name].path
            if each.table is None and each.history is not None:
                create_history(path, each.history)
            elif each.table is None:
                create_dimension(path, each.dimension)
            elif each.history is not None:
                added = add_special_versions(path, each.history)
                notices += [f"dimension {name!r}: the special member {key} was added to {path}" for key in added]
            else:
                notices += _changed(name, each.table, each)
        _ensure_table(config.sink.path, prepared.fact_schema, tuple(config.sink.partition_by))
        _remember_merge_key(config.sink.path, prepared.merge)
        _ensure_table(config.errors_path, ERROR_SCHEMA)
        if prepared.duplicates is not None and prepared.duplicates.action is DuplicateAction.ROUTE:
            _ensure_table(config.duplicates_path, prepared.duplicate_schema)


@dataclass(frozen=True)
class _Found:
    """A dimension, the description of its table (None if there is none yet), and changes of the table's columns."""

    dimension: Dimension
    table: Described | None
    changes: tuple[SchemaChange, ...] = ()
    history: History | None = None


def _changed(name: str, table: Described, found: _Found) -> Iterator[str]:
    """Change a dimension's columns, add its special members, and yield what was done."""
    if found.changes:
        change_schema(table.path, found.changes)
        yield from (change.told(name, table.path) for change in found.changes)
        table = described_table(table.path) or table
    yield from add_special_members(found.dimension, table)


def _ensure_table(path: str, schema: pa.Schema, partition_by: tuple[str, ...] = ()) -> None:
    if not has_table(path):
        create_table(path, schema, partition_by)


def _remember_merge_key(path: str, rule: MergeRule | None) -> None:
    """Note in the fact table that each of its rows has its own key, so that the next run need not check it.

    Appends delete the note, since they may add a key again.
    """
    handle, key = DeltaHandle(path), "" if rule is None else json.dumps(rule.key)
    set_properties(
        handle, lambda: {} if handle.table.metadata().configuration.get(MERGE_KEY, "") == key else {MERGE_KEY: key}
    )


def described_table(path: str) -> Described | None:
    """Return the description of the Delta table at a path; None if there is no table."""
    return describe(open_table(path), path) if has_table(path) else None


# Dimensions


def _dimension(config: PipelineConfig, name: str) -> _Found:
    """Return a dimension as in its Delta table, or as declared if the table does not exist yet."""
    declared = config.dimensions[name]
    surrogate = config.surrogate_key(name)
    rules = key_rules(declared)
    refuse_twins([*(declared.columns or ()), surrogate], f"dimension {name!r}")
    table = described_table(declared.path)
    if declared.history is not None:
        return _with_history(config, name, table)
    if table is None:
        return _Found(_declared_dimension(declared, name, surrogate, rules), None)
    label = f"dimension {name!r}"
    wanted = {**dict.fromkeys(declared.natural_key), surrogate: "bigint"}
    wanted |= {column: kind for column, kind in (declared.columns or {}).items() if column != _INFERRED_FLAG}
    changes = _schema_changes(table, declared, surrogate)
    pending = {change.column for change in changes}
    for column, kind in wanted.items():
        if column not in pending:
            key = _key_field(config, name, column)
            require_column(table, label, column, None if kind is None else arrow_type(kind), key)
    there = changed_schema(table.schema, changes)
    flag = _INFERRED_FLAG
    has_flag = flag in there.names and there.field(flag).type == pa.bool_()
    carried = {column for item in config.lookups if item.dimension == name for column in item.carry}
    kept = {*declared.natural_key, *carried}
    columns = pa.schema([field for field in there if _is_attribute(field, table, kept, {surrogate, flag})])
    dimension = Dimension(
        name,
        tuple(declared.natural_key),
        surrogate,
        columns,
        rules,
        inferred_flag=flag if has_flag else None,
        special=special_members(declared, name, columns),
        spellings=spellings(declared),
    )
    return _Found(dimension, table, tuple(changes))


def _key_field(config: PipelineConfig, name: str, column: str) -> str | None:
    """Return the field of the pipeline file that names a key column of a dimension; None for another column."""
    if column == config.surrogate_key(name):
        return f"dimensions.{name}.surrogate_key"
    return f"dimensions.{name}.natural_key" if column in config.dimensions[name].natural_key else None


def _schema_changes(table: Described, declared: DimensionConfig, surrogate: str) -> list[SchemaChange]:
    """Return the changes that give a dimension's table the declared columns.

    Raises
    ------
    DeltaTableError
        If the table cannot be changed.
    """
    kinds = {column: arrow_type(kind) for column, kind in (declared.columns or {}).items()}
    fixed = (*declared.natural_key, surrogate, _INFERRED_FLAG)
    changes = planned_changes(
        table.schema, {column: kind for column, kind in kinds.items() if column != _INFERRED_FLAG}, fixed
    )
    refuse_changes(table.path, changes)
    return changes


def _with_history(config: PipelineConfig, name: str, table: Described | None) -> _Found:
    """Return a dimension with history, whose table has all columns of its layout or does not exist yet."""
    history, label = history_of(config, name), f"dimension {name!r}"
    refuse_float_keys(history.dimension.key_schema, label)
    if table is not None:
        check_declaration(table.properties, history, label, table.path)
        for column in delta_schema(history):
            require_column(table, label, column.name, column.type, _key_field(config, name, column.name))
    return _Found(history.dimension, table, history=history)


def _lookup(declared: LookupConfig, found: _Found) -> Lookup | AsOfLookup:
    if found.history is not None:
        return as_of_lookup(found.history, declared)
    return Lookup(
        found.dimension,
        declared.role,
        dict(declared.on),
        declared.policy,
        tuple(declared.carry),
        declared.null_key,
        declared.unfit_key,
    )


def _is_attribute(field: pa.Field, table: Described, kept: set[str], apart: set[str]) -> bool:
    """Return whether a column is an attribute of the dimension. The writer fills other columns or sets them to null."""
    if field.name in apart:
        return False
    if field.name in kept:
        return True
    return stored_type(field.type) is not None and field.name not in table.filled


def _declared_dimension(
    declared: DimensionConfig, name: str, surrogate: str, rules: Mapping[str, KeyRule]
) -> Dimension:
    if declared.columns is None:
        raise DeltaTableError(
            f"dimension {name!r}: there is no Delta table at {declared.path}; create it with `headrace dimension "
            f"create`, or give dimensions.{name}.columns to begin with an empty one"
        )
    columns = pa.schema([pa.field(column, arrow_type(kind)) for column, kind in declared.columns.items()])
    special, spelled = special_members(declared, name, columns), spellings(declared)
    key = tuple(declared.natural_key)
    dimension = Dimension(name, key, surrogate, columns, rules, special=special, spellings=spelled)
    refuse_float_keys(dimension.key_schema, f"dimension {name!r}")
    return dimension


# Tables


def _checked_tables(prepared: Prepared, found: Mapping[str, _Found]) -> dict[str, Described]:
    """Return the existing tables by path, each checked against its use by the pipeline."""
    tables: dict[str, Described] = {}
    for name, each in found.items():
        if each.table is not None:
            require_support(each.table, _use_of_dimension(prepared, name, each))
            tables[each.table.path] = each.table
    for use, schema in _sinks(prepared):
        table = described_table(use.path)
        if table is None:
            continue
        others = another_table(prepared.config) if use.path == prepared.config.sink.path else ANOTHER
        require_columns(table, use.label, schema, others)
        require_support(table, use)
        if use.role is Role.MERGED and prepared.merge is not None:
            check_merge(prepared.merge, table)
        tables[use.path] = table
    _check_partitions(prepared, tables.get(prepared.config.sink.path))
    return tables


def _use_of_dimension(prepared: Prepared, name: str, found: _Found) -> Use:
    dimension = found.dimension
    infers = any(prepared.infers(role) for role, each in prepared.lookups.items() if each.dimension.name == name)
    trimmed = frozenset(column for column, rule in dimension.rules.items() if "trim" in rule.normalise)
    always = {dimension.surrogate_key, *dimension.natural_key}
    always |= set() if dimension.inferred_flag is None else {dimension.inferred_flag}
    return Use(
        Role.INFERRED if infers else Role.DIMENSION,
        f"dimension {name!r}",
        prepared.config.dimensions[name].path,
        written=frozenset(_columns_of(found).names) if infers else frozenset(),
        keys=dimension.natural_key,
        trimmed=trimmed,
        never_null=frozenset(always),
    )


def _columns_of(found: _Found) -> pa.Schema:
    """Return the columns that new members get."""
    return found.dimension.table_schema if found.history is None else delta_schema(found.history)


def _sinks(prepared: Prepared) -> list[tuple[Use, pa.Schema]]:
    """Return the tables other than dimensions that the pipeline writes, and the columns that it writes to each."""
    config, facts, rejected = prepared.config, prepared.fact_schema, ERROR_SCHEMA
    keys = tuple(config.sink.key) if prepared.duplicates is None else tuple(prepared.duplicates.key.names)
    role = Role.FACTS if prepared.merge is None else Role.MERGED
    certain = frozenset(name for name in facts.names if name not in _nullable_facts(prepared))
    label = "the fact table"
    written = frozenset(facts.names)
    uses = [
        (Use(role, label, config.sink.path, written, keys, never_null=certain, rejects=True), facts),
        (
            Use(
                Role.ERRORS,
                "the error table",
                config.errors_path,
                frozenset(rejected.names),
                never_null=_NEVER_NULL_ERRORS & frozenset(rejected.names),
            ),
            rejected,
        ),
    ]
    if prepared.duplicates is not None and prepared.duplicates.action is DuplicateAction.ROUTE:
        routed = prepared.duplicate_schema
        use = Use(
            Role.DUPLICATES,
            "the table of duplicates",
            config.duplicates_path,
            frozenset(routed.names),
            never_null=frozenset(set(routed.names) - set(prepared.stream.names)),
            rejects=True,
        )
        uses.append((use, routed))
    return uses


def _nullable_facts(prepared: Prepared) -> set[str]:
    carried = {f"{look.role}_{name}" for look in prepared.lookups.values() for name in look.carry}
    return {*prepared.stream.names, *carried}


def another_table(config: PipelineConfig | CorrelationConfig) -> str:
    """Return the advice to name another table for the facts; empty if the ledger has batches in the present one.

    A run refuses a ledger whose batches are not in the fact table.
    """
    checkpoint = str(config.checkpoint)
    if not Ledger.exists(checkpoint):
        return ANOTHER
    with Ledger(checkpoint) as ledger:
        return ANOTHER if ledger.last_loaded() is None else ""


def require_columns(table: Described, label: str, schema: pa.Schema, others: str = ANOTHER) -> None:
    """Raise an error unless a table has all columns of a schema, with its types.

    Parameters
    ----------
    table, label
        Table and its name in messages.
    schema
        Columns that the pipeline writes.
    others
        Advice to name another table, or an empty text where that is not possible.
    """
    for field in schema:
        if field.name in table.schema.names or _twin(table, field.name) is not None:
            require_column(table, label, field.name, field.type, others=others)
    missing = [field for field in schema if field.name not in table.schema.names]
    if missing:
        named, them = ("column", "it") if len(missing) == 1 else ("columns", "them")
        raise DeltaTableError(
            f"{label}: the Delta table {table.path} has no {named} {', '.join(repr(each.name) for each in missing)}; "
            f"it has {', '.join(table.schema.names)}; add {them}: "
            f"{added_columns_statement(table.path, missing)}{others}"
        )


def _twin(table: Described, column: str) -> str | None:
    """Return a column of a table whose name differs in case only, or None."""
    return next((name for name in table.schema.names if name.lower() == column.lower() and name != column), None)


def require_column(
    table: Described,
    label: str,
    column: str,
    kind: pa.DataType | None,
    field: str | None = None,
    others: str = ANOTHER,
) -> None:
    """Raise an error unless a table has a column with exactly this name and, if given, this type.

    If a field of the pipeline file is given, the column is a key that rows which are there need, so a column that is
    added would not do.
    """
    place = f"{label}: the Delta table {table.path}"
    if column not in table.schema.names:
        twin = _twin(table, column)
        if twin is not None:
            raise DeltaTableError(
                f"{place} has no column {column!r}, but {twin!r}: names that differ only in case are one name to "
                f"Delta; write {twin!r} in the pipeline file"
            )
        remedy = f"name one of these{'' if field is None else f' in {field}'}, or another table"
        if field is None and kind is not None:
            remedy = f"add it: {added_columns_statement(table.path, [pa.field(column, kind)])}{others}"
        raise DeltaTableError(f"{place} has no column {column!r}; it has {', '.join(table.schema.names)}; {remedy}")
    there = table.schema.field(column).type
    if kind is not None and not pa.types.is_nested(kind) and there != kind:
        raise DeltaTableError(
            f"{place} has column {column!r} as {type_name(there)}, but the pipeline declares {type_name(kind)}; "
            f"declare it as {type_name(there)}{others}"
        )


def _check_partitions(prepared: Prepared, table: Described | None) -> None:
    declared = tuple(prepared.config.sink.partition_by)
    if table is not None and declared and declared != table.partition_columns:
        there = ", ".join(table.partition_columns)
        raise DeltaTableError(
            f"sink.partition_by is {', '.join(declared)}, but the Delta table {table.path} is "
            f"{'partitioned by ' + there if there else 'not partitioned'}; write partition_by: [{there}]"
            f"{another_table(prepared.config)}"
        )


# Names and keys


def _duplicates(config: PipelineConfig, stream: pa.Schema) -> Duplicates | None:
    declared = config.duplicates
    if declared is None:
        return None
    key = pa.schema([stream.field(name) for name in declared.key])
    duplicates = Duplicates(key, declared.action, tuple(declared.order_by))
    duplicates.check(stream)
    return replace(duplicates, order_by=(*duplicates.order_by, FILE, RECORD_NUMBER))


def _check_names(prepared: Prepared) -> None:
    """Refuse two columns with the same name in an output table, and partition columns that the facts do not have."""
    names = prepared.fact_schema.names
    refuse_twins(names, "the facts")
    for name in prepared.config.sink.partition_by:
        if name not in names:
            raise PipelineFileError(
                f"sink.partition_by names {name!r}, which the facts do not have; they have {', '.join(names)}"
            )


# Rows that a table cannot hold


def _with_rules(prepared: Prepared, tables: Mapping[str, Described], found: Mapping[str, _Found]) -> Prepared:
    """Return the pipeline with the rules that reject rows that a table cannot hold."""
    stream = set(prepared.stream.names)
    rules: list[StorableRule] = [*_key_limits(prepared, found), *map(MergeKeyRule, prepared.config.sink.key)]
    for use, schema in _sinks(prepared):
        if use.rejects:
            facts = use.role in {Role.FACTS, Role.MERGED}
            planned = tuple(prepared.config.sink.partition_by) if facts else ()
            rules += _table_rules(use, schema, tables.get(use.path), planned)
    return replace(
        prepared,
        early_rules=tuple(rule for rule in rules if set(rule.columns) <= stream),
        late_rules=tuple(rule for rule in rules if not set(rule.columns) <= stream),
    )


def _table_rules(
    use: Use, schema: pa.Schema, table: Described | None, planned: tuple[str, ...]
) -> Iterator[StorableRule]:
    """Yield the rules of a table for its rows; `planned` has the partition columns of a table to be created."""
    partitions = planned if table is None else table.partition_columns
    limits = {} if table is None else table.text_limits()
    for field in schema:
        rule = ColumnRule(
            use.label,
            field.name,
            required=table is not None and field.name in table.required and field.name not in use.never_null,
            partition=field.name in partitions and _can_be_empty(field.type),
            characters=limits.get(field.name),
        )
        if rule.required or rule.partition or rule.characters is not None:
            yield rule
    if table is None:
        return
    for name, expression in table.constraints.items():
        yield ConstraintRule(use.label, name, expression, constraint_columns(expression, table.schema))


def _can_be_empty(kind: pa.DataType) -> bool:
    """Return whether a type has an empty value, which Delta stores as null in a partition column."""
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _key_limits(prepared: Prepared, found: Mapping[str, _Found]) -> Iterator[KeyLimit]:
    """Yield the limits of the key tables, for new members and for loaded keys."""
    longest = key_limit(max(PAGE_SIZES))
    for role, lookup in prepared.lookups.items():
        if not prepared.infers(role):
            continue
        dimension, table = lookup.dimension, found[lookup.dimension.name].table
        partitions = () if table is None else table.partition_columns
        limits = {} if table is None else table.text_limits()
        yield KeyLimit(
            f"dimension {dimension.name!r}",
            lookup.stream_columns,
            dimension.key_schema,
            dimension.rules,
            tuple(each.name for each in dimension.key_schema if each.name in partitions and _can_be_empty(each.type)),
            {name: most for name, most in limits.items() if name in dimension.natural_key},
            longest,
        )
    if prepared.duplicates is not None:
        key = prepared.duplicates.key
        yield KeyLimit("the fact table", tuple(key.names), key, prepared.duplicates.rules, limit=longest)
