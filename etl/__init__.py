"""Warehouse semantics: dimensions, surrogate keys, key equality, duplicates, and outcomes. Independent of Spark."""

from headrace.etl.dimension import (
    UNKNOWN_KEY,
    Dimension,
    build_table,
    greatest_key,
    is_special,
    member_rows,
    number_members,
    with_spellings,
    without_blank_keys,
)
from headrace.etl.duplicates import DUPLICATE_COLUMN, LOADED_BY, DuplicateAction, Duplicates, mark_duplicates
from headrace.etl.equality import KeyRule
from headrace.etl.errors import ConservationError, DeclarationError, DimensionError, EtlError, MissingMembersError
from headrace.etl.lookup import Lookup, Policy
from headrace.etl.outcomes import Outcome, OutcomeCounts
from headrace.etl.settlement import CAUSES_COLUMN, OUTCOME_COLUMN, Settled, causes, settle
from headrace.etl.sharding import digests_of, shard_of
from headrace.etl.special import Special, SpecialMembers
from headrace.etl.surrogate import KeyAllocator, new_members, resolve

__all__ = [
    "CAUSES_COLUMN",
    "DUPLICATE_COLUMN",
    "LOADED_BY",
    "OUTCOME_COLUMN",
    "UNKNOWN_KEY",
    "ConservationError",
    "DeclarationError",
    "Dimension",
    "DimensionError",
    "DuplicateAction",
    "Duplicates",
    "EtlError",
    "KeyAllocator",
    "KeyRule",
    "Lookup",
    "MissingMembersError",
    "Outcome",
    "OutcomeCounts",
    "Policy",
    "Settled",
    "Special",
    "SpecialMembers",
    "build_table",
    "causes",
    "digests_of",
    "greatest_key",
    "is_special",
    "mark_duplicates",
    "member_rows",
    "new_members",
    "number_members",
    "resolve",
    "settle",
    "shard_of",
    "with_spellings",
    "without_blank_keys",
]
