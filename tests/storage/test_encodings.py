import gzip

import pytest

from headrace.storage import encodings
from headrace.storage.encodings import not_utf8


@pytest.mark.parametrize("block", [1, 2, 5, 1 << 20])
@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("héading\nnaïve €\n".encode(), None),
        (b"", None),
        (b"k,v\n1,M\xfcller\n", "line 2 is not UTF-8 (byte 7 of the file is 0xfc)"),
        ("é\né".encode() + b"\xe2\x82", "line 2 is not UTF-8 (byte 5 of the file is 0xe2)"),
        ("k\n".encode("utf-16"), "line 1 is not UTF-8 (byte 0 of the file is 0xff)"),
    ],
)
def test_the_first_byte_that_is_not_utf8_is_named(tmp_path, monkeypatch, block, content, place):
    monkeypatch.setattr(encodings, "_BLOCK_BYTES", block)
    for name, data in (("a.csv", content), ("a.csv.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(data)
        found = not_utf8(tmp_path / name)
        assert found is None if place is None else found.startswith(place)
