"""Casts and epilogue in numpy: receives accumulators, hands on act(alpha·acc + beta·C + bias), rounded once.

bfloat16 arrays are `ml_dtypes.bfloat16` or uint16 bit patterns. Callers hold `quiet()`: overflow to infinity
and NaN are results here, not warnings. Every operation works element by element, so a result's bits don't
depend on its place in an array.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kernels.problem import Activation, BiasDim, DType, Problem

Array = NDArray[Any]

NUMPY: dict[DType, np.dtype[Any]] = {
    DType.FP16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.FP32: np.dtype(np.float32),
    DType.FP64: np.dtype(np.float64),
}

FP32 = NUMPY[DType.FP32]
SMALL = 1 << 12  # elements below which a call of torch costs more than it saves


def quiet() -> np.errstate:
    """IEEE arithmetic without numpy's warnings."""
    return np.errstate(all="ignore")


def typed(x: Array) -> Array:
    """The array itself, a uint16 one as the bfloat16 that it stands for."""
    return x.view(NUMPY[DType.BF16]) if x.dtype == np.uint16 else x


def widen(x: Array, dtype: np.dtype[Any]) -> Array:
    """`x` as float32 or float64, exact but for fp64 to fp32; no copy where it has that type already."""
    x = typed(x)
    if x.dtype == dtype:
        return x
    if x.dtype.itemsize == 2 and dtype != FP32:
        return widen(x, FP32).astype(dtype)
    wide = np.empty_like(x, dtype)
    cast_into(wide, x)
    return wide


def cast_into(target: Array, source: Array) -> None:
    """Copy with one rounding, but for fp64 to bfloat16, which ml_dtypes rounds twice (see `narrow`).

    numpy casts fp16 in software, eight times slower than torch where that is loaded.
    """
    target, source = typed(target), typed(source)
    kinds = {target.dtype, source.dtype}
    if kinds == {NUMPY[DType.FP16], FP32} and target.size > SMALL and "torch" in sys.modules:
        as_tensor(target).copy_(as_tensor(source))
    else:
        np.copyto(target, source, casting="unsafe")


def as_tensor(x: Array) -> Any:
    """torch's view of the same memory; of a read-only array too, which the caller only reads."""
    import torch

    if not x.flags.writeable and x.size:
        low, high = np.lib.array_utils.byte_bounds(x)
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
        x = np.ndarray(x.shape, x.dtype, memory, x.__array_interface__["data"][0] - low, x.strides)
    return torch.from_numpy(x)


def narrow(acc: Array, out: Array) -> None:
    """Round `acc` (fp32 or fp64) to nearest even into `out`, once."""
    if typed(out).dtype == NUMPY[DType.BF16] and acc.dtype == np.float64:
        acc = _round_to_odd(acc)
    cast_into(out, acc)


def _round_to_odd(x: Array) -> Array:
    """fp64 cut to fp32, the last bit set where inexact: rounding that again equals rounding `x` once."""
    near = x.astype(np.float32)
    bits = near.view(np.uint32)
    bits -= (np.abs(near) > np.abs(x)).astype(np.uint32)  # toward zero: sign and magnitude are apart
    bits |= ((near != x) & ~np.isnan(x)).astype(np.uint32)
    return near


def canonical_nan(acc: Array) -> None:
    """Give every NaN the same bits: which operand's payload survives a sum depends on its order."""
    # The least element is NaN where any is: found without an array of flags, which a result seldom needs.
    if acc.size and np.isnan(np.minimum.reduce(acc, axis=None)):
        acc[np.isnan(acc)] = np.nan


def epilogue(problem: Problem, acc: Array, c: Array | None, bias: Array | None) -> None:
    """Apply alpha, C, bias and activation in place to `acc` [.., M, N] in the compute type."""
    tail, kind = problem.epilogue, acc.dtype
    if tail.alpha != 1.0 and tail.reads_ab:
        acc *= kind.type(tail.alpha)
    if tail.reads_c:
        assert c is not None
        c = widen(c, kind)
        acc += c if tail.beta == 1.0 else c * kind.type(tail.beta)
    if tail.bias is not None:
        assert bias is not None
        line = widen(bias, kind)
        acc += line if tail.bias is BiasDim.N else line[:, None]
    activate(acc, tail.activation)


def activate(acc: Array, activation: Activation) -> None:
    """Apply an activation in place."""
    if activation is Activation.RELU:
        np.maximum(acc, acc.dtype.type(0), out=acc)  # keeps a NaN
    elif activation is Activation.GELU:
        _gelu(acc)
    elif activation is Activation.SILU:
        _silu(acc)


def _gelu(acc: Array) -> None:
    """½·x·(1 + erf(x/√2)); erfc keeps relative accuracy below 0. -inf · 0 is NaN, as in torch."""
    from scipy.special import erfc

    weight = erfc(acc * acc.dtype.type(-(0.5**0.5)))
    weight *= acc.dtype.type(0.5)
    acc *= weight


def _silu(acc: Array) -> None:
    """x / (1 + exp(-x)), by exp(-|x|), which can't overflow. -inf · 0 is NaN, as in torch."""
    small = np.abs(acc)
    np.negative(small, out=small)
    np.exp(small, out=small)
    one = acc.dtype.type(1)
    weight = np.where(acc < 0, small, one)
    small += one
    weight /= small
    acc *= weight
