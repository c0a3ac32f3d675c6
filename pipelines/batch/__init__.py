"""The batch protocol: a micro-batch from pieces of files to committed facts, exactly once.

In: a plan of files. Out: one commit of the facts, new members before it, rejected rows and duplicates after it.
`preparation` checks everything before the first row, `stages` plans the work, `worker` does it in Spark's tasks, and
`protocol` commits it.
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
