"""The pipeline file: its model, its parser, and its JSON Schema for editors.

Parsing is strict: the error for an unknown or misspelled field gives its position, the valid names and the nearest one.
`headrace.pipelines.config.rules` holds the rules that span several fields.
"""

from __future__ import annotations

import codecs
import datetime as dt
import json
import math
import os
import re
from collections.abc import Sequence  # noqa: TC003 - pydantic resolves annotations
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from headrace.pipelines.config.column_types import canonical
from headrace.pipelines.config.places import apart, other_files, shared_problems, tables_of_dimensions
from headrace.pipelines.config.problems import DocumentPath, InconsistentError, Places, Problem, describe, described
from headrace.pipelines.config.rules import inconsistencies
from headrace.pipelines.config.source_format import fields_for_options, record_format
from headrace.pipelines.config.transform import TransformStep  # noqa: TC001 - pydantic resolves annotations
from headrace.pipelines.errors import DeltaTableError, PipelineFileError, SeveralSourcesError
from headrace.pipelines.paths import (
    DUPLICATES,
    ERRORS,
    RESOLUTIONS,
    anchored,
    beside,
    local_url,
    sqlite_url,
    table_location,
)
from headrace.storage.errors import HeadraceError
from headrace.storage.units import parse_duration, parse_memory

__all__ = [
    "DimensionConfig",
    "DuplicatesConfig",
    "Fraction",
    "HistoryConfig",
    "LookupConfig",
    "ParentConfig",
    "PipelineConfig",
    "SinkConfig",
    "SourceConfig",
    "SparkConfig",
    "SpecialConfig",
    "Strict",
    "TriggerConfig",
    "json_schema",
    "load_pipeline",
    "pipeline_of",
    "read_document",
]

_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"
_COLUMN_PART = r"^[A-Za-z0-9_][A-Za-z0-9_-]*$"
_ENVIRONMENT = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_FRACTION = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?")
_PASSWORD = re.compile(r"^[^:/]+://[^:/@]*:([^@]*)@")


def _checked(parse: Any) -> Any:
    """Return a validator that keeps the text if `parse` accepts it."""

    def validate(value: Any) -> Any:
        try:
            parse(value)
        except HeadraceError as error:
            raise ValueError(str(error)) from error
        return value

    return validate


def _number(value: Any) -> Any:
    """Return a fraction that is given as text, such as 1.50, as a number; anything else as it is."""
    return float(value) if isinstance(value, str) and _FRACTION.fullmatch(value) else value


def _zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(f"unknown time zone {name!r}; write a name such as 'UTC' or 'America/New_York'") from error
    return name


def _encoding(name: str) -> str:
    try:
        codecs.lookup(name)
    except (LookupError, ValueError) as error:
        raise ValueError(
            f"unknown encoding {name!r}; write a name such as 'utf-8', 'windows-1252' or 'utf-16'"
        ) from error
    return name


Name = Annotated[str, Field(pattern=_NAME, max_length=64)]
ColumnPart = Annotated[str, Field(pattern=_COLUMN_PART, max_length=64)]
Memory = Annotated[str | int, AfterValidator(_checked(parse_memory))]
Fraction = BeforeValidator(_number)
Duration = Annotated[str | float, Fraction, AfterValidator(_checked(parse_duration))]
ColumnType = Annotated[str, AfterValidator(_checked(canonical))]
Encoding = Annotated[str, AfterValidator(_encoding)]
Character = Annotated[str, Field(min_length=1, max_length=1)]
TimeZone = Annotated[str, AfterValidator(_zone)]
Location = Annotated[str, Field(min_length=1)]
MissingFields = Annotated[
    Literal["error", "null"],
    BeforeValidator(lambda value: "null" if value is None else value),  # YAML reads null without quotes as None
    WithJsonSchema({"enum": ["error", "null", None]}),
]
Target = Literal["unknown", "not_applicable", "invalid", "reject"]
SpecialValues = dict[str, str | bool | int | float | dt.datetime | dt.date | None]
Columns = Annotated[list[str], Field(min_length=1)]


