"""Block-scaled tcgen05.mma: receives instructions of a thread, hands on products of scaled operands.

Each row of A and each column of B has one scale for 32 or 16 values of K. Scales lie in tensor memory, as tcgen05.cp
puts them there: row r in lane r % 32 and column r / 32, the same in all four quarters of the lanes; where an
accumulator has the second half of N in lanes 64 to 127, so have the scales of B. Values of 4 bits are E2M1.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from kernels.virtual.issue import Issue
from kernels.virtual.lanes import dot
from kernels.virtual.mma import F8_TYPES, MmaMixin
from kernels.virtual.operands import K_BYTES, unpacked
from kernels.virtual.report import Fault
from kernels.virtual.tmem import LANES

E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_E2M1_CODE = 5  # of kind mxf8f6f4, in the instruction descriptor
_SCALE_TYPES = {0: ml_dtypes.float8_e4m3fn, 1: ml_dtypes.float8_e8m0fnu}


class BlockScaleMixin(MmaMixin):
    """What generated code calls to multiply with scales."""

    def tc_mma_scaled(
        self, packed: bool, vector: int, d: Any, a: Any, b: Any, idesc: Any, scales: tuple[Any, Any], enable: Any,
        pair: int, a_in_tmem: bool,
    ) -> None:  # fmt: skip
        """tcgen05.mma.block_scale: D = (A·scale)·(B·scale)ᵀ (+ D), K-major.

        `packed`: two values of 4 bits a byte, else one value a byte. `vector`: scales a row for one instruction.
        """
        d, a, b, idesc, accumulate = (self._one(v) for v in (d, a, b, idesc, enable))
        first, second = (self._one(v) for v in scales)
        issue, key = self._queue("tcgen05.mma")
        ctas = self._ctas(pair)
        m, n = (idesc >> 27 & 3) << 7, (idesc >> 17 & 63) << 3
        self._check_scaled(idesc, m, n, pair, packed, vector)
        scale_type = _SCALE_TYPES[idesc >> 23 & 1]
        codes = (0, 0) if packed else (idesc >> 7 & 7, idesc >> 10 & 7)
        shifts = (8 * (idesc >> 29 & 3), 8 * (idesc >> 4 & 3))
        split = (m, pair) == (128, 2)
        group = self

        def run() -> None:
            left, right = [], []
            for cta in ctas:
                if a_in_tmem:
                    values = _holders(group._tmem_bytes(cta, a, m // pair, issue), codes[0])
                else:
                    values = group._values(cta, a, m // pair, packed, codes[0], issue)
                scale = group._scales(
                    cta, first, m // pair, vector, shifts[0], scale_type, issue, split=False
                )
                left.append(values * np.repeat(scale, values.shape[1] // vector, axis=1))
            columns = [group._values(cta, b, n // pair, packed, codes[1], issue) for cta in ctas]
            whole = np.concatenate(columns)
            for cta in ctas:  # each has the scales of all of N
                scale = group._scales(cta, second, n, vector, shifts[1], scale_type, issue, split=split)
                right.append(whole * np.repeat(scale, whole.shape[1] // vector, axis=1))
            sign = -1 if (idesc >> 13 ^ idesc >> 14) & 1 else 1
            for cta, rows, factor in zip(ctas, left, right, strict=True):
                group._accumulate(
                    cta, d, sign * dot(rows, factor), bool(accumulate), issue, split=split, half=False
                )

        work = ("mma", m, n, 2 * K_BYTES if packed else K_BYTES, pair)
        self.machine.submit(run, "tensor core", issue, work, key)

    def _check_scaled(self, idesc: int, m: int, n: int, pair: int, packed: bool, vector: int) -> None:
        if (m, pair) not in ((128, 1), (128, 2), (256, 2)) or not 8 <= n <= 256 or n % (8 * pair):
            raise self.fault("protocol", f"a block-scaled MMA of {m} x {n} by {pair} CTAs")
        if idesc >> 15 & 3 or idesc >> 2 & 1 or idesc >> 31:
            raise self.fault(
                "protocol", "an operand that is not K-major, sparse, or of another K is not modelled"
            )
        if idesc >> 23 & 1 == 0 and (not packed or vector != 4):
            raise self.fault("protocol", "scales of type UE4M3 go with 16 values of 4 bits")
        if packed and (idesc >> 7 & 7 != 1 or idesc >> 10 & 3 != 1):
            raise self.fault("protocol", "values of 4 bits are E2M1")
        for name in (idesc >> 29 & 3, idesc >> 4 & 3):
            if name % vector:
                raise self.fault("protocol", f"scale factor ID {name} with {vector} scales a row")

    def _values(
        self, cta: Any, descriptor: int, rows: int, packed: bool, code: int, issue: Issue
    ) -> np.ndarray:
        """[rows, K] in fp32, from shared memory."""
        data = self._staged(cta, descriptor, rows, 1, False, issue)
        if packed:
            each = data.view(np.uint8).reshape(rows, K_BYTES)
            nibbles = np.stack([each & 15, each >> 4], axis=-1).reshape(rows, 2 * K_BYTES)
            out: np.ndarray = E2M1[nibbles]
            return out
        if code == _E2M1_CODE:
            data = unpacked(data)
        return _holders(data.view(np.uint8).reshape(rows, K_BYTES), code)

    def _scales(
        self,
        cta: Any,
        address: int,
        rows: int,
        vector: int,
        shift: int,
        dtype: Any,
        issue: Issue,
        *,
        split: bool,
    ) -> np.ndarray:
        """[rows, vector] in fp32: bytes from `shift` bits up of the words that rows have in tensor memory."""
        if split:  # the second half of the rows has lanes of its own
            halves = [
                self._quarters(cta, address, rows // 2, slice(64 * h, 64 * h + 64), issue) for h in range(2)
            ]
            words = np.concatenate(halves)
        else:
            words = self._quarters(cta, address, rows, slice(0, LANES), issue)
        raw = (words[:, None] >> (shift + 8 * np.arange(vector, dtype=np.uint32))).astype(np.uint8)
        out: np.ndarray = raw.view(dtype).astype(np.float32)
        return out

    def _quarters(self, cta: Any, address: int, rows: int, lanes: slice, issue: Issue) -> np.ndarray:
        """A word a row; its copies in the quarters that `lanes` span have to agree."""
        columns = -(-rows // 32)
        block = self._columns(cta, address & 0xFFFF, columns, issue)[lanes].reshape(-1, 32, columns)
        words: np.ndarray = block.transpose(0, 2, 1).reshape(block.shape[0], -1)[:, :rows]
        if (words != words[0]).any():
            raise Fault(
                "tensor memory",
                f"{issue.who} at {issue.where}: scale factors that differ between the quarters of tensor memory",
            )
        out: np.ndarray = words[0]
        return out


def _holders(data: np.ndarray, code: int) -> np.ndarray:
    """Values of one byte each: fp8, or E2M1 in bits 2 to 5."""
    if code != _E2M1_CODE and code not in F8_TYPES:
        raise Fault("protocol", f"element type {code} of a block-scaled MMA is not modelled")
    out: np.ndarray = (
        E2M1[data >> 2 & 15] if code == _E2M1_CODE else data.view(F8_TYPES[code]).astype(np.float32)
    )
    return out
