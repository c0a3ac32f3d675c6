"""Facts on, just before and just after the instants of versions: with zones, without, by day, and before 1900."""

import csv
import datetime as dt

import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable

from headrace.pipelines.changes import apply_files, check_history
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.restating import restate
from headrace.pipelines.runner import run

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.usefixtures("spark")]

UTC = dt.UTC
TICK = dt.timedelta(microseconds=1)
ZONES = [UTC, dt.timezone(dt.timedelta(hours=5, minutes=30)), dt.timezone(dt.timedelta(hours=-11))]
INSTANTS = [
    dt.datetime(1582, 10, 10, 6, 0, 0, 1, UTC),
    dt.datetime(1850, 6, 1, 12, 0, 0, 1, UTC),
    dt.datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),
    dt.datetime(2024, 3, 31, 1, 30, tzinfo=UTC),
    dt.datetime(2024, 3, 31, 1, 30, 0, 1, UTC),
]
LATER = [dt.datetime(1582, 10, 10, 6, tzinfo=UTC), dt.datetime(1899, 12, 31, 23, 59, 59, 999999, UTC)]
DIMENSIONS = {"zoned": "timestamp", "local": "timestamp_ntz", "daily": "timestamp"}
HISTORY = {"effective": "since", "sequence": "n"}
DOCUMENT = {
    "name": "p",
    "source": {
        "format": "csv", "path": "in",
        "schema": {"fact": "bigint", "k": "bigint", "at": "timestamp", "wall": "timestamp_ntz", "day": "date"},
    },
    "dimensions": {
        name: {
            "path": f"w/{name}", "natural_key": ["k"], "columns": {"k": "bigint", "v": "string"}, "shards": 2,
            "history": {**HISTORY, "effective_type": kind, "by_day": name == "daily"},
        }
        for name, kind in DIMENSIONS.items()
    },
    "lookups": [
        {"dimension": name, "role": role, "on": {"k": "k"}, "event_time": time, "carry": ["v"], "before_first": target}
        for name, role, time, target in (
            ("zoned", "zoned", "at", "unknown"), ("local", "local", "wall", "first"), ("daily", "daily", "at", "first"),
            ("zoned", "dated", "day", "first"),
        )
    ],
    "sink": {"path": "w/facts"},
    "replicas": "replicas",
}  # fmt: skip


class Shop:
    """A pipeline with three histories of the same changes, and facts around their instants."""

    def __init__(self, folder):
        self.folder, self.versions, self.facts = folder, {}, []
        (folder / "in").mkdir()
        (folder / "p.yml").write_text(yaml.safe_dump(DOCUMENT))
        self.config = load_pipeline(folder / "p.yml")

    def change(self, number, instants):
        for name, kind in DIMENSIONS.items():
            folder = self.folder / name
            folder.mkdir(exist_ok=True)
            with (folder / f"{number}.csv").open("w", newline="") as stream:
                writer = csv.writer(stream)
                writer.writerow(["k", "v", "since", "n"])
                for place, instant in enumerate(instants):
                    since = instant.replace(tzinfo=None) if kind == "timestamp_ntz" else instant
                    writer.writerow([1, f"{number}-{place}", since.isoformat(), number * 100 + place])
                    key = instant.date() if name == "daily" else instant
                    self.versions.setdefault(name, {})[key] = f"{number}-{place}"  # the greatest sequence comes last
            apply_files(self.config, name, folder)

    def load(self):
        times = [instant + shift for instant in (*INSTANTS, *LATER) for shift in (-TICK, TICK * 0, TICK)]
        times += [dt.datetime.combine(instant.date(), dt.time(), UTC) for instant in INSTANTS]
        with (self.folder / "in" / "1.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(DOCUMENT["source"]["schema"])
            for fact, time in enumerate(times):
                self.facts.append(time)
                zoned = time.astimezone(ZONES[fact % len(ZONES)]).isoformat()
                writer.writerow([fact, 1, zoned, time.replace(tzinfo=None).isoformat(), time.date()])
        run(self.folder / "p.yml")

    def value(self, name, at, *, first=True):
        versions = sorted(self.versions[name].items())
        valid = [value for since, value in versions if since <= at]
        return valid[-1] if valid else versions[0][1] if first else None

    def check(self):
        found = pa.table(DeltaTable(str(self.folder / "w" / "facts")).scan()).to_pylist()
        for row in sorted(found, key=lambda row: row["fact"]):
            at = self.facts[row["fact"]]
            midnight = dt.datetime.combine(at.date(), dt.time(), UTC)
            expected = {
                "zoned_v": self.value("zoned", at, first=False), "local_v": self.value("local", at),
                "daily_v": self.value("daily", at.date()), "dated_v": self.value("zoned", midnight),
            }  # fmt: skip
            assert {name: row[name] for name in expected} == expected, (at, row)
        assert len(found) == len(self.facts)


def test_facts_around_the_instants_of_versions_meet_them_also_after_late_changes(tmp_path):
    shop = Shop(tmp_path)
    shop.change(1, INSTANTS)
    shop.load()
    shop.check()
    shop.change(2, LATER)
    restate(tmp_path / "p.yml")
    shop.check()
    assert [check_history(shop.config, name) for name in DIMENSIONS] == [[], [], []]
