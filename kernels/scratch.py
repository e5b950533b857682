"""Temporary arrays that are used again: receives a name, a shape and a dtype, hands on an array.

Fresh memory costs a page fault for every 4 KiB, which at 256³ takes longer than the product. Each thread has
its own; an array is valid until its name is asked for again.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEEP_BYTES = 32 << 20  # what is larger isn't kept: there the faults don't count


class _Rooms(threading.local):
    def __init__(self) -> None:
        self.held: dict[str, NDArray[np.uint8]] = {}


_rooms = _Rooms()


def scratch(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array of this thread, its values undefined."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > KEEP_BYTES:
        return np.empty(shape, dtype)
    held = _rooms.held.get(name)
    if held is None or held.nbytes < nbytes:
        held = _rooms.held[name] = _aligned(nbytes)
    return held[:nbytes].view(dtype).reshape(shape)


def _aligned(nbytes: int) -> NDArray[np.uint8]:
    """Memory that starts at a cache line, as BLAS likes it."""
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]
