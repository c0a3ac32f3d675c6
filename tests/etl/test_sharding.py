from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headrace.etl import KeyRule, shard_of
from headrace.etl.errors import DeclarationError
from headrace.storage.errors import KeyInputError

TEXT = pa.schema({"code": pa.string()})


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)))), st.integers(1, 64))
def test_the_shard_of_text_is_xxh64_of_its_bytes(texts, shards):
    expected = [xxhash.xxh64_intdigest(text.encode()) % shards for text in texts]
    assert shard_of([pa.array(texts, pa.string())], TEXT, shards).tolist() == expected


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(1, 64))
def test_the_shard_of_a_number_is_xxh64_of_its_ordered_bytes(numbers, shards):
    key = pa.schema({"id": pa.int64()})
    expected = [xxhash.xxh64_intdigest((n + 2**63).to_bytes(8, "big")) % shards for n in numbers]
    assert shard_of([pa.array(numbers, pa.int64())], key, shards).tolist() == expected


def test_the_streams_own_types_do_not_matter():
    key = pa.schema({"id": pa.int32(), "at": pa.timestamp("us", "UTC"), "code": pa.string()})
    moment = [datetime(2013, 1, 1, tzinfo=UTC)] * 3
    narrow = [pa.array([1, 2, 3], pa.int8()), pa.array(moment, pa.timestamp("s", "UTC")), pa.array(["a", "b", "c"])]
    wide = [
        pa.array([1.0, 2.0, 3.0]),
        pa.array(moment, pa.timestamp("ns", "Europe/Berlin")),
        pa.array([" A", "b ", "C"]).dictionary_encode(),
    ]
    rules = {"code": KeyRule(("trim", "casefold"))}
    assert shard_of(narrow, key, 97, rules).tolist() == shard_of(wide, key, 97, rules).tolist()


def test_rows_without_a_usable_key_belong_to_the_first_shard():
    key = pa.schema({"id": pa.int8(), "code": pa.string()})
    shards = shard_of([pa.array([None, 300, 1]), pa.array(["a", "a", None])], key, 16)
    assert shards.tolist() == [0, 0, 0]


def test_shards_of_many_keys_are_even():
    counts = np.bincount(shard_of([pa.array(np.arange(80_000))], pa.schema({"id": pa.int64()}), 8), minlength=8)
    assert counts.min() > 9_500
    assert counts.max() < 10_500


def test_there_is_at_least_one_shard():
    with pytest.raises(DeclarationError, match="at least one shard"):
        shard_of([pa.array(["a"])], TEXT, 0)


def test_a_column_that_can_never_be_equal_is_refused():
    with pytest.raises(KeyInputError, match="code"):
        shard_of([pa.array([1])], TEXT, 4)


def test_no_rows_have_no_shards():
    assert len(shard_of([pa.array([], pa.string())], TEXT, 4)) == 0
