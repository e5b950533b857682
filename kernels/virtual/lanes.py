"""Arithmetic of 32 lanes for generated code: receives bit patterns, hands on bit patterns.

A uniform value is a Python int (a predicate a bool), a vector a NumPy array of unsigned ints with one element
a lane. The generated code inlines what is short; what needs more than an expression is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i8, i16, i32, i64 = np.int8, np.int16, np.int32, np.int64
f16, f32, f64 = np.float16, np.float32, np.float64
bf16 = ml_dtypes.bfloat16

Value = Any  # int | bool | np.ndarray
UNSIGNED: dict[int, Any] = {8: u8, 16: u16, 32: u32, 64: u64}
SIGNED: dict[int, Any] = {8: i8, 16: i16, 32: i32, 64: i64}
FLOAT: dict[str, Any] = {"f16": f16, "bf16": bf16, "f32": f32, "f64": f64}
WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
LANE = np.arange(32, dtype=u32)


def full(value: int, dtype: Any) -> np.ndarray:
    """A uniform value in every lane."""
    return np.full(32, value, dtype)


def s16(x: int) -> int:
    """Signed value of 16 bits."""
    return (x ^ 0x8000) - 0x8000


def s32(x: int) -> int:
    """Signed value of 32 bits."""
    return (x ^ 0x80000000) - 0x80000000


def s64(x: int) -> int:
    """Signed value of 64 bits."""
    return (x ^ 0x8000000000000000) - 0x8000000000000000


def bits(x: Any) -> Any:
    """Bits of a float (a NumPy scalar becomes an int, an array a view)."""
    view = x.view(UNSIGNED[x.dtype.itemsize * 8])
    return view if isinstance(x, np.ndarray) else int(view)


def flt(x: Value, kind: str) -> Any:
    """The float that the bits stand for."""
    if isinstance(x, np.ndarray):
        return x.view(FLOAT[kind])
    return UNSIGNED[WIDTH[kind]](x).view(FLOAT[kind])


def shift_left(x: Value, n: Value, width: int) -> Value:
    """shl: a count of `width` or more gives 0."""
    if isinstance(x, int) and isinstance(n, int):
        return (x << n) & ((1 << width) - 1) if n < width else 0
    dtype = UNSIGNED[width]
    x, n = np.asarray(x, dtype), np.asarray(n, u32)
    return np.where(n < width, x << np.minimum(n, width - 1).astype(dtype), dtype(0))


def shift_right(x: Value, n: Value, width: int, signed: bool) -> Value:
    """shr: a count of `width` or more gives 0, or the sign."""
    dtype: Any = SIGNED[width] if signed else UNSIGNED[width]
    if isinstance(x, int) and isinstance(n, int):
        if signed:
            half = 1 << (width - 1)
            return (((x ^ half) - half) >> min(n, width - 1)) & ((1 << width) - 1)
        return x >> n if n < width else 0
    x = np.asarray(x, UNSIGNED[width]).view(dtype)
    n = np.asarray(n, u32)
    shifted = x >> np.minimum(n, width - 1).astype(dtype)
    if not signed:
        shifted = np.where(n < width, shifted, dtype(0))
    return shifted.view(UNSIGNED[width])


def funnel(lo: Value, hi: Value, n: Value, left: bool, clamp: bool) -> Value:
    """shf: a 64-bit shift of hi:lo by n, of which 32 bits are kept."""
    n = np.minimum(n, 32) if clamp else np.bitwise_and(n, 31)
    if all(isinstance(v, int) for v in (lo, hi)) and np.ndim(n) == 0:
        pair = (hi << 32) | lo
        return ((pair << int(n)) >> 32) & 0xFFFFFFFF if left else (pair >> int(n)) & 0xFFFFFFFF
    lo, hi, n = (np.asarray(v).astype(u64) for v in (lo, hi, n))
    pair = (hi << u64(32)) | lo
    top = (hi << n) | np.where(n > 0, lo >> (u64(32) - n), u64(0))
    return (top if left else pair >> n).astype(u32)


def divide(a: Value, b: Value, width: int, signed: bool, remainder: bool) -> Value:
    """Integer division, towards zero. Division by zero gives all ones, as unspecified by PTX."""
    if isinstance(a, int) and isinstance(b, int):
        return _divide_scalar(a, b, width, signed, remainder)
    pairs = np.broadcast(np.asarray(a), np.asarray(b))
    out = [_divide_scalar(int(x), int(y), width, signed, remainder) for x, y in pairs]
    return np.array(out, UNSIGNED[width])


def _divide_scalar(a: int, b: int, width: int, signed: bool, remainder: bool) -> int:
    mask = (1 << width) - 1
    if b == 0:
        return mask
    if signed:
        half = 1 << (width - 1)
        a, b = (a ^ half) - half, (b ^ half) - half
    q = abs(a) // abs(b)
    if (a < 0) != (b < 0):
        q = -q
    return (a - q * b if remainder else q) & mask


def select(p: Value, a: Value, b: Value, dtype: Any) -> Value:
    """selp with a vector predicate."""
    return np.where(p, np.asarray(a, dtype), np.asarray(b, dtype))


def blend(p: Value, new: Value, old: Value, dtype: Any) -> Value:
    """A guarded write; a register without a value before takes the new one in every lane."""
    if old is None:
        return np.broadcast_to(np.asarray(new, dtype), (32,))
    return np.where(p, np.asarray(new, dtype), np.asarray(old, dtype))


def lop3(a: Value, b: Value, c: Value, table: int) -> Value:
    """Any boolean function of three words."""
    out: Any = 0
    ones = 0xFFFFFFFF
    for i in range(8):
        if table >> i & 1:
            out = out | ((a if i & 4 else a ^ ones) & (b if i & 2 else b ^ ones) & (c if i & 1 else c ^ ones))
    return out


def prmt(a: Value, b: Value, selector: Value) -> Value:
    """Pick four bytes out of eight (default mode; bit 3 of a selector replicates the sign)."""
    if isinstance(selector, int):
        out: Any = 0
        for i in range(4):
            pick = selector >> (4 * i)
            word, shift = (b if pick & 4 else a), 8 * (pick & 3)
            byte = (word >> shift) & 0xFF
            if pick & 8:
                byte = (byte >> 7) * 0xFF
            out = out | (byte << (8 * i))
        return out
    words = [np.broadcast_to(np.asarray(v, u32), (32,)).tolist() for v in (a, b, selector)]
    return np.array([prmt(x, y, s) for x, y, s in zip(*words, strict=True)], u32)


def per_lane(function: Callable[..., int], dtype: Any, *values: Value) -> Value:
    """Apply a function of ints: once if all are uniform, else lane by lane (rare instructions)."""
    if all(isinstance(v, int) for v in values):
        return function(*values)
    columns = [np.broadcast_to(np.asarray(v), (32,)).tolist() for v in values]
    return np.array([function(*row) for row in zip(*columns, strict=True)], dtype)


def bfe(x: int, start: int, length: int, width: int, signed: bool) -> int:
    """Extract a bit field."""
    start, length = start & 0xFF, length & 0xFF
    if length == 0:
        return 0
    field = (x >> start) & ((1 << length) - 1)
    if signed:
        top = min(start + length - 1, width - 1)
        if x >> top & 1:
            field |= -1 << min(length, max(0, width - start))
    return field & ((1 << width) - 1)


def bfi(a: int, b: int, start: int, length: int, width: int) -> int:
    """Insert the low bits of a into b."""
    start, length = start & 0xFF, length & 0xFF
    mask = (((1 << length) - 1) << start) & ((1 << width) - 1)
    return (b & ~mask) | ((a << start) & mask)


def reverse_bits(x: int, width: int) -> int:
    """brev."""
    return int(f"{x:0{width}b}"[::-1], 2)


def find_bit(x: int, width: int, signed: bool, shift: bool) -> int:
    """bfind: position of the highest bit that is set (that differs from the sign)."""
    if signed and x >> (width - 1):
        x ^= (1 << width) - 1
    if x == 0:
        return 0xFFFFFFFF
    return width - x.bit_length() if shift else x.bit_length() - 1


def popc(x: int) -> int:
    """Bits that are set."""
    return x.bit_count()


def clz(x: int, width: int) -> int:
    """Leading zeros."""
    return width - x.bit_length()


# --- floats ---------------------------------------------------------------------------------------


def fma(a: Any, b: Any, c: Any) -> Any:
    """a·b + c with one rounding (through fp64, where the product of two fp32 is exact)."""
    kind = a.dtype if isinstance(a, np.ndarray | np.generic) else b.dtype
    return (np.multiply(a, b, dtype=f64) + c).astype(kind)


def directed(op: str, mode: str, *values: Any) -> Any:
    """add, mul or fma of fp32 rounded towards zero, down or up (computed in fp64)."""
    wide = [np.atleast_1d(np.asarray(v, f64)) for v in values]
    exact = wide[0] + wide[1] if op == "add" else wide[0] * wide[1]
    if op == "fma":
        exact = exact + wide[2]
    out = _directed(exact, f32, mode)
    return out if any(isinstance(v, np.ndarray) for v in values) else out[0]


def fmin(a: Any, b: Any, nan: bool) -> Any:
    """min: the number beside a NaN, unless `.NaN`."""
    return (np.minimum if nan else np.fmin)(a, b)


def fmax(a: Any, b: Any, nan: bool) -> Any:
    """max: the number beside a NaN, unless `.NaN`."""
    return (np.maximum if nan else np.fmax)(a, b)


def saturate(x: Any) -> Any:
    """Clamp to [0, 1]; NaN gives 0."""
    out = np.clip(np.where(np.isnan(x), 0, x), 0, 1).astype(x.dtype)
    return out if out.ndim else out[()]


@lru_cache(maxsize=256)
def _tiled(value: int, kind: str) -> np.ndarray:
    """A uniform word's parts, in every lane."""
    return np.full(32, value, u64 if kind == "f32" else u32).view(FLOAT[kind])


