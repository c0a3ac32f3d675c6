"""Checks of a dimension and of the facts that carry its keys, with repair plans. This module changes no table.

Members and facts are read once, in batches, into a DuckDB file in a temporary folder, so that memory stays bounded.
Natural keys are compared after the declared normalization, as lookups compare them. Only facts of the given pipeline
are checked; use the pipeline files of other pipelines to check their facts.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import pyarrow as pa

from headrace.etl import UNKNOWN_KEY, Special
from headrace.etl.ranking import key_text
from headrace.pipelines.config.merge import mixed_lookup
from headrace.pipelines.delta.reads import scan_table
from headrace.pipelines.delta.scratch import load_rows, scratch_database
from headrace.pipelines.delta.support import takes_files
from headrace.pipelines.delta.tables import GREATEST_KEY, has_table, open_table
from headrace.pipelines.dimension.special_members import special_rows, wrong_values
from headrace.pipelines.errors import DeltaTableError
from headrace.pipelines.replica.catch_up import ReplicaSpec
from headrace.pipelines.replica.checking import replica_differences
from headrace.pipelines.replica.row_sizes import LONGEST_KEY, LONGEST_ROW, RowSizes
from headrace.pipelines.replica.rows import MemberRows
from headrace.storage.units import parse_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltalake import DeltaTable

    from headrace.etl import Dimension
    from headrace.pipelines.config.model import LookupConfig, PipelineConfig
    from headrace.pipelines.replica.checking import ReplicaDifference

__all__ = ["Audit", "Finding", "Repair", "Repaired", "came_before"]

_EXAMPLES: Final = 10
_SHOWN: Final = 60
_REPEATED: Final = "FROM known SELECT 1 WHERE complete GROUP BY {} HAVING count(*) > 1 LIMIT 1"
_PROPERTY_RULE: Final = f"the property {GREATEST_KEY} is not less than the greatest key"
_REPLICA_RULE: Final = "replicas have the members of the table"
_VALUE_RULE: Final = "special members have the declared values"


def came_before(role: str) -> str:
    """Return the name of a finding: facts with the unknown member, whose member was added later."""
    return (
        f"facts of role {role} have the unknown member, -1, and their member is in the dimension now; "
        "docs/dimensions.md, 'Facts that came before their member', has the statement that corrects them"
    )


def carries_others(role: str) -> str:
    """Return the name of a finding: facts whose carried columns are not those of their member."""
    return (
        f"facts of role {role} carry other values than their member has now; docs/operations.md, 'Facts that carry "
        "earlier values', has the statement that corrects them"
    )


@dataclass(frozen=True)
class Finding:
    """A violation of a rule by a dimension, or rows that a declared policy leaves as they are.

    Parameters
    ----------
    rule
        Name of the rule, or what is left.
    rows
        Number of rows that violate it, or that are left.
    examples
        Examples of these rows, as text.
    allowed
        Whether a policy leaves the rows, so that they are no fault.
    restated
        Whether the rows are facts that `headrace dimension restate` corrects, if a change of the dimension moved them.
    """

    rule: str
    rows: int
    examples: tuple[str, ...] = ()
    allowed: bool = False
    restated: bool = False


@dataclass(frozen=True)
class Repair:
    """Repair of a finding.

    Parameters
    ----------
    rule
        Name of the finding's rule.
    action
        Description of the repair.
    rows
        Number of rows to change.
    examples
        Examples of the changes, as text.
    """

    rule: str
    action: str
    rows: int
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Repaired:
    """Result of a repair.

    Parameters
    ----------
    fixed
        What was fixed, or would be.
    left
        What needs a decision, with what can be done.
    """

    fixed: tuple[Repair, ...]
    left: tuple[Repair, ...]


@dataclass(frozen=True)
class _Rule:
    """A rule, the SQL that selects the rows that violate it, and their repair."""

    rule: str
    broken: str
    example: str
    action: str
    changes: str = ""
    change: str = ""
    of_facts: bool = False  # the rows are facts, which repairs of other rules also change


class Audit:
    """Checks a dimension at its latest version, and plans its repair; a context manager.

    Parameters
    ----------
    config
        Configuration of the pipeline.
    dimension
        Dimension with its columns as in the table.
    path
        Path of the Delta table.
    replicated
        Dimension with the columns that replicas hold.
    """

    def __init__(self, config: PipelineConfig, dimension: Dimension, path: str, replicated: Dimension) -> None:
        self._config = config
        self._dimension = dimension
        self._table = open_table(path)
        self._path = path
        self._replicated = replicated
        self._names = [f"k{position}" for position in range(len(dimension.natural_key))]
        self._key = ", ".join(self._names)
        self._attributes = {each.name: f"a{place}" for place, each in enumerate(replicated.attributes)}
        self._carried: dict[str, tuple[str, list[str]]] = {}  # table of facts, and carried attributes, by role
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-check-"))
        self._db = self._stack.enter_context(scratch_database(Path(folder) / "check.duckdb"))
        self._load_members()
        self._load_facts()
        self._plan()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def findings(self) -> list[Finding]:
        """Return the violated rules, and facts that stay as they are: see `came_before` and `carries_others`."""
        found = [
            Finding(
                rule.rule,
                self._count(rule.broken, of_facts=rule.of_facts),
                self._examples(rule.broken, rule.example),
            )
            for rule in self._rules()
        ]
        others = [
            finding for finding, _ in (*self._value_findings(), *self._property_findings(), *self._replica_findings())
        ]
        lookups = [item for item in self._config.lookups if item.dimension == self._dimension.name]
        left = [*map(self._came_before, lookups), *(self._carries_others(each) for each in self._carried)]
        return [each for each in [*found, *others, *left] if each.rows]

    def repairs(self) -> list[Repair]:
        """Return the repair of each finding, in execution order."""
        plans = []
        for rule in self._rules():
            changes, change = rule.changes or rule.broken, rule.change or rule.example
            rows = self._count(changes, of_facts=rule.of_facts)
            if self._count(rule.broken) or (rule.of_facts and rows):
                plans.append(Repair(rule.rule, rule.action, rows, self._examples(changes, change)))
        findings = (*self._value_findings(), *self._property_findings(), *self._replica_findings())
        plans += [repair for _, repair in findings]
        if self._renumbers() and all(plan.rule != _PROPERTY_RULE for plan in plans):
            plans.append(self._property_repair())
        return plans

    def divided(self) -> Repaired:
        """Return the repairs: those that need no decision, and the others.

        No decision is needed where the declaration or the table itself says what must be there: special members, the
        property with the greatest key, and replicas. A table that only Spark writes gets no special member or property.
        """
        fixes = {_REPLICA_RULE: "build the replica again"}
        if takes_files(self._table):
            missing = [self._rule_of_special(each).rule for each in self.missing_members]
            fixes |= dict.fromkeys(missing, "add the member") | {_VALUE_RULE: "set the declared values"}
            fixes[_PROPERTY_RULE] = f"set the property to {self._greatest()}"
        repairs, behind = self.repairs(), self.property_behind
        fixed = [each for each in repairs if each.rule in fixes and (behind or each.rule != _PROPERTY_RULE)]
        later = [self._property_repair()] if behind and self._renumbers() else []
        left = [each for each in repairs if each not in fixed]
        return Repaired(tuple(replace(each, action=fixes[each.rule]) for each in fixed), (*left, *later))

    @property
    def missing_members(self) -> list[Special]:
        """Declared special members that the table lacks."""
        return [member for member in self._dimension.special.present if int(member) not in self._specials]

    @property
    def wrong_members(self) -> list[Special]:
        """Special members that do not have the declared values."""
        return list(wrong_values(self._dimension, self._specials))

    @property
    def greatest(self) -> int:
        """Highest surrogate key ever assigned."""
        return self._greatest()

    @property
    def version(self) -> int:
        """Version of the table that is checked."""
        return self._table.version()

    @property
    def property_behind(self) -> bool:
        """Whether the property with the greatest key is set, and is less than the greatest key."""
        remembered, known = self._remembered(), GREATEST_KEY in self._table.metadata().configuration
        return known and (not remembered.isdecimal() or int(remembered) < self._greatest())

    def differing_replicas(self) -> list[ReplicaDifference]:
        """Return the replicas on this host that differ from the table, unless members make a comparison impossible."""
        if self._run("FROM known SELECT count(*) - count(DISTINCT key)")[0][0] or self._run(
            _REPEATED.format(self._key)
        ):
            return []
        table_id = str(self._table.metadata().id)
        memory = parse_memory(self._config.replica_memory)
        spec = ReplicaSpec(MemberRows(self._replicated), self._path, table_id, 1, self._config.replicas, memory)
        return list(replica_differences(self._db, spec, self.version, self._greatest()))

    # Rows

    def _load_members(self) -> None:
        """Read each member's position, surrogate key, normalized natural key, and the page size that it needs."""
        dimension, replicated = self._dimension, self._replicated
        sizes = RowSizes(replicated.table_schema, replicated.key_schema)
        kinds = [dimension.schema.field(name).type for name in dimension.natural_key]
        schema = pa.schema(
            [
                ("position", pa.int64()),
                ("key", pa.int64()),
                *zip(self._names, kinds, strict=True),
                ("needs", pa.int64()),
                *((self._attributes[each.name], each.type) for each in replicated.attributes),
            ]
        )
        load_rows(self._db, "members", schema)
        self._specials = special_rows(self._table, self._dimension)
        position = 0
        for batch in scan_table(self._table, replicated.table_schema.names):
            rows = pa.Table.from_batches([batch])
            keys = [key.values for key in dimension.conform_key([rows.column(name) for name in dimension.natural_key])]
            places = pa.array(np.arange(position, position + rows.num_rows))
            surrogate = rows.column(dimension.surrogate_key)
            needs = _needs(sizes, rows, keys, dimension.natural_key)
            attributes = [rows.column(name) for name in self._attributes]
            self._insert("members", pa.table([places, surrogate, *keys, needs, *attributes], schema=schema))
            position += rows.num_rows

    def _load_facts(self) -> None:
        """Count the facts of each role by natural key and surrogate key."""
        kinds = [self._dimension.schema.field(name).type for name in self._dimension.natural_key]
        schema = pa.schema([("role", pa.string()), ("key", pa.int64()), *zip(self._names, kinds, strict=True)])
        load_rows(self._db, "facts", schema.append(pa.field("n", pa.int64())))
        lookups = [item for item in self._config.lookups if item.dimension == self._dimension.name]
        if not lookups or not has_table(self._config.sink.path):
            return
        table = open_table(self._config.sink.path)
        for item in lookups:
            self._load_role(table, item, schema)

    def _load_role(self, table: DeltaTable, item: LookupConfig, schema: pa.Schema) -> None:
        by_key = {key: column for column, key in item.on.items()}
        columns = [by_key[name] for name in self._dimension.natural_key]
        there = [each.name for each in table.schema().fields]
        missing = [name for name in (f"{item.role}_key", *columns) if name not in there]
        if missing:
            raise DeltaTableError(
                f"the fact table {self._config.sink.path} has no column {missing[0]!r}, so the keys of role "
                f"{item.role!r} cannot be checked; it has {', '.join(there)}"
            )
        carried = [] if mixed_lookup(self._config, item) is not None else [*map(str, item.carry)]
        carried = [name for name in carried if name in self._attributes and f"{item.role}_{name}" in there]
        if carried:
            name = f"carried{len(self._carried)}"
            self._carried[item.role] = name, carried
            kinds = [(self._attributes[each], self._replicated.schema.field(each).type) for each in carried]
            load_rows(self._db, name, pa.schema([*list(schema)[1:], *kinds, ("n", pa.int64())]))
        wanted = [f"{item.role}_key", *columns, *(f"{item.role}_{name}" for name in carried)]
        for batch in scan_table(table, list(dict.fromkeys(wanted))):
            keys = [key.values for key in self._dimension.conform_key([batch.column(name) for name in columns])]
            role = pa.repeat(pa.scalar(item.role), batch.num_rows)
            rows = pa.table([role, batch.column(f"{item.role}_key"), *keys], schema=schema)
            self._insert("facts", rows.group_by(schema.names).aggregate([([], "count_all")]))
            if carried:
                self._count_carried(item.role, rows, [batch.column(f"{item.role}_{name}") for name in carried])

    def _count_carried(self, role: str, rows: pa.Table, values: Sequence[pa.Array]) -> None:
        """Count the facts of a role by keys and carried attributes."""
        name, carried = self._carried[role]
        for attribute, value in zip(carried, values, strict=True):
            rows = rows.append_column(self._attributes[attribute], value)
        columns = ", ".join(rows.column_names[1:])
        counted = f"SELECT {columns}, count(*) AS n FROM given WHERE key > 0 GROUP BY ALL"
        self._db.register("given", rows)
        self._run(f"INSERT INTO {name} {counted}")
        self._db.unregister("given")

    def _insert(self, name: str, rows: pa.Table) -> None:
        self._db.register("given", rows)
        self._run(f"INSERT INTO {name} FROM given")
        self._db.unregister("given")

    # Plan

    def _plan(self) -> None:
        """Assign surrogate keys so that each natural key has one member and each member a unique surrogate key.

        Of several members with the same natural key, the one with the lowest surrogate key stays. Of several members
        with the same surrogate key, the one that most facts refer to keeps it; the others get keys above the highest
        ever assigned.
        """
        complete = self._complete("")
        other = ", ".join(["0", *(str(int(member)) for member in self._others())])
        valid = "coalesce(key >= 1, false)"
        self._run(
            f"""
            CREATE TABLE known AS
            SELECT *, ({complete}) AS complete FROM members
            WHERE key IS DISTINCT FROM {UNKNOWN_KEY} AND NOT (coalesce(key IN ({other}), false) AND NOT ({complete}));
            CREATE TABLE kept AS
            SELECT * FROM known WHERE complete
            QUALIFY row_number() OVER (PARTITION BY {self._key} ORDER BY NOT {valid}, key, position) = 1;
            CREATE TABLE meant AS
            SELECT key, {self._key}, sum(n) AS facts FROM facts GROUP BY key, {self._key};
            CREATE TABLE numbered AS
            SELECT kept.*, {valid} AND row_number() OVER (
                PARTITION BY key ORDER BY coalesce(facts, 0) DESC, {self._key}) = 1 AS stays
            FROM kept LEFT JOIN meant USING (key, {self._key});
            CREATE TABLE targets AS
            SELECT {self._key}, key, CASE WHEN stays THEN key ELSE {self._greatest()} + row_number() OVER (
                PARTITION BY stays ORDER BY {self._key}) END AS number FROM numbered;
            CREATE TABLE changed AS
            SELECT role, facts.key AS key, {self._columns("facts")}, n, coalesce(number, {UNKNOWN_KEY}) AS number
            FROM facts LEFT JOIN targets USING ({self._key})
            WHERE facts.key IS DISTINCT FROM coalesce(number, {UNKNOWN_KEY})
                AND facts.key IS DISTINCT FROM {UNKNOWN_KEY}
                AND NOT (coalesce(facts.key IN ({other}), false) AND NOT ({self._complete("facts.")}));
            CREATE TABLE wrong AS
            SELECT * FROM facts WHERE key IS DISTINCT FROM {UNKNOWN_KEY}
                AND NOT (coalesce(key IN ({other}), false) AND NOT ({complete})) AND NOT EXISTS (
                FROM known WHERE known.key = facts.key AND {self._same("known", "facts")});
            """
        )

    def _others(self) -> list[Special]:
        """Return the declared special members other than the unknown member."""
        return [member for member in self._dimension.special.present if member is not Special.UNKNOWN]

    def _complete(self, prefix: str) -> str:
        """Return the condition that no part of the natural key is null."""
        return " AND ".join(f"{prefix}{name} IS NOT NULL" for name in self._names)

    def _columns(self, table: str) -> str:
        return ", ".join(f"{table}.{name} AS {name}" for name in self._names)

    def _same(self, one: str, other: str) -> str:
        return " AND ".join(f"{one}.{name} = {other}.{name}" for name in self._names)

    def _greatest(self) -> int:
        """Return the highest surrogate key ever assigned."""
        stored = self._run("SELECT coalesce(max(key), 0) FROM members")[0][0]
        remembered = self._remembered()
        return max(0, stored, int(remembered) if remembered.isdecimal() else 0)

    def _remembered(self) -> str:
        return str(self._table.metadata().configuration.get(GREATEST_KEY, "0"))

    # Rules

    def _rules(self) -> list[_Rule]:
        known = f"FROM known SELECT key, {self._key}"
        renumbered = f"FROM targets SELECT {self._key}, key, number WHERE key IS DISTINCT FROM number"
        gets = "{natural}: number {key} becomes {number}"
        by_number = f"{renumbered} AND key IN (FROM known SELECT key GROUP BY key HAVING count(*) > 1)"
        removed = (
            f"SELECT m.key AS key, {self._columns('m')}, k.key AS number FROM known AS m JOIN kept AS k ON "
            f"{self._same('m', 'k')} WHERE m.position <> k.position"
        )
        return [
            _Rule(
                "every member has a surrogate key",
                f"{known} WHERE key IS NULL",
                "{natural}",
                "give the member a number above the greatest ever given",
                f"{renumbered} AND key IS NULL",
                gets,
            ),
            _Rule(
                "surrogate keys are unique",
                f"{known} WHERE key IS NOT NULL QUALIFY row_number() OVER (PARTITION BY key ORDER BY {self._key}) > 1",
                "number {key}: {natural} and another member",
                "leave the number to the member that most facts mean, and give the others numbers above the greatest",
                by_number,
                gets,
            ),
            _Rule(
                "surrogate keys are positive, or -1 for the unknown member",
                f"{known} WHERE key < 1",
                "{natural} has number {key}",
                "give the member a number above the greatest ever given",
                f"{renumbered} AND key < 1",
                gets,
            ),
            *(self._rule_of_special(member) for member in self._dimension.special.present),
            _Rule(
                "natural keys are not null",
                f"{known} WHERE NOT complete",
                "number {key}: {natural}",
                "remove the member, which no fact can mean; facts with its number get the number of their natural key",
            ),
            _Rule(
                "natural keys are unique",
                f"{known} WHERE complete QUALIFY row_number() OVER (PARTITION BY {self._key} ORDER BY key) > 1",
                "{natural}, also with number {key}",
                "keep the member with the lowest number, and remove the others",
                removed,
                "{natural}: number {key} is removed, number {number} stays",
            ),
            _Rule(
                f"replicas hold the members, which need at most {LONGEST_ROW} bytes, and {LONGEST_KEY} for their keys",
                f"FROM known SELECT key, {self._key}, needs WHERE needs > {LONGEST_ROW}",
                "{natural} with number {key} needs {needs} bytes",
                "shorten the texts of the member, or carry fewer attributes",
            ),
            *(self._rule_of_role(item) for item in self._config.lookups if item.dimension == self._dimension.name),
        ]

    def _rule_of_special(self, member: Special) -> _Rule:
        key, named = int(member), ", ".join(f"any_value({name}) AS {name}" for name in self._names)
        nameless = "" if member is Special.UNKNOWN else f" AND NOT ({self._complete('')})"
        return _Rule(
            f"there is one {member.text.replace('_', ' ')} member",
            f"SELECT {named}, {key} AS key, unnest(range(abs(count(*) - 1))) FROM members WHERE key = {key}{nameless}",
            "member {key}",
            f"keep one member {key}, or add it; the next run adds a missing one",
        )

    def _value_findings(self) -> list[tuple[Finding, Repair]]:
        """Return the special members that do not have the values of their declaration."""
        wrong = wrong_values(self._dimension, self._specials)
        if not wrong:
            return []
        rule = _VALUE_RULE
        shown = tuple(
            f"member {int(member)}: {name} is {self._specials[int(member)][name]!r}, and is declared {value!r}"
            for member, values in wrong.items()
            for name, value in values.items()
        )
        action = "set the declared values; the next run does it"
        return [(Finding(rule, len(wrong), shown), Repair(rule, action, len(wrong), shown))]

    def _rule_of_role(self, item: LookupConfig) -> _Rule:
        role = f"role = '{item.role}'"
        return _Rule(
            f"facts of role {item.role} carry the number of the member with their natural key",
            f"FROM wrong SELECT key, {self._key}, n WHERE {role}",
            "{natural}: number {key} (facts: {n})",
            "give the facts the number of the member with their natural key, or -1 where there is none",
            f"FROM changed SELECT key, {self._key}, n, number WHERE {role}",
            "{natural}: number {key} becomes {number} (facts: {n})",
            of_facts=True,
        )

    def _came_before(self, item: LookupConfig) -> Finding:
        """Return the facts with the unknown member whose natural key has a member; none if a merge mixed records."""
        role = "false" if mixed_lookup(self._config, item) is not None else f"role = '{item.role}'"
        rows = f"SELECT facts.* FROM facts JOIN kept USING ({self._key}) WHERE {role}"
        rows = f"{rows} AND facts.key = {UNKNOWN_KEY} AND kept.key > 0"
        examples = self._examples(f"SELECT DISTINCT {self._key} FROM ({rows})", "{natural}")
        return Finding(came_before(item.role), self._count(rows, of_facts=True), examples, allowed=True)

    def _carries_others(self, role: str) -> Finding:
        """Return the facts whose carried attributes are not those that their member has."""
        name, carried = self._carried[role]
        others = " OR ".join(
            f"f.{self._attributes[each]} IS DISTINCT FROM kept.{self._attributes[each]}" for each in carried
        )
        rows = f"SELECT f.* FROM {name} AS f JOIN kept USING (key, {self._key}) WHERE {others}"
        examples = self._examples(f"SELECT DISTINCT {self._key} FROM ({rows})", "{natural}")
        return Finding(carries_others(role), self._count(rows, of_facts=True), examples, allowed=True)

    def _property_findings(self) -> list[tuple[Finding, Repair]]:
        found = []
        configuration = self._table.metadata().configuration
        if configuration.get("delta.enableChangeDataFeed") != "true":
            rule = "the change data feed is on, so that replicas can follow"
            action = f"ALTER TABLE delta.`{self._path}` SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')"
            found.append((Finding(rule, 1), Repair(rule, action, 0)))
        if self.property_behind:
            shown = (f"it is {self._remembered()}, and the greatest key is {self._greatest()}",)
            found.append((Finding(_PROPERTY_RULE, 1, shown), self._property_repair()))
        return found

    def _replica_findings(self) -> list[tuple[Finding, Repair]]:
        found = []
        for difference in self.differing_replicas():
            place = difference.spec.place(difference.shard).parent / f"{difference.shard}-of-{difference.spec.shards}"
            rule, shown = _REPLICA_RULE, difference.examples
            action = f"remove the folder {place}; the next run builds the replica again"
            found.append((Finding(rule, difference.rows, shown), Repair(rule, action, difference.rows, shown)))
        return found

    def _property_repair(self) -> Repair:
        """Return the statement that remembers the highest key, including the keys that the repair assigns."""
        given = self._run("SELECT coalesce(max(number), 0) FROM targets")[0][0]
        value = max(self._greatest(), int(given))
        action = f"ALTER TABLE delta.`{self._path}` SET TBLPROPERTIES ('{GREATEST_KEY}' = '{value}')"
        return Repair(_PROPERTY_RULE, action, 0)

    # Queries

    def _renumbers(self) -> bool:
        """Return whether the repair gives members other numbers."""
        return bool(self._run("SELECT count(*) FROM targets WHERE key IS DISTINCT FROM number")[0][0])

    def _run(self, sql: str) -> list[tuple[Any, ...]]:
        return self._db.execute(sql).fetchall()

    def _count(self, query: str, *, of_facts: bool = False) -> int:
        counted = "coalesce(sum(n), 0)" if of_facts else "count(*)"
        return int(self._run(f"SELECT {counted} FROM ({query})")[0][0])

    def _examples(self, query: str, text: str) -> tuple[str, ...]:
        rows = self._db.sql(f"FROM ({query}) ORDER BY ALL LIMIT {_EXAMPLES}").to_arrow_table()
        natural = key_text([rows.column(name) for name in self._names]).to_pylist()
        others = [name for name in rows.column_names if name not in self._names]
        values: list[dict[str, Any]] = rows.select(others).to_pylist()
        shown = [each if len(each) <= _SHOWN else f"{each[:_SHOWN]}..." for each in natural]
        return tuple(text.format(natural=name, **value) for name, value in zip(shown, values, strict=True))


def _needs(sizes: RowSizes, rows: pa.Table, keys: Sequence[pa.Array], names: Sequence[str]) -> pa.Array:
    """Return the page bytes that each member with a complete natural key needs; 0 for other members."""
    needs = np.zeros(rows.num_rows, dtype=np.int64)
    usable = np.logical_and.reduce([np.asarray(key.is_valid()) for key in keys])
    for name, key in zip(names, keys, strict=True):
        rows = rows.set_column(rows.column_names.index(name), name, key)
    some = rows.filter(pa.array(usable))
    if some.num_rows and sizes.needs(some, LONGEST_ROW) > LONGEST_ROW:
        needs[usable] = sizes.of_each(some)
    return pa.array(needs)
