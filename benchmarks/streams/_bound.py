"""`most_online`: a bound on the results that two streams can have online, whatever the flushing policy.

A pair of tuples is a result online if the first of them is in memory when the second arrives. A tuple enters memory
when it arrives and leaves once. At most a given number of tuples is in memory at any time. Even a policy that knows the
future obeys these rules.

Let each tuple pay a price per arrival for its place, and drop the limit on their number. Then each tuple leaves when it
is best for itself, and the results, minus the prices paid, plus the prices times the places, are at least the results
of every policy (Lagrangian duality). Any prices give a bound. Good ones are found by raising the price where memory
would be overfull, and lowering it elsewhere.
"""

import numpy as np

__all__ = ["most_online"]

SLOTS = 200  # prices over time
ITERATIONS = 60
STARTS = 10.0 ** -np.arange(0, 7, 0.5)  # prices to start from


def most_online(sides, keys, tuples):
    """Return a number of results that no policy exceeds online.

    Parameters
    ----------
    sides, keys : int64[n]
        Input, 0 or 1, and key of each tuple in order of arrival; equal keys join.
    tuples
        Most tuples in memory, of both inputs together.
    """
    streams = _Streams(sides, keys, tuples)
    bounds = {price: streams.bound(np.full(SLOTS, price))[0] for price in STARTS}
    start = min(bounds, key=bounds.get)
    prices, best = np.full(SLOTS, start), bounds[start]
    for iteration in range(ITERATIONS):
        bound, used = streams.bound(prices)
        best = min(best, bound)
        over = np.clip(used / np.maximum(streams.places, 1) - 1, -1, 2)
        prices = prices * np.exp(0.6 / (1 + iteration / 8) * over)
    return int(best)


class _Streams:
    """Tuples by input and key, and the places in memory of each slot of time.

    Attributes
    ----------
    places : int64[SLOTS]
        Places in memory, summed over the arrivals of a slot: no more tuples are there than have arrived.
    """

    def __init__(self, sides, keys, tuples):
        number = len(keys)
        self._arrival = np.arange(number)
        group = np.unique(keys, return_inverse=True)[1] * 2 + sides  # tuples of one key and one input
        ordered = np.sort(group * number + self._arrival)
        self._at, self._group = ordered % number, ordered // number
        first = np.searchsorted(ordered, np.arange(group.max() + 2) * number)  # of each group
        self._rank = np.arange(number) - first[self._group]
        partners = group ^ 1
        next_partner = np.searchsorted(ordered, partners * number + self._arrival)
        self._met = np.flatnonzero(next_partner < np.append(first, number)[partners + 1])  # a partner follows
        self._next = next_partner[self._met]
        edges = np.linspace(0, number, SLOTS + 1).astype(np.int64)
        self._edges, self._widths = edges[:-1], np.diff(edges)
        self.places = self._by_slot(np.minimum(self._arrival, tuples))

    def bound(self, prices):
        """Return the bound that some prices give, and the places that tuples would take in each slot."""
        paid = np.concatenate([[0.0], np.cumsum(np.repeat(prices, self._widths))])
        best, at = self._best_partner(self._rank + 1 - paid[self._at])
        gain = best[self._next] - self._rank[self._next] + paid[self._met]
        kept = gain > 0
        number = len(self._arrival)
        change = np.bincount(self._met[kept], minlength=number + 1)
        change -= np.bincount(self._at[at[self._next[kept]]], minlength=number + 1)
        used = self._by_slot(np.cumsum(change)[:number])
        return gain[kept].sum() + prices @ self.places, used

    def _best_partner(self, value):
        """Return for each tuple the greatest value of it and its successors in its group, and which has it."""
        apart = self._group * (2 * np.abs(value).max() + 2)
        backwards = (value - apart)[::-1]
        greatest = np.maximum.accumulate(backwards)
        places = np.arange(len(value))
        which = np.maximum.accumulate(np.where(backwards == greatest, places, 0))
        return greatest[::-1] + apart, (len(value) - 1 - which)[::-1]

    def _by_slot(self, values):
        return np.add.reduceat(values, self._edges)
