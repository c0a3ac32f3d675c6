"""JSON lines: blocks of text as records, one object a line."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace.storage.records import _json_kernels as kernels
from headrace.storage.records.csv_files import encoding_reason, undecoded
from headrace.storage.records.records import Records, Rejections
from headrace.storage.records.sources import BlockReader, open_text
from headrace.storage.records.values import Fields, convert, decoded, type_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.storage.records.formats import RecordFormat
    from headrace.storage.records.pieces import Piece

__all__ = ["json_records", "json_rows"]

_ROWS = (1 << 16) - 40  # no power of two: columns would share lines of the processor's cache
_LEAST_ROWS = 1 << 10
_MISSING = (
    "is missing; write null for no value (a source of a pipeline with `missing_fields: null` takes records without it)"
)
_FIELDS = 1 << 19
_KINDS = {
    kernels.NUMBER: "a JSON number",
    kernels.STRING: "a JSON string",
    kernels.BOOLEAN: "a JSON boolean",
    kernels.NESTED: "a JSON object or array",
}


def json_rows(columns: int) -> int:
    """Return how many records of so many columns are read at once."""
    return max(_LEAST_ROWS, min(_ROWS, _FIELDS // max(columns, 1)))


def _names(columns: pa.Schema) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    encoded = [name.encode() for name in columns.names]
    ends = np.cumsum([0, *(len(name) for name in encoded)])
    return np.frombuffer(b"".join(encoded) + b"\0", dtype=np.uint8), ends.astype(np.int64)


def json_records(piece: Piece, form: RecordFormat) -> Iterator[Records]:
    """Yield the records of a piece of JSON lines; see `read_records`."""
    assert form.columns is not None
    columns, rows = len(form.columns), json_rows(len(form.columns))
    names, ends = _names(form.columns)
    starts, stops = (np.zeros((columns, rows), dtype=np.int32) for _ in range(2))
    kinds = np.zeros((columns, rows), dtype=np.uint8)
    bounds, places = (np.zeros((2, rows), dtype=np.int32) for _ in range(2))
    faults = np.zeros(rows, dtype=np.uint8)
    number = piece.first_record
    with open_text(piece.path, form) as source:
        reader = BlockReader(source, piece.start, piece.stop)
        while True:
            records, reader.position = kernels.split_objects(
                reader.data,
                reader.position,
                reader.size,
                reader.final,
                names,
                ends,
                form.ignores_unknown,
                starts,
                stops,
                kinds,
                bounds,
                faults,
                places,
            )
            if records:
                block = _Block(reader.data, records, starts, stops, kinds, bounds, faults, places)
                yield block.records_of(form, number)
            number += records
            if records < rows:
                if reader.final:
                    return
                reader.fill()


class _Block:
    """Records of one block, as the kernel found them."""

    def __init__(
        self,
        data: NDArray[np.uint8],
        records: int,
        starts: NDArray[np.int32],
        stops: NDArray[np.int32],
        kinds: NDArray[np.uint8],
        bounds: NDArray[np.int32],
        faults: NDArray[np.uint8],
        places: NDArray[np.int32],
    ) -> None:
        self.data = data
        self.records = records
        self.starts, self.stops, self.kinds = starts[:, :records], stops[:, :records], kinds[:, :records]
        self.bounds, self.faults, self.places = bounds, faults[:records], places

    def records_of(self, form: RecordFormat, number: int) -> Records:
        """Return the records as rows of the declared columns."""
        assert form.columns is not None
        rejected = Rejections()
        for record, place in undecoded(self.data, self.bounds, self.records):
            inside = np.flatnonzero((self.starts[:, record] <= place) & (place < self.stops[:, record]))
            column = form.columns.names[inside[0]] if len(inside) else None
            value = self._text(self.starts[inside[0], record], self.stops[inside[0], record]) if len(inside) else None
            rejected.add(record, column, value, encoding_reason(int(self.data[place]), form))
            self.kinds[:, record], self.faults[record] = kernels.NULL, 0
        for broken in np.flatnonzero(self.faults):
            rejected.add(int(broken), *self._fault(int(broken), form))
        columns = [self._column(place, field, form, rejected) for place, field in enumerate(form.columns)]
        rows = pa.RecordBatch.from_arrays(columns, schema=form.columns)
        return Records(rows, pa.array(np.arange(number, number + self.records)), rejected.table())

    def _text(self, start: Any, stop: Any) -> str:
        return decoded(self.data[start:stop])

    def _fault(self, record: int, form: RecordFormat) -> tuple[str | None, str | None, str]:
        """Return the column, the value and the rule of a record that is wrong as a whole."""
        assert form.columns is not None
        start, stop = int(self.places[0, record]), int(self.places[1, record])
        found = self._text(start, stop)
        fault = self.faults[record]
        if fault == kernels.NOT_OBJECT:
            return None, None, "is not a JSON object; write one object a line"
        if fault == kernels.UNKNOWN_FIELD:
            near = difflib.get_close_matches(found.casefold(), [name.casefold() for name in form.columns.names], n=1)
            alike = [name for name in form.columns.names if near and name.casefold() == near[0]]
            hint = f" (did it mean {alike[0]!r}?)" if alike else ""
            return found, None, f"is a field that is not declared{hint}; names are exact"
        if fault == kernels.REPEATED_FIELD:
            return found, None, "is a field that is there twice"
        if fault == kernels.TOO_DEEP:
            return None, None, "is nested deeper than 512 levels"
        offset = start - int(self.bounds[0, record])
        near_text = self._text(start, min(stop, start + 40))
        place = f"at byte {offset + 1}, {near_text!r}" if near_text else "at its end"
        after_return = offset > 0 and self.data[start - 1] == ord("\r")
        hint = "; a carriage return alone ends no line, so end each line with a line feed" if after_return else ""
        return None, None, f"is not valid JSON {place}{hint}"

    def _column(self, place: int, field: pa.Field, form: RecordFormat, rejected: Rejections) -> pa.Array:
        """Return a column; reject what is of another kind, and what is missing."""
        kinds = self.kinds[place]
        wrong, expected = _wrong_kinds(kinds, field.type)
        if form.missing_fields == "error":
            for row in np.flatnonzero(kinds == kernels.MISSING):
                rejected.add(int(row), field.name, None, _MISSING)
        for row in np.flatnonzero(wrong):
            value = self._text(self.starts[place, row], self.stops[place, row])
            rejected.add(int(row), field.name, value, f"is {_KINDS[int(kinds[row])]}, not {expected}")
        wanted = (kinds != kernels.NULL) & (kinds != kernels.MISSING) & ~wrong
        fields = Fields(self.data, self.starts[place], self.stops[place], wanted)
        if form.decimal == "," and (pa.types.is_decimal(field.type) or pa.types.is_floating(field.type)):
            return self._with_comma(fields, kinds, field, form, rejected)
        return _converted(fields, field, form, rejected)

    def _with_comma(
        self, fields: Fields, kinds: NDArray[np.uint8], field: pa.Field, form: RecordFormat, rejected: Rejections
    ) -> pa.Array:
        """Return a column whose strings have a decimal comma; JSON's own numbers have a point whatever is declared."""
        from dataclasses import replace  # noqa: PLC0415 - rare

        numbers = fields.wanted & (kinds == kernels.NUMBER)
        plain = _converted(replace(fields, wanted=numbers), field, replace(form, decimal="."), rejected)
        commas = _converted(replace(fields, wanted=fields.wanted & ~numbers), field, form, rejected)
        import pyarrow.compute as pc  # noqa: PLC0415 - rare

        return pc.if_else(pa.array(numbers), plain, commas)


def _converted(fields: Fields, field: pa.Field, form: RecordFormat, rejected: Rejections) -> pa.Array:
    converted = convert(fields, field.type, form)
    for row in np.flatnonzero(converted.rules):
        rejected.add(int(row), field.name, fields.text(int(row)), converted.reasons[int(converted.rules[row])])
    return converted.values


def _wrong_kinds(kinds: NDArray[np.uint8], dtype: pa.DataType) -> tuple[NDArray[np.bool_], str]:
    """Return which values are of a kind that the type does not take, and what it takes."""
    if pa.types.is_boolean(dtype):
        return (kinds == kernels.NUMBER) | (kinds == kernels.NESTED), "true or false"
    if pa.types.is_integer(dtype) or pa.types.is_decimal(dtype) or pa.types.is_floating(dtype):
        return (kinds == kernels.BOOLEAN) | (kinds == kernels.NESTED), f"a number for {type_name(dtype)}"
    other = (kinds == kernels.NUMBER) | (kinds == kernels.BOOLEAN) | (kinds == kernels.NESTED)
    return other, f"a JSON string for {type_name(dtype)}"
