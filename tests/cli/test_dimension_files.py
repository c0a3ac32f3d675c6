"""Files of members: each has the declared columns, is read like the source of the pipeline, and names its records."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

PIPELINE = """
name: shop
source: {format: csv, path: in, schema: {id: int, sku: string}%s}
dimensions:
  item:
    path: w/item
    natural_key: [sku]
    rules: {sku: [casefold]}
    columns: {sku: string, title: string, price: 'decimal(8,2)'}
  old:
    path: w/old
    natural_key: [sku]
    columns: {sku: string, title: string}
    history: {effective: since, effective_type: date}
  free: {path: w/free, natural_key: [sku]}
lookups:
  - {dimension: item, role: item, on: {sku: sku}, policy: infer, carry: [title]}
sink: {path: w/facts}
replicas: replicas
"""
SETTINGS = ", encoding: latin-1, decimal: ',', delimiter: ';', nulls: [NA]"
SOUND = "sku,title,price\na,Ale,1.50\nb,Bun,2\n"


@pytest.fixture
def shop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "pipeline.yml").write_text(PIPELINE % "")
    return tmp_path


@pytest.fixture
def items(invoke, shop):
    (shop / "items.csv").write_text(SOUND)
    assert invoke("dimension", "create", "item", "items.csv").code == 0
    return shop / "w" / "item"


def members(path="w/item"):
    rows = DeltaTable(path).to_pyarrow_table().to_pylist()
    return {row["sku"]: row for row in rows if row["sku"] is not None}


def json_lines(path, **fields):
    path.write_text('{"sku": "a", "title": "Ale", "price": 1.5}\n' + "".join(fields.values()))


def parquet(path, *names):
    pq.write_table(pa.table({name: ["1"] for name in names}), path)


def folder(path):
    path.mkdir()
    for name in ("1", "2"):
        (path / f"{name}.csv").write_text("sku,titel,price\nc,x,1\n")


WRONG = {
    "misspelled.csv": (
        lambda path: path.write_text("sku,titel,price\na,x,1.5\n"),
        "'title' is missing (there is 'titel')",
    ),
    "case.csv": (lambda path: path.write_text("sku,Title,price\na,x,1.5\n"), "'title' is missing (there is 'Title')"),
    "missing.csv": (lambda path: path.write_text("sku,price\na,1.5\n"), "column 'title' is missing"),
    "undeclared.csv": (lambda path: path.write_text("sku,title,price,size\na,x,1.5,2\n"), "'size' is not declared"),
    "missing.jsonl": (
        lambda path: json_lines(path, more='{"sku": "b", "price": 1}\n'),
        "record 2, column 'title': is missing",
    ),
    "misspelled.jsonl": (
        lambda path: json_lines(path, more='{"sku": "b", "titel": "x", "price": 1}\n'),
        "record 2, column 'titel': is a field that is not declared",
    ),
    "misspelled.parquet": (
        lambda path: parquet(path, "sku", "titel", "price"),
        "'title' is missing (there is 'titel')",
    ),
    "folder": (folder, "1.csv: column 'title' is missing (there is 'titel')"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_without_the_declared_columns_is_refused_before_anything_is_written(invoke, shop, name):
    make, message = WRONG[name]
    make(shop / name)
    outcome = invoke("dimension", "create", "item", name)
    assert outcome.code == 1
    assert message in outcome.err
    assert not (shop / "w").exists()


@pytest.mark.usefixtures("shop")
def test_a_history_is_refused_before_its_file_is_read(invoke):
    outcome = invoke("dimension", "create", "old", "nowhere.csv")
    assert "headrace dimension apply old" in outcome.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("sku,titel\na,x\n", "'title' is missing (there is 'titel')"),
        ("SKU,title\na,x\n", "'sku' is missing (there is 'SKU')"),
    ],
)
@pytest.mark.usefixtures("items")
def test_a_column_is_filled_only_from_a_file_that_has_it_and_the_key(invoke, shop, content, message):
    (shop / "more.csv").write_text(content)
    outcome = invoke("dimension", "add-column", "item", "title", "string", "--from", "more.csv")
    assert outcome.code == 1
    assert message in outcome.err
    assert members()["a"]["title"] == "Ale"


@pytest.mark.usefixtures("items")
def test_a_record_without_the_new_column_erases_no_value(invoke, shop):
    (shop / "more.jsonl").write_text('{"sku": "a", "title": "Ate"}\n{"sku": "b"}\n')
    outcome = invoke("dimension", "add-column", "item", "title", "string", "--from", "more.jsonl")
    assert "record 2, column 'title': is missing" in outcome.err
    assert [row["title"] for row in members().values()] == ["Ale", "Bun"]


@pytest.mark.usefixtures("items")
def test_other_columns_of_the_file_are_left_out_and_named(invoke, shop):
    (shop / "more.csv").write_text("sku,size,color,x\na,2,red,1\n")
    outcome = invoke("dimension", "add-column", "item", "size", "int", "--from", "more.csv")
    assert members()["a"]["size"] == 2
    assert "columns of the source that were not read: color, x" in outcome.out


def test_members_are_read_with_the_settings_of_the_source(invoke, shop):
    (shop / "pipeline.yml").write_text(PIPELINE % SETTINGS)
    (shop / "items.csv").write_bytes("sku;title;price\na;café;1,50\nb;NA;2\n".encode("latin-1"))
    assert invoke("dimension", "create", "item", "items.csv").code == 0
    assert [(row["title"], str(row["price"])) for row in members().values()] == [("café", "1.50"), (None, "2.00")]
    (shop / "more.csv").write_bytes("sku;share\na;1,5\nb;NA\n".encode("latin-1"))
    assert invoke("dimension", "add-column", "item", "share", "double", "--from", "more.csv").code == 0
    assert [row["share"] for row in members().values()] == [1.5, None]


def test_options_override_the_settings_of_the_source(invoke, shop):
    (shop / "pipeline.yml").write_text(PIPELINE % (SETTINGS + ", header: false"))
    (shop / "items.csv").write_text("sku|title|price\na|café|1.50\nb|-|2\n", encoding="utf-8")
    options = ["--header", "--encoding", "utf-8", "--decimal", ".", "--delimiter", "|", "--null", "-"]
    assert invoke("dimension", "create", "item", "items.csv", *options).code == 0
    assert [(row["title"], str(row["price"])) for row in members().values()] == [("café", "1.50"), (None, "2.00")]


def test_files_without_a_heading_have_the_columns_in_the_declared_order(invoke, shop):
    (shop / "pipeline.yml").write_text(PIPELINE % ", header: false")
    (shop / "items.csv").write_text("a,Ale,1.5\n")
    assert invoke("dimension", "create", "item", "items.csv").code == 0
    assert members()["a"]["title"] == "Ale"
    outcome = invoke("dimension", "create", "free", "items.csv")
    assert "the source declares `header: false`" in outcome.err


def test_a_byte_outside_the_encoding_is_shown_once_escaped(invoke, shop):
    (shop / "items.csv").write_bytes("sku,title,price\na,café,1\n".encode("latin-1"))
    outcome = invoke("dimension", "create", "item", "items.csv")
    assert r"'caf\xe9' is not UTF-8 (byte 0xe9); declare the file's encoding if it has another one" in outcome.err
    assert "declares title" not in outcome.err


def test_a_record_without_a_key_is_named_by_file_and_number(invoke, shop):
    (shop / "items").mkdir()
    (shop / "items" / "1.csv").write_text(SOUND)
    (shop / "items" / "2.csv").write_text("sku,title,price\nc,x,1\n\n,y,2\n")
    outcome = invoke("dimension", "create", "item", "items")
    assert "column 'sku' of items/2.csv, record 3 (the heading is record 1) is missing" in outcome.err


@pytest.mark.usefixtures("items")
def test_a_value_without_a_key_is_named_by_file_and_number(invoke, shop):
    (shop / "more.jsonl").write_text('{"sku": "a", "size": 1}\n{"sku": null, "size": 2}\n')
    outcome = invoke("dimension", "add-column", "item", "size", "int", "--from", "more.jsonl")
    assert "no valid 'sku' in more.jsonl, record 2; correct it" in outcome.err


def test_a_table_names_the_record_without_a_key(invoke, shop):
    (shop / "rows.csv").write_text("k,v\n1,a\n,b\n")
    outcome = invoke("table", "build", "rows.csv", "--key", "k", "-o", "rows.tbl")
    assert "rows.csv, record 3 (the heading is record 1)" in outcome.err


@pytest.mark.usefixtures("items")
def test_filling_a_column_that_fails_left_a_column_that_was_there_as_it_was(invoke, shop, monkeypatch):
    monkeypatch.setattr("headrace.pipelines.dimension.columns._ATTEMPTS", 0)
    (shop / "more.csv").write_text("sku,title,size\na,x,1\n")
    outcome = invoke("dimension", "add-column", "item", "title", "string", "--from", "more.csv")
    assert "left   the columns as they were" in outcome.err
    outcome = invoke("dimension", "add-column", "item", "size", "int", "--from", "more.csv")
    assert "left   the new column, in which members have no value yet; repeat the command to fill it" in outcome.err


@pytest.mark.usefixtures("items")
def test_a_lookup_that_finds_nothing_fails(invoke):
    outcome = invoke("dimension", "lookup", "item", "x", "y", "--json")
    assert (outcome.code, outcome.document["members"], outcome.document["not_found"]) == (1, [], ["x", "y"])
    assert invoke("dimension", "lookup", "item", "a", "y").code == 0


@pytest.mark.usefixtures("items")
def test_a_refusal_of_the_operating_system_is_shown(invoke, monkeypatch):
    def refuse(*_):
        raise OSError("Generic error\n  \x1b[31m↳\x1b[0m Unable to open file\n  ↳ Permission denied (os error 13)\n")

    monkeypatch.setattr("deltalake.table.TableAlterer.add_columns", refuse)
    outcome = invoke("dimension", "add-column", "item", "size", "int")
    assert "Generic error: Permission denied (os error 13); the folder must be writable" in outcome.err
    assert "ALTER TABLE" not in outcome.err


# Inferred members


@pytest.fixture
def inferred(invoke, items):
    """Return the dimension with two members that facts inferred."""
    table = DeltaTable(items)
    rows = [{"item_key": 3, "sku": "c", "is_inferred": True}, {"item_key": 4, "sku": "d", "is_inferred": True}]
    write_deltalake(items, pa.Table.from_pylist(rows, pa.schema(table.schema().to_arrow())), mode="append")
    assert invoke("dimension", "repair", "item").code == 0  # remembers the greatest key
    return items


@pytest.mark.usefixtures("inferred")
def test_late_records_complete_inferred_members_once(invoke, shop):
    (shop / "late.csv").write_text("sku,title,price\nC,Cake,3\na,Ale,1.50\n")
    done = invoke("dimension", "complete", "item", "late.csv", "--json").document
    assert (done["completed"], done["complete_already"], done["inferred"]) == (1, 1, 1)
    assert (members()["c"]["title"], members()["c"]["item_key"], members()["c"]["is_inferred"]) == ("Cake", 3, False)
    assert members()["d"]["is_inferred"] is True
    version = DeltaTable("w/item").version()
    done = invoke("dimension", "complete", "item", "late.csv", "--json").document
    assert (done["completed"], done["complete_already"]) == (0, 2)
    assert DeltaTable("w/item").version() == version
    assert invoke("dimension", "check", "item").code == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("c,Cake,3\nx,Xi,1\n", "has no member for 1 of the records: x; leave these records out"),
        ("c,Cake,3\na,Other,1.50\n", "1 of the records differ from the complete members that they name: a"),
        ("c,Cake,3\nC,Cake,3\n", "natural keys more than once: c"),
        ("c,Cake,3\n,Cake,3\n", "no valid 'sku' in late.csv, record 3"),
    ],
)
@pytest.mark.usefixtures("inferred")
def test_records_that_do_not_complete_a_member_are_refused_and_nothing_is_written(invoke, shop, rows, message):
    (shop / "late.csv").write_text(f"sku,title,price\n{rows}")
    outcome = invoke("dimension", "complete", "item", "late.csv")
    assert outcome.code == 1
    assert message in outcome.err
    assert members()["c"]["is_inferred"] is True


@pytest.mark.usefixtures("inferred")
def test_inferred_members_name_the_command_that_completes_them(invoke):
    assert "headrace dimension complete item SOURCE" in invoke("dimension", "inferred", "item").out


def test_members_with_a_history_are_completed_by_changes(invoke, shop):
    write_deltalake("w/old", pa.table({"sku": ["a"]}))
    (shop / "late.csv").write_text("sku,title\na,x\n")
    outcome = invoke("dimension", "complete", "old", "late.csv")
    assert "headrace dimension apply old SOURCE" in outcome.err


@pytest.mark.usefixtures("inferred")
def test_a_check_counts_facts_that_carry_earlier_values(invoke, shop):
    facts = {
        "id": [1, 2, 3, 4],
        "sku": ["c", "C", "a", "z"],
        "item_key": [3, 3, 1, -1],
        "item_title": [None, None, "Ale", "?"],
    }
    write_deltalake("w/facts", pa.table(facts))
    assert "carry other values" not in invoke("dimension", "check", "item").out
    (shop / "late.csv").write_text("sku,title,price\nc,Cake,3\n")
    completed = invoke("dimension", "complete", "item", "late.csv")
    assert "`headrace dimension check item --pipeline pipeline.yml`" in completed.out
    outcome = invoke("dimension", "check", "item")
    assert outcome.code == 0
    assert "2 facts of role item carry other values than their member has now" in outcome.out
