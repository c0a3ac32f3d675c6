"""Random declarations, files, kills, repetitions, compactions and snapshots against an oracle of plain Python."""

import datetime as dt
import decimal
import json
import math
import random
import unicodedata
from collections import Counter, defaultdict

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import DeltaTable

from headrace.etl.history import inferred_entries
from headrace.pipelines.changes import SnapshotOptions, apply_files, compact_dimension, open_versions
from headrace.pipelines.config.column_types import arrow_type
from headrace.pipelines.config.history import history_of
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.delta.commits import Commit, commit_files
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.delta.tables import DeltaHandle
from headrace.pipelines.history.layout import delta_schema, version_rows

UTC = dt.UTC
NO_ZONE = dt.datetime  # of times without a zone
STEPS = (
    "after plan", "before apply", "after apply", "before changes", "after changes", "before errors", "after errors",
    "before moved", "after moved", "after done",
)  # fmt: skip
VALUES = {
    "string": ["", " ", "a", "A", "é", "e\u0301", "ß", "\U0001d518", "x" * 3000, "NULL", '"', "a\nb", "a,b", "\ufeffz"],
    "boolean": [True, False],
    "bigint": [0, -1, 7, 2**63 - 1, -(2**63)],
    "smallint": [0, 1, -32768, 32767],
    "double": [0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, 5e-324],
    "float": [0.0, -0.0, 0.25, math.nan],
    "date": [dt.date(1, 1, 1), dt.date(9999, 12, 31), dt.date(1969, 12, 31), dt.date(2024, 2, 29)],
    "timestamp": [
        dt.datetime(1969, 12, 31, 23, 59, 59, 999999, UTC), dt.datetime(2024, 1, 1, tzinfo=UTC),
        dt.datetime(1, 1, 1, tzinfo=UTC), dt.datetime(9999, 12, 31, 23, 59, 59, 999999, UTC),
    ],
    "timestamp_ntz": [NO_ZONE(1969, 12, 31, 23, 59, 59, 1), NO_ZONE(2024, 3, 31, 2, 30)],
    "decimal(10,2)": [decimal.Decimal("0.00"), decimal.Decimal("-99999999.99"), decimal.Decimal("1.50")],
    "decimal(38,10)": [decimal.Decimal("9" * 28 + "." + "9" * 10), decimal.Decimal("0E-10")],
    "binary": [b"", b"\x00\xff", b"a"],
}  # fmt: skip
KEYS = {
    "bigint": [0, 1, 2, 3, -5, 2**63 - 1],
    "string": ["a", "A", " a ", "é", "e\u0301", "straße", "STRASSE", "", "\U0001d518"],
    "date": [dt.date(2024, 1, 1), dt.date(1960, 1, 1)],
    "decimal(10,2)": [decimal.Decimal("1.00"), decimal.Decimal("-0.50")],
}
TIMES = {
    "date": [dt.date(1969, 12, 30), *(dt.date(2024, 1, day) for day in range(1, 8)), dt.date(1, 1, 2)],
    "timestamp": [
        dt.datetime(1969, 12, 31, 23, 59, 59, 999998, UTC), dt.datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),
        *(dt.datetime(2024, 1, 1, hour, tzinfo=UTC) for hour in range(0, 24, 6)),
        dt.datetime(2024, 1, 2, 0, 0, 0, 1, UTC),
    ],
    "timestamp_ntz": [
        NO_ZONE(1950, 5, 5, 5, 5, 5, 5), *(NO_ZONE(2024, 1, day, day) for day in range(1, 6)),
    ],
}  # fmt: skip
FACT_TIMES = {
    "date": [pa.date32(), pa.timestamp("us", "UTC"), pa.timestamp("ms")],
    "timestamp": [
        pa.date32(),
        pa.timestamp("us", "UTC"),
        pa.timestamp("us", "Europe/Berlin"),
        pa.timestamp("ms", "UTC"),
    ],
    "timestamp_ntz": [pa.date32(), pa.timestamp("us"), pa.timestamp("ms")],
}
NAMES = ["a b", "order", "x.y", "Größe", "select", "it's", "q`q", "a-b", "date", "v"]


