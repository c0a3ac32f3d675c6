"""The stages of a batch, planned for a prepared pipeline (`headrace.pipelines.batch.preparation`).

The first stage reads the files. Lookups that cannot infer members follow (over whole replicas, without a shuffle), then
the duplicate search, then each inferring lookup, on rows shuffled by its key. Rejected rows, and duplicates that are
not loaded, bypass the later stages, so they add no members. Keys in a single shard need no shuffle: one task handles
them together with the preceding stage. Inferring lookups of different dimensions share a round, which is computed once.
A second role of the same dimension waits for the members of the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

import pyarrow as pa

from headrace.etl import (
    DUPLICATE_COLUMN,
    OUTCOME_COLUMN,
    Dimension,
    Duplicates,
    Lookup,
)
from headrace.etl.history import AsOfLookup
from headrace.etl.history.declaration import AT
from headrace.etl.lookup import Policy
from headrace.pipelines.batch.error_rows import ERROR_SCHEMA, Origin
from headrace.pipelines.batch.merge import merge_rule
from headrace.pipelines.batch.read_step import ReadStep, record_format
from headrace.pipelines.batch.resolutions import RESOLUTION_SCHEMA
from headrace.pipelines.batch.retry_step import RetryStep
from headrace.pipelines.batch.settlement import AUDIT_SCHEMA, Settlement
from headrace.pipelines.batch.steps import DuplicateStep, LookupStep
from headrace.pipelines.batch.storable import StorableStep
from headrace.pipelines.batch.worker import Stage
from headrace.pipelines.config.column_types import arrow_schema
from headrace.pipelines.delta.data_files import FileSpec
from headrace.pipelines.history.layout import delta_schema
from headrace.pipelines.replica.catch_up import ReplicaSpec
from headrace.pipelines.replica.operators import Joiner
from headrace.pipelines.replica.rows import LoadedKeyRows, MemberRows
from headrace.pipelines.replica.version_rows import current_rows, version_rows
from headrace.pipelines.spark.frame import (
    FILE,
    NOTE,
    RECORD_NUMBER,
    REJECTED,
    ROUTED,
    SHARD,
    STATE,
    ShardRule,
    member_column,
    source_schema,
)
from headrace.storage.units import parse_duration, parse_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.pipelines.batch.merge import MergeRule
    from headrace.pipelines.batch.storable import StorableRule
    from headrace.pipelines.batch.transform import Transform
    from headrace.pipelines.config.model import PipelineConfig
    from headrace.pipelines.replica.rows import ReplicaRows

__all__ = ["DUPLICATES_ROLE", "Group", "Prepared", "StageRun", "Target", "member_schema"]

DUPLICATES_ROLE = "(duplicates)"
_CURRENT_SHARE: Final = 1.5  # of the two shares of an as-of lookup, for the current versions


@dataclass(frozen=True)
class Target:
    """The planned Delta version of a join.

    Parameters
    ----------
    version, base
        Delta version V, and the highest surrogate key at V.
    shards
        Number of shards.
    table_id
        Identity of the table.
    own
        Ranges (above, up to) of surrogate keys that earlier attempts at the batch assigned to new members for this
        role.
    """

    version: int
    base: int
    shards: int
    table_id: str
    own: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Group:
    """Lookups of one stage.

    Parameters
    ----------
    roles
        Roles in the order of the pipeline file.
    shuffled
        Whether the rows must be shuffled by the key of the group's only role.
    alone
        Whether one task must receive all rows, because the keys are in a single shard.
    """

    roles: tuple[str, ...]
    shuffled: bool
    alone: bool = False


@dataclass(frozen=True)
class StageRun:
    """Context that all stages of a batch share.

    Parameters
    ----------
    owner
        Id of the run, which owns the operators that workers keep.
    shards
        Number of shards by role, for roles that need a shuffle.
    files
        Partition columns of each table whose files the tasks write, by table path. Rows of other tables travel with the
        frame, and Spark writes them.
    origin
        Origin of the rows, for tables that name the batch.
    """

    owner: str
    shards: Mapping[str, int]
    files: Mapping[str, tuple[str, ...]]
    origin: Origin


@dataclass(frozen=True)
class Prepared:
    """A pipeline that was checked against its Delta tables.

    Parameters
    ----------
    config
        Configuration of the pipeline.
    stream
        Schema of the stream.
    lookups
        Lookups by role, in the order of the pipeline file.
    duplicates
        Declared key of the duplicates, or None.
    shards
        Number of shards by role, for roles that need a shuffle.
    early_rules, late_rules
        Table rules for stream columns, and for columns that lookups add. A row that violates a rule is rejected.
    notices
        Changes that the preparation made.
    transform
        Transformations between the source and the lookups, or None. A stage of its own then reads the files.
    """

    config: PipelineConfig
    stream: pa.Schema
    lookups: Mapping[str, Lookup | AsOfLookup]
    duplicates: Duplicates | None
    shards: Mapping[str, int]
    early_rules: tuple[StorableRule, ...] = ()
    late_rules: tuple[StorableRule, ...] = ()
    notices: tuple[str, ...] = ()
    transform: Transform | None = None

    @property
    def fact_schema(self) -> pa.Schema:
        """Schema of the fact table: stream, surrogate keys, carried attributes, outcome, and optionally the origin."""
        own = {name for look in self.lookups.values() for name in (look.outcome_column, look.reason_column)}
        added = [field for look in self.lookups.values() for field in look.added_schema() if field.name not in own]
        audit = AUDIT_SCHEMA if self.config.sink.audit else ()
        return pa.schema([*self.stream, *added, pa.field(OUTCOME_COLUMN, pa.string()), *audit])

    @property
    def merge(self) -> MergeRule | None:
        """Rule by which facts are merged into the fact table; None if they are appended."""
        return merge_rule(self.config, self.fact_schema)

    @property
    def duplicate_schema(self) -> pa.Schema:
        """Schema of the table of routed duplicates."""
        return pa.schema([*self.stream, pa.field(DUPLICATE_COLUMN, pa.string()), pa.field(FILE, pa.string())])

    def rounds(self, shards: Mapping[str, int] | None = None) -> list[list[Group]]:
        """Return the stages in rounds, each computed once; `shards` overrides the pipeline's shard counts."""
        non_inferring = tuple(role for role, look in self.lookups.items() if look.policy is not Policy.INFER)
        current = [Group(non_inferring, shuffled=False)]
        if self.duplicates is not None:
            current.append(Group((DUPLICATES_ROLE,), shuffled=True))
        rounds = [current]
        met: set[str] = set()
        for role, lookup in self.lookups.items():
            if lookup.policy is not Policy.INFER:
                continue
            if lookup.dimension.name in met:
                rounds.append([])
                met.clear()
            met.add(lookup.dimension.name)
            rounds[-1].append(Group((role,), shuffled=True))
        return [_joined(groups, self.shards if shards is None else shards) for groups in rounds]

    def infers(self, role: str) -> bool:
        """Return whether a role adds members to its dimension."""
        return role != DUPLICATES_ROLE and self.lookups[role].policy is Policy.INFER

    def path(self, role: str) -> str:
        """Return the path of the Delta table that a role joins with."""
        if role == DUPLICATES_ROLE:
            return self.config.sink.path
        return self.config.dimensions[self.lookups[role].dimension.name].path

    def shard_rule(self, role: str, shards: int) -> ShardRule:
        """Return the rule that assigns rows to shards for a role."""
        if role == DUPLICATES_ROLE:
            assert self.duplicates is not None
            key = self.duplicates.key
            return ShardRule(tuple(key.names), key, shards, self.duplicates.rules)
        lookup = self.lookups[role]
        dimension = lookup.dimension
        return ShardRule(lookup.stream_columns, dimension.key_schema, shards, dimension.rules)

    def reading_stage(self, run: StageRun) -> Stage:
        """Return the stage that reads the files for the transformations."""
        source = arrow_schema(self.config.source.columns)
        reader = self._reader(run, source)
        return Stage(0, run.owner, reader, (), None, None, source_schema(source))

    def stages(
        self,
        rounds: list[list[Group]],
        number: int,
        targets: Mapping[str, Target],
        run: StageRun,
    ) -> list[Stage]:
        """Return the stages of one round.

        Parameters
        ----------
        rounds
            Groups of all rounds.
        number
            Index of the round.
        targets
            Planned version of each role in the round.
        run
            Context that all stages of the batch share.
        """
        before = sum(len(groups) for groups in rounds[:number])
        flat = [group for groups in rounds for group in groups]
        planned = [self._stage(flat, before, before + i, targets, run) for i in range(len(rounds[number]))]
        from_files = number == 0 and self.transform is None and run.origin.retried is None
        if from_files and all(stage.next_shard is not None for stage in planned[:-1]):
            return [*(replace(stage, packs=True) for stage in planned[:-1]), planned[-1]]
        return planned

    def _stage(
        self,
        groups: list[Group],
        first: int,
        number: int,
        targets: Mapping[str, Target],
        run: StageRun,
    ) -> Stage:
        """Return a stage; `first` is the first stage of its round."""
        last = number == len(groups) - 1
        members = self._member_fields(groups[first : number + 1], run)
        following = None if last else groups[number + 1]
        return Stage(
            number=number if self.transform is None else number + 1,
            owner=run.owner,
            reader=self._reader(run, self.stream) if number == 0 and self.transform is None else None,
            steps=(
                *_storable(self.early_rules if number == 0 else ()),
                *(self.step(role, targets[role], run) for role in groups[number].roles),
                *_storable(self.late_rules if last else ()),
            ),
            next_shard=self.shard_rule(following.roles[0], run.shards[following.roles[0]])
            if following is not None and following.shuffled
            else None,
            settles=self._settlement(run) if last else None,
            schema=pa.schema([*(self._settled_fields(run) if last else self._fields(groups[: number + 2])), *members]),
        )

    def _reader(self, run: StageRun, columns: pa.Schema) -> ReadStep | RetryStep:
        source = self.config.source
        if run.origin.retried is not None:
            return RetryStep(record_format(source), columns)
        return ReadStep(record_format(source), columns, source.is_folder)

    def _rejects(self, run: StageRun) -> tuple[str, pa.Schema]:
        """Return the table that receives rejected rows, and its columns."""
        if run.origin.retried is None:
            return self.config.errors_path, ERROR_SCHEMA
        return self.config.resolutions_path, RESOLUTION_SCHEMA

    def _settlement(self, run: StageRun) -> Settlement:
        return Settlement(
            lookups=tuple(self.lookups.values()),
            duplicates=self.duplicates,
            duplicate_schema=self.duplicate_schema,
            facts=_file_spec(self.config.sink.path, self.fact_schema, run),
            rejected=_file_spec(*self._rejects(run), run),
            routed=_file_spec(self.config.duplicates_path, self.duplicate_schema, run),
            origin=run.origin,
        )

    def _fields(self, groups: list[Group]) -> list[pa.Field]:
        """Return the input columns of the last of the given stages."""
        roles = [role for group in groups[:-1] for role in group.roles]
        fields = list(source_schema(self.stream))
        for role in roles:
            if role == DUPLICATES_ROLE:
                fields.append(pa.field(DUPLICATE_COLUMN, pa.string()))
            else:
                fields.extend(self.lookups[role].added_schema())
        return [*fields, pa.field(SHARD, pa.int32())] if groups[-1].shuffled else fields

    def _settled_fields(self, run: StageRun) -> list[pa.Field]:
        """Return the output columns of the last stage: the rows that Spark writes, and notes."""
        facts = [] if self.config.sink.path in run.files else list(self.fact_schema)
        if self.merge is not None:  # the order of the records of one key
            places = [field for field in source_schema(pa.schema([])) if field.name in {FILE, RECORD_NUMBER}]
            facts += [field for field in places if field.name not in self.fact_schema.names]
        channels = (
            (REJECTED, *self._rejects(run)),
            (ROUTED, self.config.duplicates_path, self.duplicate_schema),
        )
        own = [(name, pa.struct(schema)) for name, path, schema in channels if path not in run.files]
        return [*facts, *(pa.field(*pair) for pair in [*own, (STATE, pa.int8()), (NOTE, pa.string())])]

    def _member_fields(self, groups: list[Group], run: StageRun) -> list[pa.Field]:
        """Return the columns of new members that travel with the rows, because tasks do not write their files."""
        roles = [role for group in groups for role in group.roles]
        inferring = [self.lookups[role] for role in roles if self.infers(role) and self.path(role) not in run.files]
        return [pa.field(member_column(look.role), pa.struct(member_schema(look))) for look in inferring]

    def step(self, role: str, target: Target, run: StageRun) -> LookupStep | DuplicateStep:
        """Return the step of a role at its planned version."""
        if role == DUPLICATES_ROLE:
            assert self.duplicates is not None
            rows: ReplicaRows = LoadedKeyRows(Duplicates(self.duplicates.key, rules=self.duplicates.rules))
            joiner = self._joiner(role, target, rows, self.duplicates.operator_on, self.duplicates.operator_columns)
            return DuplicateStep(self.duplicates, joiner)
        lookup = self.lookups[role]
        files = _file_spec(self.path(role), member_schema(lookup), run)
        if isinstance(lookup, AsOfLookup):
            rows = current_rows(lookup.history, self._carried(lookup.dimension.name))
            current = lookup.current
            older = self._older(lookup, target)
            joiner = self._joiner(role, target, rows, current.operator_on, current.operator_columns)
            share = _CURRENT_SHARE if older else 1
            joiner = replace(joiner, memory=int(joiner.memory * share))
            return LookupStep(lookup, joiner, files, target.own, older)
        rows = MemberRows(self._narrow(lookup.dimension))
        joiner = self._joiner(role, target, rows, lookup.operator_on, lookup.operator_columns)
        return LookupStep(lookup, joiner, files, target.own)

    def _older(self, lookup: AsOfLookup, target: Target) -> tuple[Joiner, ...]:
        """Return the joiners over all versions that a lookup needs: none for lookups of the current version."""
        if lookup.event_time is None:
            return ()
        rows = version_rows(lookup.history, self._carried(lookup.dimension.name))
        directions: list[Literal["backward", "forward"]] = ["backward"]
        directions += ["forward"] if lookup.before_first == "first" else []
        joiners = []
        for direction in directions:
            name = f"{lookup.role} ({direction})"
            joiner = self._joiner(name, target, rows, lookup.current.operator_on, lookup.entry_columns, lookup.role)
            memory = int(joiner.memory * (2 - _CURRENT_SHARE)) // len(directions)
            joiners.append(replace(joiner, nearest=(lookup.time_column, AT, direction), memory=memory))
        return tuple(joiners)

    def _carried(self, dimension: str) -> set[str]:
        """Return the columns of a dimension that some fact carries."""
        return {name for look in self.lookups.values() if look.dimension.name == dimension for name in look.carry}

    def _narrow(self, dimension: Dimension) -> Dimension:
        """Return the dimension with only the attributes that some fact carries, as replicas hold it."""
        carried = self._carried(dimension.name)
        kept = [field for field in dimension.schema if field.name in carried or field.name in dimension.natural_key]
        return Dimension(
            dimension.name,
            dimension.natural_key,
            dimension.surrogate_key,
            pa.schema(kept),
            dimension.rules,
            inferred_flag=None,
        )

    def _joiner(
        self,
        name: str,
        target: Target,
        rows: ReplicaRows,
        on: list[tuple[str, str]],
        columns: Sequence[str],
        role: str | None = None,
    ) -> Joiner:
        """Return a joiner with one share of the memory; `role` is its role if `name` is another one."""
        config, path = self.config, self.path(role or name)
        replica = ReplicaSpec(
            rows, path, target.table_id, target.shards, config.replicas, parse_memory(config.replica_memory)
        )
        return Joiner(
            name,
            replica,
            target.version,
            target.base,
            tuple(on),
            tuple(columns),
            memory=parse_memory(config.memory) // self._memory_shares(),
            whole_memory=parse_memory(config.memory),
            deadline=None if config.deadline is None else parse_duration(config.deadline),
        )

    def _memory_shares(self) -> int:
        """Return the number of operators that share the memory of a worker, since any task may need any replica.

        An as-of lookup has two shares for each shard, most of them for the current versions, which serve most facts.
        """
        dated = {role for role, look in self.lookups.items() if isinstance(look, AsOfLookup) and look.event_time}
        roles = (*self.lookups, *self._duplicate_roles())
        return sum(self.shards.get(role, 1) * (2 if role in dated else 1) for role in roles)

    def _duplicate_roles(self) -> tuple[str, ...]:
        return () if self.duplicates is None else (DUPLICATES_ROLE,)


def member_schema(lookup: Lookup | AsOfLookup) -> pa.Schema:
    """Return the columns of new members of a lookup's dimension in Delta."""
    return delta_schema(lookup.history) if isinstance(lookup, AsOfLookup) else lookup.dimension.table_schema


def _storable(rules: tuple[StorableRule, ...]) -> tuple[StorableStep, ...]:
    return (StorableStep(rules),) if rules else ()


def _file_spec(path: str, schema: pa.Schema, run: StageRun) -> FileSpec | None:
    """Return the file specification of a table whose files the tasks write; None if Spark writes the table."""
    return FileSpec(path, schema, run.files[path]) if path in run.files else None


def _joined(groups: list[Group], shards: Mapping[str, int]) -> list[Group]:
    """Merge groups that need all rows in one task with each other and with an unshuffled group directly before them."""
    joined: list[Group] = []
    for group in groups:
        if group.shuffled and shards[group.roles[0]] == 1:
            before = joined.pop().roles if joined and not joined[-1].shuffled else ()
            joined.append(Group((*before, *group.roles), shuffled=False, alone=True))
        else:
            joined.append(group)
    return joined
