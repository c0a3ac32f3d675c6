"""The single list of Delta table features that Headrace supports, by feature and by the table's role in a pipeline.

`FEATURES` is the list. Each entry gives the test for the feature and, for each role, the result: tasks write files
(`FILES`), Spark's own writer is needed (`SPARK`), or the table is refused, with the reason and the remedy. This module
writes nothing: `require_support` runs before the first row is read and before any table is created.

tests/pipelines/test_table_features.py proves every supported combination: it reads the results with Spark.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from headrace.pipelines.config.column_types import type_name
from headrace.pipelines.delta.constraints import unsupported_part
from headrace.pipelines.delta.reads import SCANNED_FEATURES, plain_schema
from headrace.pipelines.errors import DeltaTableError, PipelineFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from deltalake import DeltaTable

__all__ = [
    "FEATURES",
    "Described",
    "Feature",
    "Role",
    "Use",
    "Way",
    "describe",
    "refuse_float_keys",
    "refuse_twins",
    "require_row_changes",
    "require_support",
    "takes_files",
]

_PLAIN_PARTITIONS: Final = {"byte", "short", "integer", "long", "string", "date", "boolean"}
_PLAIN_FEATURES: Final = {
    "appendOnly", "changeDataFeed", "checkConstraints", "deletionVectors", "generatedColumns", "invariants",
    "timestampNtz",
}  # fmt: skip
_SPARK_FEATURES: Final = {
    "allowColumnDefaults", "checkpointProtection", "clustering", "columnMapping", "domainMetadata", "icebergCompatV1",
    "icebergCompatV2", "identityColumns", "inCommitTimestamp", "materializePartitionColumns", "rowTracking",
    "typeWidening", "typeWidening-preview", "v2Checkpoint", "vacuumProtocolCheck", "variantType", "variantType-preview",
}  # fmt: skip
_UNREADABLE: Final = ("typeWidening", "typeWidening-preview", "vacuumProtocolCheck")
_READABLE: Final = {*SCANNED_FEATURES, "timestampNtz"}
_CHAR: Final = "__CHAR_VARCHAR_TYPE_STRING"
_CONSTRAINT: Final = "delta.constraints."


class Role(StrEnum):
    """Role of a table in a pipeline."""

    DIMENSION = "looked up"
    INFERRED = "looked up and given new members"
    FACTS = "given facts"
    MERGED = "given facts by merge"
    ERRORS = "given rejected rows"
    DUPLICATES = "given routed duplicates"


class Way(StrEnum):
    """Method that writes rows to a table."""

    FILES = "files"
    SPARK = "Spark"


@dataclass(frozen=True)
class Use:
    """Use of a table by a pipeline.

    Parameters
    ----------
    role, label, path
        Role of the table, its name in messages, and its path.
    written
        Columns that receive values; empty for a dimension that is only looked up.
    keys
        Columns that identify a row: the natural key, or the key of duplicates.
    trimmed
        Columns of `keys` that are compared without leading and trailing white space.
    never_null
        Columns of `written` that are never null.
    rejects
        Whether a row that the table cannot hold goes to the error table instead.
    """

    role: Role
    label: str
    path: str
    written: frozenset[str] = frozenset()
    keys: tuple[str, ...] = ()
    trimmed: frozenset[str] = frozenset()
    never_null: frozenset[str] = frozenset()
    rejects: bool = False


@dataclass(frozen=True)
class Described:
    """Description of a Delta table, without its rows.

    Parameters
    ----------
    path, version
        Path of the table, and the described version.
    reader_features, writer_features
        Reader and writer features of the table's protocol.
    properties
        Table properties.
    schema
        Columns with their Arrow types.
    kinds
        Delta's type name of each column; "nested" for a nested type.
    required
        Columns declared NOT NULL.
    column_metadata
        Metadata of each column in the table's schema, without its type.
    partition_columns
        Partition columns, in order.
    local
        Whether the table is in a local folder.
    """

    path: str
    version: int
    reader_features: frozenset[str]
    writer_features: frozenset[str]
    properties: Mapping[str, str]
    schema: pa.Schema
    kinds: Mapping[str, str]
    required: tuple[str, ...]
    column_metadata: Mapping[str, Mapping[str, Any]]
    partition_columns: tuple[str, ...]
    local: bool

    @property
    def constraints(self) -> dict[str, str]:
        """CHECK constraints by name."""
        return {
            name.removeprefix(_CONSTRAINT): text
            for name, text in self.properties.items()
            if name.startswith(_CONSTRAINT)
        }

    def columns_with(self, prefix: str) -> list[str]:
        """Return the columns with a metadata entry that starts with a prefix."""
        return [
            name for name, entries in self.column_metadata.items() if any(key.startswith(prefix) for key in entries)
        ]

    def text_limits(self) -> dict[str, int]:
        """Return the maximum number of characters of each char(n) and varchar(n) column."""
        declared = {name: str(entries[_CHAR]) for name, entries in self.column_metadata.items() if _CHAR in entries}
        return {name: int(text.rpartition("(")[2].rstrip(")")) for name, text in declared.items()}

    @property
    def filled(self) -> set[str]:
        """Columns that Spark's writer fills if they are omitted."""
        return {
            *self.columns_with("delta.generationExpression"),
            *self.columns_with("delta.identity."),
            *self.columns_with("CURRENT_DEFAULT"),
        }


