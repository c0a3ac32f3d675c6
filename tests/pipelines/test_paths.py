"""Paths are literal: what a library would take for something else is encoded or refused."""

import os
import stat
import string
from pathlib import Path

import pyarrow as pa
import pytest
from sqlalchemy.engine import make_url

from headrace.pipelines.catalog import Catalog
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.delta.tables import DeltaHandle, create_table, has_table, read_changes, read_rows
from headrace.pipelines.errors import DeltaTableError, JarsUnavailableError, PipelineFileError
from headrace.pipelines.paths import anchored, is_link, local_url, sqlite_url, table_location
from headrace.pipelines.spark.jars import cache_folder

REFUSED = "[]^|\\"
TAKEN = [mark for mark in string.punctuation if mark not in f"{REFUSED}/"]
NAMES = [
    *(f"a{mark}b" for mark in TAKEN),
    "a b",
    " lead",
    "trail ",
    "a%zz",
    "ünï",
    "日本",
    "e\u0301",
    "..a",
    "~",
    "{x,y}",
]

PIPELINE = """
name: flights
source: {format: csv, path: in, schema: {id: bigint, tail: string}}
dimensions:
  plane: {path: w/dim_plane, natural_key: [tailnum]}
lookups:
  - {dimension: plane, role: plane, on: {tail: tailnum}}
sink: {path: w/facts}
"""


def project(folder, text=PIPELINE):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pipeline.yml").write_text(text)
    return folder / "pipeline.yml"


@pytest.mark.parametrize("name", NAMES)
def test_a_table_is_made_and_read_exactly_where_its_path_says(tmp_path, name):
    path = tmp_path / name / "w" / "t"
    path.parent.mkdir(parents=True)
    create_table(str(path), pa.schema([("x", pa.int64())]), rows=pa.table({"x": [1]}))
    assert has_table(str(path))
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert read_rows(str(path), 0, ["x"]).read_all().column("x").to_pylist() == [1]
    assert read_changes(str(path), 0, 0, ["x"]).column("x").to_pylist() == [1]
    assert [commit["operation"] for commit in DeltaHandle(str(path)).commits(5)] == ["WRITE"]


@pytest.mark.parametrize("name", [*(f"a{mark}b" for mark in REFUSED), "a%41", "a\nb", "a%2Fb"])
def test_a_path_that_the_library_would_read_otherwise_is_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(DeltaTableError, match="does not take literally"):
        create_table(str(tmp_path / name / "t"), pa.schema([("x", pa.int64())]))
    file = project(tmp_path / name)
    with pytest.raises(PipelineFileError, match=r"line 5, column 11: dimensions\.plane\.path: .*rename that folder"):
        load_pipeline(file)
    assert [path.name for path in tmp_path.rglob("*")] == [name, "pipeline.yml"]


@pytest.mark.parametrize("name", [*NAMES, "in[1]", "a%41", "a\\b", "a\nb"])
def test_the_catalog_lies_in_the_project(tmp_path, name):
    folder = tmp_path / name
    with Catalog(sqlite_url(folder / ".headrace" / "catalog.db")) as catalog:
        catalog.start_run("flights", "once")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (folder / ".headrace" / "catalog.db").is_file()


def test_the_catalog_of_a_pipeline_file_does_not_depend_on_the_current_folder(tmp_path, monkeypatch):
    file = project(tmp_path / "a?b", PIPELINE + "catalog: sqlite:///state/runs.db\n")
    monkeypatch.chdir(tmp_path)
    assert make_url(load_pipeline("a?b/pipeline.yml").catalog).database == str(file.parent / "state" / "runs.db")
    assert load_pipeline(file).catalog == load_pipeline("a?b/pipeline.yml").catalog


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "postgresql+psycopg://u@h/d", "no url at all"])
def test_other_urls_stay_as_they_are(url):
    assert local_url(url, Path("/p")) == url


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("w/facts", "/project/w/facts"),
        ("w/facts/", "/project/w/facts"),
        ("../shared//dim", "/shared/dim"),
        ("./w/../x", "/project/x"),
        ("/abs/facts", "/abs/facts"),
        ("a?b*c[1]%41#d", "/project/a?b*c[1]%41#d"),
        ("file:///abs/a%20b", "/abs/a b"),
        ("file:/abs/a", "/abs/a"),
        ("s3a://bucket/a%41", "s3a://bucket/a%41"),
        ("c:d", "/project/c:d"),
        ("~/facts", "/home/me/facts"),
    ],
)
def test_a_path_of_a_pipeline_file_is_literal_and_relative_to_it(monkeypatch, path, place):
    monkeypatch.setenv("HOME", "/home/me")
    assert anchored(path, Path("/project")) == place


def test_symbolic_links_are_followed_so_that_one_table_has_one_name(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert anchored("facts", tmp_path / "link") == str(tmp_path / "real" / "facts")


def test_links_in_a_circle_are_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(PipelineFileError, match="leads nowhere"):
        anchored("a/facts", tmp_path)


def test_without_a_home_folder_a_tilde_is_refused(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _uid: (_ for _ in ()).throw(KeyError("uid")))
    with pytest.raises(PipelineFileError, match="no home folder; set HOME"):
        anchored("~/facts", Path("/project"))


def test_without_a_home_folder_the_cache_is_a_private_temporary_folder(monkeypatch, tmp_path):
    for name in ("HOME", "HEADRACE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _uid: (_ for _ in ()).throw(KeyError("uid")))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder() == tmp_path / f"headrace-{os.getuid()}"
    assert stat.S_IMODE(cache_folder().stat().st_mode) == stat.S_IRWXU


def test_a_temporary_folder_that_others_can_write_to_is_not_trusted(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache_folder().chmod(0o777)
    with pytest.raises(JarsUnavailableError, match="HEADRACE_CACHE"):
        cache_folder()


def test_a_relative_cache_is_made_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_CACHE", "c")
    assert cache_folder() == tmp_path / "c"


@pytest.mark.parametrize(("path", "link"), [("s3a://b/x", True), ("a:b/c", False), ("/x/a://b", False)])
def test_a_link_is_told_from_a_path(path, link):
    assert is_link(path) is link


def test_links_are_not_looked_at():
    assert table_location("s3a://bucket/a%41[1]") == "s3a://bucket/a%41[1]"