class KilledError(BaseException):
    """Ends a run as kill -9 would."""


class Declared:
    """A random declaration."""

    def __init__(self, rng):
        names = rng.sample(NAMES, len(NAMES))
        self.key = {names.pop(): rng.choice(list(KEYS)) for _ in range(rng.choice([1, 1, 2]))}
        self.rules = {}
        for name, kind in self.key.items():
            if kind == "string" and rng.random() < 0.6:
                self.rules[name] = rng.choice([["trim", "casefold"], ["nfc"], ["blank"], ["nfkc", "casefold"]])
        self.attributes = {names.pop(): rng.choice(list(VALUES)) for _ in range(rng.randint(1, 5))}
        self.types = {name: rng.choice(["0", "1", "1c", "2", "2", "a"]) for name in self.attributes}
        self.time = rng.choice(list(TIMES))
        self.by_day = self.time != "date" and rng.random() < 0.3
        self.sequence = rng.random() < 0.7
        self.operation = rng.random() < 0.7
        self.end = rng.choice([None, dt.date(9999, 12, 31)])
        self.format = rng.choice(["parquet", "json"])
        self.shards = rng.choice([1, 2, 3])

    def history(self):
        lists = {"0": "type_0", "1": "type_1", "1c": "type_1_current", "2": "type_2", "a": "audit"}
        found = {lists[k]: [n for n in self.types if self.types[n] == k] for k in lists}
        found |= {"effective": "since", "effective_type": self.time, "by_day": self.by_day}
        found |= {"sequence": "n"} if self.sequence else {}
        found |= {"operation": "op"} if self.operation else {}
        return found | ({"end": self.end} if self.end else {})

    def document(self):
        dimension = {
            "path": "w/dim", "natural_key": list(self.key), "columns": {**self.key, **self.attributes},
            "rules": self.rules, "history": self.history(), "shards": self.shards,
        }  # fmt: skip
        schema = {f"f{i}": kind for i, kind in enumerate(self.key.values())}
        return {
            "name": "fuzz",
            "source": {"format": self.format, "path": "in", "schema": schema},
            "dimensions": {"dim": dimension},
            "lookups": [{"dimension": "dim", "role": "r", "on": {f"f{i}": n for i, n in enumerate(self.key)}}],
            "sink": {"path": "w/facts"},
            "trigger": {"max_files": 2},
            "replicas": "replicas",
        }  # fmt: skip

    @property
    def spelled(self):
        return [name for name, rules in self.rules.items() if rules != ["blank"]]

    @property
    def columns(self):
        columns = {**self.key, **self.attributes, "since": self.time}
        columns |= {"n": "bigint"} if self.sequence else {}
        return columns | ({"op": "string"} if self.operation else {})

    def instant(self, value):
        return value.date() if self.by_day else value

    @property
    def beginning(self):
        day = NO_ZONE(1, 1, 1)
        return {"date": day.date(), "timestamp": day.replace(tzinfo=UTC), "timestamp_ntz": day}[
            "date" if self.by_day else self.time
        ]

    @property
    def ending(self):
        if self.end is None or self.by_day or self.time == "date":
            return self.end
        return dt.datetime.combine(self.end, dt.time(), UTC if self.time == "timestamp" else None)

    def normal(self, row):
        """Return the normalized key; None if a part is null."""
        parts = []
        for name in self.key:
            value = row[name]
            for rule in sorted(self.rules.get(name, ()), key=["nfc", "nfkc", "casefold", "trim", "blank"].index):
                if value is not None:
                    value = rule_of(rule, value)
            parts.append(value)
        return None if None in parts else tuple(parts)


