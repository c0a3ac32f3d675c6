"""The batch protocol: takes a micro-batch from file pieces to committed facts, exactly once.

In: a plan of files. Out: one commit of the facts, preceded by new members and followed by rejected rows and duplicates.
`preparation` checks everything before the first row is read, `stages` plans the work, `worker` runs it in Spark's
tasks, and `protocol` commits it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.pipelines._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.pipelines.batch.preparation import check_pipeline
    from headrace.pipelines.batch.protocol import BatchProtocol
    from headrace.pipelines.batch.stages import Prepared

__all__ = ["BatchProtocol", "Prepared", "check_pipeline"]

__getattr__ = lazy_exports(
    __name__,
    {
        "preparation": ("check_pipeline",),
        "protocol": ("BatchProtocol",),
        "stages": ("Prepared",),
    },
)
