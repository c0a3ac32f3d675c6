"""Errors of the pipelines layer: starting Spark, reading a pipeline file, the run catalog, a batch.

An error that the user can correct also derives from `InputError`. An error about loaded data that violates a guarantee
derives from `QualityError`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.storage.errors import CorruptionError, HeadraceError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "BatchError",
    "CatalogError",
    "ConservationError",
    "DeltaTableError",
    "ExtractionError",
    "JarsUnavailableError",
    "JavaNotFoundError",
    "LeaseHeldError",
    "LedgerError",
    "PipelineError",
    "PipelineFileError",
    "PolicyViolationError",
    "QualityError",
    "RejectedRowsError",
    "ReplicaDamagedError",
    "SeveralSourcesError",
    "SnapshotOptionsError",
    "SourceFileError",
    "SparkStartError",
    "StateDamagedError",
    "TableMovedError",
    "UnknownDimensionError",
    "telling",
]


class PipelineError(HeadraceError):
    """Base class of the errors of the pipelines layer."""


class PipelineFileError(PipelineError, InputError):
    """The pipeline file cannot be used. The message gives each position, the valid names and the nearest one."""


class SeveralSourcesError(PipelineFileError):
    """A command that supports pipelines with one source was given one with several. Nothing was read or written."""


class SparkStartError(PipelineError):
    """Spark did not start. The message names its log and the remedy."""


class JavaNotFoundError(SparkStartError):
    """Java is not installed, or is too old for Spark."""


class JarsUnavailableError(SparkStartError):
    """Delta's jars are not in the cache and could not be downloaded."""


class CatalogError(PipelineError):
    """The run catalog cannot be opened, read or written."""


class ExtractionError(PipelineError, InputError):
    """A table of a source database cannot be extracted as asked. Only complete files were written."""


class LeaseHeldError(PipelineError):
    """Another live run of the same pipeline holds its lease."""


class LedgerError(PipelineError):
    """The ledger of loaded files cannot be read or written, or this release cannot continue it."""


class DeltaTableError(PipelineError, InputError):
    """A Delta table does not exist, or does not have the form that the pipeline needs."""


class UnknownDimensionError(PipelineFileError, DeltaTableError):
    """The pipeline file declares no dimension of the given name."""


class SnapshotOptionsError(PipelineFileError):
    """The options of a snapshot do not fit the history of its dimension; the message names the option."""


class OtherCommandError(DeltaTableError):
    """Another command does what was asked; the message names it."""


class TableMovedError(PipelineError):
    """Another writer changed a Delta table after the version that a commit was planned at. The batch is replanned."""


class BatchError(PipelineError):
    """A micro-batch failed in Spark. No data is lost: the next run repeats the batch."""


class ReplicaDamagedError(PipelineError):
    """A replica was found to be damaged in the middle of a join. It was discarded, and the task runs again."""


class StateDamagedError(PipelineError, CorruptionError):
    """A file of a correlation's state is damaged or missing. Nothing of the batch was written."""


class SourceFileError(PipelineError, InputError):
    """A file of the source does not have the declared columns. Nothing of its batch was written."""


class RejectedRowsError(PipelineError, InputError):
    """Rejected rows cannot be selected, retried or dismissed as asked. Nothing was changed."""


class QualityError(PipelineError):
    """The data violated a guarantee. The run stops before the batch is committed."""


class ConservationError(QualityError):
    """Input rows do not equal facts + dropped or routed duplicates + rejected rows. Raised before the batch commits."""


class PolicyViolationError(QualityError):
    """A key is absent and the lookup's policy is `fail`. Nothing of the batch was written."""


@contextmanager
def telling(done: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Add notes to an error that leaves the block: what was done before it, and stays done."""
    try:
        yield
    except BaseException as error:
        for text in done():
            error.add_note(text)
        raise
