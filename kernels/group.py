"""Tables of unlike products for one launch: receives problems and where their operands lie, hands on bytes.

A table holds, in this order: for each product the number of tiles up to its end (int32), padded to 128 bytes; then
a record of 384 bytes a product: the tensor maps of A and B, and what `FIELDS` names. It is what
kernels/hopper/grouped.py reads, and may be used for as long as the operands stay where they are.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from kernels.device import Device
from kernels.problem import DType, Problem
from kernels.selector import Variant

MAP_BYTES = 128
RECORD_BYTES = 384
# The rest of a record, in order: strides of D and C are in elements along p (M) and q (N).
_VALUES = (
    ("d", "q"), ("d_batch", "q"), ("d_p", "q"), ("d_q", "q"), ("c", "q"), ("c_batch", "q"), ("c_p", "q"),
    ("c_q", "q"), ("bias", "q"), ("alpha", "f"), ("beta", "f"), ("code", "i"), ("p", "i"), ("q", "i"),
    ("tiles_p", "i"), ("tiles_q", "i"), ("batch", "i"), ("raster", "i"), ("k_tiles", "i"), ("first", "i"),
    ("x_layers", "i"), ("y_layers", "i"),
)  # fmt: skip
_LAYOUT = struct.Struct("<" + "".join(letter for _, letter in _VALUES))
# Offset in a record and struct's letter of each value.
FIELDS: dict[str, tuple[int, str]] = {
    name: (2 * MAP_BYTES + struct.calcsize("<" + "".join(letter for _, letter in _VALUES[:i])), letter)
    for i, (name, letter) in enumerate(_VALUES)
}
TILE_K = 64
SPAN = 64  # elements of a row of TMA's 128-byte swizzle
BOX_UNIT = 8  # rows: boxes are no taller than a product with fewer rows than a tile needs
_TYPES = {DType.FP16: 6, DType.BF16: 9}  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16, _BFLOAT16
_SWIZZLE_128B, _PROMOTE_256B = 3, 3

Encode = Callable[..., int]


class GroupVariant(Variant, Protocol):
    """A kernel that computes a list of products of one type and layout in one launch."""

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of D that a block computes at a time."""
        ...

    def function(self, problem: Problem) -> str:
        """Name, in the build's manifest, of the function for products of this type and layout."""
        ...

    def raster(self, problem: Problem, device: Device) -> int:
        """Order of tiles, as in kernels/call.py."""
        ...

    def seconds_together(self, problems: Sequence[Problem], device: Device) -> float:
        """Estimated time of one launch for all."""
        ...


class Place(NamedTuple):
    """An operand in device memory: address and strides in elements, as (layer, row of M or N, k)."""

    address: int
    layers: int
    layer: int
    row: int
    k: int


class Product(NamedTuple):
    """One product of a group: A's rows are M, B's are N; the rest as kernels/call.py says."""

    problem: Problem
    a: Place
    b: Place
    d: int
    d_strides: tuple[int, int, int]
    c: int = 0
    c_strides: tuple[int, int, int] = (0, 0, 0)
    bias: int = 0
    code: int = 0


def ends_bytes(count: Any) -> Any:
    """Bytes of the first part of a table; also for numbers of a kernel that is being compiled."""
    return (count + 31) // 32 * 128


def table(products: Sequence[Product], p: int, q: int, raster: int, encode: Encode) -> tuple[bytes, int]:
    """The table of products in tiles of p × q, and the number of all tiles.

    encode: cuTensorMapEncodeTiled. Raises ValueError for an operand that it refuses.
    """
    counts = [tiles(each.problem, p, q) for each in products]
    ends = list(accumulate(counts))
    out = bytearray(ends_bytes(len(products)))
    struct.pack_into(f"<{len(ends)}i", out, 0, *ends)
    for each, end, count in zip(products, ends, counts, strict=True):
        out += _record(each, p, q, raster, end - count, encode)
    return bytes(out), ends[-1] if ends else 0


def tiles(problem: Problem, p: int, q: int) -> int:
    """Tiles of p × q in all of a problem's D."""
    return -(-problem.m // p) * -(-problem.n // q) * problem.batch


def _record(each: Product, p: int, q: int, raster: int, first: int, encode: Encode) -> bytes:
    problem = each.problem
    m, n, k, tail = problem.m, problem.n, problem.k, problem.epilogue
    values = _LAYOUT.pack(
        each.d, *each.d_strides, each.c, *each.c_strides, each.bias, tail.alpha, tail.beta, each.code, m, n,
        -(-m // p), -(-n // q), problem.batch, raster, -(-k // TILE_K) if tail.reads_ab else 0, first,
        each.a.layers, each.b.layers,
    )  # fmt: skip
    a, b = _map(problem.dtype, each.a, m, k, p, encode), _map(problem.dtype, each.b, n, k, q, encode)
    return (a + b + values).ljust(RECORD_BYTES, b"\0")


@lru_cache(maxsize=8192)  # operands come again at the same places
def _map(dtype: DType, x: Place, rows: int, k: int, tile: int, encode: Encode) -> bytes:
    """Tensor map of [layers, rows, k] whose box is what one load brings: along K all rows of a tile, else 64.

    Of an operand with fewer rows than a tile the box has no more than these: TMA is slow to fill rows with zeros.
    """
    size = dtype.itemsize
    along_k = x.k == 1
    dims = (k, rows, x.layers) if along_k else (rows, k, x.layers)
    tall = min(tile, -(-rows // BOX_UNIT) * BOX_UNIT)
    box = (TILE_K, tall, 1) if along_k else (SPAN, TILE_K, 1)
    strides = ((x.row if along_k else x.k) * size, x.layer * size)
    room = (ctypes.c_uint8 * (2 * MAP_BYTES))()
    start = -ctypes.addressof(room) % 64  # the driver wants 64-byte alignment
    error = encode(
        ctypes.addressof(room) + start, _TYPES[dtype], 3, x.address, (ctypes.c_uint64 * 3)(*dims),
        (ctypes.c_uint64 * 2)(*strides), (ctypes.c_uint32 * 3)(*box), (ctypes.c_uint32 * 3)(1, 1, 1),
        0, _SWIZZLE_128B, _PROMOTE_256B, 0,
    )  # fmt: skip
    if error:
        raise ValueError(f"TMA can't address {dims} with strides of {strides} bytes (CUDA error {error})")
    return bytes(room[start : start + MAP_BYTES])


@cache
def encoder(library: str) -> Encode:
    """cuTensorMapEncodeTiled as the compiler's run-time library offers it."""
    function = ctypes.CDLL(library)._cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [
        pointer, number, ctypes.c_uint32, pointer, pointer, pointer, pointer, pointer,
        number, number, number, number,
    ]  # fmt: skip
    function.restype = number

    def encode(*arguments: Any) -> int:  # can be hashed, as a function of ctypes can't
        return int(function(*arguments))

    return encode
