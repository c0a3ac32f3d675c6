"""The check of a result: its number of rows, and a checksum that detects swapped payloads."""

from dataclasses import dataclass

import numpy as np

__all__ = ["WORD", "Tally"]

WORD = 1 << 64


@dataclass(frozen=True)
class Tally:
    """Number of rows, and the sum of the product of each row's number and its value, modulo 2 ** 64.

    The number tells stream tuples apart, so the sum changes if two tuples swap their values.
    """

    rows: int = 0
    total: int = 0

    @classmethod
    def of(cls, numbers, values):
        """Return the tally of rows with these numbers and values, two arrays of int64."""
        return cls(len(numbers), int(np.dot(numbers, values)) % WORD)

    @classmethod
    def of_batch(cls, batch):
        """Return the tally of a record batch or table with the columns `number` and `v`."""
        return cls.of(batch["number"].to_numpy(), batch["v"].to_numpy())

    def __add__(self, other):
        return Tally(self.rows + other.rows, (self.total + other.total) % WORD)