def packed(kind: str, function: Callable[..., Any], *values: Value) -> Value:
    """Apply to the two halves of each word (f16x2, bf16x2) or each pair (f32x2)."""
    parts = [_tiled(v, kind) if isinstance(v, int) else v.view(FLOAT[kind]) for v in values]
    out = function(*parts)
    if out.dtype != FLOAT[kind]:
        out = out.astype(FLOAT[kind])
    words = out.view(u64 if kind == "f32" else u32)
    return words if any(isinstance(v, np.ndarray) for v in values) else int(words[0])


def pack_f16x2(hi: Value, lo: Value) -> Value:
    """cvt.rn.f16x2.f32: two fp32 to the halves of a word."""
    if isinstance(hi, int) and isinstance(lo, int):
        return int(_round16(hi)) << 16 | int(_round16(lo))
    out = np.empty((32, 2), f16)
    out[:, 0] = np.asarray(lo, u32).view(f32)
    out[:, 1] = np.asarray(hi, u32).view(f32)
    return out.view(u32).reshape(32)


# Two to a register: the type, and the largest finite number, to which .satfinite clamps.
NARROW: dict[str, tuple[Any, float]] = {
    "e4m3x2": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2x2": (ml_dtypes.float8_e5m2, 57344.0),
    "e2m1x2": (ml_dtypes.float4_e2m1fn, 6.0),
}


