"""`PunctuatedJoin`: a join of streams on one key that drops what no tuple can match any more.

In: batches of two or more streams, and punctuations: patterns of tuples that will not arrive any more. Out: result
batches, and among them punctuations of the result.

Source: Ding, Rundensteiner and Heineman, "MJoin: A Metadata-Aware Stream Join Operator" (2003); patterns after Tucker,
Maier, Sheard and Fegaras. Viglas' `MJoin` is another operator.

| the paper's term | here |
|---|---|
| hash buckets with a memory-resident and a disk-resident portion (5.1) | `state.HashState`, by partition |
| waiting tuple pool, queues, retrieval quota (4.1, 4.2, 5.3) | `waiting.WaitingPool`, `Scheduling` |
| punctuated range PR (5.1) | `ranges.PunctuatedRange` |
| punctuation collection (5.1) | `collection.PunctuationCollection` |
| on-the-fly dropping (4.3) | ``rows_passed`` of the statistics |
| rule 1, batch purging; rule 2, immediate purging (5.3) | ``purge_every`` |
| 1-NP (5.3), 1-NC (5.4) | ``one``; ``one`` with ``clustered`` |

The state is purged (5.2) when ``purge_every`` punctuations have come, 1 for immediate purging; when memory is full and
there are punctuations that it was not purged by; and while the inputs are blocked. The end of an input is a punctuation
of everything.

Stages: arriving tuples join with the state in memory. While inputs are blocked, waiting tuples are joined, then the
disk part of a partition with the tuples of the other inputs in memory (memory-disk stage). When that is done too, a
partition about whose keys punctuations may have come is *settled*: all of its tuples are joined, and those on disk that
nothing can match are left out when the disk part is written again. The cleanup stage settles what is left.

Each combination is a result once: see `state.HashState.given`. In a 1-N join, the tuples of the input with many need no
such check in the paper: one that has joined in memory is dropped, and never joins again. Those on disk cannot be
dropped at once, so the general check covers them, and the next settling drops them. It holds for that input only: a
tuple of the other joins as often as there are matches, also after it was spilled.

What the paper leaves open, and what is chosen here:

- More than two inputs, and keys that no input has once. A tuple is dropped when the punctuations of *all* other inputs
  cover its key, and no other input has tuples of its partition on disk.
- A punctuation is propagated when no tuple of its input that matches it is held. It names the columns of its input in
  the result. Punctuations that constrain other columns than the key purge nothing, but they are propagated and checked.
- The paper assumes that metadata is accurate. Here a tuple that arrives after a punctuation that excludes it raises
  `PunctuationError`, or goes to ``on_violation``. So punctuated ranges are kept to the end of their input, and charged
  to the memory. Intervals that touch are merged.
- A purge looks at all tuples in memory of the inputs that others' punctuations concern, as the paper's does (6.2,
  experiment 3).
- The tuples of a clustered input stay in sequence: a punctuation of it does not overtake them.
- A punctuation moves up the tuples that wait when it arrives (value-oriented scheduling, 4.2). Tuples that arrive after
  it wait for their turn, also while it is not propagated.
- A tuple of many that joins may be the last that a punctuation of its input waits for. With immediate purging the
  punctuation is propagated then; otherwise with the next purge, or while the inputs are blocked.
- An ordered arrival (4.3) is no option: after a key, `punctuate` with a `Between` up to it says the same.
- Values of punctuations are compared with keys exactly. If the keys of the inputs have several types, a value that the
  type of the left column of the conditions does not have, such as milliseconds for keys in seconds, may purge nothing
  in the other inputs. The punctuation is propagated and checked all the same.
"""

from __future__ import annotations

from headrace.joins.streams.punctuated.errors import PromiseError, PunctuationError, UniqueKeyError
from headrace.joins.streams.punctuated.operator import PunctuatedJoin, PunctuatedStats, Scheduling
from headrace.joins.streams.punctuated.patterns import ANY, Between, OneOf, Pattern, Wildcard, punctuation_of

__all__ = [
    "ANY",
    "Between",
    "OneOf",
    "Pattern",
    "PromiseError",
    "PunctuatedJoin",
    "PunctuatedStats",
    "PunctuationError",
    "Scheduling",
    "UniqueKeyError",
    "Wildcard",
    "punctuation_of",
]
