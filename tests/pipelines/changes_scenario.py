"""What tests of applied changes share: a pipeline whose dimension has a history, and its tables as rows."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from headrace.etl.history import violations
from headrace.pipelines.changes.engines import LocalEngine
from headrace.pipelines.changes.protocol import ApplyProtocol
from headrace.pipelines.changes.sources import change_columns, change_source
from headrace.pipelines.changes.targets import ChangeTarget, prepare_target
from headrace.pipelines.config.model import DimensionConfig, PipelineConfig, SinkConfig, SourceConfig
from headrace.pipelines.delta.tables import DeltaHandle, open_table, read_rows
from headrace.pipelines.history.layout import delta_schema, entries_of
from headrace.pipelines.source.discovery import examine


def config_for(history, folder, shards=2):
    """Return a pipeline with one dimension, for a history that a test declares itself."""
    source = SourceConfig(format="parquet", path=str(folder), schema={"id": "bigint"})
    dimension = DimensionConfig(
        path=str(folder / "dim"), natural_key=list(history.dimension.natural_key), shards=shards
    )
    name = history.dimension.name
    return PipelineConfig.model_construct(
        name="test", source=source, dimensions={name: dimension}, lookups=[], duplicates=None,
        sink=SinkConfig(path=str(folder / "facts")), memory="64MiB", replica_memory="64MiB",
        replicas=str(folder / "replicas"), checkpoint=str(folder / "checkpoint"),
    )  # fmt: skip


class DeltaDimension:
    """A dimension with history in Delta, to which tables of changes are applied as Parquet files."""

    def __init__(self, history, folder, engine=None, shards=2):
        self.history = history
        self.folder = Path(folder)
        self.changes = self.folder / "changes"
        self.changes.mkdir(parents=True)
        self.config = config_for(history, self.folder, shards)
        self.engine = engine or LocalEngine(str(self.folder / "replicas"), cores=2)
        self.path = self.config.dimensions[history.dimension.name].path
        (self.changes / "none.parquet").touch()
        source = change_source(self.config, change_columns(history), self.changes)
        self.target = ChangeTarget(self.config, history.dimension.name, history, source)
        (self.changes / "none.parquet").unlink()
        prepare_target(self.target)
        self.batch = -1

    def protocol(self, **options):
        return ApplyProtocol(self.target, self.engine, **options)

    def write(self, table):
        """Write changes as the next file, and return it."""
        name = f"{self.batch + 1}.parquet"
        kinds = change_columns(self.history)
        columns = {name: table.column(name).cast(kind) for name, kind in kinds.items() if name in table.column_names}
        pq.write_table(pa.table(columns), self.changes / name)
        return examine(str(self.changes), name)

    def apply(self, table, **options):
        file = self.write(table)
        self.batch += 1
        return self.protocol(**options).run_batch([file], self.batch, "stream")

    def rows(self):
        schema = delta_schema(self.history)
        return read_rows(self.path, open_table(self.path).version(), schema.names).read_all().cast(schema)

    def versions(self):
        return self.rows().select(self.history.version_schema.names).cast(self.history.version_schema)

    def entries(self):
        return entries_of(self.history, self.rows())

    def moved(self):
        return DeltaTable(self.path + "_moved").to_pyarrow_table()

    def errors(self):
        return DeltaTable(self.path + "_errors").to_pyarrow_table().to_pylist()

    def greatest_key(self):
        handle = DeltaHandle(self.path)
        handle.latest()
        return handle.greatest_key(self.history.dimension.surrogate_key)

    def violations(self):
        entries = self.entries()
        heads = entries.filter(pa.compute.equal(entries.column("_at"), entries.column(self.history.valid_from)))
        return violations(
            self.history, entries, heads.filter(heads.column(self.history.is_current)), self.greatest_key()
        )