class Strict(BaseModel):
    """Base of all parts of a pipeline file: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceConfig(Strict):
    """Where the stream comes from: a folder that receives files."""

    format: Literal["csv", "json", "parquet"]
    path: Location = Field(description="Folder that receives the files; relative to this file")
    columns: dict[str, ColumnType] = Field(alias="schema", min_length=1, description="Name and type of each column")
    files: str | None = Field(default=None, description="Pattern that file names must match, such as '*.csv'")
    recursive: bool = Field(default=False, description="Whether the files of subfolders are loaded too")
    changed: Literal["error", "reload", "ignore"] = Field(
        default="error", description="What happens when a file changes after it was loaded"
    )
    header: bool = Field(default=True, description="Whether the first record of a CSV names its columns")
    delimiter: Character = Field(default=",", description="Between the fields of a CSV")
    quote: Character | Literal[""] = Field(default='"', description="Around fields of a CSV; empty for none")
    escape: Character | None = Field(
        default=None, description="Before a quote within a quoted field; by default a quote is doubled"
    )
    nulls: list[str] = Field(
        default_factory=list, description="Spellings of null in a CSV, in addition to the empty field"
    )
    encoding: Encoding = Field(default="utf-8", description="Of text, as Python names it: 'utf-8', 'windows-1252'")
    decimal: Literal[".", ","] = Field(default=".", description="Between the whole and the fraction of a number")
    date_format: str | None = Field(default=None, description="Pattern of dates, such as '%d.%m.%Y'; ISO by default")
    timestamp_format: str | None = Field(
        default=None, description="Pattern of timestamps, such as '%d.%m.%Y %H:%M:%S'; ISO by default"
    )
    time_zone: TimeZone = Field(default="UTC", description="Zone of times that name none")
    ambiguous_time: Literal["reject", "earlier", "later"] = Field(
        default="reject", description="What happens to a local time that occurs twice when clocks are set back"
    )
    unknown_fields: Literal["error", "ignore"] | None = Field(
        default=None,
        description="Columns and fields that the schema does not have; by default an error, but ignored in Parquet",
    )
    missing_fields: MissingFields = Field(
        default="error", description="Columns and fields of the schema that are not there"
    )
    options: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="Options of Spark's reader that earlier releases took; use the fields instead"
    )
    _label: str | None = PrivateAttr(default=None)

    @property
    def label(self) -> str | None:
        """Name of the source in a pipeline with several; None in a pipeline with one."""
        return self._label

    @property
    def place(self) -> str:
        """Where the source is in the pipeline file."""
        return "source" if self._label is None else f"sources.{self._label}"

    @property
    def title(self) -> str:
        """What the columns are those of, for messages."""
        return "the source's schema"

    @property
    def named(self) -> str:
        """What the records come from, for messages."""
        return f"source, {self.path}"

    @property
    def is_folder(self) -> bool:
        """Whether the records are those of files that users put into a folder, which `headrace source` knows."""
        return True

    def located(self, table: str) -> str:
        """Return the path of the folder relative to a table, and the pattern of its files."""
        folder = self.path if "://" in table else os.path.relpath(self.path, table)
        return f"{folder}/{self.files or '*'}"

    def labeled(self, label: str) -> SourceConfig:
        """Return the source with its name in a pipeline with several."""
        source = self.model_copy()
        source._label = label  # noqa: SLF001 - a copy of the same class
        return source

    @model_validator(mode="before")
    @classmethod
    def _without_options(cls, document: Any) -> Any:
        return fields_for_options(document)

    @model_validator(mode="after")
    def _readable(self) -> SourceConfig:
        record_format(self)
        return self


class ParentConfig(Strict):
    """A dimension that the members of this one refer to, and whose new versions give them new versions."""

    dimension: ColumnPart = Field(description="The parent, a dimension with history in this file")
    on: dict[str, str] = Field(
        min_length=1, description="Natural key column of the parent for each attribute that refers to it"
    )
    carry: dict[str, str] = Field(
        min_length=1,
        description="Column of the parent's versions for each attribute that repeats it; changes do not give these",
    )
    audit: dict[str, str] = Field(
        default_factory=dict,
        description="The same for audit attributes of versions that only a version of the parent opens",
    )


class HistoryConfig(Strict):
    """What becomes of a member's earlier values; the fields are those of `headrace.etl.history.History`."""

    effective: str = Field(description="Column of the changes from whose value on a change is valid")
    effective_type: ColumnType = Field(default="timestamp", description="Its type: date, timestamp or timestamp_ntz")
    by_day: bool = Field(default=False, description="Versions begin on whole days, although the changes have times")
    sequence: str | None = Field(
        default=None, description="Column that decides between changes of one time: the greatest value wins"
    )
    sequence_type: ColumnType = Field(default="bigint", description="Type of the column `sequence`")
    operation: str | None = Field(default=None, description="Column that says whether a change is a delete")
    upserts: Columns | None = Field(default=None, description="Values of `operation` for inserts and updates")
    deletes: Columns | None = Field(default=None, description="Values of `operation` for deletes")
    partial: str | None = Field(
        default=None,
        description="Column that lists the attributes that a change gives, separated by commas; the others are kept",
    )
    parents: list[ParentConfig] = Field(
        default_factory=list, description="Dimensions whose new versions give the members of this one new versions"
    )
    type_0: list[str] = Field(default_factory=list, description="Attributes that keep their first value")
    type_1: list[str] = Field(default_factory=list, description="Attributes whose newest value is in all versions")
    type_1_current: list[str] = Field(
        default_factory=list, description="Attributes that are overwritten in the version that a change falls into"
    )
    type_2: list[str] | None = Field(
        default=None, description="Attributes whose changes open a version; by default all that no other type names"
    )
    audit: list[str] = Field(
        default_factory=list, description="Attributes of the change that opened a version; never compared"
    )
    valid_from: str = Field(default="valid_from", description="Name of the column with the start of a version")
    valid_to: str = Field(default="valid_to", description="Name of the column with the end of a version, exclusive")
    is_current: str = Field(default="is_current", description="Name of the column that marks the current version")
    version: str = Field(default="version", description="Name of the column that numbers the versions of a member")
    is_deleted: str = Field(default="is_deleted", description="Name of the column that marks deleted versions")
    end: date | None = Field(default=None, description="End of the current version, such as 9999-12-31; null if absent")


