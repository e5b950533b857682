"""Tensor memory: receives tcgen05.alloc, ld, st and cp of a group, hands on words of 128 lanes by 512 columns.

Loads and stores are done at once; the detector knows them only from their wait on. Copies from shared memory stand in
the issuing thread's queue, before or after its MMAs as they were issued.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.virtual.issue import Issue
from kernels.virtual.operands import OperandMixin, unpacked
from kernels.virtual.report import Fault

if TYPE_CHECKING:
    from kernels.virtual.cta import Cta
    from kernels.virtual.warp import Warp

LANES, COLUMNS = 128, 512  # of a CTA's tensor memory, in words of four bytes
FREES = "frees columns of a pair, and nothing orders that after what the other CTA does with them"


class TmemMixin(OperandMixin):
    """What generated code calls to use tensor memory."""

    warp: Warp
    cta: Cta
    leader: int
    lanes: int
    at: int

    if TYPE_CHECKING:

        def block(self, why: Any) -> None: ...
        def where(self) -> str: ...
        def issue(self, what: str) -> Issue: ...
        def _one(self, value: Any) -> int: ...
        def store_shared(self, address: Any, size: int, values: tuple[Any, ...]) -> None: ...

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
            self.machine.lint(self.at, FREES)
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
            self.machine.lint(self.cta.freed_from, FREES)
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

    # --- copies from shared memory ----------------------------------------------------------------

    def tc_copy(self, address: Any, descriptor: Any, shape: str, form: str, unpack: bool, pair: int) -> None:
        """tcgen05.cp: rows of 16 or 32 bytes to lanes, in each CTA of a pair from its own shared memory.

        `unpack`: 16 values of 4 bits and 8 bytes of padding become 16 bytes, each value in the middle of its byte.
        """
        address, descriptor = self._one(address), self._one(descriptor)
        issue, key = self._queue("tcgen05.cp")
        ctas = self._ctas(pair)
        rows, bits = (int(x) for x in shape.removesuffix("b").split("x"))
        lanes = _copy_lanes(rows, form) + (address >> 16)
        if lanes.max() >= LANES:
            raise self.fault("tensor memory", f"copies to lane {lanes.max()}; there are {LANES}")
        column, words = address & 0xFFFF, bits // 32
        group = self

        def run() -> None:
            for cta in ctas:
                group._allocated(cta, column, words, issue)
                if cta is not group.cta:
                    cta.touch(issue.node, issue.who, issue.where)
                data = group._staged(cta, descriptor, rows, 1, False, issue, bits // 8)
                if unpack:
                    data = unpacked(data)
                cta.tmem[lanes, column : column + words] = data.view(np.uint32).reshape(rows, words)
                group._note_columns(cta, column, words, issue, write=True)

        group.machine.submit(run, "tensor core", issue, ("copy", rows * bits // 8 * pair), key)

    def _columns(self, cta: Cta, column: int, words: int, issue: Issue) -> np.ndarray:
        """Columns that an operation reads, all lanes."""
        self._allocated(cta, column, words, issue)
        self._note_columns(cta, column, words, issue, write=False)
        out: np.ndarray = cta.tmem[:, column : column + words]
        return out

    def _note_columns(self, cta: Cta, column: int, words: int, issue: Issue, *, write: bool) -> None:
        if self.machine.detector is not None:
            place = (slice(None), slice(column, column + words))
            self.note(cta.tmem_shadow(), place, issue, write=write)

    # --- the queue of a thread --------------------------------------------------------------------

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


def _copy_lanes(rows: int, form: str) -> np.ndarray:
    """Lanes that each row of a tcgen05.cp goes to, [copies, rows]."""
    row = np.arange(rows)
    if rows == 4:  # one row a quarter
        return 32 * row[None, :]
    if form == "warpx4":
        return row + 32 * np.arange(4)[:, None]
    if form == "02_13":
        return row + 64 * np.arange(2)[:, None]
    if form == "01_23":
        return row + row // 32 * 32 + 32 * np.arange(2)[:, None]
    return row[None, :]


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
