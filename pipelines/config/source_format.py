"""Converts the source fields of a pipeline file to a `RecordFormat`, which says how to read the files of a source.

Earlier releases passed options to Spark's reader. An option that has an equivalent field becomes that field. Any other
option is refused, with the remedy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.pipelines.config.column_types import arrow_schema
from headrace.storage.records import RecordFormat

if TYPE_CHECKING:
    from headrace.pipelines.config.model import SourceConfig
    from headrace.storage.records import Kind

__all__ = ["fields_for_options", "for_other_files", "record_format"]

_FIELDS = {
    "header": "header",
    "sep": "delimiter",
    "delimiter": "delimiter",
    "quote": "quote",
    "escape": "escape",
    "nullvalue": "nulls",
    "encoding": "encoding",
    "charset": "encoding",
}
_REMEDIES = {
    "dateformat": "write `date_format` with a pattern such as '%d.%m.%Y'",
    "timestampformat": "write `timestamp_format` with a pattern such as '%d.%m.%Y %H:%M:%S'",
    "timestampntzformat": "write `timestamp_format` with a pattern such as '%d.%m.%Y %H:%M:%S'",
    "timezone": "write `time_zone`",
    "pathglobfilter": "write `files`",
    "recursivefilelookup": "write `recursive`",
    "maxfilespertrigger": "write `trigger.max_files`",
    "locale": "write `decimal: ','` for a decimal comma",
    "multiline": "leave it out: line breaks within quotes are always read, and JSON is one object a line",
    "mode": "leave it out: a record that does not fit goes to the error table",
    "columnnameofcorruptrecord": "leave it out: a record that does not fit goes to the error table",
    "enforceschema": "leave it out: columns are read by their names",
}


def record_format(source: SourceConfig) -> RecordFormat:
    """Return the record format of a source.

    Raises
    ------
    InputError
        If a field is not valid.
    """
    return RecordFormat(
        kind=source.format,
        columns=arrow_schema(source.columns),
        header=source.header,
        delimiter=source.delimiter,
        quote=source.quote,
        escape=source.escape,
        nulls=tuple(source.nulls),
        encoding=source.encoding,
        decimal=source.decimal,
        date_format=source.date_format,
        timestamp_format=source.timestamp_format,
        time_zone=source.time_zone,
        ambiguous_time=source.ambiguous_time,
        unknown_fields=source.unknown_fields,
        missing_fields=source.missing_fields,
    )


def for_other_files(source: SourceConfig, kind: Kind) -> SourceConfig:
    """Return the source with its settings of text for files beside its own: changes, or members of a dimension.

    Such files must have all columns. What the source says of undeclared fields and of spellings of null holds for its
    own format.
    """
    update: dict[str, Any] = {"format": kind, "missing_fields": "error"}
    if source.format != kind:
        update |= {"unknown_fields": None, "nulls": source.nulls if kind == "csv" else []}
    return source.model_copy(update=update)


def fields_for_options(document: Any) -> Any:
    """Return the fields of a source, with each option of Spark's reader replaced by its equivalent field.

    Raises
    ------
    ValueError
        If an option has no equivalent field, or both the option and the field are given.

    Examples
    --------
    >>> fields_for_options({"format": "csv", "options": {"sep": ";", "nullValue": "NA"}})
    {'format': 'csv', 'delimiter': ';', 'nulls': ['NA']}
    """
    if not isinstance(document, dict) or not isinstance(document.get("options"), dict):
        return document
    fields = {name: value for name, value in document.items() if name != "options"}
    problems = []
    for option, value in document["options"].items():
        field = _FIELDS.get(str(option).lower())
        if field is None:
            remedy = _REMEDIES.get(str(option).lower(), "leave it out: files are not read by Spark")
            problems.append(f"options.{option}: {remedy}")
        elif field in fields:
            problems.append(f"options.{option}: `{field}` says it, too; leave the option out")
        else:
            fields[field] = _value(field, value)
    if problems:
        raise ValueError("; ".join(problems))
    return fields


def _value(field: str, value: Any) -> Any:
    if field == "nulls":
        return [value] if value != "" else []
    return value.strip().lower() == "true" if field == "header" and isinstance(value, str) else value
