"""Correction of facts that point to another version since the changes of a dimension with history.

In: the table of moved facts and the fact table. Out: facts with the keys, and the carried columns, of the versions that
are valid at their event times now.

`progress` says up to which version of the dimension the facts are right, `candidates` finds the facts to correct, and
`corrections` computes their new values. `rewriting` writes these into the fact table, or `corrections`, by `MERGE`.
"""

__all__: list[str] = []