@dataclass(frozen=True)
class Refusal:
    """Reason for a refusal, and its remedy. `{table}` and `{found}` in the texts are placeholders."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class Feature:
    """A feature of Delta tables, and its support by role.

    Parameters
    ----------
    name
        Name of the feature in the documentation.
    found
        Function that returns the evidence of the feature in a table, for messages; empty if the table does not have it.
    support
        Support by role. A table in a role without an entry takes files.
    """

    name: str
    found: Callable[[Described, Use], Iterable[str]]
    support: Mapping[Role, Way | Refusal] = field(default_factory=dict)


def describe(table: DeltaTable, path: str) -> Described:
    """Return the description of a table at the version last read."""
    protocol, metadata, fields = table.protocol(), table.metadata(), table.schema().fields
    return Described(
        path=path,
        version=table.version(),
        reader_features=frozenset(protocol.reader_features or ()),
        writer_features=frozenset(protocol.writer_features or ()),
        properties=dict(metadata.configuration),
        schema=plain_schema(pa.schema(table.schema().to_arrow())),
        kinds={each.name: str(getattr(each.type, "type", "nested")) for each in fields},
        required=tuple(each.name for each in fields if not each.nullable),
        column_metadata={each.name: dict(each.metadata) for each in fields},
        partition_columns=tuple(metadata.partition_columns),
        local=table.table_uri.startswith("file://"),
    )


def refuse_twins(names: Sequence[str], where: str) -> None:
    """Raise an error if two names are equal in Delta, which ignores case."""
    seen: dict[str, str] = {}
    for name in names:
        twin = seen.setdefault(name.lower(), name)
        if twin == name and names.count(name) > 1:
            raise PipelineFileError(f"{where} would have two columns {name!r}; give the lookup another role")
        if twin != name:
            raise PipelineFileError(
                f"{where} would have the columns {twin!r} and {name!r}, which differ only in case and are one name to "
                "Delta; rename one of them"
            )


def refuse_float_keys(key: pa.Schema, label: str) -> None:
    """Raise an error if a column of a natural key is a float."""
    for column in key:
        if pa.types.is_floating(column.type):
            raise DeltaTableError(
                f"{label}: natural key column {column.name!r} is {type_name(column.type)}, and floats have no exact "
                "equality; make it a decimal, bigint or string"
            )


def takes_files(table: DeltaTable) -> bool:
    """Return whether tasks may write the table's files; if not, Spark's own writer must write them."""
    described = describe(table, table.table_uri)
    use = Use(Role.FACTS, "", "", written=frozenset(described.kinds))
    return _way(described, use) is Way.FILES


def require_support(table: Described, use: Use) -> Way:
    """Return the method that writes rows to a table; raise an error if the pipeline cannot use the table.

    Raises
    ------
    DeltaTableError
        If the table has a feature that its role does not support. The message names it, the reason and the remedy.
    """
    for feature in FEATURES:
        verdict = feature.support.get(use.role)
        if isinstance(verdict, Refusal) and (found := list(feature.found(table, use))):
            shown = ", ".join(found)
            named = feature.name if shown in {"", feature.name} else f"{feature.name} ({shown})"
            values = {"table": f"delta.`{table.path}`", "found": shown, "first": found[0]}
            raise DeltaTableError(
                f"{use.label}, the Delta table {table.path}, has {named}, which is not supported for a table that is "
                f"{use.role}: {verdict.reason.format(**values)}; {verdict.remedy.format(**values)}"
            )
    return _way(table, use)


def _way(table: Described, use: Use) -> Way:
    if not table.local:
        return Way.SPARK
    asks = (feature for feature in FEATURES if Way.SPARK in feature.support.values())
    return Way.SPARK if any(True for feature in asks for _ in feature.found(table, use)) else Way.FILES


def require_row_changes(table: Described, label: str) -> None:
    """Raise an error unless tasks may change rows of a table by files of new rows, deletion vectors and change files.

    Raises
    ------
    DeltaTableError
        If the table needs Spark's own writer, is partitioned, or lacks deletion vectors or the change feed.
    """
    named = f"{label}, the Delta table {table.path},"
    if not table.local:
        raise DeltaTableError(f"{named} is not in a local folder, and its rows can be changed only there")
    use = Use(Role.INFERRED, label, table.path, written=frozenset(table.kinds), never_null=frozenset(table.kinds))
    require_support(table, use)
    asks = [feature for feature in FEATURES if Way.SPARK in feature.support.values()]
    found = [feature.name for feature in asks for _ in feature.found(table, use)]
    found += ["partitioning"] if table.partition_columns else []
    if found:
        raise DeltaTableError(f"{named} has {found[0]}, which is not supported where rows are changed; {_REWRITE}")
    wanted = {"delta.enableDeletionVectors": "deletionVectors", "delta.enableChangeDataFeed": "changeDataFeed"}
    for name, feature in wanted.items():
        if table.properties.get(name) != "true" or feature not in table.writer_features:
            raise DeltaTableError(
                f"{named} does not have {name}, without which its rows cannot be changed; turn it on: ALTER TABLE "
                f"delta.`{table.path}` SET TBLPROPERTIES ('{name}' = 'true')"
            )


# Tests for features


def _protocol(*names: str) -> Callable[[Described, Use], Iterable[str]]:
    return lambda table, _: [name for name in names if name in table.reader_features | table.writer_features]


def _mapped(table: Described, _: Use) -> Iterable[str]:
    mode = table.properties.get("delta.columnMapping.mode", "none")
    return [] if mode == "none" else [f"mode {mode}"]


def _unknown(table: Described, use: Use) -> Iterable[str]:
    known = _PLAIN_FEATURES | _SPARK_FEATURES | _READABLE
    features = table.reader_features if use.role is Role.DIMENSION else table.reader_features | table.writer_features
    return sorted(features - known)


def _unreadable(table: Described, use: Use) -> Iterable[str]:
    read = use.keys or use.role in {Role.DIMENSION, Role.INFERRED}
    return [name for name in _UNREADABLE if name in table.reader_features] if read else []


def _odd_partitions(table: Described, _: Use) -> Iterable[str]:
    return [name for name in table.partition_columns if table.kinds.get(name) not in _PLAIN_PARTITIONS]


def _computed(prefix: str) -> Callable[[Described, Use], Iterable[str]]:
    """Return a test for columns of a type that Spark's writer fills."""
    return lambda table, _: table.columns_with(prefix)