def rule_of(rule, text):
    if rule == "trim":
        return text.strip() or None
    if rule == "blank":
        return text if text.strip() else None
    if rule == "casefold":
        return text.casefold()
    return unicodedata.normalize(rule.upper(), text)


def plain(value):
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return value.astimezone(UTC) if isinstance(value, dt.datetime) and value.tzinfo else value


class Oracle:
    """The versions of a set of changes, row by row."""

    def __init__(self, declared):
        self.declared = declared
        self.changes = []
        self.inferred = {}

    def rank(self, row):
        """Return what orders changes of a member and a time; the greatest wins, by sequence, then the least row."""
        declared = self.declared
        cells = []
        for name in declared.attributes:
            value = row[name] if row["op"] != "D" or declared.types[name] == "a" else None
            cells.append((2, 0) if value is None else (1, 0) if plain(value) == "NaN" else (0, plain(value)))
        cells += [(0, row[name]) for name in declared.spelled]
        return (row["op"] == "D", cells)

    def add(self, rows):
        self.changes += rows

    def order(self, row):
        return row["n"] if self.declared.sequence else row["since"]

    def winners(self):
        best = {}
        for row in self.changes:
            key = self.declared.normal(row)
            if key is None:
                continue
            at = self.declared.instant(row["since"])
            members = best.setdefault(key, {})
            old = members.get(at)
            if (
                old is None
                or self.order(row) > self.order(old)
                or (self.order(row) == self.order(old) and self.rank(row) < self.rank(old))
            ):
                members[at] = row
        return {key: dict(sorted(entries.items())) for key, entries in best.items()}

    def versions(self):
        declared, found = self.declared, []
        winners = self.winners()
        for key, entries in winners.items():
            runs = []
            for at, row in entries.items():
                state = (
                    "D"
                    if row["op"] == "D"
                    else tuple(plain(row[n]) for n in declared.attributes if declared.types[n] == "2")
                )
                if runs and runs[-1][0] == state:
                    runs[-1][1].append((at, row))
                else:
                    runs.append((state, [(at, row)]))
            present = [(at, row) for at, row in entries.items() if row["op"] != "D"]
            nothing = dict.fromkeys(declared.attributes)
            for number, (state, run) in enumerate(runs):
                upto = [row for at, row in present if at <= run[-1][0]]
                sources = {
                    "0": present[0][1] if present else nothing,
                    "1": present[-1][1] if present else nothing,
                    "1c": upto[-1] if upto else nothing,
                    "2": upto[-1] if upto else nothing,
                    "a": run[0][1],
                }
                last = number + 1 == len(runs)
                version = dict(zip(declared.key, key, strict=True))
                first = next(iter(entries.values()))
                version |= {f"{name}_spelled": first[name] for name in declared.spelled}
                version |= {n: plain(sources[declared.types[n]][n]) for n in declared.attributes}
                version |= {
                    "valid_from": run[0][0], "valid_to": declared.ending if last else runs[number + 1][1][0][0],
                    "is_current": last, "version": number + 1, "is_deleted": state == "D", "is_inferred": False,
                }  # fmt: skip
                found.append(version)
        for key, spelled in self.inferred.items():
            if key not in winners:
                version = dict(zip(declared.key, key, strict=True))
                version |= {f"{name}_spelled": spelled[name] for name in declared.spelled}
                version |= dict.fromkeys(declared.attributes)
                found.append({
                    **version, "valid_from": declared.beginning, "valid_to": declared.ending, "is_current": True,
                    "version": 1, "is_deleted": False, "is_inferred": True,
                })  # fmt: skip
        return found


def multiset(rows):
    return Counter(tuple(sorted((n, repr(plain(v))) for n, v in row.items())) for row in rows)


