"""tcgen05.mma and commit: receives instructions of a thread, hands on products in tensor memory and arrivals.

tcgen05 work is ordered, and committed, within its issuing thread only; the queues of different threads complete
independently. Sums are fp32, in NumPy's order, not the hardware's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from kernels.virtual.issue import Issue
from kernels.virtual.lanes import dot
from kernels.virtual.operands import K_BYTES
from kernels.virtual.report import Fault
from kernels.virtual.tmem import FREES, LANES, TmemMixin

if TYPE_CHECKING:
    from kernels.virtual.cta import Cta
    from kernels.virtual.memory import Span

_F16_TYPES = {0: np.float16, 1: ml_dtypes.bfloat16}
F8_TYPES = {0: ml_dtypes.float8_e4m3fn, 1: ml_dtypes.float8_e5m2}


def _lane_order(rows: int) -> np.ndarray:
    """Lanes of the rows of an accumulator with M = 64 in one CTA: row 16q+i in lane 32q+i."""
    row = np.arange(rows)
    return row if rows == LANES else 32 * (row // 16) + row % 16


class MmaMixin(TmemMixin):
    """What generated code calls to multiply with tcgen05."""

    if TYPE_CHECKING:

        def shared_span(self, address: int, size: int) -> tuple[Span, int]: ...

    def tc_mma(
        self,
        kind: str,
        d: Any,
        a: Any,
        b: Any,
        idesc: Any,
        enable: Any,
        pair: int,
        a_in_tmem: bool,
        disabled: tuple[Any, ...] = (),
    ) -> None:
        """tcgen05.mma: D = A·Bᵀ (+ D), operands in shared memory (A also in tensor memory)."""
        d, a, b, idesc, accumulate = (self._one(v) for v in (d, a, b, idesc, enable))
        if any(self._one(mask) for mask in disabled):
            raise self.fault("protocol", "an MMA that leaves out lanes is not modelled")
        issue, key = self._queue("tcgen05.mma")
        ctas = self._ctas(pair)
        m, n = (idesc >> 24 & 31) << 4, (idesc >> 17 & 63) << 3
        if (m, pair) not in ((64, 1), (128, 1), (128, 2), (256, 2)) or not 8 <= n <= 256 or n % (8 * pair):
            raise self.fault("protocol", f"an MMA of {m} x {n} by {pair} CTAs")
        if idesc >> 4 & 3 > 1:
            raise self.fault("protocol", "an accumulator other than fp32 and fp16")
        group = self

        def run() -> None:
            group._run_mma(kind, (d, a, b), idesc, bool(accumulate), ctas, (m, n), a_in_tmem, issue)

        work = ("mma", m, n, K_BYTES // 2 if kind == "f16" else K_BYTES, pair)
        self.machine.submit(run, "tensor core", issue, work, key)

    def _run_mma(
        self, kind: str, addresses: tuple[int, int, int], idesc: int, accumulate: bool, ctas: list[Cta],
        shape: tuple[int, int], a_in_tmem: bool, issue: Issue,
    ) -> None:  # fmt: skip
        d, a, b = addresses
        m, n = shape
        pair = len(ctas)
        type_a, type_b = _types(kind, idesc)
        left = [
            self._tmem_bytes(c, a, m // pair, issue).view(type_a).astype(np.float32)
            if a_in_tmem
            else self._operand(c, a, m // pair, type_a, bool(idesc >> 15 & 1), issue)
            for c in ctas
        ]
        right = [self._operand(c, b, n // pair, type_b, bool(idesc >> 16 & 1), issue) for c in ctas]
        self._multiply(left, right, d, idesc, accumulate, ctas, m, issue, half=not idesc >> 4 & 3)

    def _multiply(
        self, left: list[np.ndarray], right: list[np.ndarray], d: int, idesc: int, accumulate: bool,
        ctas: list[Cta], m: int, issue: Issue, *, half: bool,
    ) -> None:  # fmt: skip
        """The product of what each CTA supplies of A and B, into the accumulators of all."""
        pair = len(ctas)
        product = dot(np.concatenate(left), np.concatenate(right)) if pair == 2 else dot(left[0], right[0])
        if (idesc >> 13 ^ idesc >> 14) & 1:  # one of the two is negated
            product = -product
        for index, cta in enumerate(ctas):
            rows = product[index * (m // pair) : (index + 1) * (m // pair)]
            self._accumulate(cta, d, rows, accumulate, issue, split=(m, pair) == (128, 2), half=half)

    def _accumulate(
        self, cta: Cta, d: int, rows: np.ndarray, accumulate: bool, issue: Issue, *, split: bool, half: bool
    ) -> None:
        """Put rows of the product where the accumulator's layout has them; `half`: fp16 in the low half of a word."""
        column = d & 0xFFFF
        columns = rows.shape[1] // 2 if split else rows.shape[1]
        self._allocated(cta, column, columns, issue)
        if cta is not self.cta:
            cta.touch(issue.node, issue.who, issue.where)
        tmem = cta.tmem.view(np.float32)[:, column : column + columns]
        if split:  # lanes 0-63 hold the first half of the columns, 64-127 the second
            rows = np.concatenate([rows[:, :columns], rows[:, columns:]])
        lanes: Any = slice(0, LANES) if rows.shape[0] == LANES else _lane_order(rows.shape[0]) + (d >> 16)
        if half:
            words = cta.tmem[:, column : column + columns]
            old = words[lanes].astype(np.uint16).view(np.float16) if accumulate else np.float32(0)
            words[lanes] = (rows + old).astype(np.float16).view(np.uint16)
        elif accumulate:
            tmem[lanes] += rows
        else:
            tmem[lanes] = rows
        if self.machine.detector is not None and cta.freed_from is not None:
            self.machine.lint(cta.freed_from, FREES)
        self._note_columns(cta, column, columns, issue, write=True)

    def _tmem_bytes(self, cta: Cta, address: int, rows: int, issue: Issue) -> np.ndarray:
        """A from tensor memory, as bytes: rows in lanes."""
        column, words = address & 0xFFFF, K_BYTES // 4
        lanes: Any = slice(0, LANES) if rows == LANES else _lane_order(rows) + (address >> 16)
        return np.ascontiguousarray(self._columns(cta, column, words, issue)[lanes]).view(np.uint8)

    def tc_commit(self, address: Any, mask: Any, pair: int) -> None:
        """tcgen05.commit: an arrival once all that this thread has issued is done.

        The signal is under way when the thread's next commit sends its own, so it has a node of its own, which
        only who waits for this very barrier knows.
        """
        address = self._one(address)
        issue, key = self._queue("tcgen05.commit")
        ranks = [r for r in range(16) if self._one(mask) >> r & 1] if mask is not None else [address >> 24]
        for rank in ranks:
            self.shared_span(rank << 24 | address & 0xFFFFFF, 8)
        group = self
        detector = self.machine.detector
        signal = 0 if detector is None else detector.node()

        def run() -> None:
            for rank in ranks:
                cta = group.cta.cluster.member(rank)
                if cta is None or cta.gone:
                    raise Fault(
                        "protocol", f"{issue.who} at {issue.where} signals CTA {rank}, which has exited"
                    )
                if cta is not group.cta:
                    cta.touch(issue.node, issue.who, issue.where)
                    cta.signals.setdefault(signal, issue)
                barrier = cta.mbarriers.get(address & 0xFFFFFF)
                if barrier is None:
                    raise Fault(
                        "barrier", f"{issue.who} at {issue.where}: no mbarrier at {address & 0xFFFFFF:#x}"
                    )
                clock = issue.clock if detector is None else (issue.clock[0] | 1 << signal, issue.clock[1])
                group.machine.arrive(barrier, 1, clock, f"{issue.who} at {issue.where}")

        self.machine.submit(run, "tensor core", issue, ("commit",), key)


def _types(kind: str, idesc: int) -> tuple[Any, Any]:
    """Element types of A and B."""
    a, b = idesc >> 7 & 7, idesc >> 10 & 7
    if kind == "f16":
        return _F16_TYPES[a], _F16_TYPES[b]
    if kind == "tf32":
        return np.float32, np.float32
    if a not in F8_TYPES or b not in F8_TYPES:
        raise Fault("protocol", f"element types {a} and {b} of kind {kind}")
    return F8_TYPES[a], F8_TYPES[b]
