"""`headrace dimension apply` and `compact`: files of changes become versions, each file once, also after kill -9."""

import datetime as dt
import os
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest
from deltalake import DeltaTable, write_deltalake

PIPELINE = """
name: shop
source: {format: csv, path: in, delimiter: ';', schema: {order: bigint, customer: bigint, day: date}}
dimensions:
  customer:
    path: w/dim_customer
    natural_key: [id]
    columns: {id: bigint, city: string, phone: string}
    shards: 2
    history: {effective: since, effective_type: date, sequence: n, operation: op, type_1: [phone], end: 9999-12-31}
  plain: {path: w/dim_plain, natural_key: [id], columns: {id: bigint}}
lookups:
  - {dimension: customer, role: customer, on: {customer: id}}
sink: {path: w/orders}
"""
FIRST = """op;id;city;phone;since;n
I;7;Oslo;555-01;2024-01-01;1
U;7;Bergen;555-01;2024-03-01;2
I;8;Narvik;555-02;2024-02-01;3
I;;Nowhere;555-03;2024-02-01;4
I;9;Bad;555-03;2024-13-01;4
X;9;Bad;555-03;2024-12-01;4
"""
LATE = """op;id;city;phone;since;n
U;7;Bergen;555-09;2024-02-15;5
D;8;;;2024-05-01;6
"""
KILLED = """
import os, signal, sys
from headrace.pipelines.changes import apply_files
from headrace.pipelines.config import load_pipeline

def hook(step):
    if step == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)

apply_files(load_pipeline("pipeline.yml"), "customer", "changes", hook=hook)
"""


@pytest.fixture(autouse=True)
def shop(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_REPLICAS", str(tmp_path / "replicas"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.yml").write_text(PIPELINE)
    (tmp_path / "in").mkdir()
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "1.csv").write_text(FIRST)
    return tmp_path


def versions():
    rows = pa.table(DeltaTable("w/dim_customer").scan()).to_pylist()
    rows = [row for row in rows if row["customer_key"] > 0]
    return [
        (row["id"], row["city"], row["phone"], row["valid_from"].isoformat(), row["is_current"], row["is_deleted"])
        for row in sorted(rows, key=lambda row: (row["id"], row["valid_from"]))
    ]


def errors():
    rows = DeltaTable("w/dim_customer_errors").to_pyarrow_table().to_pylist()
    return sorted((row["_file"], row["_record_number"], row["record"], row["reason"]) for row in rows)


AFTER_FIRST = [
    (7, "Oslo", "555-01", "2024-01-01", False, False),
    (7, "Bergen", "555-01", "2024-03-01", True, False),
    (8, "Narvik", "555-02", "2024-02-01", True, False),
]
AFTER_LATE = [
    (7, "Oslo", "555-01", "2024-01-01", False, False),
    (7, "Bergen", "555-01", "2024-02-15", True, False),
    (8, "Narvik", "555-02", "2024-02-01", False, False),
    (8, "Narvik", "555-02", "2024-05-01", True, True),
]


def test_changes_become_versions(invoke, shop):
    document = invoke("dimension", "apply", "customer", "changes", "--json").document
    assert document["created"]
    assert document["outcomes"] == {"added": 2, "versioned": 1, "rejected": 3}
    assert (document["rows"], document["inserted"], document["files"]) == (6, 3, 1)
    assert versions() == AFTER_FIRST
    (shop / "changes" / "2.csv").write_text(LATE)
    document = invoke("dimension", "apply", "customer", "changes", "--json").document
    assert not document["created"]
    assert (document["outcomes"], document["files"], document["moved_ranges"]) == ({"deleted": 1, "updated": 1}, 1, 2)
    assert versions() == AFTER_LATE


@pytest.mark.parametrize("facts", [True, False])
def test_late_changes_name_the_command_that_corrects_facts(invoke, shop, facts):
    assert "restate" not in invoke("dimension", "apply", "customer", "changes").out
    if facts:
        write_deltalake("w/orders", pa.table({"order": [1], "customer_key": [1]}))
    (shop / "changes" / "2.csv").write_text(LATE)
    result = invoke("dimension", "apply", "customer", "changes")
    assert result.code == 0, result
    command = "headrace dimension restate customer --pipeline pipeline.yml"
    assert (f"`{command}` corrects the facts in 2 moved ranges" in result.out) is facts


def test_changes_that_cannot_be_applied_are_kept_with_their_cause(invoke):
    shown = invoke("dimension", "apply", "customer", "changes")
    assert "3 changes of dimension customer did not apply" in shown.out
    assert [(name, number) for name, number, _, _ in errors()] == [("1.csv", 4), ("1.csv", 5), ("1.csv", 6)]
    assert [record for _, _, record, _ in errors()] == FIRST.splitlines()[4:]
    reasons = [reason for _, _, _, reason in errors()]
    assert reasons[0] == "customer: key column 'id' is null"
    assert "since = 2024-13-01" in reasons[1]
    assert "'op' is none of" in reasons[2]


