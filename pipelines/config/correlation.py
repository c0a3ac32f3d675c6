"""The pipeline file of a correlation: two or more sources whose rows are joined with each other while they arrive.

Such a file has `sources` and `correlate` in place of `source`. Transformations, lookups and the search for duplicates
apply to the results of the join, as they do to the records of a source. `headrace.pipelines.correlate` runs the join.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence  # noqa: TC003 - pydantic resolves annotations
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import AfterValidator, Field, PrivateAttr, ValidationError, model_validator

from headrace.pipelines.config.column_types import arrow_schema, type_name
from headrace.pipelines.config.model import (
    ColumnPart,
    DimensionConfig,
    DuplicatesConfig,
    Duration,
    Fraction,
    Location,
    LookupConfig,
    Memory,
    Name,
    PipelineConfig,
    SinkConfig,
    SourceConfig,
    SparkConfig,
    Strict,
    TriggerConfig,
    pipeline_of,
    read_document,
)
from headrace.pipelines.config.places import apart, other_files, shared_problems, tables_of_dimensions
from headrace.pipelines.config.problems import DocumentPath, InconsistentError, Places, Problem, describe, described
from headrace.pipelines.config.rules import inconsistencies
from headrace.pipelines.config.transform import TransformStep  # noqa: TC001 - pydantic resolves annotations
from headrace.pipelines.errors import DeltaTableError, PipelineFileError
from headrace.pipelines.paths import (
    DUPLICATES,
    ERRORS,
    RESOLUTIONS,
    anchored,
    beside,
    is_link,
    local_url,
    sqlite_file,
    sqlite_url,
    table_location,
)
from headrace.storage.errors import InputError, nearest
from headrace.storage.units import parse_memory

if TYPE_CHECKING:
    from headrace.pipelines.config.join_plan import JoinPlan

__all__ = [
    "CorrelateConfig",
    "CorrelationConfig",
    "CorrelationSinkConfig",
    "NearConfig",
    "ResultsConfig",
    "columns_of_condition",
    "load_any",
    "load_steps",
]

_OUTER: Final = ("left", "right", "full")
_TWO: Final = 2
_TIMES: Final = ("date", "timestamp", "timestamp_ntz")
PARTITION_TYPES: Final = ("boolean", "tinyint", "smallint", "int", "bigint", "string", "date")


def columns_of_condition(text: str) -> tuple[str, str]:
    """Return the two columns of a condition.

    Raises
    ------
    ValueError
        If the text is not a condition.

    Examples
    --------
    >>> columns_of_condition("orders.id = payments.order")
    ('orders.id', 'payments.order')
    """
    left, equals, right = (part.strip() for part in text.partition("="))
    if not (left and equals and right) or "=" in right:
        raise ValueError(f"{text!r} is not a condition; write it as 'orders.id = payments.order'")
    return left, right


def _condition(text: str) -> str:
    columns_of_condition(text)
    return text


def _inner(how: str) -> str:
    if how in _OUTER:
        raise ValueError(
            f"a {how} join needs the end of a source to know which rows have no match, but a source of a pipeline has "
            "no end; leave `how` out, or join complete files with `headrace correlate --how`"
        )
    if how != "inner":
        raise ValueError(f"{how!r} is not a join type; leave `how` out, since the only one is 'inner'")
    return how


Condition = Annotated[str, AfterValidator(_condition)]


class NearConfig(Strict):
    """A condition between two columns whose values differ by a distance at most."""

    columns: Condition = Field(description="The two columns, such as 'orders.at = payments.at'")
    within: Annotated[str | int | float, Fraction] = Field(
        description="Greatest distance: a number, or between times a duration such as '5m'"
    )


class CorrelateConfig(Strict):
    """The join of the sources with each other."""

    on: list[Condition] = Field(min_length=1, description="Equal columns, such as 'orders.id = payments.order'")
    near: list[NearConfig] = Field(default_factory=list, description="Columns with close values")
    how: Annotated[str, AfterValidator(_inner)] = Field(default="inner", description="Join type; only inner joins")
    lateness: Duration | None = Field(
        default=None,
        description="How far a row's time may be behind the newest of its source; bounds the state if `near` has times",
    )
    shards: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        default=None, description="Into how many parts the keys are divided; one for each core by default"
    )
    state: Location | None = Field(
        default=None, description="Folder for the rows that may still match, which all hosts share; in the checkpoint"
    )


class CorrelationSinkConfig(Strict):
    """The Delta tables that receive the results."""

    path: Location = Field(description="The table of results; relative to this file")
    partition_by: list[str] = Field(default_factory=list)
    errors: Location | None = Field(default=None, description="The error table; <path>_errors by default")
    duplicates: Location | None = Field(
        default=None, description="The table of routed duplicates; <path>_duplicates by default"
    )


class ResultsConfig(SourceConfig):
    """The results of a join as the source of the steps that follow: Parquet files in the state folder."""

    _sources: tuple[SourceConfig, ...] = PrivateAttr(default=())

    @classmethod
    def of(cls, folder: str, columns: Mapping[str, str], sources: Iterable[SourceConfig]) -> ResultsConfig:
        """Return the results of sources; `columns` has the type of each column by name."""
        results = cls.model_validate({"format": "parquet", "path": folder, "schema": dict(columns)})
        results._sources = tuple(sources)  # noqa: SLF001 - an object of this class
        return results

    @property
    def title(self) -> str:
        """What the columns are those of, for messages."""
        return "the result of `correlate`"

    @property
    def named(self) -> str:
        """What the records come from, for messages."""
        return f"sources, {', '.join(source.path for source in self._sources)}"

    @property
    def is_folder(self) -> bool:
        """Whether users put the files there."""
        return False

    def located(self, table: str) -> str:
        """Return where the sources are, relative to a table, in an order that does not depend on their names."""
        return " + ".join(sorted(source.located(table) for source in self._sources))


class CorrelationConfig(Strict):
    """A pipeline that joins the rows of two or more sources with each other."""

    name: Name
    sources: dict[ColumnPart, SourceConfig] = Field(min_length=2, description="The sources by name")
    correlate: CorrelateConfig
    transform: list[TransformStep] = Field(
        default_factory=list, description="Steps between the results of the join and the lookups, in order"
    )
    dimensions: dict[ColumnPart, DimensionConfig] = Field(default_factory=dict)
    lookups: list[LookupConfig] = Field(default_factory=list)
    duplicates: DuplicatesConfig | None = None
    sink: CorrelationSinkConfig
    trigger: TriggerConfig = Field(default_factory=TriggerConfig, description="When a batch starts; limits per source")
    deadline: Duration | None = Field(default=None, description="From the start of a batch until its results are in")
    memory: Memory = Field(
        default="256MiB", description="Budget of one Python worker; with lookups or duplicates, half of it for the join"
    )
    replica_memory: Memory = Field(default="1GiB", description="Budget while a replica is built")
    catalog: str | None = Field(
        default=None,
        description="SQLAlchemy URL of the run catalog, secrets as ${VARIABLE}; by default a SQLite file here",
    )
    checkpoint: Location | None = Field(default=None, description="Folder of the ledgers of loaded files")
    replicas: Location | None = Field(default=None, description="Folder for replicas on each host that joins")
    spark: SparkConfig = Field(default_factory=SparkConfig)
    _places: Places | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _consistent(self) -> CorrelationConfig:
        problems = [*_column_problems(self), *_reload_problems(self), *_lateness_problems(self), *_unit_problems(self)]
        problems = problems or _join_problems(self) or _step_problems(self)
        if problems:
            raise InconsistentError(problems)
        return self

    @property
    def errors_path(self) -> str:
        """Path of the table of rejected rows."""
        return self.sink.errors or beside(self.sink.path, ERRORS)

    @property
    def state_path(self) -> str:
        """Folder of the state."""
        return self.correlate.state or f"{self.checkpoint}/state"

    @property
    def conditions(self) -> list[Any]:
        """Conditions between the sources, as operators of `headrace.joins.streams` take them."""
        from headrace.joins.streams import Near  # noqa: PLC0415 - numba comes in here

        bands = [Near(*columns_of_condition(near.columns), self._distance(near)) for near in self.correlate.near]
        return [*map(columns_of_condition, self.correlate.on), *bands]

    def _distance(self, near: NearConfig) -> str | int | float | Decimal:
        """Return the distance of a condition; between exact numbers a decimal in place of YAML's float."""
        source, _, column = columns_of_condition(near.columns)[0].partition(".")
        inexact = self.sources[source].columns[column] in {"float", "double"}
        return Decimal(str(near.within)) if isinstance(near.within, float) and not inexact else near.within

    @property
    def has_steps(self) -> bool:
        """Whether results go through steps before they are loaded; otherwise they are the facts."""
        return bool(self.transform or self.lookups or self.duplicates)

    @property
    def join_memory(self) -> int:
        """Budget of the join in one worker, in bytes."""
        shared = self.lookups or self.duplicates
        return parse_memory(self.memory) // (2 if shared else 1)

    def plan(self) -> JoinPlan:
        """Return the plan of the joins."""
        from headrace.pipelines.config.join_plan import join_plan  # noqa: PLC0415 - numba comes in here

        return join_plan({name: arrow_schema(each.columns) for name, each in self.sources.items()}, self.conditions)

    def steps(self) -> PipelineConfig:
        """Return what follows the join as a pipeline, whose source is the results of a batch."""
        columns = {field.name: type_name(field.type) for field in self.plan().schema}
        shared = ("name", "transform", "dimensions", "lookups", "duplicates", "trigger", "deadline", "replica_memory",
                  "catalog", "checkpoint", "replicas", "spark")  # fmt: skip
        sink = SinkConfig.model_construct(
            **{name: getattr(self.sink, name) for name in CorrelationSinkConfig.model_fields}
        )
        config = PipelineConfig.model_construct(
            source=ResultsConfig.of(self.state_path, columns, self.sources.values()),
            sink=sink,
            memory=self.join_memory,
            **{name: getattr(self, name) for name in shared},
        )
        config._places = self._places  # noqa: SLF001 - errors that are found later name the line, too
        return config

    def of_source(self, source: str) -> PipelineConfig:
        """Return one source with its own ledger as a pipeline, for the operations on the files of a source."""
        return PipelineConfig.model_construct(
            name=self.name,
            source=self.sources[source],
            sink=SinkConfig(path=self.sink.path, errors=self.errors_path),
            trigger=self.trigger,
            catalog=self.catalog,
            checkpoint=f"{self.checkpoint}/sources/{source}",
            dimensions={},
            lookups=[],
            transform=[],
            duplicates=None,
        )

    def error(self, problems: Sequence[Problem]) -> PipelineFileError:
        """Return the error for problems that were found after the file was read, each with its line."""
        if self._places is None:
            return PipelineFileError("; ".join(problem.text for problem in problems))
        return PipelineFileError(described(problems, self._places))


