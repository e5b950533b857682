"""Writeback: receives an accumulator in tensor memory, hands on rows of D, fused and staged for TMA stores.

A warp reaches only its own 32 of the 128 TMEM lanes (warp index modulo 4), so a warpgroup reads an
accumulator with one row a thread: thread t holds row t. Rows are staged in shared memory under the swizzle
that the tensor map of D names; without it the rows of a warp would meet in the same banks.

The fused epilogue of Step 9 is act(alpha · acc + beta · C + bias) in fp32, chosen at run time by the bits of
`code` (kernels/call.py), with one rounding at the end.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.experimental import primitives as prims

EPI_N = 64  # columns of one read from TMEM
EPI_BARRIER = 10  # named barrier of the first writeback warpgroup; the second uses 11
EVICT_FIRST = 0x12F0000000000000  # L2 policy for what nobody reads again soon
PART = 16  # columns that get bias and activation at a time: bounds registers and code
RELU, GELU, SILU = 1, 2, 3  # bits 0-1 of `code`
FP16, BF16, FP32 = 1, 2, 3  # types in `code`
TYPES = {cutlass.Float16: FP16, cutlass.BFloat16: BF16, Float32: FP32}
GMEM = cutlass.AddressSpace.gmem


# Tensor memory and staging


@dsl_user_op
def read_chunk(
    tmem: Int32,
    warp: Int32,
    column: int | Int32,
    columns: int = EPI_N,
    *,
    loc: Any = None,
    ip: Any = None,
) -> cutlass.Vector:
    """`columns` fp32 of this thread's row. The registers count only after `tcgen05_wait("load")`."""
    address = prims.make_tmem_ptr_from_warp_row_col(tmem, warp % 4, column + (tmem & 0xFFFF), Float32)
    return prims.tcgen05_ld("32x32b", address, num=columns, loc=loc, ip=ip)


