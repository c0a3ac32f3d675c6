"""Types of the arrays that compiled kernels take and return."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bytes", "Flags", "Int32s", "Int64s", "Words"]

Bytes: TypeAlias = NDArray[np.uint8]
Flags: TypeAlias = NDArray[np.bool_]
Int32s: TypeAlias = NDArray[np.int32]
Int64s: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint64]