def load_any(path: str | Path) -> PipelineConfig | CorrelationConfig:
    """Read a pipeline file of either kind. A file with `sources` or `correlate` is a correlation.

    Raises
    ------
    PipelineFileError
        As in `load_pipeline`.
    """
    document, places = read_document(path)
    several = {"sources", "correlate"} & document.keys()
    return _correlation_of(document, places) if several else pipeline_of(document, places)


def load_steps(path: str | Path) -> PipelineConfig:
    """Read a pipeline file of either kind; of one with several sources, return what follows their join.

    Raises
    ------
    PipelineFileError
        As in `load_pipeline`.
    """
    config = load_any(path)
    return config if isinstance(config, PipelineConfig) else config.steps()


def _correlation_of(document: dict[Any, Any], places: Places) -> CorrelationConfig:
    try:
        folder = places.file.parent
        config = _anchored(CorrelationConfig.model_validate(document), folder)
    except ValidationError as error:
        raise PipelineFileError(describe(error, places, CorrelationConfig)) from error
    problems = _place_problems(config, folder)
    if problems:
        raise PipelineFileError(described(problems, places))
    config._places = places  # noqa: SLF001 - errors that are found later name the line, too
    return config


def _anchored(config: CorrelationConfig, folder: Path) -> CorrelationConfig:
    """Return the pipeline with absolute paths, and with the defaults that depend on the folder of the file."""

    def moved(model: Strict, *names: str) -> Any:
        given = {name: anchored(value, folder) for name in names if (value := getattr(model, name)) is not None}
        return model.model_copy(update=given)

    state = folder / ".headrace"
    return config.model_copy(
        update={
            "sources": {name: moved(source, "path").labeled(name) for name, source in config.sources.items()},
            "correlate": moved(config.correlate, "state"),
            "sink": moved(config.sink, "path", "errors", "duplicates"),
            "dimensions": {name: moved(each, "path", "changes") for name, each in config.dimensions.items()},
            "checkpoint": anchored(config.checkpoint or str(state / config.name / "checkpoint"), folder),
            "catalog": local_url(config.catalog, folder) if config.catalog else sqlite_url(state / "catalog.db"),
            "replicas": anchored(config.replicas, folder) if config.replicas is not None else None,
        }
    )


