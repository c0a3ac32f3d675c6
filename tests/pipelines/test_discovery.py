"""The listing of a source folder: odd names are literal, and nothing is left out in silence that may surprise."""

import os
import socket
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.pipelines.errors import SourceFileError
from headrace.pipelines.source.discovery import FoundFile, discover, examine, fingerprint, name_matcher

ODD_NAMES = [
    "a[1].csv", "a?b.csv", "a*.csv", "{a,b}.csv", "back\\slash.csv", "a-08:00.csv", "a%41.csv", "new\nline.csv",
    " leading and trailing ", "ünï 漢字.csv", "e\u0301.csv", "é.csv", "-rf", "~", "$HOME", "#frag", "a;b&c|d", "'\"",
    "con.csv.", "x" * 255,
]  # fmt: skip


def names(folder, pattern=None, **options):
    return sorted(discover(str(folder), pattern, **options).names)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_name_is_literal(tmp_path, name):
    for each in (name, "a1.csv", "ab.csv", "a.csv", "aA.csv"):
        (tmp_path / each).write_text(each)
    found = discover(str(tmp_path))
    assert sorted(found.names) == sorted({name, "a1.csv", "ab.csv", "a.csv", "aA.csv"})
    assert examine(str(tmp_path), name) == found.file(found.names.index(name))
    assert examine(str(tmp_path), name).size == len(name.encode())


@pytest.mark.parametrize("folder", ["in[1]", "a?b", "a*b", "a%41", "{x,y}", "a:b", "new\nline"])
def test_a_folder_is_literal(tmp_path, folder):
    for each in (folder, "in1", "aXb", "aA", "x"):
        (tmp_path / each).mkdir()
        (tmp_path / each / f"{each}.csv").write_text("1")
    assert names(tmp_path / folder) == [f"{folder}.csv"]


def test_sizes_and_dates_are_those_of_the_files(tmp_path):
    (tmp_path / "a").write_text("12345")
    os.utime(tmp_path / "a", ns=(0, 123_456_789_123_456_789))
    (tmp_path / "old").write_text("")
    os.utime(tmp_path / "old", ns=(0, -(10**18)))
    found = discover(str(tmp_path))
    assert sorted(found.file(index) for index in range(2)) == [
        FoundFile("a", 5, 123_456_789_123_456_789),
        FoundFile("old", 0, -(10**18)),
    ]


def test_a_date_that_no_64_bit_number_holds_is_the_latest_one(tmp_path):
    (tmp_path / "a").write_text("1")
    os.utime(tmp_path / "a", (0, 13_000_000_000))
    assert examine(str(tmp_path), "a").mtime_ns == discover(str(tmp_path)).mtimes[0] == 2**63 - 1


def test_hidden_names_are_left_out_without_mention(tmp_path):
    for name in (".a.csv", "_SUCCESS", "a.csv"):
        (tmp_path / name).write_text("1")
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "_temporary" / "b.csv").write_text("1")
    found = discover(str(tmp_path), recursive=True)
    assert (found.names, found.left_out) == (["a.csv"], ())


def test_subfolders_are_read_on_request_and_named_otherwise(tmp_path):
    (tmp_path / "a.csv").write_text("1")
    (tmp_path / "sub/[x]").mkdir(parents=True)
    (tmp_path / "sub/[x]/b.csv").write_text("1")
    (tmp_path / "sub/c.txt").write_text("1")
    assert names(tmp_path, recursive=True) == ["a.csv", "sub/[x]/b.csv", "sub/c.txt"]
    assert names(tmp_path, "*.csv", recursive=True) == ["a.csv", "sub/[x]/b.csv"]
    found = discover(str(tmp_path), "*.csv")
    assert found.names == ["a.csv"]
    assert found.left_out == (("sub", "a folder; source.recursive: true reads its files"),)


def test_links_to_files_are_files_and_links_to_folders_are_named(tmp_path):
    source, outside = tmp_path / "in", tmp_path / "outside"
    source.mkdir()
    outside.mkdir()
    (outside / "data").write_text("123")
    (source / "file").symlink_to(outside / "data")
    (source / "folder").symlink_to(outside)
    (source / "loop").symlink_to(source)
    (source / "nowhere").symlink_to(outside / "none")
    (source / "itself").symlink_to(source / "itself")
    found = discover(str(source), recursive=True)
    assert (found.names, list(found.sizes)) == (["file"], [3])
    assert [left.name for left in found.left_out] == ["folder", "itself", "loop", "nowhere"]


