"""Join predicates: equality, bands, ranges, and as-of.

In: what the user states about columns of the stream and of the key. Out: for each stream tuple a key or a range of keys
to search for, in normalized form (`search_keys`). Operators locate, search and buffer by those alone.
"""

from headrace.joins.predicates.base import Bound, Predicate
from headrace.joins.predicates.equality import BoundEquality, Equality, On, as_predicate
from headrace.joins.predicates.ranges import AsOf, Band, BoundRanges, Range
from headrace.joins.predicates.search_keys import KeyRanges, NearestWords, SearchKeys

__all__ = [
    "AsOf",
    "Band",
    "Bound",
    "BoundEquality",
    "BoundRanges",
    "Equality",
    "KeyRanges",
    "NearestWords",
    "On",
    "Predicate",
    "Range",
    "SearchKeys",
    "as_predicate",
]
