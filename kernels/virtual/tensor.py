"""Tensor cores: receives tcgen05 and wgmma instructions of a group, hands on operations over shared and
tensor memory.

tcgen05 work is ordered, and committed, within its issuing thread only; the queues of different threads
complete independently. wgmma computes when it is issued; that its operands stay until it is waited for is the
detector's to check. Sums are fp32, in NumPy's order, not the hardware's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from kernels.virtual import tensormap
from kernels.virtual.copies import Issue
from kernels.virtual.detect import GRANULE
from kernels.virtual.report import Fault

if TYPE_CHECKING:
    from kernels.virtual.barriers import MBarrier
    from kernels.virtual.machine import Cta, Machine
    from kernels.virtual.memory import Span
    from kernels.virtual.warp import Warp

LANES, COLUMNS = 128, 512  # of a CTA's tensor memory, in words of four bytes
K_BYTES = 32  # bytes of K that one instruction consumes
_FREES = "frees columns of a pair, and nothing orders that after what the other CTA does with them"
_SPAN_100 = {0: 0, 2: 128, 4: 64, 6: 32}
_SPAN_90 = {0: 0, 1: 128, 2: 64, 3: 32}
_F16_TYPES = {0: np.float16, 1: ml_dtypes.bfloat16}
_F8_TYPES = {0: ml_dtypes.float8_e4m3fn, 1: ml_dtypes.float8_e5m2}


@lru_cache(maxsize=4096)
def operand_chunks(descriptor: int, span: int, rows: int, item: int, mn_major: bool) -> np.ndarray:
    """Numbers of the 16-byte chunks of an operand: [rows, 2] along K, or [K, rows/8 (by item)] along M or N."""
    start = (descriptor & 0x3FFF) << 4
    lbo = (descriptor >> 16 & 0x3FFF) << 4
    sbo = (descriptor >> 32 & 0x3FFF) << 4
    if not mn_major:
        row = np.arange(rows)[:, None]
        chunk = np.arange(K_BYTES // 16)[None, :]
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
def operand_granules(descriptor: int, span: int, rows: int, item: int, mn_major: bool) -> np.ndarray:
    """The detector's granules of an operand."""
    chunks = operand_chunks(descriptor, span, rows, item, mn_major)
    return (chunks[..., None] * (16 // GRANULE) + np.arange(16 // GRANULE)).ravel()


def _lane_order(rows: int) -> np.ndarray:
    """Lanes of the rows of an accumulator with M = 64 in one CTA: row 16q+i in lane 32q+i."""
    row = np.arange(rows)
    return row if rows == LANES else 32 * (row // 16) + row % 16


class TensorMixin:
    """What generated code calls to use tensor cores and tensor memory."""

    warp: Warp
    cta: Cta
    machine: Machine
    mask: np.ndarray
    leader: int
    lanes: int
    at: int

    if TYPE_CHECKING:

        def block(self, why: Any) -> None: ...
        def where(self) -> str: ...
        def fault(self, kind: str, text: str) -> Fault: ...
        def issue(self, what: str) -> Issue: ...
        def note(self, shadow: Any, place: Any, issue: Issue, *, write: bool) -> bool: ...
        def shared_span(self, address: int, size: int) -> tuple[Span, int]: ...
        def _mbarrier(self, address: Any) -> MBarrier: ...
        def _one(self, value: Any) -> int: ...
        def store_shared(self, address: Any, size: int, values: tuple[Any, ...]) -> None: ...

    # --- tensor memory ----------------------------------------------------------------------------

    def tc_alloc(self, address: int, columns: int, pair: int) -> bool:
        """tcgen05.alloc: the address is written to shared memory."""
        if columns not in (32, 64, 128, 256, 512):
            raise self.fault("tensor memory", f"allocates {columns} columns")
        if self.cta.relinquished:
            raise self.fault("tensor memory", "allocates after relinquish_alloc_permit")
        used = self.cta.tmem_used
        for first in range(0, COLUMNS, columns):
            if not used[first : first + columns].any():
                used[first : first + columns] = True
                self.cta.tmem_blocks[first] = columns
                self.store_shared(address, 4, (first,))
                self.machine.progress += 1
                return True
        self.block(self.cta)
        return False

    def tc_dealloc(self, address: int, columns: int, pair: int) -> bool:
        """tcgen05.dealloc. That of a pair (cta_group::2) is for both CTAs: neither should use it any more."""
        first = self._one(address) & 0xFFFF
        if self.cta.tmem_blocks.get(first) != columns:
            raise self.fault(
                "tensor memory", f"frees {columns} columns at {first}, which were not allocated so"
            )
        detector = self.machine.detector
        if detector is not None:
            number = detector.access(self.warp.node, self.at, False, str(self.warp), self.where())
            place = (slice(None), slice(first, first + columns))
            self.cta.tmem_users = detector.users(self.cta.tmem_shadow(), place)
            detector.write(self.cta.tmem_shadow(), place, number, self.warp.clock)
            if pair == 2:
                self._free_of_pair(place)
        self.cta.tmem_used[first : first + columns] = False
        del self.cta.tmem_blocks[first]
        self.machine.wake(self.cta)
        return True

    def _free_of_pair(self, place: Any) -> None:
        """A lint where the other CTA's uses of its memory are not known to be over: before this, or still to come."""
        detector, peer = self.machine.detector, self.cta.cluster.member(self.cta.rank ^ 1)
        if detector is None or peer is None:
            return
        users = peer.tmem_users or detector.users(peer.tmem_shadow(), place)
        if any(not detector.known(number, self.warp.clock) for number in users):
            self.machine.lint(self.at, _FREES)
        peer.freed_from = self.at

    def tc_relinquish(self) -> None:
        """tcgen05.relinquish_alloc_permit."""
        self.cta.relinquished = True

    def _allocated(self, cta: Cta, first: int, columns: int, issue: Issue | None = None) -> None:
        if first + columns > COLUMNS or not cta.tmem_used[first : first + columns].all():
            who = f"{issue.who} at {issue.where}" if issue and issue.who else f"{self.warp} at {self.where()}"
            text = (
                f"{who}: columns {first} to {first + columns} of CTA {cta.label} are not allocated (any more)"
            )
            raise Fault("tensor memory", text)

    def _tile(self, address: int, shape: str, count: int) -> tuple[np.ndarray, int, int]:
        """Lanes of this warp's quarter, first column and number of columns of a load or store."""
        quarter = self.warp.index % 4
        lane, column = address >> 16, address & 0xFFFF
        if lane // 32 not in (0, quarter) and lane:
            raise self.fault(
                "tensor memory", f"reaches lane {lane}; warp {self.warp.index} has quarter {quarter}"
            )
        within = lane % 32
        columns = {"32x32b": count, "16x128b": 4 * count, "16x256b": 8 * count}[shape]
        rows = 32 if shape == "32x32b" else 16
        if within + rows > 32:
            raise self.fault("alignment", f"lane {lane} for shape {shape}")
        self._allocated(self.cta, column, columns)
        return np.arange(32 * quarter + within, 32 * quarter + within + rows), column, columns

    def tc_load(self, address: Any, shape: str, count: int, halves: bool = False) -> np.ndarray:
        """tcgen05.ld: one row of 32 lanes a register; `halves`: the low halves of two columns in each."""
        lanes, column, columns = self._tile(self._one(address), shape, 2 * count if halves else count)
        low, high = int(lanes[0]), int(lanes[-1]) + 1
        self._note_tmem(low, high, column, columns, write=False)
        if self.machine.timing is not None:
            done = self.machine.timing.tensor_read(self.warp, (high - low) * columns * 4)
            self.warp.tc_done = max(self.warp.tc_done, done)
        block = self.cta.tmem[low:high, column : column + columns]
        if halves:
            block = (block[:, ::2] & np.uint32(0xFFFF)) | (block[:, 1::2] << np.uint32(16))
        return np.ascontiguousarray(_to_registers(block, shape))

    def tc_store(self, address: Any, shape: str, count: int, values: tuple[Any, ...]) -> None:
        """tcgen05.st."""
        lanes, column, columns = self._tile(self._one(address), shape, count)
        low, high = int(lanes[0]), int(lanes[-1]) + 1
        registers = np.empty((len(values), 32), np.uint32)
        for row, value in zip(registers, values, strict=True):
            row[:] = value
        self.cta.tmem[low:high, column : column + columns] = _from_registers(registers, shape)
        self._note_tmem(low, high, column, columns, write=True)

    def _note_tmem(self, low: int, high: int, column: int, columns: int, *, write: bool) -> None:
        """Loads and stores count as done only from their wait on: until then they have a node of their own."""
        detector = self.machine.detector
        if detector is None:
            return
        if self.cta.freed_from is not None:
            self.machine.lint(self.cta.freed_from, _FREES)
        warp = self.warp
        if self.machine.program.unwaited:  # a lint; the compiler is taken to wait before the first use
            number = detector.access(warp.node, self.at, False, str(warp), self.where())
            place = (slice(low // 16, high // 16), slice(column, column + columns))
            (detector.write if write else detector.read)(self.cta.tmem_shadow(), place, number, warp.clock)
            return
        if not warp.tc_reads:
            warp.tc_reads = 1 << detector.node()
        node = warp.tc_reads.bit_length() - 1
        number = detector.access(node, self.at, False, str(warp), self.where())
        clock = (warp.clock[0] | warp.tc_reads, warp.clock[1])
        place = (slice(low // 16, high // 16), slice(column, column + columns))
        (detector.write if write else detector.read)(self.cta.tmem_shadow(), place, number, clock)

    def tc_wait(self, what: str) -> bool:
        """tcgen05.wait::ld and wait::st."""
        timing = self.machine.timing
        if timing is not None and self.warp.tc_done:
            # others ask the engine first if their time comes first: this warp must not run ahead
            timing.wake(self.warp, self.warp.tc_done)
            self.warp.tc_done = 0.0
            self.block(self.warp)
            return False
        if self.warp.tc_reads:
            self.warp.clock = (self.warp.clock[0] | self.warp.tc_reads, self.warp.clock[1])
            self.warp.tc_reads = 0
        return True

    def tc_fence(self, which: str) -> None:
        """tcgen05.fence: order between threads follows from barriers here."""

    # --- tcgen05.mma ------------------------------------------------------------------------------

    def _queue(self, what: str) -> tuple[Issue, Any]:
        """A place in the issuing thread's queue: what it issued before comes first."""
        if self.lanes != 1:
            raise self.fault("protocol", f"{what} by {self.lanes} lanes at once; one thread issues it")
        key = (self.cta.label, self.warp.index, self.leader)
        issue = self.issue(what)
        if self.machine.detector is not None:
            before = self.warp.tc_nodes.get(self.leader, 0)
            self.warp.tc_nodes[self.leader] = before | 1 << issue.node
            issue.clock = (issue.clock[0] | before, issue.clock[1])
        return issue, key

    def _ctas(self, pair: int) -> list[Cta]:
        if pair == 1:
            return [self.cta]
        even = self.cta.rank & ~1
        members = [self.cta.cluster.member(even), self.cta.cluster.member(even + 1)]
        if any(m is None or m.gone for m in members):
            raise self.fault("protocol", "cta_group::2 without both CTAs of the pair")
        return [m for m in members if m is not None]

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
        sign = (-1 if idesc >> 13 & 1 else 1) * (-1 if idesc >> 14 & 1 else 1)
        left = [
            self._tmem_operand(c, a, m // pair, type_a, issue)
            if a_in_tmem
            else self._operand(c, a, m // pair, type_a, bool(idesc >> 15 & 1), issue)
            for c in ctas
        ]
        right = [self._operand(c, b, n // pair, type_b, bool(idesc >> 16 & 1), issue) for c in ctas]
        product = np.concatenate(left) @ np.concatenate(right).T if pair == 2 else left[0] @ right[0].T
        if sign < 0:
            product = -product
        for index, cta in enumerate(ctas):
            rows = product[index * (m // pair) : (index + 1) * (m // pair)]
            half = not idesc >> 4 & 3
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
        if self.machine.detector is not None:
            if cta.freed_from is not None:
                self.machine.lint(cta.freed_from, _FREES)
            place = (slice(None), slice(column, column + columns))
            self.note(cta.tmem_shadow(), place, issue, write=True)

    def _operand(
        self, cta: Cta, descriptor: int, rows: int, dtype: Any, mn_major: bool, issue: Issue
    ) -> np.ndarray:
        """[rows, K] in fp32, from the shared memory of one CTA."""
        item = np.dtype(dtype).itemsize
        span = self._layout(descriptor)
        key = (descriptor & 0x3FFF3FFF3FFF, span, rows, item, mn_major)
        chunks = operand_chunks(*key)
        if cta.gone:
            raise Fault("protocol", f"{issue.who} at {issue.where} reads a CTA that has exited")
        try:
            data = cta.smem.views[16][chunks]
        except IndexError as error:
            raise Fault("bounds", f"{issue.who} at {issue.where} reads beyond shared memory") from error
        if self.machine.detector is not None:
            self.note(cta.smem.with_shadow(), operand_granules(*key), issue, write=False)
        values = data.view(dtype).reshape(chunks.shape[0], -1)
        out: np.ndarray = values.astype(np.float32)
        return out.T if mn_major else out

    def _layout(self, descriptor: int) -> int:
        """Bytes of the swizzle that a descriptor names."""
        if self.machine.program.target.startswith("sm_9"):
            return _SPAN_90[descriptor >> 62]
        code = descriptor >> 61
        if code not in _SPAN_100:
            raise self.fault("protocol", f"a shared-memory descriptor of layout {code}")
        return _SPAN_100[code]

    def _tmem_operand(self, cta: Cta, address: int, rows: int, dtype: Any, issue: Issue) -> np.ndarray:
        """A from tensor memory: two 16-bit values a word, rows in lanes."""
        column, words = address & 0xFFFF, K_BYTES // 4
        self._allocated(cta, column, words, issue)
        lanes: Any = slice(0, LANES) if rows == LANES else _lane_order(rows) + (address >> 16)
        if self.machine.detector is not None:
            place = (slice(None), slice(column, column + words))
            self.note(cta.tmem_shadow(), place, issue, write=False)
        block = np.ascontiguousarray(cta.tmem[lanes, column : column + words])
        out: np.ndarray = block.view(dtype).astype(np.float32)
        return out

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

    # --- wgmma ------------------------------------------------------------------------------------

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
        product = left @ right.T
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


def _types(kind: str, idesc: int) -> tuple[Any, Any]:
    """Element types of A and B."""
    a, b = idesc >> 7 & 7, idesc >> 10 & 7
    if kind == "f16":
        return _F16_TYPES[a], _F16_TYPES[b]
    if kind == "tf32":
        return np.float32, np.float32
    if a not in _F8_TYPES or b not in _F8_TYPES:
        raise Fault("protocol", f"element types {a} and {b} of kind {kind}")
    return _F8_TYPES[a], _F8_TYPES[b]


def _to_registers(block: np.ndarray, shape: str) -> np.ndarray:
    """Words of tensor memory as [register, lane]."""
    if shape == "32x32b":
        return block.T
    columns = block.shape[1]
    words = {"16x128b": 4, "16x256b": 8}[shape]
    tiles = block.reshape(2, 8, columns // words, 4, words // 4)  # half, row, repeat, lane, word
    return tiles.transpose(2, 0, 4, 1, 3).reshape(-1, 32)


def _from_registers(registers: np.ndarray, shape: str) -> np.ndarray:
    """The inverse of `_to_registers`."""
    if shape == "32x32b":
        return registers.T
    count = registers.shape[0]
    words = {"16x128b": 4, "16x256b": 8}[shape]
    repeat = count * 2 // words
    tiles = registers.reshape(repeat, 2, words // 4, 8, 4)
    return tiles.transpose(1, 3, 0, 4, 2).reshape(16, repeat * words)


def _fragment(registers: tuple[Any, ...], dtype: Any) -> np.ndarray:
    """A of wgmma from registers: 16 rows by 32 bytes of K."""
    stacked = np.empty((4, 32), np.uint32)
    for row, value in zip(stacked, registers, strict=True):
        row[:] = value
    per = 4 // np.dtype(dtype).itemsize
    values = stacked.view(dtype).reshape(2, 2, 8, 4, per)  # K half, row half, row, lane, element
    out: np.ndarray = values.transpose(1, 2, 0, 3, 4).reshape(16, 8 * per).astype(np.float32)
    return out
