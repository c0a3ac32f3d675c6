"""BLAKE2b as compiled code has it, against `hashlib`."""

import numpy as np
import pytest

from headrace.storage._digest_kernels import digest_word
from headrace.storage.superblock import digest


@pytest.mark.parametrize("length", [0, 1, 8, 64, 127, 128, 129, 255, 256, 257, 2032])
def test_a_digest_is_that_of_hashlib(length, rng):
    data = rng.integers(0, 256, length + 5, dtype=np.uint8)
    found = int(digest_word(data, 3, 3 + length)).to_bytes(8, "little")
    assert found == digest(data[3 : 3 + length].tobytes())
