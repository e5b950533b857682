"""fp32 products whose bits depend on no library: receives A and B, hands on A·B.

Each element is a function of its row and column alone. The product is computed in fp64, where products of
fp32 (and of halves) are exact, and rounded once to fp32. Whatever order the library sums in,
|v - exact| ≤ γ·‖a_i‖·‖b_j‖ =: e (Cauchy-Schwarz, γ = K·2⁻⁵³). An element v that rounds to the same number
anywhere within ±2e has its exact value at least e away from a rounding boundary, so every sum of that
accuracy rounds to that number. The few others (about 1 in 10³ at K = 1024) are summed again in one fixed
order, elementwise, whose error is below e as well: so an element that one call flags and another does not
still gets the same bits from both. Rounding on to a half is a monotone step more, and fewer are flagged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.elementwise import Array, narrow, widen
from kernels.scratch import scratch

F64 = np.dtype(np.float64)
Matmul = Callable[[Array, Array, Array], None]

BLOCK_ELEMENTS = 1 << 21  # fp64 elements of a block of A or B: 16 MiB, bounds what is allocated
SETTLE_ELEMENTS = 1 << 17  # fp64 terms summed again at a time: 1 MiB, stays in L2
TIGHTEN_SHARE = 16  # with more than 1/16 flagged, a bound by |A|·|B| pays for a second product
TRANSPOSE_SHARE = 4  # with more flagged than N/4, reading B's columns pays for transposing it


def product(a: Array, b: Array, out: Array, matmul: Matmul, b_wide: Array | None = None) -> None:
    """Write A·B into `out` [M, N], fp32 or a half (by way of fp32). `b_wide` is B by `wide_columns`, if kept.

    matmul(a64, b64, out64) may sum along K in any order, with or without FMA.
    """
    m, k = a.shape
    n = b.shape[1]
    rows = _block(m, max(k, min(n, 1024)))
    for right in _slices(n, n if b_wide is not None else _block(n, k)):
        panel = _Panel(_wide("b", b[:, right]) if b_wide is None else b_wide, matmul)
        for down in _slices(m, rows):
            panel.round(_wide("a", a[down]), out[down, right])


def wide_columns(b: Array) -> Array:
    """B [K, N] in fp64, stored by columns: the form that `product` reads fastest when it can be kept."""
    return _transposed(widen(b, F64)).T


def _wide(name: str, x: Array) -> Array:
    """`x` in fp64 and dense; read where it lies if it is so already."""
    if x.dtype == F64 and (x.flags.c_contiguous or x.T.flags.c_contiguous):
        return x
    room = scratch(f"exact-{name}", x.shape, F64)
    np.copyto(room, widen(x, np.dtype(np.float32)) if x.dtype.itemsize == 2 else x)
    return room


def _transposed(x: Array) -> Array:
    """x.T, dense; by tiles, since columns of a power of two apart share cache lines' places."""
    if x.T.flags.c_contiguous:
        return x.T
    rows, columns = x.shape
    out = np.empty((columns, rows), x.dtype)
    for down in _slices(rows, 32):
        for right in _slices(columns, 32):
            out[right, down] = x[down, right].T
    return out


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


class _Panel:
    """Columns of B in fp64, and what is known of them."""

    def __init__(self, b64: Array, matmul: Matmul) -> None:
        self.b64 = b64
        self.matmul = matmul
        self.reach, self.finite = _norms(b64, axis=0)
        self.reach *= 2 * _gamma(len(b64))

    def round(self, a64: Array, out: Array) -> None:
        """Write the block a64·b64 into `out`."""
        shape = (a64.shape[0], self.b64.shape[1])
        value, reach = scratch("exact-value", shape, F64), scratch("exact-reach", shape, F64)
        self.matmul(a64, self.b64, value)
        norms, finite = _norms(a64, axis=1)
        np.multiply(norms[:, None], self.reach, out=reach)
        flagged = _straddles(value, reach, out)
        if not (finite and self.finite):
            nan = np.isnan(value)
            flagged &= ~nan
            out[nan] = np.nan
        where = np.flatnonzero(flagged)
        if where.size * TIGHTEN_SHARE > value.size:
            where = self._tighten(a64, value, where, out)
        if where.size:
            self._settle(a64, where, out)

    def _tighten(self, a64: Array, value: Array, where: NDArray[np.intp], out: Array) -> NDArray[np.intp]:
        """Of the flagged elements, those that stay so with e = γ·(|a_i|·|b_j|); others are rounded to `out`.

        Sparse and structured data, whose sums are exact zeros by the thousand, clear here.
        """
        total = np.empty_like(value)
        self.matmul(np.abs(a64), np.abs(self.b64), total)
        reach = total.ravel()[where] * (2 * _gamma(len(self.b64)))
        reach[~np.isfinite(reach)] = 0.0
        low = np.empty(where.shape, out.dtype)
        straddling = _straddles(value.ravel()[where], reach, low)
        i, j = np.divmod(where, value.shape[1])
        out[i, j] = low
        kept: NDArray[np.intp] = where[straddling]
        return kept

    def _settle(self, a64: Array, where: NDArray[np.intp], out: Array) -> None:
        """Sum the flagged elements again in a fixed order."""
        k, n = self.b64.shape
        if where.size * TRANSPOSE_SHARE > n:
            self.b64 = _transposed(self.b64).T
        step = max(1, SETTLE_ELEMENTS // k)
        for start in range(0, where.size, step):
            i, j = np.divmod(where[start : start + step], n)
            terms = scratch("exact-terms", (len(i), k), F64)
            np.take(a64, i, axis=0, out=terms, mode="clip")
            terms *= self.b64.T[j]
            sums = halved_sum(terms).astype(np.float32)
            sums += np.float32(0)
            settled = np.empty(sums.shape, out.dtype)
            narrow(sums, settled)
            out[i, j] = settled


def _straddles(value: Array, reach: Array, out: Array) -> NDArray[np.bool_]:
    """Round value - reach into `out`; True where value + reach rounds to another number of its type."""
    fp32 = np.dtype(np.float32)
    straight = out.dtype == fp32
    low = out if straight else scratch("exact-low", value.shape, fp32)
    high = scratch("exact-high", value.shape, fp32)
    for edge, at in ((np.subtract, low), (np.add, high)):
        edge(value, reach, out=at, casting="same_kind")
        np.add(at, np.float32(0), out=at)  # one zero: the sign of an underflowed sum depends on its order
    if straight:
        return low != high  # type: ignore[no-any-return]
    narrow(low, out)
    other = np.empty(out.shape, out.dtype)
    narrow(high, other)
    return out.view(np.uint16) != other.view(np.uint16)  # type: ignore[no-any-return]


def halved_sum(terms: NDArray[Any]) -> NDArray[Any]:
    """Sum along the last axis by adding halves, elementwise: log2 K roundings. `terms` is used up."""
    width: int = terms.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        terms[..., : width - half] += terms[..., half:width]
        width = half
    return terms[..., 0]
