"""SSIJ, the semi-streaming index join: a fast stream joined with a relation on disk, within a memory and a deadline.

In: batches of a stream and a clustered table. Out: result batches, each tuple's within its deadline. The algorithm is
that of Bornea, Deligiannakis, Kotidis and Vassalos, "Semi-Streamed Index Join for Near-Real Time Execution of ETL
Transformations" (ICDE 2011), with additions. Where to find it:

================  ==================================================================================================
Paper             Module
================  ==================================================================================================
IV-A: M           `memory.store` (account of everything), `memory.reservation` (fixed reservations)
IV-A: index       `headrace.storage.tree.snapshot` (inner nodes); `memory.direct_lookup` for unique keys of one word
IV-A: CR          `headrace.storage.read.cache`; frames that other components do not use
IV-A: IB          `headrace.joins.input_buffer`
IV-A: SB, II      `memory.stream_buffer`, `memory.inverted_index`
IV-B: pending     `operator` (`SSIJAlgorithm`); IB_thresh and SB_thresh in `schedule`
IV-B: online      `phases.online` (algorithm 1), `phases.direct`, `phases.nearest`, `phases.direct_nearest`,
                  `phases.row_tier`
IV-B: join        `phases.join` (algorithm 2), `phases.pair_batches`, `phases.read_ahead`
IV-C: utility     `headrace.storage.read.cache`; ToKeep and ToRemove: `choose_resident` in `phases._join_kernels`
IV-D: read plan   `headrace.storage.read.plan`; S, T, maxDist: `headrace.storage.read.device`; maxScan: `options`
IV-E: updates     `SSIJ.apply`, `SSIJ.refresh`
IV-F: deadlines   `schedule`, `cost`; `headrace.joins.deadlines` for deadlines of single tuples
================  ==================================================================================================

Additions to the paper: `memory.record_tier` (single rows that are looked up often) with `phases.record_tier`;
`memory.row_tier` (all rows, if they fit); `memory.filter_tier` (which keys are absent); `workers` (threads).
"""
