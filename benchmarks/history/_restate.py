"""Facts that belong to another version since changes came late: `headrace dimension restate` against Delta's MERGE.

The facts are in the order of their days, as they were loaded, and the changes move facts in all files. MERGE is given
the versions that the changes opened: a row for each, with its natural key, its days and the new values. It is tuned by
Delta's documentation: deletion vectors, few shuffle partitions, adaptive execution, a broadcast source. Both tables
have the same files at the start, and no change feed.
"""

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.history._members import (
    EACH,
    FIRST_VERSIONS,
    LAST_DAY,
    Members,
    cities,
    date,
    link_table,
    pipeline,
    write_files,
    write_stream,
)  # fmt: skip
from benchmarks.history._processor import Stopwatch
from benchmarks.history._settings import content, merging
from headrace.pipelines.changes.applying import apply_files
from headrace.pipelines.delta.commits import Commit, commit_files
from headrace.pipelines.delta.tables import DeltaHandle, open_table
from headrace.pipelines.restating import restate
from headrace.pipelines.runner import run

__all__ = ["CONTESTANTS", "measure"]

CONTESTANTS = OURS, MERGE = "headrace dimension restate", "Delta MERGE, tuned"
ROWS_OF_A_FILE = 1 << 21
COLUMNS = "number, customer, day, customer_key, customer_city, _outcome"


def measure(spark, folder, settings):
    """Yield a row for each contestant and round."""
    members = Members(settings.members)
    config = pipeline(folder, "restate", settings.memory)
    path, facts = members.create(config, settings.kept or None), config.sink.path
    _load(spark, config, members, settings)
    merged = f"{facts}_merged"
    link_table(facts, merged)
    (folder / "changed").mkdir()
    single = np.random.default_rng(4).permutation(np.flatnonzero(~members.twice))
    # A change moves the later half of the facts of its member, on average.
    each = max(1, round(settings.moved / (settings.facts / settings.members) * 2))
    for number in range(settings.rounds + 1):
        chosen = single[number * each : (number + 1) * each]
        file = folder / "changed" / f"{number}.parquet"
        pq.write_table(_changes(members, chosen, number), file)
        above = DeltaHandle(path).greatest_key("customer_key")
        apply_files(config, "customer", file)
        moved = {}
        contestants = {OURS: lambda: _restate(config), MERGE: lambda: _merge(spark, path, merged, above)}  # noqa: B023
        for name in sorted(contestants, reverse=number % 2 == 1):
            began, watch = time.perf_counter(), Stopwatch()
            moved[name] = contestants[name]()
            yield {"contestant": name, "round": number, "counted": number > 0, "rows": moved[name],
                   "seconds": time.perf_counter() - began, "processor": watch.seconds()}  # fmt: skip
        if moved[OURS] != moved[MERGE]:
            raise AssertionError(f"the contestants corrected different numbers of facts: {moved}")
        print(f"both corrected {moved[OURS]:,} facts")
    found = [content(spark.read.format("delta").load(table), COLUMNS) for table in (facts, merged)]
    if found[0] != found[1] or found[0][0] != settings.facts:
        raise AssertionError(f"the facts differ: {found}")
    print(f"both tables have the same {settings.facts:,} facts")


def _load(spark, config, members, settings):
    """Create the fact table by a batch of its pipeline, and add the other facts as files."""
    facts = config.sink.path
    first = min(1000, settings.facts)
    write_stream(
        Path(config.source.path), 0, _asked(members, 0, first, settings.facts).select(["number", "customer", "day"])
    )
    run(config)
    spark.sql(
        f"ALTER TABLE delta.`{facts}` SET TBLPROPERTIES "
        "('delta.enableDeletionVectors' = 'true', 'delta.enableChangeDataFeed' = 'false')"
    )
    schema = pa.schema(open_table(facts).schema().to_arrow())
    parts = ((at, min(at + ROWS_OF_A_FILE, settings.facts)) for at in range(first, settings.facts, ROWS_OF_A_FILE))
    files = write_files(facts, schema, (_asked(members, *part, settings.facts, schema) for part in parts))
    commit_files(facts, open_table(facts), files, Commit("benchmark", 0))


def _asked(members, first, last, count, schema=None):
    """Return facts with these numbers, as they were loaded: by day, from the first versions to `LAST_DAY`."""
    rng = np.random.default_rng(first)
    number = np.arange(first, last)
    member = rng.integers(0, len(members.ids), len(number))
    day = FIRST_VERSIONS[1] + number * (LAST_DAY - FIRST_VERSIONS[1]) // count
    key, city = members.at(member, day)
    columns = {"number": number, "customer": members.ids[member], "day": date(day), "customer_key": key,
               "customer_city": cities(city)}  # fmt: skip
    if schema is None:
        return pa.table(columns)
    late = (member % EACH == 0) & (day < members.second[member])
    columns["_outcome"] = pa.array(["matched", "late"]).take(pa.array(late.astype(np.int8)))
    return pa.table(
        [columns.get(field.name, pa.nulls(len(number), field.type)) for field in schema], schema.names
    ).cast(schema)


def _changes(members, chosen, number):
    """Return late changes of the city, each on any day since facts exist."""
    rng = np.random.default_rng(number)
    day = rng.integers(FIRST_VERSIONS[1], LAST_DAY, len(chosen))
    _, city = members.at(chosen, day)
    phone = pa.array(members.ids[chosen] + 70_000_000).cast(pa.string())
    return pa.table({"id": members.ids[chosen], "city": cities((city + 1) % 10_000), "phone": phone, "since": date(day),
                     "n": day})  # fmt: skip


def _restate(config):
    (role,) = restate(config)
    return role.restated


def _merge(spark, path, facts, above):
    """Correct the facts of the versions with keys above a number, and return the number of facts."""
    with merging(spark):
        return spark.sql(_MERGE.format(path=path, facts=facts, above=above)).first()["num_updated_rows"]


_MERGE = """
MERGE INTO delta.`{facts}` AS fact USING (
    SELECT id, customer_key, city, valid_from, valid_to
    FROM delta.`{path}` WHERE customer_key > {above}
) AS version
ON fact.customer = version.id AND fact.day >= version.valid_from
AND (version.valid_to IS NULL OR fact.day < version.valid_to)
WHEN MATCHED THEN UPDATE SET customer_key = version.customer_key, customer_city = version.city
"""
