"""Changes of members: from files of changes to committed versions of a dimension with history.

In: files of changes. Out: versions in the dimension's Delta table, rejected changes in its error table, and the ranges
of facts that now belong to another version.
"""

__all__: list[str] = []