def test_a_file_is_applied_once(invoke):
    invoke("dimension", "apply", "customer", "changes/1.csv")
    version = DeltaTable("w/dim_customer").version()
    again = invoke("dimension", "apply", "customer", "changes")
    assert "has the changes of all files already" in again.out
    document = invoke("dimension", "apply", "customer", "changes", "--again", "--json").document
    assert document["outcomes"] == {"replayed": 3, "rejected": 3}
    assert versions() == AFTER_FIRST
    assert DeltaTable("w/dim_customer").version() == version + 1  # the commit that names the rejected changes


def test_what_is_left_out_is_told(invoke, shop):
    (shop / "changes" / "2.csv").touch()
    (shop / "changes" / "old").mkdir()
    for _ in range(2):
        shown = " ".join(invoke("dimension", "apply", "customer", "changes").out.split())
        assert "2.csv empty; it is loaded when it holds a byte" in shown
        assert "old a folder; apply it by itself" in shown
    assert "has the changes of all files that are not left out already" in shown
    alone = invoke("dimension", "apply", "customer", "changes/2.csv", "--json").document
    assert alone["left_out"] == [{"name": "2.csv", "reason": "empty; it is loaded when it holds a byte"}]
    assert versions() == AFTER_FIRST


def test_a_changed_file_is_read_again(invoke, shop):
    invoke("dimension", "apply", "customer", "changes/1.csv")
    (shop / "changes" / "1.csv").write_text("\n".join([*FIRST.splitlines()[:4], *LATE.splitlines()[1:]]) + "\n")
    document = invoke("dimension", "apply", "customer", "changes/1.csv", "--json").document
    assert document["outcomes"] == {"deleted": 1, "updated": 1, "replayed": 3}
    assert versions() == AFTER_LATE


@pytest.mark.parametrize("step", ["after plan", "after apply", "after changes", "after errors", "after moved"])
def test_a_killed_apply_is_resumed(invoke, shop, step):
    (shop / "changes" / "2.csv").write_text(LATE)
    killed = subprocess.run([sys.executable, "-c", KILLED, step], env=os.environ, check=False)
    assert killed.returncode == -signal.SIGKILL
    document = invoke("dimension", "apply", "customer", "changes", "--json").document
    assert document["files"] == 2
    assert versions() == AFTER_LATE
    assert len(errors()) == 3
    assert "already" in invoke("dimension", "apply", "customer", "changes").out


def test_compaction_changes_no_row(invoke, shop):
    invoke("dimension", "apply", "customer", "changes")
    (shop / "changes" / "2.csv").write_text(LATE)
    invoke("dimension", "apply", "customer", "changes")
    document = invoke("dimension", "compact", "customer", "--json").document
    assert document["files_after"] == 1
    assert versions() == AFTER_LATE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody", "changes"], "no dimension 'nobody'; its dimensions are customer, plain"),
        (["plain", "changes"], "declared without history"),
        (["customer", "nowhere"], "there is no file or folder"),
        (["customer", "in"], "has no files"),
        (["customer", "pipeline.yml"], "do not say one format"),
        (["customer", "changes", "--snapshot", "2025-02-01"], "add --sequence with a value"),
        (
            ["customer", "changes", "--snapshot", "x", "--sequence", "9"],
            "--snapshot 'x': the time of the snapshot is no",
        ),
        (["customer", "changes", "--sequence", "9"], "--sequence belongs to --snapshot"),
        (["customer", "changes", "--missing", "delete"], "--missing belongs to --snapshot"),
    ],
)
def test_what_cannot_be_applied_is_refused_before_anything_is_written(invoke, shop, arguments, message):
    outcome = invoke("dimension", "apply", *arguments)
    assert outcome.code == 1
    assert message in " ".join(outcome.err.split())
    assert not (shop / "w").exists()


@pytest.mark.parametrize("options", [["--snapshot", "2025-02-01"], ["--sequence", "9"]])
def test_options_of_a_snapshot_are_corrected_in_the_command(invoke, options):
    outcome = invoke("dimension", "apply", "customer", "changes", *options)
    assert "go on  correct the command; its arguments: headrace dimension apply --help" in outcome.err


def test_a_first_apply_that_fails_left_nothing(invoke, shop):
    (shop / "changes" / "1.csv").write_text("op;id;citty;phone;since;n\nI;7;Oslo;1;2024-01-01;1\n")
    outcome = invoke("dimension", "apply", "customer", "changes")
    assert outcome.code == 1
    assert "left   no change was applied" in outcome.err


