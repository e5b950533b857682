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

# By element type, in the numbers that a map holds, which are those of tensormap.replace (the driver's differ): bytes
# of an item, and elements in one. Elements of 4 bits come by 16; padded, they take 16 bytes in shared memory.
ITEMS = {
    0: (1, 1), 1: (2, 1), 2: (4, 1), 3: (4, 1), 4: (8, 1), 5: (8, 1), 6: (2, 1), 7: (4, 1), 8: (4, 1), 9: (8, 1),
    10: (2, 1), 11: (4, 1), 12: (4, 1), 13: (1, 2), 14: (8, 16),
}  # fmt: skip
PADDED = 14
FLOAT_KINDS = {6: "f16", 7: "f32", 8: "f32", 9: "f64", 10: "bf16", 11: "f32", 12: "f32"}
DRIVER_KINDS = {
    8: 9,
    9: 10,
    10: 8,
}  # CUtensorMapDataType where it differs: fp64, bfloat16, fp32 with denormals flushed
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
    per_item: int = 1  # elements of the tensor in one item; coordinates count elements
    padded: bool = False

    @property
    def box_bytes(self) -> int:
        """Bytes of a whole box in global memory, which a barrier counts; what lies outside the tensor counts too."""
        return int(np.prod(self.box)) * self.item

    @property
    def shared_bytes(self) -> int:
        """Bytes of a whole box in shared memory."""
        return self.box_bytes * (2 if self.padded else 1)

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
    item, per_item = ITEMS.get(kind, (0, 1))
    dims, box = (-(-dims[0] // per_item), *dims[1:]), (box[0] // per_item, *box[1:])
    span, interleave = SPANS[word >> 13 & 3], word >> 11 & 3
    return TensorMap(address, item, kind, dims, strides, box, span, interleave, per_item, kind == PADDED)


def replaced(data: bytes, field: str, ordinal: int, value: int) -> bytes:
    """tensormap.replace: the map with another value in a field. Raises ValueError for what a field can't hold."""
    out = bytearray(data)
    (word,) = struct.unpack_from("<I", data, 8)
    shift, width = {
        "rank": (4, 3),
        "elemtype": (7, 4),
        "interleave_layout": (11, 2),
        "swizzle_mode": (13, 2),
    }.get(field, (0, 0))
    if width:
        if value >> width:
            raise ValueError(f"{field} {value}")
        struct.pack_into("<I", out, 8, word & ~(((1 << width) - 1) << shift) | value << shift)
    elif field == "global_address":
        struct.pack_into("<Q", out, 0, value)
    elif ordinal > 4 or value < 1:
        raise ValueError(f"{field} {value} of dimension {ordinal}")
    elif field == "global_dim":
        struct.pack_into("<I", out, 32 + 4 * ordinal, value - 1)
    elif field == "box_dim" and value <= 256:
        out[55 + ordinal] = value - 1
    else:
        raise ValueError(f"{field} {value}")
    return bytes(out)


def encode(
    address: int,
    kind: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    mode: int,
    interleave: int,
) -> bytes:
    """Write the fields (strides in bytes, of dimension 1 and up).

    Raises ValueError beyond the limits of cuTensorMapEncodeTiled (CUDA driver API, tensor map object management).
    """
    if address % (unit := 32 if interleave else 16):
        raise ValueError(f"the tensor begins at {address:#x}, which is no multiple of {unit} bytes")
    if any(not 1 <= dim <= 1 << 32 for dim in dims):
        raise ValueError(f"dimensions of {tuple(dims)}, each takes 1 to 2**32")
    if any(stride % 16 or stride >= 1 << 40 for stride in strides):
        raise ValueError(f"strides of {tuple(strides)} bytes, each takes a multiple of 16 below 2**40")
    if any(not 1 <= rows <= 256 for rows in box):
        raise ValueError(f"a box of {tuple(box)}, each side takes 1 to 256")
    item, per_item = ITEMS[kind]
    inner = box[0] // per_item * item
    if not interleave and (inner % 16 or (SPANS[mode] and inner > SPANS[mode])):
        raise ValueError(
            f"{inner} bytes of a box lie side by side, the swizzle takes up to {SPANS[mode] or 'any'}, by 16"
        )
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
