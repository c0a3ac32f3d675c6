"""MeshJoin, for comparison: `operator`, its `window` of waiting tuples, and how its memory is `split`."""
