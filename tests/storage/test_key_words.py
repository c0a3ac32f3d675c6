"""Keys as they lie in a column are the keys that the codec makes."""

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest

from headrace.storage.format.keys import KeyCodec, key_words

TYPES = (pa.int64(), pa.uint64(), pa.int32(), pa.timestamp("us"), pa.date32(), pa.bool_())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_words_stand_for_the_keys_of_the_codec(dtype):
    codec = KeyCodec(pa.schema([("k", dtype)]), ["k"])
    column = pa.array([0, 1, 1, 0]).cast(pa.int32() if dtype == pa.date32() else pa.int64()).cast(dtype)
    found = key_words(codec, [column])
    assert found.valid is None
    assert found.keys().prefix.tolist() == codec.encode_stream([column])[0].prefix.tolist()


def test_the_words_of_whole_columns_are_not_copied():
    codec = KeyCodec(pa.schema([("k", pa.int64())]), ["k"])
    values = np.tile([-(2**63), -1, 0, 2**63 - 1], 500)
    found = key_words(codec, [pa.array(values)])
    assert found.words.ctypes.data == pa.array(values).buffers()[1].address
    assert found.keys().prefix.tolist() == [0, 2**63 - 1, 2**63, 2**64 - 1] * 500


def test_nulls_and_values_that_no_key_can_have_are_told():
    codec = KeyCodec(pa.schema([("k", pa.int64())]), ["k"])
    assert key_words(codec, [pa.array([1, None, 3])]).flags.tolist() == [True, False, True]
    assert key_words(codec, [pa.array([2**64 - 1, 5], pa.uint64())]).flags.tolist() == [False, True]
    moments = KeyCodec(pa.schema([("k", pa.timestamp("s"))]), ["k"])
    column = pa.array([dt.datetime(2020, 1, 1), dt.datetime(2020, 1, 1, 0, 0, 0, 5)], pa.timestamp("us"))  # noqa: DTZ001 - local times
    assert key_words(moments, [column]).flags.tolist() == [True, False]


def test_keys_of_several_columns_are_packed():
    codec = KeyCodec(pa.schema([("a", pa.int16()), ("b", pa.int16())]), ["a", "b"])
    columns = [pa.array([1, -2], pa.int16()), pa.array([3, 4], pa.int16())]
    assert key_words(codec, columns).keys().prefix.tolist() == codec.encode_stream(columns)[0].prefix.tolist()