class World:
    """A dimension, its files of changes, and the oracle."""

    def __init__(self, folder, rng):
        self.folder, self.rng = folder, rng
        self.declared = Declared(rng)
        for name in ("in", "changes"):
            (folder / name).mkdir(parents=True)
        (folder / "fuzz.yml").write_text(yaml.safe_dump(self.declared.document(), sort_keys=False))
        self.config = load_pipeline(folder / "fuzz.yml")
        self.history = history_of(self.config, "dim")
        self.oracle = Oracle(self.declared)
        self.path = str(folder / "w" / "dim")
        self.count = 0
        self.keys = {}
        self.clock = 0
        self.log = []

    def value(self, kind):
        if self.rng.random() < 0.15:
            return None
        found = self.rng.choice(VALUES[kind])
        if self.declared.format == "json" and isinstance(found, float) and not math.isfinite(found):
            return 1.0
        if self.declared.format == "json" and found == b"\x00\xff":
            return b"b"
        return found

    def row(self):
        rng, declared = self.rng, self.declared
        row = {n: None if rng.random() < 0.03 else rng.choice(KEYS[k]) for n, k in declared.key.items()}
        row |= {n: self.value(k) for n, k in declared.attributes.items()}
        row["since"] = rng.choice(TIMES[declared.time])
        row["n"] = rng.randrange(5) if declared.sequence else None
        row["op"] = rng.choice("IUUUDU") if declared.operation else None
        return row

    def write(self, place, rows, columns):
        if self.declared.format == "parquet":
            schema = pa.schema([(n, arrow_type(k)) for n, k in columns.items()])
            pq.write_table(pa.Table.from_pylist([{n: r[n] for n in columns} for r in rows], schema), place)
        else:
            lines = [
                json.dumps({n: as_json(r[n]) for n in columns}, ensure_ascii=self.rng.random() < 0.5) for r in rows
            ]
            place.write_text("".join(line + "\n" for line in lines))

    def put(self, rows):
        suffix = self.declared.format
        self.count += 1
        place = self.folder / "changes" / f"{self.count:04d}.{suffix}"
        self.write(place, rows, self.declared.columns)
        return place

    def killed(self, step, times=1):
        seen = Counter()

        def hook(name):
            seen[name] += 1
            if name == step and seen[name] == times:
                raise KilledError(step)

        return hook

    def apply(self, source=None, **options):
        """Apply what waits, with some kills."""
        source = source or self.folder / "changes"
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            try:
                apply_files(self.config, "dim", source, hook=self.killed(self.rng.choice(STEPS)), **options)
            except KilledError as killed:
                self.log.append(f"killed {killed}")
                if self.rng.random() < 0.3:
                    self.compact()
        return apply_files(self.config, "dim", source, **options)

    def compact(self):
        self.log.append("compact")
        compact_dimension(self.config, "dim")

    def infer(self):
        """Add members as the facts of a run do."""
        handle = DeltaHandle(self.path)
        handle.latest()
        greatest = handle.greatest_key(self.history.dimension.surrogate_key)
        row = self.row()
        key = self.declared.normal(row)
        if key is None or any(
            dict(zip(self.declared.key, key, strict=True)).items() <= v.items() for v in self.oracle.versions()
        ):
            return
        self.log.append(f"infer {key}")
        spelled = pa.table({n: pa.array([row[n]], arrow_type(k)) for n, k in self.declared.key.items()})
        added = inferred_entries(self.history, spelled, [greatest + 1])
        with FileWriter(FileSpec(self.path, delta_schema(self.history))) as writer:
            for batch in version_rows(self.history, added).to_batches():
                writer.write(batch)
            files = writer.close()
        commit_files(self.path, handle.table, files, Commit("facts", handle.table.version()))
        self.oracle.inferred[key] = row

    def begin(self):
        """Create the dimension with some changes."""
        rows = [self.row() for _ in range(5)]
        self.put(rows)
        self.oracle.add(rows)
        self.apply()

    def step(self):
        """Do something to the dimension."""
        rng = self.rng
        action = rng.choice(["apply"] * 5 + ["again", "same", "compact", "infer", "snapshot"])
        self.log.append(action)
        if action == "compact":
            self.compact()
        elif action == "infer":
            self.infer()
        elif action == "again":
            self.apply(again=True)
        elif action == "snapshot":
            self.snapshot()
        else:
            for _ in range(rng.choice([1, 1, 2, 3])):
                rows = [self.row() for _ in range(rng.choice([0, 1, 3, 20, 60]))]
                self.oracle.add(rows)
                if action == "same" and self.oracle.changes:
                    stored = [row for row in self.oracle.changes if self.declared.operation or row["op"] != "D"]
                    rows = rows + rng.choices(stored, k=10)
                self.put(rows)
            self.apply()

    def snapshot(self):
        """Apply a snapshot; its rows are those whose values differ from what the winning changes say at its time."""
        rng, declared = self.rng, self.declared
        at = rng.choice(TIMES[declared.time])
        instant = declared.instant(at)
        missing = rng.choice(["keep", "delete"])
        rows = {}
        for _ in range(rng.choice([1, 5])):
            row = self.row()
            key = declared.normal(row)
            if key is not None:
                rows[key] = {**row, "since": at, "n": 9 if declared.sequence else None, "op": "U"}
        if not rows:
            return
        changes, winners = [], self.oracle.winners()
        said = {key: [row for time, row in entries.items() if time <= instant] for key, entries in winners.items()}
        for key, row in rows.items():
            last = said.get(key) or None
            if (
                last is None
                or last[-1]["op"] == "D"
                or any(plain(last[-1][n]) != plain(row[n]) for n in declared.attributes if declared.types[n] != "a")
            ):
                changes.append(row)
        if missing == "delete":
            for key, entries in said.items():
                if key not in rows and entries and entries[-1]["op"] != "D":
                    changes.append(
                        {
                            **dict(zip(declared.key, key, strict=True)),
                            **dict.fromkeys(declared.attributes),
                            "since": at,
                            "n": 9 if declared.sequence else None,
                            "op": "D",
                        }
                    )
        self.count += 1
        place = self.folder / f"snapshot{self.count}.{declared.format}"
        self.write(place, list(rows.values()), {**declared.key, **declared.attributes})
        self.log.append(f"snapshot {at} {missing}")
        options = SnapshotOptions(at.isoformat(), "9" if declared.sequence else None, missing)
        self.apply(place, snapshot=options)
        self.oracle.add(changes)

    def rows(self):
        rows = pa.table(DeltaTable(self.path).scan()).to_pylist()
        return [row for row in rows if row["dim_key"] > 0]

    def check(self):
        rows, versions = self.rows(), self.oracle.versions()
        self.by_member = defaultdict(list)
        for version in sorted(versions, key=lambda version: version["version"]):
            self.by_member[tuple(version[n] for n in self.declared.key)].append(version)
        hidden = {"dim_key", "_sequence", "_entries"}
        shown = multiset({n: v for n, v in row.items() if n not in hidden} for row in rows)
        expected = multiset(versions)
        assert shown == expected, (list(shown - expected)[:3], list(expected - shown)[:3])
        for row in rows:
            member = tuple(row[n] for n in self.declared.key)
            assert self.keys.setdefault(row["dim_key"], member) == member
        assert len({row["dim_key"] for row in rows}) == len(rows)
        self.check_facts()

    def check_facts(self):
        """Look up drawn facts at times on, just before and just after the changes, and compare row by row."""
        rng, declared = self.rng, self.declared
        kind = rng.choice(FACT_TIMES[declared.time])
        facts = []
        for _ in range(40):
            key = {
                f"f{i}": None if rng.random() < 0.05 else rng.choice(KEYS[k])
                for i, k in enumerate(declared.key.values())
            }
            facts.append(
                key | {"at": None if rng.random() < 0.05 else moved(rng, rng.choice(TIMES[declared.time]), kind)}
            )
        schema = pa.schema([*((f"f{i}", arrow_type(k)) for i, k in enumerate(declared.key.values())), ("at", kind)])
        on = {f"f{i}": name for i, name in enumerate(declared.key)}
        with open_versions(self.config, "dim") as versions:
            found = versions.as_of(
                pa.Table.from_pylist(facts, schema), on, "at", role="r", carry=("valid_from", "version")
            )
        key_of = {(*(row[n] for n in declared.key), row["version"]): row["dim_key"] for row in self.rows()}
        expected = Counter(repr(self.fact(row, key_of)) for row in facts)
        names = [*schema.names, "r_key", "r_version", "_r_outcome"]
        assert Counter(repr([plain(row[n]) for n in names]) for row in found.to_pylist()) == expected

    def fact(self, row, key_of):
        """Return a fact with its key, version and outcome."""
        declared = self.declared
        key = declared.normal({name: row[f"f{i}"] for i, name in enumerate(declared.key)})
        versions = self.by_member.get(key, []) if row["at"] is not None else []
        given = [plain(value) for value in row.values()]
        if not versions:
            return [*given, -1, 1, "unknown"]
        at, like = row["at"], versions[0]["valid_from"]
        if isinstance(like, NO_ZONE) and not isinstance(at, NO_ZONE):
            at = NO_ZONE.combine(at, dt.time(), like.tzinfo)
        elif isinstance(at, NO_ZONE) and not isinstance(like, NO_ZONE):
            at = at.date()
        valid = [version for version in versions if version["valid_from"] <= at] or versions[:1]
        outcome = "matched" if versions[-1]["valid_from"] <= at else "late"
        number = valid[-1]["version"]
        return [*given, key_of[(*key, number)], number, outcome]

    def check_feed(self):
        feed = pa.table(DeltaTable(self.path).load_cdf(starting_version=0)).to_pylist()
        left = Counter()
        for row in feed:
            kind = row.pop("_change_type")
            for name in ("_commit_version", "_commit_timestamp"):
                del row[name]
            (key,) = multiset([row])
            left[key] += 1 if kind in {"insert", "update_postimage"} else -1
        assert +left == multiset(pa.table(DeltaTable(self.path).scan()).to_pylist())
        assert not -left