def test_a_file_without_a_column_is_refused(invoke, shop):
    (shop / "changes" / "1.csv").write_text("op;id;city;since;n\nI;7;Oslo;2024-01-01;1\n")
    outcome = invoke("dimension", "apply", "customer", "changes")
    assert outcome.code == 1
    assert "phone" in outcome.err
    assert versions() == []


@pytest.mark.parametrize(
    ("declared", "message"),
    [("", "'phone': '2'"), ("type_0: [phone], ", "'phone': '0'")],
)
def test_a_declaration_that_the_table_was_not_made_with_is_refused(invoke, shop, declared, message):
    invoke("dimension", "apply", "customer", "changes")
    (shop / "pipeline.yml").write_text(PIPELINE.replace("type_1: [phone], ", declared))
    outcome = invoke("dimension", "apply", "customer", "changes", "--again")
    assert outcome.code == 1
    assert message in " ".join(outcome.err.split())
    assert "was made with" in " ".join(outcome.err.split())
    assert versions() == AFTER_FIRST


def test_json_lines_and_parquet_do_as_well(invoke, shop):
    (shop / "more").mkdir()
    since = [dt.date(2024, 1, 1), dt.date(2024, 2, 1)]
    columns = {"op": ["I", "I"], "id": [1, 2], "city": ["a", "b"], "phone": ["x", "y"], "since": since, "n": [1, 1]}
    pa.parquet.write_table(pa.table(columns), shop / "more" / "a.parquet")
    line = '{"op": "U", "id": 2, "city": "c", "phone": "y", "since": "2024-03-01", "n": 2}\n'
    (shop / "lines.jsonl").write_text(line)
    assert invoke("dimension", "apply", "customer", "more", "--json").document["outcomes"] == {"added": 2}
    assert invoke("dimension", "apply", "customer", "lines.jsonl", "--json").document["outcomes"] == {"versioned": 1}
    assert [row[:2] for row in versions()] == [(1, "a"), (2, "b"), (2, "c")]


def test_columns_of_a_history_are_not_changed_behind_its_back(invoke):
    invoke("dimension", "apply", "customer", "changes")
    for command in (["widen-column", "customer", "city", "binary"], ["drop-column", "customer", "city"]):
        outcome = invoke("dimension", *command)
        assert outcome.code == 1
        assert "has a history" in " ".join(outcome.err.split())
    assert versions() == AFTER_FIRST


def test_an_attribute_is_added_later(invoke, shop):
    invoke("dimension", "apply", "customer", "changes")
    assert invoke("dimension", "add-column", "customer", "mail", "string").code == 0
    (shop / "pipeline.yml").write_text(PIPELINE.replace("phone: string}", "phone: string, mail: string}"))
    (shop / "mail.csv").write_text("op;id;city;phone;mail;since;n\nU;7;Bergen;555-01;a@b;2024-04-01;9\n")
    outcome = invoke("dimension", "apply", "customer", "mail.csv", "--json")
    assert outcome.document["outcomes"] == {"versioned": 1}
    assert "is sound" in invoke("dimension", "check", "customer").out


def test_a_history_is_not_made_from_a_list_of_members(invoke, shop):
    outcome = invoke("dimension", "create", "customer", "changes/1.csv")
    assert outcome.code == 1
    assert "--snapshot TIME" in " ".join(outcome.err.split())
    assert "go on  use the command that the cause names" in outcome.err
    assert not (shop / "w").exists()


def test_an_added_attribute_is_not_filled_from_a_source(invoke, shop):
    invoke("dimension", "apply", "customer", "changes")
    (shop / "mail.csv").write_text("id;mail\n7;a@b\n")
    outcome = invoke("dimension", "add-column", "customer", "mail", "string", "--from", "mail.csv")
    assert outcome.code == 1
    assert "has a history" in " ".join(outcome.err.split())
    assert "mail" not in invoke("dimension", "info", "customer").out


def test_a_dimension_is_shown_without_the_nested_column_of_its_history(invoke):
    invoke("dimension", "apply", "customer", "changes")
    info = invoke("dimension", "info", "customer")
    assert "_entries" not in info.out
    assert "_sequence" in info.out
    assert "_entries" in invoke("dimension", "info", "customer", "--json").document["columns"]


