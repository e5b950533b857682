"""fp32 products whose bits depend on no library: receives A and B, hands on A·B.

Each element is a function of its row and column alone. The product is computed in fp64, where products of fp32
(and of halves) are exact, and rounded once to fp32. Whatever order the library sums in, |v - exact| ≤ γ·‖a_i‖·‖b_j‖ =: e (Cauchy-Schwarz, γ = K·2⁻⁵³). An element v
that rounds to the same fp32 number anywhere within ±2e has its exact value at least e away from a rounding
boundary, so every sum of that accuracy rounds to the same number. The few others (about 1 in 10⁴ at K = 1024)
are summed again in one fixed order, elementwise, whose error is below e as well: so an element that one call
flags and another does not still gets the same bits from both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.elementwise import Array, widen

F64 = np.dtype(np.float64)
Matmul = Callable[[Array, Array, Array], None]

BLOCK_ELEMENTS = 1 << 21  # fp64 elements of a block of A or B: 16 MiB, bounds what is allocated
TIGHTEN_FRACTION = 1 / 512  # flagged share above which a bound by |A|·|B| pays for a second product


def product(a: Array, b: Array, out: Array, matmul: Matmul, b_wide: Array | None = None) -> None:
    """Write A·B into `out` [M, N] fp32. `b_wide` is B in fp64 where a caller keeps it.

    matmul(a64, b64, out64) may sum along K in any order, with or without FMA.
    """
    m, k = a.shape
    n = b.shape[1]
    gamma = _gamma(k)
    rows = _block(m, max(k, min(n, 1024)))
    columns = n if b_wide is not None else _block(n, k)
    for right in _slices(n, columns):
        b64 = np.ascontiguousarray(widen(b[:, right], F64)) if b_wide is None else b_wide
        b_norm, b_finite = _norms(b64, axis=0)
        for down in _slices(m, rows):
            a64 = np.ascontiguousarray(widen(a[down], F64))
            a_norm, a_finite = _norms(a64, axis=1)
            _round_block(
                a64,
                b64,
                (2 * gamma * a_norm)[:, None],
                b_norm,
                out[down, right],
                matmul,
                a_finite and b_finite,
            )


def _gamma(k: int) -> float:
    """Relative error of K products summed in any order; 1.01 covers the roundings of norms and of v ± 2e."""
    return (k + 16) * 2.0**-53 * 1.01


def _block(length: int, across: int) -> int:
    return max(64, min(length, BLOCK_ELEMENTS // max(across, 1)))


def _slices(length: int, block: int) -> Iterator[slice]:
    return (slice(start, min(start + block, length)) for start in range(0, length, block))


def _norms(x: Array, axis: int) -> tuple[NDArray[np.float64], bool]:
    """Euclidean norms; 0 for rows that hold NaN or infinity (their elements are the same in every order)."""
    squares = np.einsum("ij,ij->i" if axis == 1 else "ij,ij->j", x, x)
    finite = np.isfinite(squares)
    everywhere = bool(finite.all())
    return np.sqrt(squares if everywhere else np.where(finite, squares, 0.0)), everywhere


def _round_block(
    a64: Array,
    b64: Array,
    reach_a: Array,
    reach_b: Array,
    out: Array,
    matmul: Matmul,
    finite: bool,
) -> None:
    value = np.empty((a64.shape[0], b64.shape[1]), F64)
    matmul(a64, b64, value)
    reach = reach_a * reach_b
    flagged = _straddles(value, reach, out)
    if not finite:
        nan = np.isnan(value)
        flagged &= ~nan
        out[nan] = np.nan
    where = np.flatnonzero(flagged)
    if where.size > TIGHTEN_FRACTION * value.size:
        where = _tighten(a64, b64, value, where, matmul, out)
    if where.size:
        _settle(a64, b64, where, out)


def _straddles(value: Array, reach: Array, low: Array) -> NDArray[np.bool_]:
    """Round value - reach into `low`; True where value + reach rounds to another fp32 number."""
    high = np.empty(value.shape, np.float32)
    np.subtract(value, reach, out=low, casting="same_kind")
    np.add(value, reach, out=high, casting="same_kind")
    np.add(low, np.float32(0), out=low)  # one zero: the sign of an underflowed sum depends on its order
    return np.not_equal(low, high)


def _tighten(
    a64: Array, b64: Array, value: Array, where: NDArray[np.intp], matmul: Matmul, out: Array
) -> NDArray[np.intp]:
    """Of the flagged elements, those that stay so with e = γ·(|a_i|·|b_j|); the others are rounded to `out`.

    Sparse and structured data, whose sums are exact zeros by the thousand, clear here.
    """
    total = np.empty_like(value)
    matmul(np.abs(a64), np.abs(b64), total)
    reach = total.ravel()[where] * (2 * _gamma(a64.shape[1]))
    reach[~np.isfinite(reach)] = 0.0
    low = np.empty(where.shape, np.float32)
    straddling = _straddles(value.ravel()[where], reach, low)
    i, j = np.divmod(where, value.shape[1])
    out[i, j] = low
    return where[straddling]


def _settle(a64: Array, b64: Array, where: NDArray[np.intp], out: Array) -> None:
    """Sum the flagged elements again in a fixed order: halves are added, so log2 K roundings an element."""
    k, n = b64.shape
    step = max(1, BLOCK_ELEMENTS // k)
    for start in range(0, where.size, step):
        i, j = np.divmod(where[start : start + step], n)
        terms = a64[i]
        terms *= b64.T[j]
        out[i, j] = halved_sum(terms) + 0.0


def halved_sum(terms: NDArray[Any]) -> NDArray[Any]:
    """Sum along the last axis by adding halves, elementwise; `terms` is used up."""
    width: int = terms.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        terms[..., : width - half] += terms[..., half:width]
        width = half
    return terms[..., 0]