def pack_narrow(kind: str, hi: Value, lo: Value) -> Value:
    """cvt.rn.satfinite of two fp32 to fp8 (packed in 16 bits, NaN is 0x7f) or E2M1 (in 8 bits, NaN the largest)."""
    dtype, largest = NARROW[kind]
    bits = np.empty((32, 2), u32)
    bits[:, 0], bits[:, 1] = lo, hi
    values = bits.view(f32)
    narrow = np.clip(np.nan_to_num(values, nan=largest), -largest, largest).astype(dtype).view(np.uint8)
    words: np.ndarray
    if kind == "e2m1x2":
        words = narrow[:, 0] | narrow[:, 1] << 4
    else:
        narrow = np.where(np.isnan(values), np.uint8(0x7F), narrow)
        words = np.ascontiguousarray(narrow).view(u16).reshape(32)
    return words if isinstance(hi, np.ndarray) or isinstance(lo, np.ndarray) else int(words[0])


def _round16(x: int) -> Any:
    return u32(x).view(f32).astype(f16).view(u16)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 bits to bf16 bits in the low half, to nearest even; NaN becomes 0x7fff."""
    wide = x + (((x >> 16) & 1) + 0x7FFF).astype(u32)
    out = wide >> 16
    nan = (x & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, u32(0x7FFF), out) if nan.any() else out


def pack_bf16x2(hi: Value, lo: Value) -> Value:
    """cvt.rn.bf16x2.f32."""
    uniform = isinstance(hi, int) and isinstance(lo, int)
    h, low = (np.atleast_1d(np.asarray(v, u32)) for v in (hi, lo))
    out = (round_bf16(h) << 16) | round_bf16(low)
    return int(out[0]) if uniform else out.astype(u32)


def convert(x: Value, source: str, target: str, mode: str, sat: bool) -> Value:
    """cvt where a float takes part. mode: rn, rz, rm, rp, and rni, rzi, rmi, rpi for whole numbers."""
    uniform = not isinstance(x, np.ndarray)
    width = int("".join(c for c in source if c.isdigit()))
    array = np.atleast_1d(np.asarray(x, UNSIGNED[width]))
    value: Any = array.view(
        FLOAT[source] if source in FLOAT else (SIGNED if source[0] == "s" else UNSIGNED)[width]
    )
    out = _to_float(value, target, mode) if target in FLOAT else _to_int(value, target, mode)
    if sat and target in FLOAT:
        out = saturate(out)
    out = np.ascontiguousarray(out)
    raw = out.view(UNSIGNED[out.dtype.itemsize * 8])
    return int(raw[0]) if uniform else raw


def _to_float(value: Any, target: str, mode: str) -> Any:
    if mode.endswith("i") and value.dtype.kind == "f":
        value = _whole(value, mode)
    if target == "bf16" and value.dtype == f32:
        return round_bf16(value.view(u32)).astype(u16).view(bf16)
    if mode in ("rz", "rm", "rp") and value.dtype.itemsize > np.dtype(FLOAT[target]).itemsize:
        return _directed(value, FLOAT[target], mode)
    return value.astype(FLOAT[target])


def _directed(value: Any, dtype: Any, mode: str) -> Any:
    """Rounding other than to nearest: one step back where nearest went the wrong way."""
    near = value.astype(dtype)
    back = near.astype(value.dtype)
    if mode == "rz":
        wrong, towards = np.abs(back) > np.abs(value), np.zeros_like(near)
    elif mode == "rm":
        wrong, towards = back > value, np.full_like(near, -np.inf)
    else:
        wrong, towards = back < value, np.full_like(near, np.inf)
    return np.where(wrong, np.nextafter(near, towards), near)


def _whole(value: Any, mode: str) -> Any:
    return {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](value)


def _to_int(value: Any, target: str, mode: str) -> Any:
    """A float to an integer: out of range saturates, NaN gives 0."""
    width = int(target[1:])
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if target[0] == "s" else (0, (1 << width) - 1)
    whole = _whole(value.astype(f64), mode)
    out = [0 if math.isnan(x) else int(min(max(x, low), high)) for x in whole.tolist()]
    return np.array(out, (SIGNED if target[0] == "s" else UNSIGNED)[width])


def dot(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left · rightᵀ in fp32, rounded once from fp64, where the products of one instruction mostly add up exactly.

    BLAS in fp32 adds in an order that depends on the shape: an element's bits would differ from tiling to tiling.
    """
    product: np.ndarray = left.astype(f64) @ right.astype(f64).T
    return product.astype(f32)


def smooth(function: Callable[[Any], Any], x: Any) -> Any:
    """A transcendental function in fp32, rounded from fp64.

    numpy's own in fp32 differ in the last bit with an element's place in the array: vector code takes some, not all.
    """
    return function(np.asarray(x, f64)).astype(f32)


def rcp(x: Any) -> Any:
    """1/x."""
    return (f32(1) / x).astype(f32) if isinstance(x, np.ndarray) else f32(1) / x