def _computed_but_written(prefix: str) -> Callable[[Described, Use], Iterable[str]]:
    return lambda table, use: [name for name in table.columns_with(prefix) if name in use.written]


def _invariants(table: Described, _: Use) -> Iterable[str]:
    return table.columns_with("delta.invariants")


def _constraints(table: Described, _: Use) -> Iterable[str]:
    return table.constraints


def _uncheckable(table: Described, use: Use) -> Iterable[str]:
    """Return the constraints that cannot be checked row by row before the rows are written."""
    if use.role not in {Role.FACTS, Role.MERGED}:
        return table.constraints
    return [name for name, text in table.constraints.items() if unsupported_part(text, table.schema) is not None]


def _required(table: Described, _: Use) -> Iterable[str]:
    return table.required


def _required_but_absent(table: Described, use: Use) -> Iterable[str]:
    """Return NOT NULL columns that may receive a null that no rule can reject."""
    given = use.written if use.rejects else use.never_null
    return [name for name in table.required if name not in given and name not in table.filled]


def _padded_keys(table: Described, use: Use) -> Iterable[str]:
    texts = {name: str(entries.get(_CHAR, "")) for name, entries in table.column_metadata.items()}
    return [name for name in use.keys if texts.get(name, "").startswith("char(") and name not in use.trimmed]