def _place_problems(config: CorrelationConfig, folder: Path) -> list[Problem]:
    """Return locations that cannot hold what they must hold."""
    problems = []
    for location, path in _tables(config).items():
        name = ".".join(map(str, location))
        try:
            table_location(path)
        except DeltaTableError as error:
            problems.append(Problem(location, f"{name}: {error}"))
        if location[0] == "sink" and is_link(path):
            text = f"{name}: the results of `correlate` go to tables on a file system, not to {path}"
            problems.append(Problem(location, f"{text}; name a folder that all hosts share"))
    if is_link(config.state_path):
        text = f"correlate.state: {config.state_path} is not a folder of a file system; name one that all hosts share"
        problems.append(Problem(("correlate", "state"), text))
        return problems
    sources: dict[DocumentPath, str] = {("sources", name, "path"): each.path for name, each in config.sources.items()}
    problems += apart(
        _tables(config), sources | other_files(config.dimensions, config.catalog), config.checkpoint, config.replicas
    )
    problems += shared_problems(config.dimensions, config.lookups)
    overlap = _overlap(config, folder)
    if overlap:
        text = (
            f"correlate.state: the folder {config.state_path} overlaps {overlap}; name a folder that holds nothing else"
        )
        problems.append(Problem(("correlate", "state"), text))
    return problems


