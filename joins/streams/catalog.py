"""Table of the joins of streams by name, and the choice among them.

An operator is added by one line of `ALGORITHMS`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.joins.errors import JoinInputError
from headrace.joins.handle import check_number
from headrace.joins.streams.base.operator import HOWS, WAIT_THRESHOLD
from headrace.joins.streams.diner import DINER
from headrace.joins.streams.hashing.double_pipelined_hash import DoublePipelinedHash
from headrace.joins.streams.hashing.mjoin import MJoin
from headrace.joins.streams.hashing.pr_join import PRJoin
from headrace.joins.streams.hashing.rpj import RPJ
from headrace.joins.streams.hashing.symmetric_hash import SymmetricHash
from headrace.joins.streams.hashing.xjoin import XJoin
from headrace.joins.streams.merging.hash_merge import HashMerge
from headrace.joins.streams.merging.progressive_merge import ProgressiveMerge
from headrace.joins.streams.miner import MINER
from headrace.joins.streams.tuples.conditions import Conditions, JoinGraph, Near, conditions_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    import pyarrow as pa

    from headrace.joins.streams.base.operator import StreamsJoin

__all__ = ["ALGORITHMS", "AUTO", "Entry", "choose_algorithm", "make_join"]

AUTO = "auto"
_TWO = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """An operator and what it can do.

    Attributes
    ----------
    operator
        Class of the operator.
    most_inputs
        Most inputs; None for any number.
    hows
        Join types.
    bands
        Whether all conditions may be bands.
    """

    operator: Callable[..., StreamsJoin[Any]]
    most_inputs: int | None = _TWO
    hows: tuple[str, ...] = ("inner",)
    bands: bool = True

    def fits(self, inputs: int, how: str, *, only_bands: bool) -> bool:
        """Return whether the operator can do a join."""
        enough = self.most_inputs is None or inputs <= self.most_inputs
        return enough and how in self.hows and (self.bands or not only_bands)


ALGORITHMS: Mapping[str, Entry] = {
    "diner": Entry(DINER),
    "miner": Entry(MINER, most_inputs=None),
    "mjoin": Entry(MJoin, most_inputs=None, bands=False),
    "xjoin": Entry(XJoin, hows=HOWS, bands=False),
    "rpj": Entry(RPJ, bands=False),
    "pr-join": Entry(PRJoin, bands=False),
    "hash-merge": Entry(HashMerge, bands=False),
    "progressive-merge": Entry(ProgressiveMerge),
    "double-pipelined-hash": Entry(DoublePipelinedHash, hows=HOWS, bands=False),
    "symmetric-hash": Entry(SymmetricHash, hows=HOWS),
}
"""Operators in the order of preference."""


def choose_algorithm(name: str, inputs: int, on: Conditions, how: str) -> str:
    """Return the name of the operator for a join.

    Parameters
    ----------
    name
        A name of `ALGORITHMS`, or of its operator's class, or ``"auto"`` for the first one that fits.
    inputs
        Number of inputs.
    on
        Conditions.
    how
        Join type.

    Raises
    ------
    JoinInputError
        If there is no such operator, or it cannot do the join. The message names those that can.

    Examples
    --------
    >>> choose_algorithm("auto", 2, [("a.x", "b.x")], "inner")
    'diner'
    """
    check_number("inputs", inputs, _TWO)
    only_bands = all(isinstance(condition, Near) for condition in conditions_of(on))
    fitting = [known for known, entry in ALGORITHMS.items() if entry.fits(inputs, how, only_bands=only_bands)]
    name = next((known for known, entry in ALGORITHMS.items() if entry.operator.__name__ == name), name)
    if name != AUTO and (not isinstance(name, str) or name not in ALGORITHMS):
        raise JoinInputError(f"there is no algorithm {name!r}; the algorithms are {AUTO}, {', '.join(ALGORITHMS)}")
    if not fitting:
        raise JoinInputError(f"no algorithm makes this {how} join of {inputs} inputs; join two inputs at a time")
    if name == AUTO:
        return fitting[0]
    if name not in fitting:
        bands = " on bands alone" if only_bands else ""
        raise JoinInputError(f"{name} makes no {how} join of {inputs} inputs{bands}; choose {' or '.join(fitting)}")
    return name


def make_join(
    name: str,
    inputs: Mapping[str, pa.Schema],
    on: Conditions,
    how: str = "inner",
    memory: int | str = "64MiB",
    *,
    spill: str | os.PathLike[str] | None = None,
    wait: float | str = WAIT_THRESHOLD,
    **options: Any,
) -> StreamsJoin[Any]:
    """Return an operator by name.

    Parameters
    ----------
    name
        A name of `ALGORITHMS`, or ``"auto"``.
    inputs, on, how, memory
        See the operators.
    spill
        Existing folder for spill files; operators that do not spill ignore it.
    wait
        Seconds without an arrival after which the inputs are blocked; operators without a reactive phase ignore it.
    **options
        Further parameters, such as ``clock``. Those that the operator does not have are an error.

    Raises
    ------
    JoinInputError
        See `choose_algorithm`; and what `JoinGraph` and the operator raise.
    """
    entry = ALGORITHMS[choose_algorithm(name, len(JoinGraph(inputs, on).names), on, how)]
    kind = entry.operator
    known = inspect.signature(kind).parameters.keys()
    unknown = options.keys() - known
    if unknown:
        raise JoinInputError(f"{kind.__name__} has no parameter {', '.join(sorted(unknown))}")
    options |= {name: value for name, value in (("spill", spill), ("wait", wait)) if name in known}
    join: StreamsJoin[Any] = kind(inputs, on, how, memory, **options)
    return join