class SpecialConfig(Strict):
    """Special members of a dimension, each with the values of its attributes; the others are null."""

    unknown: SpecialValues = Field(default_factory=dict, description="Member -1, which every dimension has")
    not_applicable: SpecialValues | None = Field(default=None, description="Member -2; none by default")
    invalid: SpecialValues | None = Field(default=None, description="Member -3; none by default")


class DimensionConfig(Strict):
    """A dimension: a Delta table that analysts query."""

    path: Location = Field(description="The Delta table; relative to this file")
    natural_key: Columns = Field(description="Columns that name a member in the source")
    surrogate_key: str | None = Field(default=None, description="The warehouse's own key; <dimension>_key by default")
    columns: dict[str, ColumnType] | None = Field(
        default=None, description="Columns with types; when given, a missing table is created with them"
    )
    rules: dict[str, list[Literal["trim", "casefold", "nfc", "nfkc", "blank", "convert"]]] = Field(
        default_factory=dict, description="Normalisation of natural key columns before they are compared"
    )
    special: SpecialConfig = Field(
        default_factory=SpecialConfig, description="Members for facts without a usable key, and their attributes"
    )
    shards: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        default=None, description="Into how many parts the keys are divided; one for each core by default"
    )
    history: HistoryConfig | None = Field(
        default=None, description="One row for each version of a member; without it one row for each member"
    )
    changes: Location | None = Field(
        default=None, description="Folder with files of changes, which a run applies before each batch of facts"
    )


class LookupConfig(Strict):
    """One role of a dimension in the stream."""

    dimension: str
    role: ColumnPart = Field(description="Names the column <role>_key; unique in a pipeline")
    on: dict[str, str] = Field(min_length=1, description="Natural key column for each stream column")
    policy: Literal["infer", "unknown", "reject", "fail"] = Field(
        default="unknown", description="What happens to a key that is not in the dimension"
    )
    null_key: Target = Field(default="unknown", description="Special member of facts whose key is null, or reject")
    unfit_key: Target | None = Field(
        default=None, description="The same for a value that no key can equal; by default the policy decides"
    )
    carry: list[str] = Field(default_factory=list, description="Attributes that facts take along as <role>_<attribute>")
    event_time: str | None = Field(
        default=None,
        description="Time of the fact, for a dimension with history; the current version counts by default",
    )
    before_first: Literal["first", "unknown", "not_applicable", "invalid", "reject"] = Field(
        default="first", description="Where a fact goes that is older than the first version of its member"
    )
    null_time: Literal["current", "unknown", "not_applicable", "invalid", "reject"] = Field(
        default="unknown", description="Where a fact without event time goes"
    )


