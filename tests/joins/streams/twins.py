"""Naive joins on the base of the real ones: nested loops over any number of inputs, one tuple at a time."""

import numpy as np

from headrace.joins.streams import Near, StreamsAlgorithm, StreamsJoin, StreamsParameters
from headrace.joins.streams.tuples.store import TupleStore


class NestedLoops(StreamsJoin):
    """Nested loop join: every arriving tuple meets every combination of tuples of the other inputs."""

    def __init__(self, inputs, on, how="inner", memory="64MiB", *, clock=None):
        super().__init__(NestedLoopsAlgorithm(StreamsParameters.check(inputs, on, how, memory, clock=clock), on))


class NestedLoopsAlgorithm(StreamsAlgorithm):
    def __init__(self, parameters, on):
        super().__init__(parameters)
        conditions = [on] if isinstance(on, str | Near) else on
        self._conditions = [parsed(condition, self.graph.names) for condition in conditions]
        keys = self.graph.keys
        self._stores = [
            TupleStore(layout, self.budget, [None] * len(keys[side])) for side, layout in enumerate(self.layouts)
        ]
        self._values = [[] for _ in self.sides]

    @property
    def rows_in_memory(self):
        return sum(map(len, self._stores))

    def _arrive(self, side, rows):
        before = len(self._stores[side])
        self._stores[side].insert(rows)
        values = rows.batch().to_pylist()
        self._values[side] += values
        choices = [range(len(store)) for store in self._stores]
        choices[side] = range(before, before + len(rows))
        found = combinations(self._values, choices, self._conditions)
        positions = np.array(found, dtype=np.int64).reshape(-1, len(self._stores)).T.copy()
        yield from self.results.batches([(store.rows, positions[at]) for at, store in enumerate(self._stores)])

    def _cleanup(self):
        return iter(())


def combinations(values, choices, conditions):
    """Return the positions of the tuples of all combinations that meet the conditions, by nested loops.

    `choices` are the positions to combine for each input. A condition is checked as soon as both inputs are there.
    """
    found = [()]
    for side, positions in enumerate(choices):
        now = [condition for condition in conditions if side == max(condition[0][0], condition[1][0])]
        found = [
            (*combination, at)
            for combination in found
            for at in positions
            if all(meets(values, (*combination, at), condition) for condition in now)
        ]
    return found


def parsed(condition, names):
    """Return (side, column), (side, column), width of a condition."""
    if isinstance(condition, Near):
        pair, width = (condition.left, condition.right), condition.within
    else:
        pair, width = ((condition, condition) if isinstance(condition, str) else condition), None
    ends = []
    for position, text in enumerate(pair):
        name, dot, label = text.partition(".")
        ends.append((names.index(name), label) if dot else (position, text))
    return ends[0], ends[1], width


def meets(values, combination, condition):
    """Return whether a combination of rows meets a condition."""
    (left_side, left), (right_side, right), width = condition
    a, b = values[left_side][combination[left_side]][left], values[right_side][combination[right_side]][right]
    if a is None or b is None:
        return False
    if width is None:
        return a == b
    distance = abs(a - b)
    if isinstance(width, str):
        return distance.total_seconds() * 1000 <= float(width.removesuffix("ms"))
    return distance <= width
