"""Memory that a kernel can address: receives host buffers and CTA windows, hands on bounds-checked spans.

Global memory is the host's own: addresses are real, and only buffers that were named for the launch may be
touched. Shared memory starts as all ones (NaN in every float type), so what was never written shows.
"""

from __future__ import annotations

import bisect
import ctypes
from typing import Any

import numpy as np

from kernels.virtual.detect import Shadow
from kernels.virtual.report import Fault

# Items of 16 bytes are moved as complex128: copied bit for bit, and NumPy indexes them fast.
VIEWS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class Span:
    """Bytes in a row, viewed in every item size. `start` is the address of `views[n][0]`, a multiple of 16."""

    def __init__(self, name: str, base: int, size: int, start: int, raw: np.ndarray) -> None:
        self.name = name
        self.base = base
        self.end = base + size
        self.start = start
        self.raw = raw
        self.views = {n: raw[: raw.size // n * n].view(dtype) for n, dtype in VIEWS.items()}
        self.shadow: Shadow | None = None

    def with_shadow(self) -> Shadow:
        """The detector's notes, made when first needed."""
        if self.shadow is None:
            self.shadow = Shadow(self.name, self.raw.size, self.start)
        return self.shadow


def host_span(name: str, address: int, size: int) -> Span:
    """A buffer of the host. The view starts at the 16-byte boundary at or below it."""
    start = address & ~15
    length = address + size - start
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(start))
    return Span(name, address, size, start, raw)


class GlobalMemory:
    """The buffers of a launch."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.spans: list[Span] = []

    def add(self, name: str, address: int, size: int) -> None:
        """Allow accesses to a buffer. Overlapping buffers become one."""
        if size <= 0:
            return
        low, high = address, address + size
        for span in [s for s in self.spans if s.base < high and low < s.end]:
            low, high = min(low, span.base), max(high, span.end)
            index = self.spans.index(span)
            del self.spans[index], self.starts[index]
        at = bisect.bisect(self.starts, low)
        self.starts.insert(at, low)
        self.spans.insert(at, host_span(name, low, high - low))

    def find(self, address: int, size: int) -> Span:
        """The buffer that holds all of [address, address + size)."""
        index = bisect.bisect_right(self.starts, address) - 1
        if index >= 0:
            span = self.spans[index]
            if address + size <= span.end:
                return span
        near = "no buffer near"
        if self.spans:
            span = self.spans[max(index, 0)]
            near = f"nearest is {span.name} at {span.base:#x}, {span.end - span.base} bytes"
        raise Fault(
            "bounds", f"{size} bytes of global memory at {address:#x} lie outside every buffer; {near}"
        )


class Parameter:
    """One `.param` of the launch: bytes copied from the host, at an address of their own."""

    def __init__(self, data: bytes) -> None:
        self.store = np.zeros(len(data) + 192, np.uint8)
        pad = -self.store.ctypes.data % 128
        self.bytes = self.store[pad : pad + len(data)]
        self.bytes[:] = np.frombuffer(data, np.uint8)
        self.address = self.bytes.ctypes.data
        self.data = data

    def read(self, offset: int, size: int, count: int) -> Any:
        """ld.param of one or several values."""
        data = self.data
        if count == 1:
            return int.from_bytes(data[offset : offset + size], "little")
        return tuple(
            int.from_bytes(data[offset + k * size : offset + (k + 1) * size], "little") for k in range(count)
        )
