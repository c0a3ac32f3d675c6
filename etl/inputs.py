"""Checks of what callers pass: batches of one schema, columns that are there and have one name each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.joins.handle import check_batch, check_same_schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa

    from headrace.etl.errors import EtlError

__all__ = ["check_names", "of_one_schema"]


def check_names(
    there: Sequence[str], wanted: Iterable[str], where: str, error: type[EtlError], what: str = "column"
) -> None:
    """Raise an error unless each wanted column occurs exactly once.

    Parameters
    ----------
    there
        Names of the columns that are there.
    wanted
        Names of the columns that are needed.
    where
        Whose columns these are, for the message, such as ``"duplicates: the stream"``.
    error
        Class of the error.
    what
        What is missing, for the message.
    """
    for name in wanted:
        if name not in there:
            raise error(f"{where} has no {what} {name!r}; it has {', '.join(there) or 'none'}")
        if there.count(name) > 1:
            raise error(f"{where} has {there.count(name)} columns {name!r}; rename or leave out all but one")


def of_one_schema(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches.

    Raises
    ------
    StreamSchemaError
        If one is not a record batch, or has another schema than the first.
    """
    schema = None
    for batch in batches:
        check_batch(batch)
        if schema is not None:
            check_same_schema(batch.schema, schema)
        schema = batch.schema
        yield batch