def _tables(config: CorrelationConfig) -> dict[DocumentPath, str]:
    """Return the path of each table by its place in the file."""
    tables: dict[DocumentPath, str] = {
        ("sink", "path"): config.sink.path,
        ("sink", "errors"): config.errors_path,
        ("sink", "errors", RESOLUTIONS): beside(config.errors_path, RESOLUTIONS),
    }
    if config.duplicates is not None:
        tables["sink", "duplicates"] = config.sink.duplicates or beside(config.sink.path, DUPLICATES)
    return tables | tables_of_dimensions(config.dimensions)


def _overlap(config: CorrelationConfig, folder: Path) -> str:
    """Return what the state folder may not share a place with; an empty text if there is nothing."""
    state = Path(config.state_path)
    apart = {f"sources.{name}, the folder {source.path}": source.path for name, source in config.sources.items()}
    apart |= {f"{'.'.join(map(str, location))}, the table {path}": path for location, path in _tables(config).items()}
    if config.replicas is not None:
        apart[f"replicas, the folder {config.replicas}"] = config.replicas
    for label, path in apart.items():
        if not is_link(path) and _meet(state, Path(path)):
            return label
    assert config.checkpoint is not None
    checkpoint = Path(config.checkpoint)
    if state != checkpoint / "state" and _meet(state, checkpoint):
        return f"the checkpoint {checkpoint}, in which only {checkpoint / 'state'} is free"
    around = {
        "the folder of the pipeline file": folder.resolve(),
        "the folder of all checkpoints": folder / ".headrace",
    }
    catalog = sqlite_file(config.catalog or "")
    if catalog is not None:
        around[f"the run catalog {catalog}"] = catalog
    return next((label for label, path in around.items() if path.is_relative_to(state)), "")


def _meet(one: Path, other: Path) -> bool:
    return one.is_relative_to(other) or other.is_relative_to(one)


def _column_problems(config: CorrelationConfig) -> list[Problem]:
    """Return reserved column names, and conditions on sources or columns that there are not."""
    problems = [
        Problem(
            ("sources", source, "schema", name),
            f"column {name!r} of source {source!r} begins with '_', which is kept for Headrace",
        )
        for source, declared in config.sources.items()
        for name in declared.columns
        if name[:1] == "_"
    ]
    named: list[tuple[tuple[str | int, ...], str]] = [
        (("correlate", "on", at), text) for at, text in enumerate(config.correlate.on)
    ]
    named += [(("correlate", "near", at, "columns"), near.columns) for at, near in enumerate(config.correlate.near)]
    for location, text in named:
        problems += [
            Problem(location, found) for each in columns_of_condition(text) if (found := _unknown(config, each))
        ]
    return problems