class DuplicatesConfig(Strict):
    """The declared key of the stream's records, and what becomes of a record that repeats one."""

    key: Columns
    action: Literal["drop", "flag", "route"] = "drop"
    order_by: list[str] = Field(default_factory=list, description="Of rows with one key the first by these is kept")
    shards: Annotated[int, Field(ge=1, le=4096)] | None = None


class SinkConfig(Strict):
    """The Delta tables that receive the result."""

    path: Location = Field(description="The fact table; relative to this file")
    partition_by: list[str] = Field(default_factory=list)
    errors: Location | None = Field(default=None, description="The error table; <path>_errors by default")
    duplicates: Location | None = Field(
        default=None, description="The table of routed duplicates; <path>_duplicates by default"
    )
    mode: Literal["append", "merge"] = Field(
        default="append", description="Whether a fact whose key is in the table updates the stored row"
    )
    key: list[str] = Field(default_factory=list, description="Columns that identify a fact in a merge")
    order_by: list[str] = Field(
        default_factory=list, description="Of records with one key, the last by these columns wins"
    )
    update: list[str] = Field(default_factory=list, description="Columns that a merge updates; by default all")
    keep: list[str] = Field(default_factory=list, description="Columns that keep the first record's values")
    nulls: Literal["overwrite", "keep"] = Field(
        default="overwrite", description="Whether a later null overwrites a stored value"
    )
    audit: bool = Field(default=False, description="Facts say where they came from: _file, _batch and _loaded_at")


class TriggerConfig(Strict):
    """When a micro-batch starts and how much it takes."""

    max_files: Annotated[int, Field(ge=1)] = Field(default=100, description="Files in a batch")
    max_bytes: Memory | None = Field(default=None, description="Bytes of files in a batch, which has one file at least")
    interval: Duration = Field(default="1s", description="Least time from the start of one batch to the next")


class SparkConfig(Strict):
    """How Spark is started when it is not running already."""

    master: str | None = None
    conf: dict[str, str | int | float | bool] = Field(default_factory=dict)


class PipelineConfig(Strict):
    """A pipeline: one stream, its lookups and the tables it loads."""

    name: Name
    source: SourceConfig
    transform: list[TransformStep] = Field(
        default_factory=list, description="Steps between the source and the lookups, in order"
    )
    dimensions: dict[ColumnPart, DimensionConfig] = Field(default_factory=dict)
    lookups: list[LookupConfig] = Field(default_factory=list)
    duplicates: DuplicatesConfig | None = None
    sink: SinkConfig
    trigger: TriggerConfig = Field(default_factory=TriggerConfig)
    deadline: Duration | None = Field(default=None, description="From the start of a batch until its facts are in")
    memory: Memory = Field(default="64MiB", description="Budget of all joins in one Python worker")
    replica_memory: Memory = Field(default="1GiB", description="Budget while a replica is built")
    catalog: str | None = Field(
        default=None,
        description="SQLAlchemy URL of the run catalog, secrets as ${VARIABLE}; by default a SQLite file here",
    )
    checkpoint: Location | None = Field(default=None, description="Folder of the ledger of loaded files")
    replicas: Location | None = Field(default=None, description="Folder for replicas on each host that joins")
    spark: SparkConfig = Field(default_factory=SparkConfig)
    _places: Places | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _consistent(self) -> PipelineConfig:
        problems = inconsistencies(self)
        if problems:
            raise InconsistentError(problems)
        return self

    def surrogate_key(self, dimension: str) -> str:
        """Return the surrogate key column of a dimension."""
        return self.dimensions[dimension].surrogate_key or f"{dimension}_key"

    @property
    def folder(self) -> Path | None:
        """Folder of the pipeline file; None for a configuration that was not read from a file."""
        return None if self._places is None else self._places.file.parent

    def error(self, problems: Sequence[Problem]) -> PipelineFileError:
        """Return the error for problems that were found after the file was read, each with its line."""
        if self._places is None:
            return PipelineFileError("; ".join(problem.text for problem in problems))
        return PipelineFileError(described(problems, self._places))

    @property
    def errors_path(self) -> str:
        """Path of the table of rejected rows."""
        return self.sink.errors or beside(self.sink.path, ERRORS)

    @property
    def resolutions_path(self) -> str:
        """Path of the table that says which rejected rows were retried or dismissed."""
        return beside(self.errors_path, RESOLUTIONS)

    @property
    def duplicates_path(self) -> str:
        """Path of the table of routed duplicates."""
        return self.sink.duplicates or beside(self.sink.path, DUPLICATES)


