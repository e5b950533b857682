"""Memory that this process lends to a service on the same machine: receives sizes, hands on arrays and their places.

Each piece is a sealed memfd, mapped here: the service maps it too, so that an array in it is multiplied where it
lies. It is freed when the last array over it is gone.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import itertools
import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: Operands begin at multiples of this; the service asks for it.
ALIGN = 256


class Shared:
    """One memfd and its mapping. `number` is unique in this process."""

    numbers = itertools.count(1)

    def __init__(self, nbytes: int) -> None:
        self.number = next(self.numbers)
        self.nbytes = max(nbytes, 1)
        self.descriptor = os.memfd_create("gemm-client", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.nbytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.map = mmap.mmap(self.descriptor, self.nbytes, mmap.MAP_SHARED)
        except BaseException:
            os.close(self.descriptor)
            raise

    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """All of it, as an array that keeps the mapping."""
        return np.frombuffer(self.map, np.uint8)

    def close(self) -> None:
        """Close and unmap; arrays that refer to it keep the mapping."""
        os.close(self.descriptor)
        with contextlib.suppress(BufferError):
            self.map.close()


class Spot(NamedTuple):
    """Where an array lies: in which memfd, and at which byte."""

    number: int
    descriptor: int
    offset: int


class Arrays:
    """The arrays of one client that live in memory to be lent. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._kept: dict[int, tuple[int, int, int]] = {}  # start → end, number, descriptor
        # A finalizer may run amid anything, even with the lock held: it only notes what is gone.
        self._gone: deque[int] = deque()
        self.numbers: set[int] = set()
        #: How many are gone, so that who lent them sees at a glance whether there is one to take back.
        self.lost = 0

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """An array of zeros in a memfd of its own."""
        nbytes = math.prod(shape) * dtype.itemsize
        shared = Shared(nbytes)
        whole = shared.bytes()
        start = address(whole.data)
        with self._lock:
            self._tidy()
            bisect.insort(self._starts, start)
            self._kept[start] = (start + shared.nbytes, shared.number, shared.descriptor)
            self.numbers.add(shared.number)
        # Only the array refers to the mapping: with the last array over it, it goes.
        weakref.finalize(shared.map, self._note, start, shared.descriptor)
        return whole[:nbytes].view(dtype).reshape(tuple(shape))

    def find(self, data: memoryview) -> Spot | None:
        """Where bytes lie, if they lie in one such array, at a place that the service takes."""
        if not self._starts or not data.nbytes:
            return None
        at = address(data)
        with self._lock:
            self._tidy()
            index = bisect.bisect_right(self._starts, at) - 1
            if index < 0:
                return None
            start = self._starts[index]
            end, number, descriptor = self._kept[start]
        offset = at - start
        if at + data.nbytes > end or offset % ALIGN:
            return None
        return Spot(number, descriptor, offset)

    def _note(self, start: int, descriptor: int) -> None:
        os.close(descriptor)
        self._gone.append(start)

    def _tidy(self) -> None:
        """Forget what is gone, before its addresses come back in another array."""
        while self._gone:
            start = self._gone.popleft()
            self._starts.remove(start)
            self.numbers.discard(self._kept.pop(start)[1])
            self.lost += 1


def address(data: memoryview) -> int:
    """Where a buffer begins in this process's memory."""
    place: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return place