def moved(rng, time, kind):
    """Return a time as a type of facts, sometimes one tick away."""
    if kind == pa.date32():
        return time.date() if isinstance(time, NO_ZONE) else time
    if not isinstance(time, NO_ZONE):
        time = NO_ZONE.combine(time, dt.time(), UTC if kind.tz else None) + dt.timedelta(
            microseconds=rng.choice([0, 1, 86_399_999_999])
        )
    step = dt.timedelta(**{{"us": "microseconds", "ms": "milliseconds"}[kind.unit]: rng.choice([-1, 0, 0, 1])})
    time = time if time.year < 2 or time.year > 9998 else time + step
    return time.replace(microsecond=time.microsecond // 1000 * 1000) if kind.unit == "ms" else time


def as_json(value):
    if isinstance(value, dt.date | dt.datetime):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, bytes):
        return value.decode()
    return value


def run_seed(folder, seed, steps):
    world = World(folder, random.Random(seed))
    try:
        world.begin()
        world.check()
        for _ in range(steps):
            world.step()
            world.check()
        world.check_feed()
    except BaseException:
        print(seed, world.declared.document()["dimensions"], world.log)  # noqa: T201 - how to repeat it
        raise


@pytest.mark.parametrize("seed", range(1))
def test_a_dimension_is_what_its_changes_say(tmp_path, seed):
    run_seed(tmp_path, seed, 4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2, *range(100, 160)])
def test_more_dimensions_are_what_their_changes_say(tmp_path, seed):
    run_seed(tmp_path, seed, 8)