def load_pipeline(path: str | Path) -> PipelineConfig:
    """Read a pipeline file.

    Parameters
    ----------
    path
        Path of a YAML file. Relative paths in the file are relative to its folder.

    Raises
    ------
    PipelineFileError
        If the file cannot be read, is not YAML, or has invalid content. The message lists every problem by position.
    """
    document, places = read_document(path)
    if "sources" in document:
        raise SeveralSourcesError(f"{path} has several sources, and this works for pipelines with one source only")
    return pipeline_of(document, places)


def pipeline_of(document: dict[Any, Any], places: Places) -> PipelineConfig:
    """Return the pipeline that a document of `read_document` describes; errors are those of `load_pipeline`."""
    try:
        config = PipelineConfig.model_validate(document)
    except ValidationError as error:
        raise PipelineFileError(describe(error, places, PipelineConfig)) from error
    anchored_config = _anchored(config, places.file.parent)
    _refuse_odd_tables(anchored_config, places)
    anchored_config._places = places  # noqa: SLF001 - errors that are found later name the line, too
    return anchored_config


def read_document(path: str | Path) -> tuple[dict[Any, Any], Places]:
    """Return the document of a pipeline file, with environment variables substituted, and the places of its nodes.

    Raises
    ------
    PipelineFileError
        If the file cannot be read, is not YAML, or uses an environment variable that is not set.
    """
    file = _absolute(path)
    try:
        parsed, places = _parsed(file)
        _refuse_plain_secret(parsed.get("catalog"), places)
        return _substituted(parsed, places), places
    except RecursionError as error:
        raise PipelineFileError(f"{file} is nested too deeply, or a part of it holds itself; write it flat") from error


def json_schema() -> str:
    """Return the JSON Schema of a pipeline file as text. The package ships it as `pipeline.schema.json`."""
    from headrace.pipelines.config.correlation import CorrelationConfig  # noqa: PLC0415 - it imports this module

    schema = TypeAdapter(PipelineConfig | CorrelationConfig).json_schema(by_alias=True)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


def _absolute(path: str | Path) -> Path:
    try:
        return Path(path).absolute()
    except FileNotFoundError as error:
        raise PipelineFileError(
            f"the current folder has been removed, so {path} names no file; change to another folder, or name the "
            "pipeline file from the root"
        ) from error


def _parsed(file: Path) -> tuple[dict[Any, Any], Places]:
    """Return the document of a file, and the positions of its nodes."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise PipelineFileError(
            f"there is no pipeline file {file}; correct the path, or write one with `headrace init`"
        ) from error
    except IsADirectoryError as error:
        raise PipelineFileError(f"{file} is a folder; name the pipeline file in it, such as pipeline.yml") from error
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineFileError(f"the pipeline file {file} cannot be read: {error}") from error
    try:
        document, root = _loaded(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        reason = "; ".join(filter(None, (error.problem, error.context)))
        raise PipelineFileError(f"{file}{where}: the file is not valid YAML: {reason}") from error
    except yaml.YAMLError as error:
        raise PipelineFileError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise PipelineFileError(f"{file} holds no pipeline; it begins with 'name:' and 'source:'")
    return document, Places(file, root)


def _loaded(text: str) -> tuple[Any, yaml.Node | None]:
    loader = _Document(text)
    try:
        root = loader.get_single_node()
        return (None if root is None else loader.construct_document(root)), root
    finally:
        loader.dispose()


class _Document(yaml.SafeLoader):
    """Safe YAML loader that rejects repeated keys (the last would silently win), and keeps what is written.

    YAML 1.1 reads `on` as true, 0x1F as 31, 010 as 8, 12:30:45 as 45045 and 1.50 as 1.5. Here they stay text: a plain
    scalar is a number only if the number is written in the same way. Fields for numbers parse the text.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                mark = key_node.start_mark
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_fraction(self, node: yaml.ScalarNode) -> float | str:
        """Return a number, or the text of a scalar that the number would not be written as."""
        number = float(self.construct_yaml_float(node))
        return number if str(number) == node.value or not math.isfinite(number) else str(node.value)