def _limited_texts(table: Described, _: Use) -> Iterable[str]:
    return table.text_limits()


def _unrejected_texts(table: Described, use: Use) -> Iterable[str]:
    return [] if use.rejects else [name for name in table.text_limits() if name in use.written]


def _float_keys(table: Described, use: Use) -> Iterable[str]:
    return [name for name in use.keys if table.kinds.get(name) in {"float", "double"}]


def _odd_keys(table: Described, use: Use) -> Iterable[str]:
    odd = ("nested", "variant", "interval")
    return [name for name in use.keys if table.kinds.get(name, "").startswith(odd)]


def _text_partitions(table: Described, use: Use) -> Iterable[str]:
    """Return text partition columns of tables whose rows may hold empty texts there, which Delta stores as null."""
    if use.rejects:
        return []
    texts = [name for name in table.partition_columns if table.kinds.get(name) == "string"]
    return [name for name in texts if name in use.written and name not in use.never_null]


_WRITTEN: Final = (Role.INFERRED, Role.FACTS, Role.MERGED, Role.ERRORS, Role.DUPLICATES)
_BY_SPARK: Final = dict.fromkeys(_WRITTEN, Way.SPARK)
_DROP: Final = "drop the feature: ALTER TABLE {table} DROP FEATURE `{first}`"
_REWRITE: Final = (
    "write its rows into a new table without it (CREATE TABLE ... USING delta AS SELECT ...) and name that one"
)


def _refused(reason: str, remedy: str, roles: Iterable[Role] = tuple(Role)) -> dict[Role, Way | Refusal]:
    return dict.fromkeys(roles, Refusal(reason, remedy))


