"""Pipelines of a source and a sink alone: each record is loaded once, or rejected once, whatever happens."""

import pytest
import yaml
from deltalake import DeltaTable

from headrace.pipelines.errors import BatchError, LedgerError
from headrace.pipelines.rejects import Selection
from headrace.pipelines.retries import retry
from headrace.pipelines.runner import run

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

STEPS = ("before join", "after join", "before facts", "after facts", "after errors", "before record", "after record")
TRANSFORM = [{"where": "amount >= 0"}, {"derive": {"cents": "cast(amount * 100 as bigint)"}}]


class CrashError(Exception):
    """Raised by a hook in place of a crash."""


class Shop:
    """A folder with a pipeline that loads orders without lookups."""

    def __init__(self, folder, options):
        self.folder = folder
        self.pipeline = folder / "pipeline.yml"
        self.document = {
            "name": "orders",
            "source": {"format": "csv", "path": "in", "schema": {"id": "bigint", "amount": "decimal(8,2)"}},
            "sink": {"path": "w/orders"},
            "trigger": {"max_files": 1},
            "spark": {"master": "local[2,4]", "conf": {"spark.sql.shuffle.partitions": 2}},
            **options,
        }
        (folder / "in").mkdir()
        self.write()

    def write(self):
        self.pipeline.write_text(yaml.safe_dump(self.document))

    def add(self, number):
        """Put a file with two orders, one of which has a negative amount, and a malformed record into the source."""
        rows = f"{number},{number}.25\n-{number},-1\n{number},free\n"
        (self.folder / f"in/{number:03}.csv").write_text(f"id,amount\n{rows}")

    def read(self, name):
        return DeltaTable(str(self.folder / "w" / name)).to_pyarrow_table().to_pylist()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [{}, {"transform": TRANSFORM}], ids=["plain", "transformed"])
@pytest.mark.parametrize("by_spark", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_records_are_loaded_once_although_runs_end_at_any_step(tmp_path, monkeypatch, options, by_spark):
    if by_spark:
        monkeypatch.setattr("headrace.pipelines.batch.tables.takes_files", lambda _: False)
    shop = Shop(tmp_path, options)
    for number, step in enumerate(STEPS, 1):
        shop.add(number)

        def crash(name, step=step):
            if name == step:
                raise CrashError(step)

        with pytest.raises(BatchError, match=step):
            run(shop.pipeline, hook=crash)
    shop.add(len(STEPS) + 1)
    run(shop.pipeline)
    assert run(shop.pipeline).batches == ()
    numbers = range(1, len(STEPS) + 2)
    loaded = sorted(row["id"] for row in shop.read("orders"))
    assert loaded == sorted([*numbers, *(() if options else (-number for number in numbers))])
    assert {row["_outcome"] for row in shop.read("orders")} == {"matched"}
    rejected = sorted((row["_file"], row["record"]) for row in shop.read("orders_errors"))
    assert rejected == [(f"{number:03}.csv", f"{number},free") for number in numbers]


def test_rejected_records_are_retried(tmp_path):
    shop = Shop(tmp_path, {})
    shop.add(1)
    assert run(shop.pipeline).total("rejected") == 1
    shop.document["source"]["schema"]["amount"] = "string"
    shop.document["transform"] = [{"derive": {"amount": "cast(try_cast(amount as int) as decimal(8, 2))"}}]
    shop.write()
    assert retry(shop.pipeline, Selection()).run.total("loaded") == 1
    assert sorted((row["id"], row["amount"] is None) for row in shop.read("orders")) == [
        (-1, False),
        (1, False),
        (1, True),
    ]
    assert run(shop.pipeline).batches == ()


def test_a_checkpoint_that_was_removed_does_not_load_every_file_again(tmp_path):
    shop = Shop(tmp_path, {})
    shop.add(1)
    run(shop.pipeline)
    (tmp_path / ".headrace/orders/checkpoint").rename(tmp_path / "away")
    with pytest.raises(LedgerError, match="a run would load every file again"):
        run(shop.pipeline)
    assert len(shop.read("orders")) == 2
