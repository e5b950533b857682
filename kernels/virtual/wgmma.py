"""wgmma: receives instructions of a warp, hands on accumulators in its registers.

It computes when it is issued; that its operands stay until it is waited for is the detector's to check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from kernels.virtual.issue import Issue
from kernels.virtual.lanes import dot
from kernels.virtual.operands import K_BYTES, OperandMixin

if TYPE_CHECKING:
    from kernels.virtual.cta import Cta
    from kernels.virtual.warp import Warp


class WgmmaMixin(OperandMixin):
    """What generated code calls to use wgmma."""

    warp: Warp
    cta: Cta
    at: int

    if TYPE_CHECKING:

        def where(self) -> str: ...
        def _one(self, value: Any) -> int: ...

    def wg_fence(self) -> None:
        """wgmma.fence: registers are in order here."""

    def wg_commit(self) -> None:
        """wgmma.commit_group."""
        self.warp.wg_groups.append(self.warp.wg_open)
        self.warp.wg_done.append(0.0)
        self.warp.wg_open = 0

    def wg_wait(self, newest: int) -> bool:
        """wgmma.wait_group: the operands of older groups may be overwritten from here on."""
        groups = self.warp.wg_groups
        count = max(len(groups) - newest, 0)
        for bits in groups[:count]:
            self.warp.clock = (self.warp.clock[0] | bits, self.warp.clock[1])
        if self.machine.timing is not None and count:
            self.warp.not_before(max(self.warp.wg_done[:count]))
        del groups[:count], self.warp.wg_done[:count]
        return True

    def wg_mma(
        self, types: tuple[str, ...], n: int, acc: tuple[Any, ...], a: Any, b: int, enable: Any, sign: int,
        trans_a: int, trans_b: int,
    ) -> np.ndarray:  # fmt: skip
        """wgmma.mma_async: this warp's 16 of the 64 rows."""
        dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32}[types[1]]
        issue = self._wg_issue()
        if self.machine.timing is not None:
            self.warp.wg_done[-1] = self.machine.timing.warp_product(self.warp, n, K_BYTES // 2)
        if isinstance(a, tuple):
            left = _fragment(a, dtype)
        else:
            whole = self._operand(self.cta, self._one(a), 64, dtype, bool(trans_a), issue)
            quarter = self.warp.index % 4
            left = whole[16 * quarter : 16 * quarter + 16]
        right = self._operand(self.cta, self._one(b), n, dtype, bool(trans_b), issue)
        product = dot(left, right)
        if sign < 0:
            product = -product
        if types[0] != "f32":
            raise self.fault("protocol", "wgmma with an fp16 accumulator is not modelled")
        fresh = product.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(n // 2, 32)
        if self._one(enable):
            old = np.empty((n // 2, 32), np.uint32)
            for row, value in zip(old, acc, strict=True):
                row[:] = value
            total: np.ndarray = old.view(np.float32) + fresh
            return total.view(np.uint32)
        return np.ascontiguousarray(fresh).view(np.uint32)

    def _wg_issue(self) -> Issue:
        detector = self.machine.detector
        if detector is None:
            return Issue("", self.at, "", 0, (0, 0), self.warp)
        warp = self.warp
        if not warp.wg_open:
            warp.wg_open = 1 << detector.node()
        node = warp.wg_open.bit_length() - 1
        clock = (warp.clock[0] | warp.wg_open, warp.clock[1])
        return Issue(f"wgmma of {warp}", self.at, self.where(), node, clock)


def _fragment(registers: tuple[Any, ...], dtype: Any) -> np.ndarray:
    """A of wgmma from registers: 16 rows by 32 bytes of K."""
    stacked = np.empty((4, 32), np.uint32)
    for row, value in zip(stacked, registers, strict=True):
        row[:] = value
    per = 4 // np.dtype(dtype).itemsize
    values = stacked.view(dtype).reshape(2, 2, 8, 4, per)  # K half, row half, row, lane, element
    out: np.ndarray = values.transpose(1, 2, 0, 3, 4).reshape(16, 8 * per).astype(np.float32)
    return out
