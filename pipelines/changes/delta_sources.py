"""A Delta table as a source of changes: the rows of its change feed, or all of its rows, as files of changes.

Changes have the columns of the feed in addition to the table's own: `_change_type`, `_commit_version` and
`_commit_timestamp`, which a history may name as operation, sequence and effective time. Rows as they were before an
update are left out.

The rows are staged as Parquet in the folder of the dimension, where all hosts read them, and removed afterward.
"""

from __future__ import annotations

import shutil
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.pipelines.delta.reads import feed_is_exact, plain_schema, scan_table
from headrace.pipelines.delta.tables import CHANGE_TYPE, COMMIT_VERSION, open_table
from headrace.pipelines.errors import DeltaTableError
from headrace.storage.format import is_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.etl.history import History

__all__ = ["DeltaSource", "staged"]

_TIMESTAMP: Final = "_commit_timestamp"
_STAGED: Final = "_headrace_staged"
_KEPT_SECONDS: Final = 24 * 3600
_UTC: Final = pa.timestamp("us", "UTC")
_FEED_TYPES: Final = {CHANGE_TYPE: pa.string(), COMMIT_VERSION: pa.int64(), _TIMESTAMP: _UTC}


class DeltaSource:
    """A Delta table at its newest version.

    Parameters
    ----------
    path
        Path of the table.

    Raises
    ------
    DeltaTableError
        If the table cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._table = open_table(path)

    @property
    def table_id(self) -> str:
        """Identity of the table; a table that was made again has another."""
        return str(self._table.metadata().id)

    @property
    def version(self) -> int:
        """Newest version of the table."""
        return self._table.version()

    def changes(self, history: History, columns: Sequence[str], first: int) -> Iterator[pa.RecordBatch]:
        """Yield the changes from a version on.

        Parameters
        ----------
        history
            Declaration of the dimension that receives the changes.
        columns
            Columns of the changes.
        first
            First version; 0 for all changes since the table was made.

        Raises
        ------
        DeltaTableError
            If the table lacks a column, or its feed no longer has the changes, or has a delete that the history cannot
            represent.
        """
        self._require(columns, [*self._names, *_FEED_TYPES])
        for batch in self._feed(columns, first):
            kept = batch.filter(pc.not_equal(batch.column(CHANGE_TYPE), "update_preimage"))
            if history.operation is None and pc.any(pc.equal(kept.column(CHANGE_TYPE), "delete")).as_py():
                raise DeltaTableError(
                    f"the Delta table {self.path} has deletes, and dimension {history.dimension.name!r} declares no "
                    f"`operation`; declare {CHANGE_TYPE} as the operation"
                )
            yield _with_texts(kept.select(list(columns)))

    def rows(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows of the table."""
        self._require(columns, self._names)
        yield from scan_table(self._table, columns)

    def schema(self, columns: Sequence[str]) -> pa.Schema:
        """Return columns of the table or of its feed with their types.

        Raises
        ------
        DeltaTableError
            If there is no such column.
        """
        self._require(columns, [*self._names, *_FEED_TYPES])
        kinds = plain_schema(pa.schema(self._table.schema().to_arrow()))
        own = {field.name: field.type for field in kinds}
        found = [own[name] if name in own else _FEED_TYPES[name] for name in columns]
        return pa.schema(
            [(name, pa.string() if _is_texts(kind) else kind) for name, kind in zip(columns, found, strict=True)]
        )

    @property
    def _names(self) -> list[str]:
        return [field.name for field in self._table.schema().fields]

    def _require(self, columns: Sequence[str], there: Sequence[str]) -> None:
        missing = [name for name in columns if name not in there]
        if missing:
            raise DeltaTableError(
                f"the Delta table {self.path} has no column {missing[0]!r}; its changes have {', '.join(there)}"
            )

    def _feed(self, columns: Sequence[str], first: int) -> Iterator[pa.RecordBatch]:
        from deltalake.exceptions import DeltaError  # noqa: PLC0415 - heavy

        wanted = list(dict.fromkeys([*columns, *_FEED_TYPES]))
        try:
            if not feed_is_exact(self._table, first, self.version, columns):
                raise DeltaTableError(f"{self._gone(first)}: it has timestamps that only Spark reads")
            reader = pa.RecordBatchReader.from_stream(self._table.load_cdf(first, self.version, columns=wanted))
            for batch in reader:
                yield _plain(batch)
        except (DeltaError, OSError, pa.ArrowException) as error:
            raise DeltaTableError(
                f"{self._gone(first)}: {str(error).splitlines()[0]}. Turn its change feed on (ALTER TABLE "
                f"delta.`{self.path}` SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')), and apply its rows "
                "once with --snapshot"
            ) from error

    def _gone(self, first: int) -> str:
        return f"the Delta table {self.path} has no change feed for its versions {first} to {self.version}"


