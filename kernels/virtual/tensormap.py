"""Tensor maps: receives the 128 bytes of a CUtensorMap, hands on boxes of a global tensor and swizzled
places.

The layout of the bytes is inferred from maps that the compiler's host code writes. The stub library writes the
same layout for maps made through the driver's call.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

# Bytes an element, by CUtensorMapDataType; what the compiler writes itself has 10 for bfloat16, where the driver's
# enumeration has 9 (and 10 for fp32 with denormals flushed, which no kernel here asks for).
ITEM_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 2, 11: 4, 12: 4}
FLOAT_KINDS = {6: "f16", 7: "f32", 8: "f64", 9: "bf16", 10: "bf16", 11: "f32", 12: "f32"}
SPANS = (0, 32, 64, 128)  # bytes of a swizzle atom's row, by mode
UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor in global memory and the box that one instruction moves; dimension 0 is contiguous."""

    address: int
    item: int
    kind: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # bytes; of dimension 1 and up
    box: tuple[int, ...]
    span: int  # bytes of the swizzle, 0 for none
    interleave: int

    @property
    def box_bytes(self) -> int:
        """Bytes of a whole box; what lies outside the tensor counts too."""
        return int(np.prod(self.box)) * self.item

    @property
    def reach(self) -> int:
        """Bytes from the first element to the end of the last."""
        return (
            sum((d - 1) * s for d, s in zip(self.dims, (self.item, *self.strides), strict=True)) + self.item
        )


def decode(data: bytes) -> TensorMap:
    """Read the fields."""
    (address,) = struct.unpack_from("<Q", data, 0)
    (word,) = struct.unpack_from("<I", data, 8)
    rank = (word >> 4 & 7) + 1
    kind = word >> 7 & 15
    dims = tuple(d + 1 for d in struct.unpack_from(f"<{rank}I", data, 32))
    strides = tuple(s * 16 for s in struct.unpack_from(f"<{rank - 1}I", data, 12))
    box = tuple(b + 1 for b in data[55 : 55 + rank])
    return TensorMap(
        address, ITEM_BYTES.get(kind, 0), kind, dims, strides, box, SPANS[word >> 13 & 3], word >> 11 & 3
    )


def encode(
    address: int,
    kind: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    mode: int,
    interleave: int,
) -> bytes:
    """Write the fields (strides in bytes, of dimension 1 and up)."""
    out = bytearray(128)
    struct.pack_into("<Q", out, 0, address)
    word = (len(dims) - 1) << 4 | kind << 7 | interleave << 11 | mode << 13
    struct.pack_into("<I", out, 8, word)
    for i, stride in enumerate(strides):
        struct.pack_into("<I", out, 12 + 4 * i, stride // 16)
    for i, dim in enumerate(dims):
        struct.pack_into("<I", out, 32 + 4 * i, dim - 1)
    out[55 : 55 + len(box)] = bytes(b - 1 for b in box)
    return bytes(out)


def clip(start: int, length: int, size: int) -> tuple[slice, slice]:
    """The part of [start, start + length) that lies in [0, size), in the tensor and in the box."""
    low, high = max(start, 0), min(start + length, size)
    if high <= low:
        return slice(0, 0), slice(0, 0)
    return slice(low, high), slice(low - start, high - start)


def swizzle(address: np.ndarray, span: int) -> np.ndarray:
    """Where the bytes at absolute shared addresses really lie: 16-byte chunks are permuted within eight rows."""
    if span == 0:
        return address
    flipped: np.ndarray = address ^ (((address >> 7) & {32: 1, 64: 3, 128: 7}[span]) << 4)
    return flipped


@lru_cache(maxsize=4096)
def chunks(offset: int, count: int, span: int) -> np.ndarray:
    """Numbers of the 16-byte chunks that `count` logical chunks from `offset` occupy."""
    return swizzle(offset + 16 * np.arange(count), span) >> 4
