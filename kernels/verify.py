"""Is a result right? Receives a `Problem`, its operands and D; hands on a `Verdict` by the API's error bound.

Elementwise, without activation: |D - ref| ≤ u·((K/16 + 4)·|alpha|·(|A|·|B|) + 4·(|beta·C| + |bias|)) + ½ ulp
of the output type, ref in higher precision. With one: the activation of the reference, within the same error
through its slope, plus one ulp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kernels.elementwise import NUMPY, Array, activate, quiet, typed
from kernels.problem import Activation, BiasDim, DType, Precision, Problem

UNIT = {DType.FP32: 2.0**-22, DType.FP64: 2.0**-51}
UNIT_TF32 = 2.0**-9
SMOOTH = (Activation.GELU, Activation.SILU)
SLOPE = {Activation.NONE: 1.0, Activation.RELU: 1.0, Activation.GELU: 1.13, Activation.SILU: 1.1}
Wide = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether D is right; `worst`: the largest error as a share of what is allowed; `detail`: where it is."""

    ok: bool
    worst: float
    detail: str
    error: float = 0.0  # ‖D - ref‖ / ‖ref‖ over finite elements


@dataclass(frozen=True, slots=True)
class Expected:
    """Reference and allowed error of each element; `free` marks where the compute type may overflow."""

    value: Wide
    allowed: Wide
    free: NDArray[np.bool_]


def expected(
    problem: Problem, a: Array | None, b: Array | None, c: Array | None = None, bias: Array | None = None
) -> Expected:
    """D in higher precision (fp64, or long double for fp64) and the error allowed at each element."""
    with quiet():
        return _expected(problem, a, b, c, bias)


def error_bound(
    problem: Problem, a: Array | None, b: Array | None, c: Array | None = None, bias: Array | None = None
) -> Wide:
    """The error allowed at each element, rounding to the output type included."""
    return expected(problem, a, b, c, bias).allowed


def check(
    problem: Problem,
    out: Array,
    a: Array | None,
    b: Array | None,
    c: Array | None = None,
    bias: Array | None = None,
) -> Verdict:
    """Compare `out` with the reference: NaN, infinities and every element's error."""
    with quiet():
        want = _expected(problem, a, b, c, bias)
        got = typed(out).astype(want.value.dtype).reshape(want.value.shape)
        return _compare(problem, got, want)


def _expected(
    problem: Problem, a: Array | None, b: Array | None, c: Array | None, bias: Array | None
) -> Expected:
    wide: Any = np.longdouble if problem.dtype is DType.FP64 else np.float64
    unit = UNIT_TF32 if problem.precision is Precision.TF32 and problem.dtype is DType.FP32 else None
    unit = unit or UNIT[problem.dtype.compute]
    tail = problem.epilogue
    shape = (problem.batch, problem.m, problem.n)
    value, scale = np.zeros(shape, wide), np.zeros(shape, wide)
    free = np.zeros(shape, np.bool_)
    if tail.reads_ab:
        assert a is not None
        assert b is not None
        left, right = _wide(a, problem.trans_a, wide), _wide(b, problem.trans_b, wide)
        value += wide(tail.alpha) * np.matmul(left, right)
        sizes = np.matmul(np.abs(left), np.abs(right))
        free |= np.isfinite(sizes) & (sizes > _largest(problem.dtype.compute) / 4)
        share = problem.k if problem.dtype is DType.FP64 else problem.k / 16
        scale += wide((share + 4) * abs(tail.alpha)) * sizes
    if tail.reads_c:
        assert c is not None
        added = wide(tail.beta) * _wide(c, False, wide)
        value, scale = value + added, scale + 4 * np.abs(added)
    if tail.bias is not None:
        assert bias is not None
        line = typed(bias).astype(wide)
        line = line if tail.bias is BiasDim.N else line[:, None]
        value, scale = value + line, scale + 4 * np.abs(line)
    allowed = unit * scale
    free |= np.isfinite(value) & (np.abs(value) + allowed > _largest(problem.dtype.compute) / 4)
    if tail.activation in SMOOTH:
        free |= np.isneginf(value)  # -inf · 0: NaN as IEEE has it, or the limit
    if tail.activation is not Activation.NONE:
        compute_ulp = _ulp(value, problem.dtype.compute)
        allowed = SLOPE[tail.activation] * (allowed + compute_ulp / 2)
        _activate(value, tail.activation)
        allowed = allowed + _ulp(value, problem.out_dtype)
    # what underflows on the way loses units of the smallest fp32 (fp64) number
    tiny = 2.0**-140 if problem.dtype.compute is DType.FP32 else 2.0**-1060
    return Expected(value, allowed + _ulp(value, problem.out_dtype) / 2 + tiny, free)


def _activate(value: Wide, activation: Activation) -> None:
    if value.dtype != np.longdouble:
        activate(value, activation)
        return
    if activation is Activation.GELU:
        # scipy has no long double erf: fp64's own error is within the ulp that activations are allowed
        near = value.astype(np.float64)
        activate(near, activation)
        value[...] = near
        return
    activate(value, activation)


def _wide(x: Array, transposed: bool, wide: Any) -> Wide:
    x = typed(x).astype(wide)
    x = x if x.ndim == 3 else x[None]
    return x.transpose(0, 2, 1) if transposed else x


def _largest(dtype: DType) -> float:
    info: Any = ml_dtypes.finfo(NUMPY[dtype])  # type: ignore[no-untyped-call]
    return float(info.max)


def _ulp(value: Wide, dtype: DType) -> Wide:
    """Distance of neighbours of `dtype` around each value."""
    info: Any = ml_dtypes.finfo(NUMPY[dtype])  # type: ignore[no-untyped-call]
    _, exponent = np.frexp(np.where(np.isfinite(value), value, 0))
    step: Wide = np.ldexp(
        np.ones((), value.dtype), np.maximum(exponent - 1, int(info.minexp)) - int(info.nmant)
    )
    return step


def _compare(problem: Problem, got: Wide, want: Expected) -> Verdict:
    largest = _largest(problem.out_dtype)
    ref = want.value
    finite = np.isfinite(ref) & ~want.free
    error = np.where(finite, np.abs(got - ref), 0)
    # a value that may round past the largest number may be infinite, and the other way round
    near_top = finite & (np.abs(ref) + want.allowed >= largest)
    error = np.where(near_top & np.isinf(got) & (np.sign(got) == np.sign(ref)), 0, error)
    error = np.where(
        near_top & np.isfinite(got) & (np.abs(got) <= largest), np.minimum(error, want.allowed), error
    )
    share = np.where(error == 0, 0, error / want.allowed)
    share = np.where(np.isnan(share), np.inf, share)
    special = ~np.isfinite(ref) & ~want.free
    same = np.where(np.isnan(ref), np.isnan(got), got == ref)
    share = np.where(special & ~same, np.inf, share)
    worst = float(share.max(initial=0.0))
    norm = float(np.sqrt(np.sum(np.where(finite & ~near_top, ref, 0) ** 2)))
    gap = float(np.sqrt(np.sum(np.where(near_top, 0, error) ** 2)))
    relative = gap / norm if norm else gap
    if worst <= 1.0:
        return Verdict(True, worst, f"largest error is {worst:.2f} of what is allowed", relative)
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(share)), share.shape))
    wrong = int(np.count_nonzero(share > 1))
    seen = f"got {got[place]}, expected {ref[place]} ± {want.allowed[place]:.3g}"
    detail = f"{wrong} of {share.size} elements are wrong, worst at {place}: {seen}"
    return Verdict(False, worst, detail, relative)
