"""The paper's data, scaled down: relations, and streams that ask for their keys (section VI, table II).

One factor scales pages and keys of the relation, tuples of the stream, thresholds and memory. The density of wanted
pages, the share of them that the memory holds, the pages that a seek costs and the tuples that fill a page stay. In the
paper's relation 320 rows have one key and lie in five adjacent pages; here they are one row and one page whose transfer
takes five times as long, so that no run spends its time on the output of 320 rows for each tuple. The figure `scaling`
measures what both simplifications change.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

__all__ = ["Relation", "moving_keys", "stream_batches", "zipf_keys"]

PAPER_PAGES = 1_250_000  # of 8 KiB: 10 GB
INPUT_THRESHOLD = 250_000
STREAM_THRESHOLD = 1_000_000
STREAM_THRESHOLD_TIGHT = 400_000
MAX_SCAN = 200
TUPLES_PER_PAGE = 64  # tuples of the stream are as wide as rows were in the paper
TIGHT = 0.01
_FILL = 0.8
_ROW_OVERHEAD = 48  # bytes of a row and of its page beside the padding, at most


@dataclass(frozen=True)
class Relation:
    """Rows in key order, about `rows_per_page` to a page at the usual fill, of which `rows_per_key` have the same key.

    `weight` is how many of the paper's pages a page stands for; `stands_for` how many pages the paper's relation had.
    """

    name: str
    pages: int
    rows_per_page: int
    weight: float = 1.0
    fill: float = _FILL
    page_size: int = 16_384
    stands_for: int = PAPER_PAGES
    key: str = "key"
    rows_per_key: int = 1

    @property
    def domain(self):
        """Number of keys."""
        return self.rows // self.rows_per_key

    @property
    def rows(self):
        return self.pages * self.rows_per_page

    @property
    def factor(self):
        """Factor of the paper's sizes and durations."""
        return self.pages * self.weight / self.stands_for

    @property
    def tuple_nbytes(self):
        """Bytes of a stream tuple."""
        return max(16, int(self.page_size / self.weight / TUPLES_PER_PAGE))

    def scaled(self, count):
        """Return the count that stands for one of the paper."""
        return max(1, round(count * self.factor))

    def paper_pages(self, count):
        """Return the number of pages that stands for so many of the paper's."""
        return max(1, round(count / self.weight))

    def as_in_the_paper(self, share):
        """Return the parameters of table II, for a memory of that share of the relation."""
        tuples = STREAM_THRESHOLD_TIGHT if share <= TIGHT else STREAM_THRESHOLD
        return {
            "input_threshold": self.scaled(INPUT_THRESHOLD),
            "stream_threshold": self.scaled(tuples),
            "max_scan": self.paper_pages(MAX_SCAN),
            "record_tier": False,
        }

    def content(self, seed=1):
        """Return the rows, in key order, with padding that nothing compresses where rows have room for it."""
        rng = np.random.default_rng(seed)
        width = max(0, int(self.page_size * _FILL) // self.rows_per_page - _ROW_OVERHEAD)
        if width == 0:
            return pa.table({"key": self._keys(), "value": rng.integers(0, 1 << 40, self.rows)})
        padding = pa.Array.from_buffers(
            pa.binary(),
            self.rows,
            [
                None,
                pa.py_buffer(np.arange(self.rows + 1, dtype=np.int32) * width),
                pa.py_buffer(rng.bytes(self.rows * width)),
            ],
        )
        return pa.table({"key": self._keys(), "value": rng.integers(0, 1 << 40, self.rows), "padding": padding})

    def _keys(self):
        return np.arange(self.rows, dtype=np.int64) // self.rows_per_key


def zipf_keys(keys, skew, count, *, scattered=False, seed=2):
    """Return keys drawn by Zipf's law.

    The smallest are the most popular (the paper's NoPerm) or random ones (its Random, `scattered` here).
    """
    rng = np.random.default_rng(seed)
    if skew == 0:
        return rng.integers(0, keys, count)
    cumulated = np.cumsum(np.arange(1, keys + 1, dtype=np.float64) ** -skew)
    rank = np.searchsorted(cumulated, rng.random(count) * cumulated[-1])
    return np.random.default_rng(7).permutation(keys)[rank] if scattered else rank


def moving_keys(keys, intervals, count, *, seed=2):
    """Return keys with temporal locality: each interval of the stream keeps to a range of its own, with skew 1.

    The ranges follow each other through the keys, as in the paper.
    """
    width, each = keys // intervals, count // intervals
    parts = [zipf_keys(width, 1.0, each, seed=seed + number) + number * width for number in range(intervals)]
    return np.concatenate(parts)


def stream_batches(keys, rows, nbytes, name="key"):
    """Return the keys as batches of tuples of so many bytes."""
    carried = np.zeros(len(keys) * (nbytes - 8), dtype=np.uint8)
    column = pa.Array.from_buffers(pa.binary(nbytes - 8), len(keys), [None, pa.py_buffer(carried)])
    table = pa.table({name: np.asarray(keys, dtype=np.int64), "carried": column})
    return table.to_batches(max_chunksize=rows)
