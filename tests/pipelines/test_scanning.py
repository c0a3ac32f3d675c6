"""The scan for the stored rows of members: every row that is wanted comes to the shard of its member."""

import numpy as np
import pyarrow as pa
import pytest
from changes_scenario import DeltaDimension

from headrace.etl import Dimension
from headrace.etl.history import History
from headrace.etl.sharding import shard_of
from headrace.pipelines.changes.scanning import FILTER_BYTES, KeyFilter, StoredScan
from headrace.pipelines.delta.tables import open_table
from headrace.pipelines.spark.frame import SHARD, ShardRule

COLUMNS = pa.schema([("shop", pa.string()), ("id", pa.int64()), ("city", pa.string())])
HISTORY = History(Dimension("customer", ("shop", "id"), "key", COLUMNS), effective="since", effective_type=pa.date32())


def test_a_filter_has_every_added_key_and_few_others(rng):
    digests = np.unique(rng.integers(0, 2**64, 3_000, dtype=np.uint64))
    added, others = digests[::3], np.setdiff1d(digests, digests[::3])
    halves = [KeyFilter.empty(FILTER_BYTES * len(added)) for _ in range(2)]
    for half, part in zip(halves, np.array_split(added, 2), strict=True):
        half.add(part)
    united = KeyFilter.united([half.bits.tobytes() for half in halves])
    assert united.may_have(added).all()
    assert united.may_have(others).mean() < 0.01
    assert not halves[0].may_have(others).all()
    assert not KeyFilter.empty(0).may_have(digests).any()


def stored(folder, rng):
    """Return a dimension of two hundred members whose rows are in several files, some of them removed."""
    dimension = DeltaDimension(HISTORY, folder)
    for round_number in range(3):
        member = rng.permutation(200)[:150]
        dimension.apply(pa.table({
            "shop": [f"s{each % 7}" for each in member], "id": member // 7, "city": [f"c{round_number}"] * 150,
            "since": pa.array(np.full(150, round_number * 5, np.int32)).cast(pa.date32()),
        }))  # fmt: skip
    return dimension


@pytest.mark.parametrize("shards", [1, 3])
def test_the_rows_of_named_members_come_to_the_shards_of_the_members(tmp_path, rng, shards):
    dimension = stored(tmp_path / "d", rng)
    rows = dimension.rows().to_pylist()
    wanted = {(row["shop"], row["id"]) for row in rows[::9] if row["id"] is not None}
    key = HISTORY.dimension.key_schema
    asked = pa.RecordBatch.from_pylist(
        [*({"shop": shop, "id": number} for shop, number in wanted), {"shop": None}], key
    )
    scan = StoredScan(HISTORY, dimension.path, open_table(dimension.path).version(), shards, len(wanted))
    named = scan.no_members()
    scan.note(named, asked, ShardRule(("shop", "id"), key, shards, {}))
    found = [batch for file in scan.files() for batch in scan.rows(file, named)]
    assert len(scan.files()) > 1
    for batch in found:
        expected = shard_of([batch.column(name) for name in key.names], key, shards)
        assert batch.column(SHARD).to_pylist() == expected.tolist()
    got = sorted(row["key"] for batch in found for row in batch.to_pylist())
    of_wanted = {row["key"] for row in rows if (row["shop"], row["id"]) in wanted}
    assert of_wanted <= set(got)
    assert len(got) == len(set(got)) <= len(of_wanted) + 10
    assert set(got) <= {row["key"] for row in rows if row["id"] is not None}
