"""The data of the experiments: one large dimension, and streams that reference its members with Zipf skew."""

import numpy as np
import pyarrow as pa

__all__ = ["dimension", "stream", "zipf_positions"]


def dimension(rows, seed=1):
    """Return members in key order: an id with gaps, a wide attribute and a narrow one."""
    rng = np.random.default_rng(seed)
    ids = np.arange(rows, dtype=np.int64) * 4 + rng.integers(0, 4, rows)
    return pa.table({"id": ids, "wide": rng.integers(0, 1 << 40, rows), "narrow": rng.integers(0, 1000, rows)})


def zipf_positions(rng, members, skew, count):
    """Return positions of members drawn by Zipf's law, popularity scattered over the key order at random."""
    if skew == 0:
        return rng.integers(0, members, count)
    weights = np.arange(1, members + 1, dtype=np.float64) ** -skew
    cumulated = np.cumsum(weights)
    popularity = np.searchsorted(cumulated, rng.random(count) * cumulated[-1])
    return np.random.default_rng(7).permutation(members)[popularity]


def stream(ids, skew, batches, batch_rows, seed=2):
    """Return batches whose keys are drawn from `ids` with this skew."""
    rng = np.random.default_rng(seed)
    keys = ids[zipf_positions(rng, len(ids), skew, batches * batch_rows)]
    table = pa.table({"number": np.arange(len(keys), dtype=np.int64), "key": keys})
    return table.to_batches(max_chunksize=batch_rows)