_TAG = "tag:yaml.org,2002:"
_Document.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in {f"{_TAG}bool", f"{_TAG}int", f"{_TAG}value"}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Document.add_implicit_resolver(f"{_TAG}bool", re.compile(r"^(?:true|false|True|False)$"), list("tTfF"))
_Document.add_implicit_resolver(f"{_TAG}int", re.compile(r"^(?:0|-?[1-9][0-9]*)$"), list("-0123456789"))
_Document.add_constructor(f"{_TAG}float", _Document.construct_fraction)


def _refuse_plain_secret(url: Any, places: Places) -> None:
    """Raise an error if the catalog URL holds a password as plain text."""
    match = _PASSWORD.match(url) if isinstance(url, str) else None
    if match is not None and _ENVIRONMENT.fullmatch(match[1]) is None:
        text = "catalog: the URL holds a password; write ${VARIABLE} instead, and set that in the environment"
        raise PipelineFileError(described([Problem(("catalog",), text)], places))


def _substituted(value: Any, places: Places, location: DocumentPath = ()) -> Any:
    """Return the document with each ${VARIABLE} replaced by the value of the environment variable."""
    if isinstance(value, dict):
        return {key: _substituted(item, places, (*location, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_substituted(item, places, (*location, at)) for at, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            text = f"the file uses ${{{match[1]}}}, but the environment has no variable {match[1]}; set it"
            raise PipelineFileError(described([Problem(location, text)], places))
        return os.environ[match[1]]

    return _ENVIRONMENT.sub(replace, value)


def _anchored(config: PipelineConfig, folder: Path) -> PipelineConfig:
    """Return the pipeline with absolute paths, and with the defaults that depend on the folder of the file."""

    def moved(model: Strict, *names: str) -> Any:
        given = {name: anchored(value, folder) for name in names if (value := getattr(model, name)) is not None}
        return model.model_copy(update=given)

    state = folder / ".headrace"
    return config.model_copy(
        update={
            "source": moved(config.source, "path"),
            "sink": moved(config.sink, "path", "errors", "duplicates"),
            "dimensions": {name: moved(dimension, "path", "changes") for name, dimension in config.dimensions.items()},
            "checkpoint": anchored(config.checkpoint or str(state / config.name / "checkpoint"), folder),
            "catalog": local_url(config.catalog, folder) if config.catalog else sqlite_url(state / "catalog.db"),
            "replicas": anchored(config.replicas, folder) if config.replicas is not None else None,
        }
    )


def _refuse_odd_tables(config: PipelineConfig, places: Places) -> None:
    """Raise an error before anything is written if tables meet, or if `deltalake` would take another path for one."""
    tables = tables_of_dimensions(config.dimensions)
    tables["sink", "path"] = config.sink.path
    tables["sink", "errors"] = config.errors_path
    tables["sink", "errors", RESOLUTIONS] = config.resolutions_path
    tables["sink", "duplicates"] = config.duplicates_path
    problems = []
    for location, path in tables.items():
        try:
            table_location(path)
        except DeltaTableError as error:
            problems.append(Problem(location, f"{'.'.join(map(str, location))}: {error}"))
    files: dict[DocumentPath, str] = {("source", "path"): config.source.path}
    problems += apart(
        tables, files | other_files(config.dimensions, config.catalog), config.checkpoint, config.replicas
    )
    problems += shared_problems(config.dimensions, config.lookups)
    if problems:
        raise PipelineFileError(described(problems[:1], places))