@dsl_user_op
def stage_row(
    buffer: Any, row: Int32, values: cutlass.Vector, pitch: int, *, loc: Any = None, ip: Any = None
) -> None:
    """Write a row of `pitch` bytes (128 or 64) into a swizzled buffer, 16 bytes at a time."""
    lanes = 128 // values.dtype.width
    for chunk in range(pitch // 16):
        place = _chunk(row, chunk, pitch) * lanes
        (buffer + place).store(values[chunk * lanes : (chunk + 1) * lanes], alignment=16, loc=loc, ip=ip)


def unstage_row(buffer: Any, row: Int32, pitch: int) -> cutlass.Vector:
    """Read such a row back as fp32: C comes in through the buffers that D leaves by."""
    lanes = 128 // buffer.dtype.width
    values: list[Any] = []
    for chunk in range(pitch // 16):
        place = _chunk(row, chunk, pitch) * lanes
        values += (buffer + place).load(alignment=16, count=lanes).to(Float32).to_elements()
    return _vector(tuple(values))


def unstage_element(buffer: Any, row: Int32, column: Int32) -> Float32:
    """One fp32 of a staged row of 128 bytes, whoever wrote it."""
    return (buffer + _chunk(row, column // 4, 128) * 4 + column % 4).load()


def _chunk(row: Int32, chunk: int | Int32, pitch: int) -> Int32:
    """Where the swizzle puts chunk c of row r: c ^ (r % 8) in rows of 128 bytes, c ^ (r / 2 % 4) in 64."""
    flip = row % 8 if pitch == 128 else row // 2 % 4
    return row * (pitch // 16) + (flip ^ chunk)


# Fused epilogue


class Fused:
    """The run-time epilogue of one call: scalars, flags, where C, D and bias lie, and the size of D."""

    FIELDS = (
        *("alpha", "beta", "code", "bias", "c", "c_batch", "c_row", "c_column"),
        *("d", "d_batch", "d_row", "d_column", "rows", "columns"),
    )
    alpha: Float32
    beta: Float32
    code: Int32
    bias: Int64
    c: Int64
    c_batch: Int64
    c_row: Int64
    c_column: Int64
    d: Int64
    d_batch: Int64
    d_row: Int64
    d_column: Int64
    rows: Int32
    columns: Int32

    def __init__(self, *values: Any) -> None:
        for name, value in zip(self.FIELDS, values, strict=True):
            setattr(self, name, value)

    def __extract_mlir_values__(self) -> list[Any]:
        return [getattr(self, name).ir_value() for name in self.FIELDS]

    def __new_from_mlir_values__(self, values: list[Any]) -> Fused:
        types = [type(getattr(self, name)) for name in self.FIELDS]
        return Fused(*(t(v) for t, v in zip(types, values, strict=True)))

    @property
    def has_c(self) -> Any:
        """Whether there is a C to read."""
        return (self.code >> 2) & 3 != 0

    @property
    def has_more(self) -> Any:
        """Whether there is a bias or an activation."""
        return (self.code & 0b0110011) != 0


@cute.jit
def fuse(f: Fused, values: cutlass.Vector, c: Any, row: Int32, column: Int32) -> cutlass.Vector:
    """act(alpha · values + beta · c + bias) of a piece of a row; c isn't used where there is no C."""
    count = values.shape[0]
    if f.has_more:
        if cutlass.const_expr(count <= PART):
            values = _fuse_part(f, values, c, row, column)
        else:
            # One copy of this long code: the part in front is taken off and comes back at the end.
            for part in range(count // PART):
                elements = values.to_elements()
                front = None
                if cutlass.const_expr(c is not None):
                    of_c = c.to_elements()
                    front = _vector(of_c[:PART])
                    c = _vector((*of_c[PART:], *of_c[:PART]))
                done = _fuse_part(f, _vector(elements[:PART]), front, row, column + part * PART)
                values = _vector((*elements[PART:], *done.to_elements()))
    elif cutlass.const_expr(c is not None):
        if f.has_c:
            values = _fma(values, f.alpha, _fma(c, f.beta, cutlass.full((count,), 0.0, Float32)))
        else:
            values = values * f.alpha
    else:
        values = values * f.alpha
    return values


@cute.jit
def _fuse_part(f: Fused, values: cutlass.Vector, c: Any, row: Int32, column: Int32) -> cutlass.Vector:
    """The same with a bias, an activation or both.

    Each sum is an explicit fused multiply-add: were it left to the compiler, it could differ from function to
    function, and with it the last bit.
    """
    addend = cutlass.full((values.shape[0],), 0.0, Float32)
    kind = (f.code >> 4) & 3
    if kind != 0:
        along_m = (f.code >> 6) & 1
        address = f.bias + Int64(cutlass.min(row, f.rows - 1) * along_m) * size_of(kind)
        addend = load_line(address, kind, Int64(1 - along_m), column, f.columns, values.shape[0])
    if cutlass.const_expr(c is not None):
        if f.has_c:
            addend = _fma(c, f.beta, addend)
    values = _fma(values, f.alpha, addend)
    activation = f.code & 3
    if activation == RELU:
        values = _vector(tuple(relu(v) for v in values.to_elements()))
    if activation == GELU:
        values = _vector(tuple(gelu(v) for v in values.to_elements()))
    if activation == SILU:
        values = _vector(tuple(silu(v) for v in values.to_elements()))
    return values


def _fma(values: cutlass.Vector, scale: Float32, addend: cutlass.Vector) -> cutlass.Vector:
    pairs = zip(values.to_elements(), addend.to_elements(), strict=True)
    return _vector(tuple(cute.math.fma(v, scale, a) for v, a in pairs))


def c_line(f: Fused, row: Int32, column: Int32, layer: Int32, count: int) -> cutlass.Vector:
    """`count` elements of a row of C by plain loads, whatever its type and strides."""
    kind = (f.code >> 2) & 3
    start = Int64(layer) * f.c_batch + Int64(cutlass.min(row, f.rows - 1)) * f.c_row
    return load_line(f.c + start * size_of(kind), kind, f.c_column, column, f.columns, count)


@cute.jit
def load_line(
    address: Int64, kind: Int32, stride: Int64, first: Int32, limit: Int32, count: cutlass.Constexpr
) -> cutlass.Vector:
    """`count` elements from the `first` on, `stride` apart, as fp32; zeros where there is no type.

    Beyond the limit the last element is read again: what becomes of it is clipped later.
    """
    line = cutlass.full((count,), 0.0, Float32)
    if kind == FP16:
        line = _gather(address, cutlass.Float16, stride, first, limit, count)
    if kind == BF16:
        line = _gather(address, cutlass.BFloat16, stride, first, limit, count)
    if kind == FP32:
        line = _gather(address, Float32, stride, first, limit, count)
    return line


def _gather(
    address: Int64, dtype: Any, stride: Int64, first: Int32, limit: Int32, count: int
) -> cutlass.Vector:
    values = []
    step = stride * (dtype.width // 8)
    for j in range(count):
        place = address + Int64(cutlass.min(first + j, limit - 1)) * step
        values.append(cutlass.inttoptr(place, GMEM, dtype).load().to(Float32))
    return _vector(tuple(values))


def size_of(kind: Int32) -> Int64:
    """Bytes of an element of a type in `code`."""
    return Int64(2) << Int64(kind == FP32)


@cute.jit
def store_element(d: Int64, index: Int64, value: Float32, kind: Int32) -> None:
    """One element of a D whose type is known at run time."""
    address = d + index * size_of(kind)
    if kind == FP16:
        cutlass.inttoptr(address, GMEM, cutlass.Float16).store(value.to(cutlass.Float16))
    if kind == BF16:
        cutlass.inttoptr(address, GMEM, cutlass.BFloat16).store(value.to(cutlass.BFloat16))
    if kind == FP32:
        cutlass.inttoptr(address, GMEM, Float32).store(value)


def _vector(values: tuple[Any, ...]) -> cutlass.Vector:
    return cutlass.Vector.from_elements(values, Float32)


def relu(x: Float32) -> Float32:
    """Zero for what is below zero; a NaN compares false and stays."""
    return Float32(cutlass.select_(x < 0.0, Float32(0.0), x))


def gelu(x: Float32) -> Float32:
    """x · Φ(x), through erfc: 1 + erf cancels for negative x."""
    return x * 0.5 * cute.math.erfc(x * -(0.5**0.5))


def silu(x: Float32) -> Float32:
    """x · sigmoid(x), through exp(-|x|), which can't overflow."""
    e = cute.math.exp(-cute.math.absf(x))
    top = Float32(cutlass.select_(x < 0.0, e, Float32(1.0)))
    return x * top / (e + 1.0)