FEATURES: Final[tuple[Feature, ...]] = (
    Feature("partitioning", lambda table, _: table.partition_columns),
    Feature("partitioning by a column of this type", _odd_partitions, dict(_BY_SPARK)),
    Feature(
        "partitioning by text that may be empty",
        _text_partitions,
        _refused(
            "Delta stores an empty text as null in a partition column",
            _REWRITE.replace("without it", "without that partitioning"),
            (Role.ERRORS,),
        ),
    ),
    Feature("column mapping", _mapped, dict(_BY_SPARK)),
    Feature("deletion vectors", _protocol("deletionVectors")),
    Feature("change data feed turned off", lambda table, _: [] if _follows(table) else ["off"]),
    Feature(
        "append-only",
        lambda table, _: [] if table.properties.get("delta.appendOnly") != "true" else ["on"],
        _refused(
            "a merge updates stored rows",
            "use `sink.mode: append`, or allow updates: ALTER TABLE {table} SET TBLPROPERTIES ('delta.appendOnly' = "
            "'false')",
            (Role.MERGED,),
        ),
    ),
    Feature("timestamps without time zone", _protocol("timestampNtz")),
    Feature(
        "type widening or vacuum protocol check",
        _unreadable,
        _refused(
            "its rows cannot be read without Spark", _DROP, (Role.DIMENSION, Role.INFERRED, Role.FACTS, Role.MERGED)
        ),
    ),
    Feature("type widening", _protocol("typeWidening", "typeWidening-preview"), dict(_BY_SPARK)),
    Feature("vacuum protocol check", _protocol("vacuumProtocolCheck"), dict(_BY_SPARK)),
    Feature("v2 checkpoints", _protocol("v2Checkpoint"), dict(_BY_SPARK)),
    Feature("variant columns", _protocol("variantType", "variantType-preview"), dict(_BY_SPARK)),
    Feature("row tracking", _protocol("rowTracking"), dict(_BY_SPARK)),
    Feature("liquid clustering", _protocol("clustering"), dict(_BY_SPARK)),
    Feature("domain metadata", _protocol("domainMetadata"), dict(_BY_SPARK)),
    Feature("in-commit timestamps", _protocol("inCommitTimestamp"), dict(_BY_SPARK)),
    Feature("checkpoint protection", _protocol("checkpointProtection"), dict(_BY_SPARK)),
    Feature("materialized partition columns", _protocol("materializePartitionColumns"), dict(_BY_SPARK)),
    Feature("Iceberg compatibility", _protocol("icebergCompatV1", "icebergCompatV2"), dict(_BY_SPARK)),
    Feature("the column defaults feature", _protocol("allowColumnDefaults"), dict(_BY_SPARK)),
    Feature("the identity columns feature", _protocol("identityColumns"), dict(_BY_SPARK)),
    Feature(
        "a feature that this version of Headrace does not know",
        _unknown,
        _refused("what it asks of readers and writers is not known", _DROP),
    ),
    Feature("default columns", _computed("CURRENT_DEFAULT"), dict(_BY_SPARK)),
    Feature("generated columns", _computed("delta.generationExpression"), dict(_BY_SPARK)),
    Feature(
        "generated columns that the pipeline writes",
        _computed_but_written("delta.generationExpression"),
        _refused("their values come from their expression", "rename the pipeline's column, or " + _REWRITE, _WRITTEN),
    ),
    Feature("identity columns", _computed("delta.identity."), dict(_BY_SPARK)),
    Feature(
        "identity columns that the pipeline writes",
        _computed_but_written("delta.identity."),
        _refused("Delta and Headrace could give one number twice", _REWRITE, _WRITTEN),
    ),
    Feature(
        "column invariants",
        _invariants,
        _refused("a row that breaks one would stop every batch", _REWRITE, _WRITTEN),
    ),
    Feature("CHECK constraints", _constraints, dict(_BY_SPARK)),
    Feature(
        "CHECK constraints that cannot be checked row by row",
        _uncheckable,
        _refused(
            "a row that breaks one would stop every batch; Headrace checks comparisons of columns with numbers, texts "
            "and each other, IN, BETWEEN, IS NULL, AND, OR and NOT for facts",
            "drop the constraint: ALTER TABLE {table} DROP CONSTRAINT `{first}`",
            _WRITTEN,
        ),
    ),
    Feature("NOT NULL columns", _required, dict(_BY_SPARK)),
    Feature(
        "NOT NULL columns that some row would leave null",
        _required_but_absent,
        _refused(
            "that row would stop every batch",
            "allow nulls: ALTER TABLE {table} ALTER COLUMN `{first}` DROP NOT NULL",
            _WRITTEN,
        ),
    ),
    Feature("char or varchar columns", _limited_texts, dict(_BY_SPARK)),
    Feature(
        "char or varchar columns whose length some row could exceed",
        _unrejected_texts,
        _refused(
            "that row would stop every batch",
            "lift the limit: ALTER TABLE {table} ALTER COLUMN `{first}` TYPE STRING",
            (Role.ERRORS,),
        ),
    ),
    Feature(
        "key columns of type char",
        _padded_keys,
        _refused(
            "Delta pads their text with blanks, so no text of the stream would equal it",
            "declare the rule `trim` for the column, or make it text: ALTER TABLE {table} ALTER COLUMN `{first}` TYPE "
            "STRING",
            (Role.DIMENSION, Role.INFERRED, Role.FACTS, Role.MERGED),
        ),
    ),
    Feature(
        "key columns of a float type",
        _float_keys,
        _refused(
            "floats have no exact equality",
            "name other columns, or write its rows into a new table with a decimal, bigint or string column",
            (Role.DIMENSION, Role.INFERRED, Role.FACTS, Role.MERGED),
        ),
    ),
    Feature(
        "key columns of a nested type",
        _odd_keys,
        _refused(
            "they cannot be compared", "name other columns", (Role.DIMENSION, Role.INFERRED, Role.FACTS, Role.MERGED)
        ),
    ),
)


def _follows(table: Described) -> bool:
    return table.properties.get("delta.enableChangeDataFeed") == "true"
