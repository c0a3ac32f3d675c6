"""Streams made with the sizes and the shapes of those in the papers, whose data are not public.

Keys are whole numbers: prices in quarters of a cent, temperatures in twentieths of a degree, or values of a
distribution. Each tuple has 200 bytes.
"""

import numpy as np
import pyarrow as pa

SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.int64()), ("payload", pa.binary(184))])
TWO_KEYS = pa.schema([("id", pa.int64()), ("x", pa.int64()), ("y", pa.int64()), ("payload", pa.binary(176))])
TUPLE = 200
CENT, DEGREE = 4, 20  # in keys
FIVE_CENTS = 5 * CENT


def batch(ids, keys):
    """Return tuples with these ids and keys; keys of two columns are x and y."""
    schema = SCHEMA if keys.ndim == 1 else TWO_KEYS
    padding = schema.field("payload").type
    payload = pa.py_buffer(np.zeros(padding.byte_width * len(keys), dtype=np.uint8))
    columns = [pa.array(column, pa.int64()) for column in (ids, *np.atleast_2d(keys.T))]
    return pa.RecordBatch.from_arrays(
        [*columns, pa.FixedSizeBinaryArray.from_buffers(padding, len(keys), [None, payload])], schema=schema
    )


def stock(tuples, spread, seed, *, noise=1 / 40, rounded=0.0):
    """Return keys of buys and of sells in one day: both follow one price, which wanders.

    Parameters
    ----------
    tuples
        Tuples of both streams together.
    spread
        About the range of the price over the day, in quarters of a cent.
    noise
        Standard deviation of a tuple's distance from the price, as a share of the spread.
    rounded
        Share of tuples whose key is rounded to five cents.
    """
    rng = np.random.default_rng(seed)
    each = tuples // 2
    steps = rng.normal(0, 1, each)
    price = np.cumsum(steps)
    price = (price - price.min()) / np.ptp(price) * spread
    streams = [np.rint(price + rng.normal(offset, spread * noise, each)).astype(np.int64) for offset in (-1, 1)]
    for keys in streams:
        chosen = rng.random(each) < rounded
        keys[chosen] = np.rint(keys[chosen] / FIVE_CENTS).astype(np.int64) * FIVE_CENTS
    return tuple(streams)


def weather(each, seed):
    """Return temperatures at two stations over some years: seasons, days, and weather of each station."""
    rng = np.random.default_rng(seed)
    hours = np.arange(each)
    shared = 8 * np.sin(2 * np.pi * hours / 8766) + 4 * np.sin(2 * np.pi * hours / 24)
    streams = []
    for mean in (10.0, 12.0):
        noise = np.convolve(rng.normal(0, 1, each + 47), np.ones(48) / 48**0.5, "valid") * 3
        streams.append(np.rint(20 * (mean + shared + noise)).astype(np.int64))
    return streams[0], streams[1]


def normal(each, mean, spread, seed):
    """Return whole numbers with a normal distribution; the mean is a number, or one for each tuple."""
    return np.rint(np.random.default_rng(seed).normal(mean, spread, each)).astype(np.int64)


def shifting_normal(each, shift, seed, *, units=1, periods=10):
    """Return keys whose mean is 75 + i * shift in period i, with a variance of 15.

    Parameters
    ----------
    units
        Number of keys from one whole number to the next.
    """
    rng = np.random.default_rng(seed)
    means = 75 + shift * (np.arange(each) * periods // each)
    return tuple(np.rint(units * rng.normal(means, 15**0.5)).astype(np.int64) for _ in range(2))


def zipf(each, keys, skew, seed):
    """Return keys from 1 on with a Zipf distribution."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, keys + 1) ** -float(skew)
    bounds = np.cumsum(weights / weights.sum())
    return tuple(np.minimum(np.searchsorted(bounds, rng.random(each)), keys - 1) + 1 for _ in range(2))


def matches(left, right):
    """Return how many pairs of keys are equal."""
    values, counts = np.unique(left, return_counts=True)
    others, other_counts = np.unique(right, return_counts=True)
    _, at, other_at = np.intersect1d(values, others, return_indices=True)
    return int((counts[at] * other_counts[other_at]).sum())


def near_matches(left, right, width):
    """Return how many pairs of keys differ by at most `width`."""
    right = np.sort(right)
    return int((np.searchsorted(right, left + width, "right") - np.searchsorted(right, left - width)).sum())
