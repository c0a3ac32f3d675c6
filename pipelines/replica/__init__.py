"""Replicas: clustered tables on the local disk that follow the Delta tables of dimensions and loaded keys.

In: a Delta version and a shard. Out: join operators over a clustered table with exactly the rows of that version.
"""

__all__: list[str] = []
