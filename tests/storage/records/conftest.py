import gzip

import pyarrow as pa
import pytest

from headrace.storage.records import Piece, RecordFormat, kind_of, raw_records, read_records


class Found:
    """All that a file gives: rows, numbers, causes by record number, and the text of rejected records."""

    def __init__(self, path, form, pieces=None):
        self.rows, self.numbers, self.causes = [], [], {}
        for piece in pieces or [Piece(str(path))]:
            for records in read_records(piece, form):
                records.rows.validate(full=True)
                assert records.rows.schema == form.columns
                numbers = records.numbers.to_pylist()
                for cause in records.rejects.to_pylist():
                    number = numbers[cause.pop("row")]
                    self.causes.setdefault(number, []).append(cause)
                self.rows += records.rows.to_pylist()
                self.numbers += numbers
        rejected = sorted(self.causes)
        self.raw = dict(zip(rejected, raw_records(path, form, rejected), strict=True))

    @property
    def good(self):
        return [row for row, number in zip(self.rows, self.numbers, strict=True) if number not in self.causes]

    @property
    def reasons(self):
        return {number: "; ".join(cause["reason"] for cause in causes) for number, causes in self.causes.items()}


@pytest.fixture
def read(tmp_path):
    """Return a function that writes a file, reads it, and returns what it found."""

    def run(content, columns, name="f.csv", **options):
        path = tmp_path / name
        raw = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return Found(path, RecordFormat(kind_of(name), pa.schema(columns), **options))

    return run


@pytest.fixture
def value(read):
    """Return a function that reads one field of one column, and returns its value or the reason why there is none."""

    def run(text, dtype, **options):
        found = read(f'v\n"{text.replace(chr(34), chr(34) * 2)}"\n', [("v", dtype)], **options)
        assert len(found.rows) == 1
        return found.reasons[1] if found.causes else found.rows[0]["v"]

    return run
