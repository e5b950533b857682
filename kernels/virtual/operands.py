"""Operands of tensor cores in shared memory: receives descriptors, hands on matrices in fp32 and the detector's places.

A descriptor of sm_90 names its swizzle in other bits than one of sm_100.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.virtual import tensormap
from kernels.virtual.detect import GRANULE
from kernels.virtual.issue import Issue
from kernels.virtual.report import Fault

if TYPE_CHECKING:
    from kernels.virtual.cta import Cta
    from kernels.virtual.machine import Machine

K_BYTES = 32  # bytes of K that one instruction consumes
_SPAN_100 = {0: 0, 2: 128, 4: 64, 6: 32}
_SPAN_90 = {0: 0, 1: 128, 2: 64, 3: 32}


@lru_cache(maxsize=4096)
def operand_chunks(
    descriptor: int, span: int, rows: int, item: int, mn_major: bool, width: int = K_BYTES
) -> np.ndarray:
    """Numbers of the 16-byte chunks of an operand: [rows, 2] along K, or [K, rows/8 (by item)] along M or N.

    `width`: bytes of a row along K, where an instruction takes another number of them.
    """
    start = (descriptor & 0x3FFF) << 4
    lbo = (descriptor >> 16 & 0x3FFF) << 4
    sbo = (descriptor >> 32 & 0x3FFF) << 4
    if not mn_major:
        row = np.arange(rows)[:, None]
        chunk = np.arange(width // 16)[None, :]
        if span:
            address = start + (row // 8) * sbo + (row % 8) * span + chunk * 16
        else:
            address = start + (row // 8) * sbo + (row % 8) * 16 + chunk * lbo
    else:
        k = np.arange(K_BYTES // item)[:, None]
        at = np.arange(rows * item // 16)[None, :] * 16  # bytes along M or N
        if span:
            address = start + (at // span) * lbo + (k // 8) * sbo + (k % 8) * span + at % span
        else:
            address = start + (at // 16) * lbo + (k // 8) * sbo + (k % 8) * 16
    return tensormap.swizzle(address, span) >> 4


@lru_cache(maxsize=4096)
def operand_granules(
    descriptor: int, span: int, rows: int, item: int, mn_major: bool, width: int = K_BYTES
) -> np.ndarray:
    """The detector's granules of an operand."""
    chunks = operand_chunks(descriptor, span, rows, item, mn_major, width)
    return (chunks[..., None] * (16 // GRANULE) + np.arange(16 // GRANULE)).ravel()


def unpacked(chunks: np.ndarray) -> np.ndarray:
    """Chunks of 16 packed values of 4 bits and padding, as 16 bytes with a value each in bits 2 to 5."""
    packed = chunks.view(np.uint8).reshape(*chunks.shape, 16)[..., :8]
    out = np.empty((*chunks.shape, 16), np.uint8)
    out[..., ::2], out[..., 1::2] = (packed & 15) << 2, packed >> 4 << 2
    return out.view(np.complex128)[..., 0]


class OperandMixin:
    """What instructions of tensor cores read from shared memory."""

    machine: Machine

    if TYPE_CHECKING:

        def fault(self, kind: str, text: str) -> Fault: ...
        def note(self, shadow: Any, place: Any, issue: Issue, *, write: bool) -> bool: ...

    def _operand(
        self, cta: Cta, descriptor: int, rows: int, dtype: Any, mn_major: bool, issue: Issue
    ) -> np.ndarray:
        """[rows, K] in fp32, from the shared memory of one CTA."""
        data = self._staged(cta, descriptor, rows, np.dtype(dtype).itemsize, mn_major, issue)
        values = data.view(dtype).reshape(data.shape[0], -1)
        out: np.ndarray = values.astype(np.float32)
        return out.T if mn_major else out

    def _staged(
        self,
        cta: Cta,
        descriptor: int,
        rows: int,
        item: int,
        mn_major: bool,
        issue: Issue,
        width: int = K_BYTES,
    ) -> np.ndarray:
        """Chunks of 16 bytes of an operand, as `operand_chunks` orders them."""
        key = (descriptor & 0x3FFF3FFF3FFF, self._layout(descriptor), rows, item, mn_major, width)
        if cta.gone:
            raise Fault("protocol", f"{issue.who} at {issue.where} reads a CTA that has exited")
        try:
            data: np.ndarray = cta.smem.views[16][operand_chunks(*key)]
        except IndexError as error:
            raise Fault("bounds", f"{issue.who} at {issue.where} reads beyond shared memory") from error
        if self.machine.detector is not None:
            self.note(cta.smem.with_shadow(), operand_granules(*key), issue, write=False)
        return data

    def _layout(self, descriptor: int) -> int:
        """Bytes of the swizzle that a descriptor names."""
        if self.machine.program.target.startswith("sm_9"):
            return _SPAN_90[descriptor >> 62]
        code = descriptor >> 61
        if code not in _SPAN_100:
            raise self.fault("protocol", f"a shared-memory descriptor of layout {code}")
        return _SPAN_100[code]
