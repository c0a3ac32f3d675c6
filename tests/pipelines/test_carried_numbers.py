"""A dimension whose table is missing is not numbered from 1 again while facts carry the numbers of its members."""

import pyarrow as pa
import pytest
import yaml
from deltalake import write_deltalake

from headrace.pipelines.batch.preparation import check_pipeline
from headrace.pipelines.changes.applying import apply_files
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.dimension.tables import create_dimension
from headrace.pipelines.errors import DeltaTableError

HISTORY = {"effective": "since", "type_2": ["city"]}


@pytest.fixture
def project(tmp_path):
    """Return a function that writes the pipeline file, and facts with the given keys."""
    (tmp_path / "in").mkdir()

    def write(keys, **dimension):
        document = {
            "name": "p",
            "source": {"format": "csv", "path": "in", "schema": {"code": "string", "at": "timestamp"}},
            "dimensions": {
                "k": {"path": "w/k", "natural_key": ["code"], "columns": {"code": "string", "city": "string"},
                      **dimension},
            },
            "lookups": [{"dimension": "k", "role": "a", "on": {"code": "code"}}],
            "sink": {"path": "w/facts"},
        }  # fmt: skip
        (tmp_path / "p.yml").write_text(yaml.safe_dump(document))
        count = len(keys)
        facts = {"code": pa.array(["c"] * count), "at": pa.nulls(count, pa.timestamp("us", "UTC")),
                 "a_key": pa.array(keys, pa.int64()), "_outcome": pa.array(["matched"] * count)}  # fmt: skip
        write_deltalake(tmp_path / "w/facts", pa.table(facts))
        return load_pipeline(tmp_path / "p.yml")

    return write


def by_run(config, _folder):
    check_pipeline(config, 2).create()


def by_command(config, _folder):
    create_dimension(config, "k", pa.table({"code": ["x"], "city": ["Rome"]}))


def by_changes(config, folder):
    (folder / "changes.csv").write_text("code,city,since\nx,Rome,2026-01-01\n")
    apply_files(config, "k", folder / "changes.csv")


WAYS = [(by_run, {}), (by_run, {"history": HISTORY}), (by_command, {}), (by_changes, {"history": HISTORY})]


@pytest.mark.parametrize(("create", "dimension"), WAYS)
def test_a_dimension_is_not_created_while_facts_carry_numbers_of_its_members(project, tmp_path, create, dimension):
    config = project([-1, 7, None], **dimension)
    with pytest.raises(DeltaTableError, match=r"carry the numbers of its members in 'a_key'.* Put the table back"):
        create(config, tmp_path)
    assert not (tmp_path / "w/k").exists()


@pytest.mark.parametrize(("create", "dimension"), WAYS)
def test_a_dimension_is_created_when_facts_carry_special_members_alone(project, tmp_path, create, dimension):
    create(project([-1, -2, None], **dimension), tmp_path)
    assert (tmp_path / "w/k").exists()