def test_what_is_neither_file_nor_folder_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s.csv"))
        found = discover(str(tmp_path), "*.csv")
    assert found.names == []
    assert [left.name for left in found.left_out] == ["pipe.csv", "s.csv"]
    assert examine(str(tmp_path), "pipe.csv") is None


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_name_that_is_not_utf_8_is_refused_by_name(tmp_path, kind):
    path = os.fsencode(tmp_path) + b"/caf\xe9.csv"
    if kind == "file":
        os.close(os.open(path, os.O_CREAT))
    else:
        Path(os.fsdecode(path)).mkdir()
    with pytest.raises(SourceFileError, match=r"caf\\xe9\.csv.* is not UTF-8; rename it") as caught:
        discover(str(tmp_path))
    str(caught.value).encode()


def test_a_name_that_is_not_utf_8_and_does_not_match_is_no_concern(tmp_path):
    os.close(os.open(os.fsencode(tmp_path) + b"/caf\xe9.txt", os.O_CREAT))
    assert names(tmp_path, "*.csv") == []


def test_a_file_that_vanishes_during_the_listing_is_skipped(tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("1")
    real = os.scandir

    class Vanishing:
        def __init__(self, path):
            self.inner = real(path)

        def __enter__(self):
            self.inner.__enter__()
            (tmp_path / "b").rename(tmp_path.parent / "elsewhere")
            return self.inner

        def __exit__(self, *error):
            return self.inner.__exit__(*error)

    with real(str(tmp_path)) as entries:
        listed = list(entries)
    monkeypatch.setattr(os, "scandir", lambda path: ListedEntries(Vanishing(path), listed))
    assert names(tmp_path) == ["a", "c"]


class ListedEntries:
    """Entries that were read before one of the files was moved away."""

    def __init__(self, inner, listed):
        self.inner = inner
        self.listed = listed

    def __enter__(self):
        self.inner.__enter__()
        return iter(self.listed)

    def __exit__(self, *error):
        return self.inner.__exit__(*error)


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(SourceFileError, match=r"there is no folder .*/none; create it"):
        discover(str(tmp_path / "none"))


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "in").write_text("1")
    with pytest.raises(SourceFileError, match="Not a directory"):
        discover(str(tmp_path / "in"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
@pytest.mark.parametrize("below", ["", "sub"])
def test_a_folder_that_may_not_be_listed_is_an_error(tmp_path, below):
    (tmp_path / "sub").mkdir()
    locked = tmp_path / below
    locked.chmod(0)
    try:
        with pytest.raises(SourceFileError, match="cannot be read: Permission denied"):
            discover(str(tmp_path), recursive=True)
    finally:
        locked.chmod(0o700)


def test_a_folder_that_fails_to_be_listed_is_an_error(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(SourceFileError, match="Input/output error; check its permissions and the disk"):
        discover(str(tmp_path))


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("*.csv", ["a.csv", ".csv", "a\nb.csv"], ["a.csv.gz", "a.CSV", "acsv"]),
        ("a?.csv", ["a1.csv"], ["a.csv", "a12.csv"]),
        ("[ab]-[!0-9].csv", ["a-x.csv"], ["c-x.csv", "a-1.csv"]),
        ("*.{csv,csv.gz,txt}", ["a.csv", "a.csv.gz", "a.txt"], ["a.json", "a.{csv"]),
        ("{a,b}{1,2}", ["a1", "b2"], ["a", "a12"]),
        ("{a,{b,c}}x", ["ax", "bx", "cx"], ["x"]),
        ("{a}", ["{a}"], ["a"]),
        ("a+b(c).csv", ["a+b(c).csv"], ["aab(c).csv"]),
    ],
)
def test_a_pattern_matches_whole_names(pattern, matching, other):
    matches = name_matcher(pattern)
    assert [name for name in [*matching, *other] if matches(name)] == matching


def test_a_fingerprint_is_of_the_whole_content(tmp_path):
    (tmp_path / "a").write_bytes(bytes(3 << 20))
    (tmp_path / "b").write_bytes(bytes(1 << 20) + b"x" + bytes((2 << 20) - 1))
    prints = [fingerprint(str(tmp_path), examine(str(tmp_path), name)) for name in ("a", "b", "a")]
    assert prints[0] == prints[2] != prints[1]
    assert len(prints[0]) == 32


def test_a_file_that_is_another_one_now_has_no_fingerprint(tmp_path):
    (tmp_path / "a").write_text("1")
    before = examine(str(tmp_path), "a")
    (tmp_path / "a").write_text("12")
    assert fingerprint(str(tmp_path), before) is None
    (tmp_path / "a").unlink()
    assert fingerprint(str(tmp_path), before) is None


TEXT = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(TEXT.filter(lambda text: text not in {".", ".."}), max_size=8))
def test_any_names_are_found_as_they_are(tmp_path, wanted):
    folder = tmp_path / str(time.monotonic_ns())
    folder.mkdir()
    for name in wanted:
        (folder / name).touch()
    assert names(folder) == sorted(name for name in wanted if name[0] not in "._")