def test_a_repair_fixes_what_needs_no_decision_unless_it_is_a_dry_run(invoke, shop):
    invoke("dimension", "apply", "customer", "changes")
    assert "nothing to repair" in invoke("dimension", "repair", "customer").out
    special = "    special: {unknown: {city: None known}}\n    shards: 2\n"
    (shop / "pipeline.yml").write_text(PIPELINE.replace("    shards: 2\n", special))
    dry = invoke("dimension", "repair", "customer", "--dry-run", "--json").document
    assert (dry["ok"], dry["changed"], [each["rows"] for each in dry["fixed"]], dry["repairs"]) == (
        False,
        False,
        [1],
        [],
    )
    assert invoke("dimension", "check", "customer").code == 3
    shown = invoke("dimension", "repair", "customer")
    assert "What was fixed in dimension customer" in shown.out
    assert "member -1" in shown.out
    assert "is sound" in invoke("dimension", "check", "customer").out


def test_members_are_counted_beside_their_versions(invoke):
    invoke("dimension", "apply", "customer", "changes")
    found = invoke("dimension", "info", "customer", "--json").document
    assert (found["members"], found["versions"]) == (2, 3)
    shown = invoke("dimension", "list", "--json").document
    assert [(each["members"], each["versions"]) for each in shown] == [(2, 3), (None, None)]


def test_a_lookup_leaves_out_what_the_history_keeps_for_itself(invoke):
    invoke("dimension", "apply", "customer", "changes")
    found = invoke("dimension", "lookup", "customer", "7", "--json").document["members"]
    assert sorted(each["city"] for each in found) == ["Bergen", "Oslo"]
    assert not {"_sequence", "_entries"} & set(found[0])
    assert "_entries" not in invoke("dimension", "lookup", "customer", "7").out


def test_changes_that_did_not_apply_can_be_read_and_sent_again(invoke, shop):
    told = invoke("errors", "list").out
    assert "shop has no rejected rows" in told
    assert "did not apply" not in told
    shows = "headrace errors show --dimension customer --pipeline pipeline.yml"
    note = f"3 changes of dimension customer did not apply; see `{shows}`"
    assert note in " ".join(invoke("dimension", "apply", "customer", "changes").out.split())
    assert note in invoke("dimension", "apply", "customer", "changes").out  # the file was applied before
    assert "status  open" in invoke(*shows.split()[1:]).out
    listed = invoke("errors", "list")
    assert note in listed.out
    assert invoke("errors", "list", "--json").document["changes"] == {"customer": 3}
    assert note in invoke("errors", "show").out
    assert "shop has no such rejected rows" in invoke("errors", "list", "--rule", "city").out
    groups = invoke("errors", "list", "--dimension", "customer", "--json").document["groups"]
    assert sorted((each["file"], each["rows"], each["status"]) for each in groups) == [("1.csv", 1, "open")] * 3
    shown = invoke("errors", "show", "--dimension", "customer", "--json", "0/1.csv:6").document
    rows = DeltaTable(str(shop / "w" / "dim_customer_errors")).to_pyarrow_table().to_pylist()
    (row,) = [each for each in rows if each["_record_number"] == 6]
    assert [(each["record"], each["reason"]) for each in shown] == [(row["record"], row["reason"])]
    assert "headrace dimension apply customer FILE" in invoke("errors", "show", "--dimension", "customer").out
    (shop / "corrected.csv").write_text(f"{row['heading']}\n{shown[0]['record'].replace('X;9', 'I;9', 1)}\n")
    again = invoke("dimension", "apply", "customer", "corrected.csv", "--json")
    assert again.document["outcomes"] == {"added": 1}


def test_changes_that_did_not_apply_are_dismissed_once_a_correct_declaration_applied_them(invoke, shop):
    invoke("dimension", "apply", "customer", "changes")
    refused = invoke("errors", "retry", "--dimension", "customer", "--all")
    assert refused.code == 2
    for words in ("apply customer FILE", "apply the same file with --again", "dismiss --dimension customer --pipeline"):
        assert words in " ".join(refused.err.split())
    text = (shop / "pipeline.yml").read_text()
    (shop / "pipeline.yml").write_text(
        text.replace("operation: op,", "operation: op, upserts: [I, U, X], deletes: [D],")
    )
    outcomes = invoke("dimension", "apply", "customer", "changes", "--again", "--json").document["outcomes"]
    assert outcomes == {"added": 1, "rejected": 2, "replayed": 3}
    dismissed = invoke("errors", "dismiss", "--dimension", "customer", "--all", "--reason", "applied again")
    assert (dismissed.code, dismissed.out) == (0, "shop: 5 changes dismissed\n")
    assert "did not apply" not in invoke("errors", "list").out
    assert "applied again" in invoke("errors", "show", "--dimension", "customer", "--status", "dismissed").out


@pytest.mark.parametrize(
    ("name", "message"),
    [("custommer", "did you mean 'customer'?"), ("plain", "declared without history: it has one row for each member")],
)
def test_changes_of_a_dimension_without_them_are_refused(invoke, name, message):
    outcome = invoke("errors", "show", "--dimension", name)
    assert outcome.code == 1
    assert message in outcome.err
