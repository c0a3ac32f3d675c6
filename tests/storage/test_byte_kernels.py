import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headrace.storage.format._byte_kernels import compare_bytes, copy_bytes, xxh64

SLACK = b"\xa5" * 8


def as_array(data):
    return np.frombuffer(data + SLACK, dtype=np.uint8).copy()


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1), st.integers(0, 9))
def test_xxh64_is_the_reference_digest(data, seed, start):
    padded = as_array(b"x" * start + data)
    assert xxh64(padded, start, len(data), np.uint64(seed)) == xxhash.xxh64_intdigest(data, seed=seed)


@pytest.mark.parametrize("length", [31, 32, 33, 4088, 8184, 65528])
def test_xxh64_of_long_input_is_the_reference_digest(length):
    data = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    assert xxh64(as_array(data.tobytes()), 0, length, np.uint64(7)) == xxhash.xxh64_intdigest(data.tobytes(), seed=7)


texts = st.binary(max_size=20) | st.binary(max_size=3).map(lambda tail: b"common prefix of it" + tail)


@given(texts, texts)
def test_comparison_orders_as_bytes_do(left, right):
    order = compare_bytes(as_array(left), 0, len(left), as_array(right), 0, len(right))
    assert np.sign(order) == (left > right) - (left < right)


@given(st.binary(max_size=40), st.integers(0, 12))
def test_copy_touches_no_byte_beyond_its_length(data, at):
    target = np.full(at + len(data) + 16, 0x5A, dtype=np.uint8)
    copy_bytes(as_array(data), 0, target, at, len(data))
    assert target.tobytes() == b"\x5a" * at + data + b"\x5a" * 16
