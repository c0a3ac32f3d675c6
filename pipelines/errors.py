"""Every error of the pipelines layer: starting Spark, reading a pipeline file, the run catalog, a batch.

An error that the user can correct also derives from `InputError`; one that says the loaded data broke a promise
derives from `QualityError`.
"""

from __future__ import annotations

from headrace.storage.errors import HeadraceError, InputError

__all__ = [
    "BatchError",
    "CatalogError",
    "ConservationError",
    "DeltaTableError",
    "JarsUnavailableError",
    "JavaNotFoundError",
    "LeaseHeldError",
    "LedgerError",
    "PipelineError",
    "PipelineFileError",
    "PolicyViolationError",
    "QualityError",
    "ReplicaDamagedError",
    "SourceFileError",
    "SparkStartError",
    "TableMovedError",
]


class PipelineError(HeadraceError):
    """Root of the errors of the pipelines layer."""


class PipelineFileError(PipelineError, InputError):
    """The pipeline file cannot be used. The message names each place, the valid names and the nearest one."""


class SparkStartError(PipelineError):
    """Spark did not start; the message names its log and the remedy."""


class JavaNotFoundError(SparkStartError):
    """There is no Java, or one that is too old for Spark."""


class JarsUnavailableError(SparkStartError):
    """Delta's jars are not in the cache and could not be fetched."""


class CatalogError(PipelineError):
    """The run catalog cannot be opened, read or written."""


class LeaseHeldError(PipelineError):
    """Another live run of the same pipeline holds its lease."""


class LedgerError(PipelineError):
    """The ledger of loaded files cannot be read or written, or is not one that this release can continue."""


class DeltaTableError(PipelineError, InputError):
    """A Delta table is missing, or not of the form that the pipeline needs."""


class TableMovedError(PipelineError):
    """Another writer changed a Delta table after the version that a commit was planned at. The batch plans again."""


class BatchError(PipelineError):
    """A micro-batch failed in Spark. Nothing of it is lost: the next run does it again."""


class ReplicaDamagedError(PipelineError):
    """A replica turned out to be damaged in the middle of a join. It has been discarded; the task runs again."""


class SourceFileError(PipelineError, InputError):
    """A file of the source does not have the declared columns. Nothing of its batch has been written."""


class QualityError(PipelineError):
    """The data broke a promise. The run stops before the batch is committed."""


class ConservationError(QualityError):
    """Rows in are not facts + dropped or routed duplicates + rejected rows. Raised before the batch is committed."""


class PolicyViolationError(QualityError):
    """A key is absent and the lookup's policy is `fail`. Nothing of the batch has been written."""