def _unknown(config: CorrelationConfig, text: str) -> str:
    """Return what is wrong with the name of a column in a condition; an empty text if nothing is."""
    source, dot, column = text.partition(".")
    if not dot or source not in config.sources:
        names = list(config.sources)
        return (
            f"{text!r} names no source{nearest(source, names)}; write 'source.column' with one of the sources "
            f"{', '.join(names)}"
        )
    columns = list(config.sources[source].columns)
    if column in columns:
        return ""
    return f"source {source!r} has no column {column!r}{nearest(column, columns)}; it has {', '.join(columns)}"


def _reload_problems(config: CorrelationConfig) -> list[Problem]:
    """Return sources whose changed files would be loaded again, while their earlier rows stay in the results."""
    return [
        Problem(
            ("sources", name, "changed"),
            f"sources.{name}.changed: 'reload' would join the records of a changed file again beside those of before, "
            "so results would come twice; write error or ignore, and deliver new records in new files",
        )
        for name, source in config.sources.items()
        if source.changed == "reload"
    ]


def _unit_problems(config: CorrelationConfig) -> list[Problem]:
    """Return distances between times, and a lateness, that are numbers without a unit. The distance 0 needs none."""
    given: list[tuple[tuple[str | int, ...], float, str]] = []
    for at, near in enumerate(config.correlate.near):
        sides = [text.partition(".")[::2] for text in columns_of_condition(near.columns)]
        types = [config.sources[source].columns.get(column) for source, column in sides if source in config.sources]
        if near.within and not isinstance(near.within, str) and all(kind in _TIMES for kind in types):
            given.append((("correlate", "near", at, "within"), near.within, "d" if "date" in types else "s"))
    lateness = config.correlate.lateness
    if lateness is not None and not isinstance(lateness, str):
        given.append((("correlate", "lateness"), lateness, "s"))
    return [
        Problem(
            location,
            f"{'.'.join(map(str, location))}: {number:g} has no unit, but is compared with times; write a duration "
            f"such as {number:g}{unit} (units: us, ms, s, m, h, d)",
        )
        for location, number, unit in given
    ]


def _lateness_problems(config: CorrelationConfig) -> list[Problem]:
    correlate = config.correlate
    if correlate.lateness is None:
        return []
    if len(config.sources) > _TWO:
        text = "correlate.lateness: the state of more than two sources cannot be bounded; leave it out"
        return [Problem(("correlate", "lateness"), text)]
    if not correlate.near:
        text = (
            "correlate.lateness: only a condition in `near` between times says when a row can match no more; add one, "
            "or leave `lateness` out"
        )
        return [Problem(("correlate", "lateness"), text)]
    return []


def _join_problems(config: CorrelationConfig) -> list[Problem]:
    """Return what the join refuses."""
    try:
        plan = config.plan()
        if config.correlate.lateness is not None:
            plan.stages[0].time_band().ticks(config.correlate.lateness)
    except InputError as error:
        return [Problem(("correlate",), f"correlate: {error}")]
    return []


def _step_problems(config: CorrelationConfig) -> list[Problem]:
    """Return inconsistencies of the steps with the results of the join, or of the table with plain results."""
    if config.has_steps:
        return inconsistencies(config.steps())
    if config.dimensions:
        text = "dimensions: no step uses them; add `lookups`, or leave them out"
        return [Problem(("dimensions",), text)]
    return _partition_problems(config)


def _partition_problems(config: CorrelationConfig) -> list[Problem]:
    """Return partition columns that the results do not have, or whose values a name of a partition does not hold."""
    schema, problems = config.plan().schema, []
    for name in config.sink.partition_by:
        if name not in schema.names:
            text = f"which the results do not have; they have {', '.join(schema.names)}"
        elif (kind := type_name(schema.field(name).type)) not in PARTITION_TYPES:
            text = f"whose type is {kind}; results are partitioned by columns of the types {', '.join(PARTITION_TYPES)}"
        else:
            continue
        problems.append(Problem(("sink", "partition_by"), f"sink.partition_by names {name!r}, {text}"))
    if not problems and len(set(config.sink.partition_by)) == len(schema):
        text = "sink.partition_by names all columns of the results; leave one out, since a file needs a column"
        problems.append(Problem(("sink", "partition_by"), text))
    return problems
