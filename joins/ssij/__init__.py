"""SSIJ, the semi-streaming index join. `operator` is the operator; the other modules are its parts.

What it holds, all on one account (`store`):

- `reserve`: the index, the buffer that pages are read into, the workspace, set apart before the first tuple
- `tiers`: rows apart from their pages, all of them (`whole`) or those asked for often (`records`), and the `filter`
- `stream_buffer`: tuples that wait, and which pages they wait for
- pages, in what the others leave (`headrace.storage.read.cache`)

What it does with a batch, in this order; `phase` is what online phases share, `state` what all do:

- `recall`: tuples whose row is in the record tier are joined
- an online phase, the one that suits predicate and keys: `whole_phase`, `direct`, `nearest`, or `online` for all else.
  `probe` and `direct_lookup` say where matches may be; what misses goes to the stream buffer
- `join_phase`, when `thresholds` say so or the `schedule` of deadlines does, by the `phase_estimate`: `parts` brings
  waiting tuples into the order in which pages will be read, `read_ahead` reads one block while another is joined,
  `pairs` says which tuples meet it; where all pages stay, `cached_join` looks the tuples up in the cache

`variant` has the switches that experiments throw, `workers` the threads; `allocators` give back what was freed.
"""
