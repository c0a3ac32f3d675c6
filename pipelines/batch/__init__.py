"""The batch protocol: takes a micro-batch from file pieces to committed facts, exactly once.

In: a plan of files. Out: one commit of the facts, preceded by new members and followed by rejected rows and duplicates.
`preparation` checks everything before the first row is read, `stages` plans the work, `worker` runs it in Spark's
tasks, and `protocol` commits it.
"""

__all__: list[str] = []
