"""Check of facts against a dimension with history.

The key of a fact must be that of the version of its member that was valid at its time, and what the fact carries must
be what the version has. Two kinds of facts are no fault, since a restatement leaves them as they are; they are counted
apart: facts that a late change made older than the first version of their member, and that a lookup would reject now,
and facts with the unknown member whose member was added later.

Versions and facts are read once into a DuckDB file on the local disk, so memory is bounded. Only facts of the given
pipeline are checked. Columns that date a version change without the facts, so they are not compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from headrace.etl import UNKNOWN_KEY
from headrace.etl.history.instants import to_instants
from headrace.etl.history.values import single
from headrace.etl.ranking import key_text
from headrace.pipelines.config.merge import mixed_lookup
from headrace.pipelines.delta.reads import scan_table
from headrace.pipelines.delta.scratch import load_rows
from headrace.pipelines.delta.tables import has_table, open_table
from headrace.pipelines.dimension.check import Finding, came_before

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltalake import DeltaTable
    from duckdb import DuckDBPyConnection

    from headrace.etl.history import History
    from headrace.pipelines.config.model import LookupConfig, PipelineConfig

__all__ = ["RESTATE", "fact_findings"]

RESTATE: Final = "headrace dimension restate; facts that it does not correct have to be loaded again"
_EXAMPLES: Final = 10


def fact_findings(
    connection: DuckDBPyConnection, config: PipelineConfig, history: History, versions: DeltaTable
) -> Iterator[Finding]:
    """Yield the rules that facts violate.

    Parameters
    ----------
    connection
        Connection with a file on the local disk.
    config
        Configuration of the pipeline whose facts are checked.
    history
        Declaration of the dimension.
    versions
        Its Delta table.
    """
    lookups = [item for item in config.lookups if item.dimension == history.dimension.name]
    if not lookups or not has_table(config.sink.path):
        return
    _load_versions(connection, history, versions)
    facts = open_table(config.sink.path)
    there = {field.name for field in facts.schema().fields}
    for item in lookups:
        role = _Role(config, history, item)
        if set(role.columns) <= there:
            role.load(connection, facts)
            yield from role.findings(connection)


def _load_versions(connection: DuckDBPyConnection, history: History, table: DeltaTable) -> None:
    """Read the versions: `key`, natural key `k0`, ..., bounds, and the attributes `a_<name>`."""
    dimension = history.dimension
    source = [dimension.surrogate_key, *dimension.natural_key, history.valid_from, history.valid_to]
    source += [history.is_current, history.version, *dimension.attributes.names]
    names = ["key", *(f"k{place}" for place in range(len(dimension.natural_key)))]
    names += ["since", "until", "is_current", "version", *(f"a_{name}" for name in dimension.attributes.names)]
    kinds = {field.name: field.type for field in history.version_schema}
    schema = pa.schema([(name, kinds[column]) for name, column in zip(names, source, strict=True)])
    batches = scan_table(table, source)
    load_rows(connection, "versions", schema, (each.rename_columns(names).cast(schema) for each in batches))


class _Role:
    """The facts of one lookup."""

    def __init__(self, config: PipelineConfig, history: History, item: LookupConfig) -> None:
        self._config = config
        self._history = history
        self._item = item
        self._mixed = mixed_lookup(config, item) is not None
        self._leaves_early = item.event_time is not None and item.before_first == "reject" and not self._mixed
        by_key = {key: column for column, key in item.on.items()}
        self._key = [f"k{place}" for place in range(len(history.dimension.natural_key))]
        self._on = [by_key[name] for name in history.dimension.natural_key]
        attributes = history.dimension.attributes.names
        self._carried = [] if self._mixed else [name for name in item.carry if name in attributes]

    @property
    def columns(self) -> list[str]:
        """Columns of the facts that the check reads."""
        time = [] if self._item.event_time is None else [self._item.event_time]
        carried = [f"{self._item.role}_{name}" for name in self._carried]
        return list(dict.fromkeys([f"{self._item.role}_key", *self._on, *time, *carried]))

    def load(self, connection: DuckDBPyConnection, table: DeltaTable) -> None:
        """Read the facts with the key of a version: `key`, natural key, time, and what they carry; each once.

        `left_as_is` says whether the policy of the lookup leaves the fact as it is. Facts with the unknown member go to
        a table of their own, `unknown`.
        """
        history = self._history
        kinds = {field.name: field.type for field in history.version_schema}
        keys = [(name, field.type) for name, field in zip(self._key, history.dimension.key_schema, strict=True)]
        carried = [(f"a_{name}", kinds[name]) for name in self._carried]
        schema = pa.schema([("key", pa.int64()), *keys, ("time", history.instant_type), *carried])
        load_rows(connection, "facts", schema, (self._row(each, schema) for each in scan_table(table, self.columns)))
        key = ", ".join(self._key)
        connection.execute(
            f"CREATE OR REPLACE TABLE unknown AS SELECT {key}, time, count(*) AS n FROM facts "
            f"WHERE key = {UNKNOWN_KEY} GROUP BY ALL"
        )
        early = "coalesce(time < born, false)" if self._leaves_early else "false"
        connection.execute(
            f"CREATE OR REPLACE TABLE facts AS SELECT facts.*, {early} AS left_as_is, count(*) AS n FROM facts "
            f"LEFT JOIN (SELECT {key}, min(since) AS born FROM versions WHERE key > 0 GROUP BY ALL) USING ({key}) "
            "WHERE key > 0 GROUP BY ALL"
        )

    def _row(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        item, history = self._item, self._history
        conformed = history.dimension.conform_key([batch.column(name) for name in self._on])
        time = pa.nulls(batch.num_rows, history.instant_type)
        if item.event_time is not None:
            time = to_instants(batch.column(item.event_time), history.instant_type, item.event_time)
        carried = [batch.column(f"{item.role}_{name}") for name in self._carried]
        columns = [batch.column(f"{item.role}_key"), *(key.values for key in conformed), time, *carried]
        return pa.RecordBatch.from_arrays(
            [single(each).cast(field.type) for each, field in zip(columns, schema, strict=True)], schema=schema
        )

    def findings(self, connection: DuckDBPyConnection) -> Iterator[Finding]:
        """Yield the rules that the facts violate, and the facts that the policy of the lookup leaves as they are."""
        for rule, query in self._rules().items():
            yield from self._found(connection, rule, query)
        left = f"facts of role {self._item.role} are older than the first version of their member, and are left as is"
        yield from self._found(connection, left, "FROM facts f WHERE f.left_as_is", allowed=True)
        if not self._mixed:
            found = f"FROM unknown f WHERE EXISTS (FROM versions v WHERE v.key > 0 AND {self._would_find()})"
            yield from self._found(connection, came_before(self._item.role), found, allowed=True)

    def _would_find(self) -> str:
        """Return the condition that the lookup finds version `v` for fact `f` now."""
        item = self._item
        same = " AND ".join(f"v.{name} = f.{name}" for name in self._key)
        if item.event_time is None:
            return f"{same} AND v.is_current"
        times = ["f.time >= v.since AND (v.is_current OR f.time < v.until)"]
        times += ["f.time < v.since AND v.version = 1"] if item.before_first == "first" else []
        times += ["f.time IS NULL AND v.is_current"] if item.null_time == "current" else []
        return f"{same} AND ({' OR '.join(f'({each})' for each in times)})"

    def _rules(self) -> dict[str, str]:
        """Return each rule, and the query for the facts that violate it."""
        role = f"facts of role {self._item.role}"
        other = " OR ".join(f"v.{name} IS DISTINCT FROM f.{name}" for name in self._key)
        met, kept = "FROM facts f JOIN versions v USING (key)", "NOT f.left_as_is"
        rules = {f"{role} have the key of a version": f"FROM facts f ANTI JOIN versions v USING (key) WHERE {kept}"}
        if not self._mixed:  # else the key was not looked up by the other columns of the fact
            rules[f"{role} have the key of a version of their member"] = f"{met} WHERE {other}"
        if not self._mixed and self._item.event_time is not None:
            early = "v.version = 1 AND f.time < v.since" if self._item.before_first == "first" else "false"
            inside = "f.time >= v.since AND (v.is_current OR f.time < v.until)"
            wrong = f"f.time IS NOT NULL AND NOT ({inside}) AND NOT ({early}) AND NOT ({other}) AND {kept}"
            rules[f"{role} have the key of the version that was valid at their time"] = f"{met} WHERE {wrong}"
        if self._carried:
            differs = " OR ".join(f'f."a_{name}" IS DISTINCT FROM v."a_{name}"' for name in self._carried)
            rules[f"{role} carry the values of their version"] = f"{met} WHERE ({differs}) AND {kept}"
        return rules

    def _found(
        self, connection: DuckDBPyConnection, rule: str, query: str, *, allowed: bool = False
    ) -> Iterator[Finding]:
        """Yield a finding if a query finds facts."""
        rows = int(connection.execute(f"SELECT coalesce(sum(n), 0) {query}").fetchall()[0][0])
        if rows:
            keys = ", ".join(f"f.{name}" for name in self._key)
            named = connection.sql(f"SELECT DISTINCT {keys}, f.time {query} ORDER BY ALL LIMIT {_EXAMPLES}")
            *columns, times = named.to_arrow_table().columns
            texts = zip(key_text(columns).to_pylist(), times.cast(pa.string()).to_pylist(), strict=True)
            examples = tuple(text if time is None else f"{text} at {time}" for text, time in texts)
            yield Finding(rule, rows, examples, allowed, restated=not (allowed or self._mixed))
