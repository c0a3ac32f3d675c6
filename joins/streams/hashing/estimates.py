"""Estimates of an aggregate over a join from its first results, with confidence intervals (online aggregation).

A partition of a join covers a rectangle: all pairs of the first tuples of each input in it. If the inputs arrive in
random order, the sides of the rectangle are random samples of the partition's tuples, without replacement, and the
estimators of ripple joins apply to it; partitions are independent of each other, so their estimates are added, as in
SMS-Join (section 4.3 of "PR-Join: A Non-Blocking Join Achieving Higher Early Result Rate with Statistical Guarantees",
Chen, Gibbons and Nath, SIGMOD 2010).

Let a partition have N and N' tuples, m and m' of which are covered, and let v be the value of a result, and 0 of a pair
that is none. The estimate is the sum of v times N N' / (m m'). Its variance follows from the mean squares of the tuples
of each input and of their interaction, for samples from finite populations (Cornfield and Tukey, "Average Values of
Mean Squares in Factorials", Annals of Mathematical Statistics 27(4), 1956). If only the totals of the inputs are known,
N is estimated from the share of the partition in the tuples that arrived, which adds the variance of this share.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.errors import JoinInputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Coverage", "Estimate", "Sample"]

_TWO = 2


@dataclass(frozen=True, slots=True, eq=False)
class Coverage:
    """Tuples of two inputs that the results so far cover.

    Attributes
    ----------
    rows : int64[2]
        Tuples of each input that have arrived, those without a key included.
    arrived : int64[2, partitions]
        Tuples with a key that have arrived, by input and partition.
    covered : int64[2, partitions]
        Those that the results cover, which arrived first: all results between them have been given.
    ripples : int64[partitions]
        How often the covered rectangle of each partition has grown since memory was full.
    """

    rows: NDArray[np.int64]
    arrived: NDArray[np.int64]
    covered: NDArray[np.int64]
    ripples: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate of an aggregate, and its confidence interval.

    Attributes
    ----------
    value
        Estimate.
    margin
        Half of the width of the interval.
    """

    value: float
    margin: float

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.value - self.margin

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.value + self.margin


class Sample:
    """Results so far, as a sample of the complete result.

    Parameters
    ----------
    coverage
        What the results cover.
    totals : int64[2]
        Tuples of each input to make estimates for.
    partitions : int64[n]
        Partition of each result.
    tuples : pair of int64[n]
        Number of the tuple of each input that a result consists of, from 0 on.

    Raises
    ------
    JoinInputError
        If there are no results, if tuples have numbers that are not theirs alone, if a result occurs twice, or if the
        results of some partition are no sample yet, since they cover less than two tuples.
    """

    def __init__(
        self,
        coverage: Coverage,
        totals: NDArray[np.int64],
        partitions: NDArray[np.int64],
        tuples: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> None:
        self._count = coverage.arrived.shape[1]
        self._partitions, self._tuples = partitions, tuples
        self._homes = [self._home(side, numbers) for side, numbers in enumerate(tuples)]
        self._require_pairs()
        self._rows, self._totals = coverage.rows, totals
        self._shares = coverage.arrived / np.maximum(coverage.rows, 1)[:, None]
        self._sizes = coverage.arrived * (totals / np.maximum(coverage.rows, 1))[:, None]
        self._covered = coverage.covered
        self._left = 1 - self._covered / np.maximum(self._sizes, 1)
        present = (coverage.arrived > 0).all(axis=0)
        if (present & ((self._covered < _TWO) & (self._left > 0)).any(axis=0)).any():
            raise JoinInputError(
                "the results of some partition cover less than two tuples of an input, which is no sample; go on until "
                "`coverage.covered` is greater, or use fewer partitions"
            )
        if len(partitions) == 0 and (self._left.any(where=present) or (totals > coverage.rows).any()):
            raise JoinInputError("there is no result to estimate from yet; go on until there are some")

    def _require_pairs(self) -> None:
        """Raise an error if two results are of the same pair of tuples."""
        first, second = self._tuples
        pairs = np.sort(first * (second.max(initial=0) + 1) + second)
        if (pairs[1:] == pairs[:-1]).any():
            raise JoinInputError(
                "two results have the same values of `ids`, so these do not identify tuples, or a result occurs twice; "
                "name columns that are different in each tuple, and pass each result once"
            )

    def _home(self, side: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the partition of each tuple of an input."""
        home = np.zeros(int(numbers.max(initial=-1)) + 1, dtype=np.int64)
        home[numbers] = self._partitions
        if (home[numbers] != self._partitions).any():
            raise JoinInputError(
                f"the values of `ids` do not identify the tuples of input {side}, since tuples of different keys have "
                "the same one; name a column that is different in each tuple"
            )
        return home

    def total(self, values: NDArray[np.float64]) -> tuple[float, float]:
        """Return the estimate of the sum of a value of all results, and the variance of the estimate."""
        pairs = np.maximum(self._covered.prod(axis=0), 1).astype(np.float64)
        sums = self._by_partition(values)
        densities = sums / pairs
        estimates = densities * self._sizes.prod(axis=0)
        center = sums * densities
        squares = [self._squares(side, values) / np.maximum(self._covered[1 - side], 1) - center for side in (0, 1)]
        free = np.maximum(self._covered - 1, 1)
        both = (self._by_partition(values * values) - center - squares[0] - squares[1]) / free.prod(axis=0)
        left = self._left
        spread = left[0] * squares[0] / free[0] + left[1] * squares[1] / free[1] - left[0] * left[1] * both
        variance = float((self._sizes.astype(np.float64).prod(axis=0) ** 2 * spread / pairs).sum())
        return float(estimates.sum()), max(variance, 0.0) + sum(self._of_sizes(side, densities) for side in (0, 1))

    def _by_partition(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = np.bincount(self._partitions, values, self._count).astype(np.float64)
        return sums

    def _squares(self, side: int, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return for each partition the sum of the squares of the sums of an input's tuples."""
        sums = np.bincount(self._tuples[side], values)
        squares: NDArray[np.float64] = np.bincount(self._homes[side], sums * sums, self._count).astype(np.float64)
        return squares

    def _of_sizes(self, side: int, densities: NDArray[np.float64]) -> float:
        """Return the variance that comes from not knowing how many tuples of an input belong to each partition."""
        rows, total = int(self._rows[side]), int(self._totals[side])
        if rows == total:
            return 0.0
        shares, worth = self._shares[side], densities * self._sizes[1 - side]
        spread = float((shares * worth**2).sum() - (shares * worth).sum() ** 2)
        return total**2 * (1 - rows / total) / rows * max(spread, 0.0)

    def sum(self, values: NDArray[np.float64], confidence: float) -> Estimate:
        """Return the estimate of a sum over all results."""
        value, variance = self.total(values)
        return Estimate(value, _deviations(confidence) * variance**0.5)

    def mean(self, values: NDArray[np.float64], counted: NDArray[np.bool_], confidence: float) -> Estimate:
        """Return the estimate of a mean over all results that are counted: a ratio of two sums.

        Its variance is that of the sum of the distances from the mean, which is right for many results.
        """
        count, _ = self.total(counted.astype(np.float64))
        if not count:
            raise JoinInputError("there is no value to estimate a mean from yet; go on until there are some")
        mean = self.total(np.where(counted, values, 0.0))[0] / count
        _, variance = self.total(np.where(counted, values - mean, 0.0))
        return Estimate(mean, _deviations(confidence) * variance**0.5 / count)


def _deviations(confidence: float) -> float:
    """Return the standard deviations of half an interval."""
    return NormalDist().inv_cdf((1 + confidence) / 2)