@contextmanager
def staged(dimension_path: str, name: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[Path]:
    """Write batches to a Parquet file in the folder of a dimension, and remove it afterward.

    Parameters
    ----------
    dimension_path
        Path of the dimension. Leftovers of runs that were killed a day ago or earlier are removed.
    name
        Name of the file without suffix, which the error table shows.
    schema
        Columns of the file.
    batches
        Rows to write.

    Yields
    ------
    Path
        The file.
    """
    folder = Path(dimension_path) / _STAGED
    own = folder / str(uuid.uuid4())
    try:
        own.mkdir(parents=True)
        _remove_old(folder)
        file = own / f"{name}.parquet"
        with pq.ParquetWriter(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch.cast(schema))
        yield file
    except OSError as error:
        raise DeltaTableError(f"{folder} cannot be written: {error}; correct the cause and run again") from error
    finally:
        shutil.rmtree(own, ignore_errors=True)
        with suppress(OSError):
            folder.rmdir()  # unless another run uses it


def _remove_old(folder: Path) -> None:
    limit = time.time() - _KEPT_SECONDS
    for place in folder.iterdir():
        if place.stat().st_mtime < limit:
            shutil.rmtree(place, ignore_errors=True)


def _is_texts(kind: pa.DataType) -> bool:
    """Return whether a type is a list of text, such as the attributes that a partial change gives."""
    return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and is_bytes(kind.value_type)


def _with_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch whose lists of text are texts with commas, as files have them."""
    for place, field in enumerate(batch.schema):
        if _is_texts(field.type):
            lists = batch.column(place).cast(pa.list_(pa.string()))
            batch = batch.set_column(place, pa.field(field.name, pa.string()), _joined(lists))
    return batch


def _joined(lists: pa.ListArray) -> pa.Array:
    """Return lists as texts with commas. An element that the text would not name becomes one that names no column."""
    names = pc.list_flatten(lists)
    odd = pc.fill_null(pc.or_(pc.equal(names, ""), pc.match_substring_regex(names, "[,;|]")), fill_value=True)
    names = pc.if_else(odd, "an element of the list that names no attribute", names)
    ends = np.cumsum(np.asarray(pc.fill_null(pc.list_value_length(lists), 0)))
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    return pc.binary_join(pa.ListArray.from_arrays(offsets, names, mask=lists.is_null()), ",")


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch of the feed with plain types, and commit times in UTC."""
    schema = plain_schema(batch.schema)
    place = schema.get_field_index(_TIMESTAMP)
    times = batch.column(place).cast(pa.timestamp("us"))
    columns = list(batch.columns)
    columns[place] = pc.assume_timezone(times, "UTC") if batch.schema.field(place).type.tz is None else times
    schema = schema.set(place, pa.field(_TIMESTAMP, _UTC))
    return pa.RecordBatch.from_arrays(
        [each.cast(field.type) for each, field in zip(columns, schema, strict=True)], schema=schema
    )
