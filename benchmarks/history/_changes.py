"""Changes of members, half of which open a version: `headrace dimension apply` against Delta's MERGE.

MERGE closes and opens versions by the usual pattern: the source has a row for each matched version, and another one
without a merge key for each version to insert. It is tuned by Delta's documentation: deletion vectors, a table ordered
by natural key in files of equal size, few shuffle partitions, adaptive execution, and a broadcast source. The change
feed is off for MERGE and on for Headrace, whose replicas follow it.
"""

import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.history._members import LAST_DAY, Members, cities, date, link_table, pipeline
from benchmarks.history._processor import Stopwatch
from benchmarks.history._settings import CONTENT, content, merging
from headrace.pipelines.changes.applying import apply_files

__all__ = ["CONTESTANTS", "changes", "measure"]

CONTESTANTS = OURS, MERGE = "headrace dimension apply", "Delta MERGE, tuned"


def measure(spark, folder, settings):
    """Yield a row for each contestant and round."""
    members = Members(settings.members)
    config = pipeline(folder, "changes", settings.memory)
    path = members.create(config, settings.kept or None)
    link_table(path, f"{path}_merged")
    spark.sql(f"ALTER TABLE delta.`{path}_merged` SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'false')")
    changed = np.random.default_rng(2).permutation(settings.members)
    (folder / "changed").mkdir()
    for number in range(settings.rounds + 1):
        chosen = np.sort(changed[number * settings.changes : (number + 1) * settings.changes])
        file = folder / "changed" / f"{number}.parquet"
        pq.write_table(changes(members, chosen, number), file)
        contestants = {OURS: lambda: _apply(config, file), MERGE: lambda: _merge(spark, f"{path}_merged", file)}  # noqa: B023
        for name in sorted(contestants, reverse=number % 2 == 1):
            began, watch = time.perf_counter(), Stopwatch()
            contestants[name]()
            yield {"contestant": name, "round": number, "counted": number > 0, "rows": settings.changes,
                   "seconds": time.perf_counter() - began, "processor": watch.seconds()}  # fmt: skip
    _compare(spark, path, settings)


def changes(members, chosen, number):
    """Return changes of the day `LAST_DAY + number`: half with a new city, half with a new phone number."""
    moves = np.arange(len(chosen)) % 2 == 0
    _, city = members.at(chosen, np.full(len(chosen), LAST_DAY))
    phone = members.ids[chosen] + 70_000_000 + np.where(moves, 0, 500_000_000 * (number + 1))
    columns = {
        "id": members.ids[chosen],
        "city": cities(np.where(moves, (city + 1) % 10_000, city)),
        "phone": pc.cast(pa.array(phone), pa.string()),
        "since": date(np.full(len(chosen), LAST_DAY + number)),
        "n": np.full(len(chosen), LAST_DAY + number),
    }
    order = np.random.default_rng(number).permutation(len(chosen))
    return pa.table(columns).take(pa.array(order))


def _apply(config, file):
    result = apply_files(config, "customer", file)
    print(f"  {dict(result.outcomes)}")


def _merge(spark, path, file):
    """Apply the changes of a file by MERGE; surrogate keys continue after the greatest one."""
    with merging(spark):
        spark.read.parquet(str(file)).createOrReplaceTempView("given")
        greatest = spark.sql(f"SELECT max(customer_key) AS greatest FROM delta.`{path}`").first()["greatest"]
        spark.sql(_STAGED.format(path=path, greatest=greatest)).createOrReplaceTempView("staged")
        spark.sql(_MERGE.format(path=path))


# The current versions are read once to tell new versions from other changes, as in the documentation's example.
_STAGED = """
WITH compared AS (
    SELECT /*+ BROADCAST(given) */ given.*, held.version, held.city <> given.city AS moves
    FROM delta.`{path}` AS held JOIN given ON held.id = given.id WHERE held.is_current
)
SELECT /*+ REPARTITION(2) */ id AS merge_key, moves, CAST(NULL AS BIGINT) AS new_key, id, city, phone, since, n, version
FROM compared
UNION ALL
SELECT NULL, moves, {greatest} + row_number() OVER (ORDER BY id), id, city, phone, since, n, version + 1
FROM compared WHERE moves
"""
_MERGE = """
MERGE INTO delta.`{path}` AS held USING staged AS s
ON held.id = s.merge_key AND (held.is_current OR NOT s.moves)
WHEN MATCHED AND s.moves THEN UPDATE SET valid_to = s.since, is_current = false
WHEN MATCHED AND held.phone <> s.phone THEN UPDATE SET phone = s.phone
WHEN NOT MATCHED THEN INSERT (
    customer_key, id, city, phone, valid_from, valid_to, is_current, version, is_deleted, is_inferred, _sequence
) VALUES (s.new_key, s.id, s.city, s.phone, s.since, NULL, true, s.version, false, false, s.n)
"""


def _compare(spark, path, settings):
    """Raise if the tables differ in other columns than surrogate keys, or a key names two versions."""
    ours, merged = (spark.read.format("delta").load(name) for name in (path, f"{path}_merged"))
    found = [content(frame, CONTENT) for frame in (ours, merged)]
    if found[0] != found[1]:
        raise AssertionError(f"the dimensions differ: {found}")
    opened = (settings.rounds + 1) * -(-settings.changes // 2)
    expected = settings.members + -(-settings.members // 5) + 1 + opened
    for frame in (ours, merged):
        keys = frame.selectExpr("count(customer_key)", "count(DISTINCT customer_key)").first()
        if set(keys) != {expected}:
            raise AssertionError(f"{expected} versions were expected, each with its own key: {keys}")
    print(f"both dimensions have the same {expected:,} versions")
