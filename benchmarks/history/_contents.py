"""The content of a large dimension, compared with what a query makes of its initial versions and its changes.

No code of Headrace reads: `deltalake` reads the dimension, with its deletion vectors, and DuckDB the initial data files
and the changes. All rows pass as streams, and the memory of the query is limited.
"""

from dataclasses import dataclass
from tempfile import gettempdir

import duckdb
import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from benchmarks.history._settings import CONTENT

__all__ = ["has_repeats", "require_expected"]

INITIAL = 1  # version of the table that has the initial members
MEMORY = "1GiB"
BUCKETS = 256
KEY = "customer_key"

# A new city opens a version; a new phone number is of type 1 and changes all versions. Versions that changes opened may
# have any key above those of the initial versions.
_EXPECTED = f"""
WITH met AS (
    SELECT initial.*, given.city AS new_city, given.phone AS new_phone, since,
    coalesce(is_current AND given.city <> initial.city, false) AS closed
    FROM read_parquet($initial) AS initial LEFT JOIN read_parquet($changes) AS given USING (id)
)
SELECT {KEY}, id, city, coalesce(new_phone, phone) AS phone, valid_from, if(closed, since, valid_to) AS valid_to,
    is_current AND NOT closed AS is_current, version
FROM met
UNION ALL
SELECT NULL, id, new_city, new_phone, since, NULL, true, version + 1 FROM met WHERE closed
"""
_HELD = f"SELECT if({KEY} <= $greatest, {KEY}, NULL) AS {KEY}, {CONTENT} FROM held"
_SUMS = f"""
SELECT id % {BUCKETS} AS bucket, count(*) AS rows, sum(hash({KEY}, {CONTENT})::HUGEINT) AS hash FROM ({{rows}})
GROUP BY ALL
"""
_ONLY = f"""
SELECT * FROM (({{these}}) EXCEPT ALL ({{those}})) WHERE id % {BUCKETS} IS NOT DISTINCT FROM $bucket
ORDER BY ALL LIMIT 1
"""


@dataclass(frozen=True)
class _Side:
    """A query for versions, and the values of its parameters."""

    query: str
    values: dict


def require_expected(path, changed):
    """Return the number of versions of a dimension.

    Raises
    ------
    AssertionError
        If the dimension is not what the files of changes make of its initial versions, or a key names two versions.
    """
    initial = DeltaTable(path, version=INITIAL).file_uris()
    ((greatest,),) = _found(path, f"SELECT max({KEY}) FROM read_parquet($initial)", {"initial": initial})
    held = _Side(_HELD, {"greatest": greatest})
    expected = _Side(_EXPECTED, {"initial": initial, "changes": sorted(map(str, changed))})
    sums, wanted = _sums(path, held), _sums(path, expected)
    if sums != wanted:
        bucket = next(each for each in {**sums, **wanted} if sums.get(each) != wanted.get(each))
        only = [_only(path, *sides, bucket) for sides in ((held, expected), (expected, held))]
        raise AssertionError(f"{path} has {only[0]}, where {only[1]} is expected")
    rows = sum(rows for rows, _ in sums.values())
    if has_repeats(batch.column(0) for batch in _reader(path, [KEY])):
        raise AssertionError(f"a surrogate key names two of the {rows:,} versions of {path}")
    return rows


def has_repeats(columns):
    """Return whether whole numbers, of which the greatest is not much more than their count, are not distinct."""
    seen, least = np.zeros(1, bool), -3  # the least key of a special member
    for column in columns:
        place = np.asarray(column) - least
        if place.max(initial=0) >= len(seen):
            seen = np.concatenate([seen, np.zeros(place.max() + len(seen), bool)])
        if seen[place].any() or len(np.unique(place)) < len(place):
            return True
        seen[place] = True
    return False


def _sums(path, side):
    """Return the number of rows and the sum of their hashes for each bucket of natural keys."""
    return {bucket: sums for bucket, *sums in _found(path, _SUMS.format(rows=side.query), side.values)}


def _only(path, these, those, bucket):
    """Return a row of a bucket that only one side has, or None."""
    query = _ONLY.format(these=these.query, those=those.query)
    return next(iter(_found(path, query, {**these.values, **those.values, "bucket": bucket})), None)


def _found(path, query, values):
    """Return the rows of a query, in which `held` has the versions of the dimension."""
    with duckdb.connect() as database:
        database.execute(f"SET memory_limit = '{MEMORY}'").fetchall()
        database.execute(f"SET temp_directory = '{gettempdir()}'").fetchall()
        database.register("held", _reader(path, [KEY, *CONTENT.split(", ")]))
        return database.execute(query, values).fetchall()


def _reader(path, columns):
    return pa.RecordBatchReader.from_stream(DeltaTable(path).scan(columns=columns))
