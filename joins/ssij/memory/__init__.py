"""Memory of SSIJ: everything that the operator holds, in one account (`store`).

In: snapshots, pages that were read, tuples that wait. Out: look-ups, and room for what comes. Tuples take frames from
the page cache; the next join phase gives back what is free.

- `reservation`: index, read buffer, and workspace, reserved before the first tuple
- `stream_buffer`, `inverted_index`: tuples that wait, and which pages they wait for
- `tiers`: `record_tier`, `row_tier`, and `filter_tier`, what is known of rows beside their pages
- `tier_trial`: whether the record tier saves reads
- `direct_lookup`: descriptors of cached pages, for unique keys of one word
"""
