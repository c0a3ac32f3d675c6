"""Pieces of files come in, rows with their numbers and causes go out; a file that changed is an error that names it."""

import os
import pickle
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.pipelines.batch.read_step import ReadStep, record_format
from headrace.pipelines.config.model import SourceConfig
from headrace.pipelines.config.source_format import fields_for_options
from headrace.pipelines.errors import SourceFileError
from headrace.pipelines.spark.frame import PIECES, State, source_schema
from headrace.storage.records import split

COLUMNS = {"id": "bigint", "c": "string", "p": "decimal(10,2)", "t": "timestamp"}


def source(**options):
    return SourceConfig.model_validate({"format": "csv", "path": "in", "schema": COLUMNS, **options})


def step_for(**options):
    form = record_format(source(**options))
    return pickle.loads(pickle.dumps(ReadStep(form, form.columns)))  # as Spark sends it to a worker


def pieces(*files, **changes):
    rows = []
    for file in files:
        seen = file.stat()
        rows.append({
            "file": file.name, "path": str(file), "start": 0, "stop": seen.st_size, "first_record": 1,
            "size": seen.st_size, "mtime_ns": seen.st_mtime_ns, **changes,
        })  # fmt: skip
    return [pa.RecordBatch.from_pylist(rows, PIECES)]


def run(step, batches):
    found = list(step.run(batches, None))
    for batch in found:
        batch.validate(full=True)
        assert batch.schema == source_schema(step.columns)
    return [row for batch in found for row in batch.to_pylist()]


def test_every_record_arrives_with_its_number_and_what_is_wrong_with_it(tmp_path):
    file = tmp_path / "a[1]*?.csv"
    file.write_text(
        "t,p,c,id\n2024-05-01,1.50,x,1\n20244-05-01,12.345,y,2\n2024-05-01,785,69,z,3\n9999-12-31 23:59:59.999999,,,4\n"
    )
    rows = run(step_for(), pieces(file))
    assert [(row["_file"], row["_record_number"], row["_state"]) for row in rows] == [
        ("a[1]*?.csv", 1, State.OPEN),
        ("a[1]*?.csv", 2, State.MALFORMED),
        ("a[1]*?.csv", 3, State.MALFORMED),
        ("a[1]*?.csv", 4, State.OPEN),
    ]
    causes = [[(cause["column"], cause["value"]) for cause in row["_malformed"] or []] for row in rows]
    assert causes == [[], [("p", "12.345"), ("t", "20244-05-01")], [(None, None)], []]
    assert rows[0]["id"] == 1
    assert rows[1]["id"] == 2


def test_pieces_of_one_file_give_its_rows_once(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("id,c,p,t\n" + "".join(f'{n},"x\ny",1.5,2024-01-01\n' for n in range(500)))
    step = step_for()
    batches = [
        batch
        for piece in split(file, step.form, 1000)
        for batch in pieces(file, start=piece.start, stop=piece.stop, first_record=piece.first_record)
    ]
    rows = run(step, batches)
    assert [row["_record_number"] for row in rows] == list(range(1, 501))
    assert [row["id"] for row in rows] == list(range(500))


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_other_formats(tmp_path, kind):
    file = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(
            pa.table(
                {"c": ["x"], "id": pa.array([1], pa.uint64()), "t": [None], "p": pa.array([None], pa.decimal128(4, 1))}
            ),
            file,
        )
    else:
        file.write_text('{"id":1,"c":"x","p":null,"t":null}\n')
    (row,) = run(step_for(format=kind), pieces(file))
    assert (row["id"], row["c"], row["_malformed"], row["_record_number"]) == (1, "x", None, 1)


def test_a_file_that_changed_is_named(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("id,c,p,t\n1,x,1,2024-01-01\n")
    planned = pieces(file)
    os.utime(file, ns=(1, 1))
    with pytest.raises(SourceFileError, match=r"a\.csv changed while the batch was loading"):
        run(step_for(), planned)
    planned = pieces(file)
    file.write_text("id,c,p,t\n1,x,1,2024-01-01\n2,")
    with pytest.raises(SourceFileError, match=r"it had 26 bytes and has 28"):
        run(step_for(), planned)
    file.unlink()
    with pytest.raises(
        SourceFileError, match=r"a\.csv was planned for this batch, but cannot be found now.*headrace source skip"
    ):
        run(step_for(), planned)


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("id,c,p,t\n" + "1,x,1,2024-01-01\n" * 200_000)
    found = step_for().run(pieces(file), None)
    next(found)
    with file.open("a") as more:
        more.write("2,y,1,2024-01-01\n")
    with pytest.raises(SourceFileError, match=r"changed while the batch was loading"):
        list(found)


def test_a_file_that_cannot_be_read_is_named_with_both_ways_on(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("id,c,p,t,more\n")
    with pytest.raises(
        SourceFileError,
        match=r"a\.csv: column 'more' is not declared.*Repair the file or correct its declaration, or "
        r"leave it out with: headrace source skip",
    ):
        run(step_for(), pieces(file))


@pytest.mark.parametrize("name", ["-a.csv", "a b;c.csv", "it's $(x).csv", "a\nb'\\.csv", "\x1b\x85\u202e.csv", " "])
def test_the_command_that_skips_a_file_is_one_line_that_a_shell_understands(tmp_path, name):
    file = tmp_path / name
    file.write_text("id,c,p,t,more\n")
    with pytest.raises(SourceFileError) as failed:
        run(step_for(), pieces(file))
    message = str(failed.value)
    assert message.isprintable()
    command = message.partition("leave it out with: ")[2].replace("headrace source skip PIPELINE", "printf '%s|'")
    told = subprocess.run(["bash", "-c", command], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
    assert os.path.normpath(told.stdout.decode().removesuffix("|")) == name


def test_options_of_sparks_reader_become_fields():
    found = source(options={"sep": ";", "nullValue": "NA", "charset": "latin-1", "header": "false", "escape": '"'})
    assert (found.delimiter, found.nulls, found.encoding, found.header, found.options) == (
        ";",
        ["NA"],
        "latin-1",
        False,
        {},
    )
    with pytest.raises(ValueError, match=r"options.dateFormat: write `date_format` with a pattern such as"):
        source(options={"dateFormat": "yyyy"})
    with pytest.raises(ValueError, match=r"options.mode: leave it out.*; options.foo: leave it out"):
        source(options={"mode": "PERMISSIVE", "foo": 1})
    with pytest.raises(ValueError, match=r"options.sep: `delimiter` says it, too"):
        source(options={"sep": ";"}, delimiter=",")
    assert fields_for_options([]) == []


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"delimiter": "||"}, "delimiter"),
        ({"encoding": "klingon"}, "unknown encoding 'klingon'"),
        ({"date_format": "dd.MM.yyyy"}, "tells the year, the month and the day"),
        ({"decimal": ";"}, "decimal"),
        ({"ambiguous_time": "both"}, "ambiguous_time"),
        ({"delimiter": ";", "quote": ";"}, "must differ"),
    ],
)
def test_fields_that_are_not_valid_are_refused(field, message):
    with pytest.raises(ValueError, match=message):
        source(**field)
