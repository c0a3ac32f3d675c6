"""Correlations: pipelines that join the rows of two or more sources with each other, exactly once.

In: the files of the next batch of each source, and the state after the batch before. Out: results in a Delta table, and
the state after the batch. The state consists of immutable runs and one manifest for each batch. The rooms before this
one read files and commit to Delta; `headrace.pipelines.correlating` runs a pipeline.
"""

__all__: list[str] = []
