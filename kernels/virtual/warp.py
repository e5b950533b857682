"""Warps and their groups of lanes: receives what generated code asks for, hands on values and blocked groups.

A warp starts as one group. A branch that differs between lanes splits it; the group at the lower block runs
first, and groups that meet at a block become one again. Collective instructions wait until all lanes are
there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.virtual.atomics import AtomicMixin
from kernels.virtual.barriers import BarrierMixin
from kernels.virtual.block_scale import BlockScaleMixin
from kernels.virtual.copies import CopyMixin
from kernels.virtual.detect import NOTHING, Clock
from kernels.virtual.lanes import Value
from kernels.virtual.report import Fault
from kernels.virtual.tma import TmaMixin
from kernels.virtual.wgmma import WgmmaMixin

if TYPE_CHECKING:
    from kernels.virtual.cta import Cta
    from kernels.virtual.machine import Machine

_LANES = np.arange(32)
_ONE_LANE: list[np.ndarray] = [np.equal(_LANES, n) for n in range(32)]
EXITED, BLOCKED, SPLIT = -1, -2, -3


class Warp:
    """32 threads of a CTA and what they share."""

    def __init__(self, cta: Cta, index: int) -> None:
        self.cta = cta
        self.machine: Machine = cta.machine
        self.index = index
        bx, by, bz = cta.block
        thread = np.arange(index * 32, index * 32 + 32)
        self.tid_x = (thread % bx).astype(np.uint32)
        self.tid_y = (thread // bx % by).astype(np.uint32)
        self.tid_z = (thread // (bx * by)).astype(np.uint32)
        live = thread < bx * by * bz
        self.live = live
        self.groups = [Group(self, live.copy(), 0, list(self.machine.program.initial))]
        self.clock: Clock = NOTHING
        self.node = 0
        self.fenced: Clock = NOTHING  # what a release fence covered, for relaxed arrivals
        self.mapped = 0  # nodes whose writes of tensor maps its TMA operations may rely on
        self.registers = 0
        self.waits: dict[Any, int] = {}  # generation of a barrier that this warp waits for
        self.bulk: dict[int, list[list[Any]]] = {}  # bulk groups by lane, the open one last
        self.copies: list[list[Any]] = [[]]  # cp.async groups
        self.tc_nodes: dict[int, int] = {}  # last node of the lane's tcgen05 queue
        self.tc_reads = 0  # nodes of tcgen05.ld that were not waited for
        self.local = np.full((32, -(-self.machine.program.layout.local_bytes // 16) * 16), 0xFF, np.uint8)
        self.tc_done = 0.0  # in the model: when its last read of tensor memory is done
        self.wg_groups: list[int] = []
        self.wg_open = 0
        self.wg_done: list[float] = [0.0]  # in the model: ends of the groups, the open one last
        self.loaded_at = -1  # instruction count at the block whose plain loads have been paid for
        self.queued = False
        self.stall = 0.0  # cycles that the model's clock has added to those of instructions
        self.left = 0  # instructions of groups that have exited
        self.release()  # open the first node

    def __str__(self) -> str:
        role = self.machine.roles.get(self.index, "")
        return f"CTA {self.cta.label} warp {self.index}" + (f" ({role})" if role else "")

    @property
    def time(self) -> float:
        """The warp's time in the model, in cycles."""
        timing = self.machine.timing
        assert timing is not None
        return self.stall + timing.issue_cost(self.left + sum(g.count for g in self.groups))

    def not_before(self, moment: float) -> None:
        """In the model, go on no earlier than this."""
        self.stall += max(0.0, moment - self.time)

    @property
    def exited(self) -> bool:
        """Whether no lane is left."""
        return not self.groups

    def run(self, budget: int) -> int:
        """Run groups until all wait or have left, or for about `budget` blocks; says how many were run."""
        blocks = self.machine.program.blocks
        whole = budget
        covered = self.machine.options.covered
        while budget > 0:
            group = self._pick()
            if group is None:
                break
            others = [g.pc for g in self.groups if g is not group]
            limit = min(others) if others else 1 << 30
            pc, registers = group.pc, group.R
            group.blocked = None
            while budget > 0:
                budget -= 1
                if covered is not None:
                    covered.update(self.machine.program.block_lines[pc])
                nxt = blocks[pc](group, registers)
                if nxt >= 0:
                    pc = nxt
                    if pc >= limit and (pc > limit or self._meet(group, pc)):
                        break
                    if others and pc in others and self._meet(group, pc):
                        break
                    continue
                if nxt == SPLIT:
                    pc = group.pc
                    break
                if nxt == EXITED:
                    self.groups.remove(group)
                break
            group.pc = pc
        return whole - budget

    def _pick(self) -> Group | None:
        """The runnable group at the lowest block."""
        best = None
        for group in self.groups:
            if group.blocked is None and (best is None or group.pc < best.pc):
                best = group
        return best

    def _meet(self, group: Group, pc: int) -> bool:
        """Take in the groups that stand at the same block; whether the caller has to choose anew."""
        group.pc = pc
        met = [g for g in self.groups if g is not group and g.pc == pc]
        for other in met:
            if group.blocked is None and other.blocked is not None and other.blocked is not GATHER:
                continue  # it is in the middle of a wait of its own
            group.take_in(other)
            self.groups.remove(other)
        return True

    def wake(self) -> None:
        """Whatever the groups waited for may have happened."""
        for group in self.groups:
            group.blocked = None

    def merge_all(self) -> None:
        """Join groups that wait at the same collective instruction."""
        for group in list(self.groups):
            if group not in self.groups:
                continue
            for other in [g for g in self.groups if g is not group and g.pc == group.pc]:
                group.take_in(other)
                group.blocked = None
                self.groups.remove(other)

    # --- clocks -----------------------------------------------------------------------------------

    def release(self) -> Clock:
        """What others may rely on from here; what follows belongs to a new node."""
        detector = self.machine.detector
        if detector is None:
            return NOTHING
        clock = self.clock
        self.node = detector.node()
        self.clock = (clock[0] | 1 << self.node, clock[1])
        return clock

    def acquire(self, clock: Clock) -> None:
        """Rely on what another has released."""
        mine = self.clock
        self.clock = (mine[0] | clock[0], mine[1] | clock[1])


GATHER = "gather"


class Group(AtomicMixin, BarrierMixin, CopyMixin, TmaMixin, BlockScaleMixin, WgmmaMixin):
    """Lanes of a warp that run together; generated code calls its methods. `at` is the instruction."""

    def __init__(self, warp: Warp, mask: np.ndarray, pc: int, registers: list[Any]) -> None:
        self.warp = warp
        self.cta = warp.cta
        self.machine = warp.machine
        self.pc = pc
        self.R = registers
        self.at = 0
        self.count = 0
        self.blocked: Any = None  # what the group waits for
        self.timed_out = False
        self.set_mask(mask)

    def set_mask(self, mask: np.ndarray) -> None:
        """Change which lanes belong to the group."""
        self.mask = mask
        self.lanes = int(np.count_nonzero(mask))
        self.full = self.lanes == 32
        self.leader = int(np.argmax(mask))
        self.mask_bits = int(np.packbits(mask, bitorder="little").view("<u4")[0])

    # --- control ----------------------------------------------------------------------------------

    def branch(self, taken: np.ndarray, target: int, following: int) -> int:
        """A branch on a predicate with a value a lane."""
        mask = self.mask
        yes = taken & mask
        count = int(np.count_nonzero(yes))
        if count == 0:
            return following
        if count == self.lanes:
            return target
        other = Group(self.warp, yes, target, list(self.R))
        other.at = self.at
        self.warp.groups.append(other)
        self.set_mask(mask & ~yes)
        self.pc = following
        return SPLIT

    def take_in(self, other: Group) -> None:
        """Become one group again: registers that differ become vectors."""
        mine, theirs = self.R, other.R
        program = self.machine.program
        for slot in program.live[self.pc]:
            a, b = mine[slot], theirs[slot]
            if a is b or b is None:
                continue
            if a is None:
                mine[slot] = b
            elif slot in program.vector_slots:
                mine[slot] = np.where(other.mask, b, a)
        self.set_mask(self.mask | other.mask)
        self.count += other.count

    def leave(self) -> int:
        """ret or exit."""
        warp = self.warp
        warp.live = warp.live & ~self.mask
        self.machine.retired += self.count
        warp.left += self.count
        self.cta.lanes_left(self)
        return EXITED

    def leave_some(self, gone: Value, following: int) -> int:
        """A guarded exit."""
        if isinstance(gone, bool | int):
            return self.leave() if gone else following
        rest = self.mask & ~gone
        if not rest.any():
            return self.leave()
        if (rest == self.mask).all():
            return following
        self.warp.live = self.warp.live & (~self.mask | rest)
        self.set_mask(rest)
        return following

    def trap(self) -> None:
        """The kernel gave up (an assertion of its own)."""
        raise Fault("trap", f"{self.who()} at {self.where()}")

    def block(self, why: Any) -> None:
        """Wait; the machine runs the same block again when `why` may have changed."""
        self.blocked = why

    def together(self, members: int) -> bool:
        """Whether all lanes that the instruction names (and that still live) are here."""
        if self.full or self.mask_bits & members == members:
            return True
        live = int(np.packbits(self.warp.live, bitorder="little").view("<u4")[0])
        if self.mask_bits & members == live & members:
            return True
        self.block(GATHER)
        return False

    def who(self) -> str:
        """For reports."""
        return str(self.warp)

    def where(self) -> str:
        """The instruction under way."""
        return self.machine.place(self.at)

    def fault(self, kind: str, text: str) -> Fault:
        """A fault at this place."""
        return Fault(kind, f"{self.who()} at {self.where()}: {text}")

    # --- lanes ------------------------------------------------------------------------------------

    def elected(self) -> np.ndarray:
        """One lane of those that are here."""
        return _ONE_LANE[self.leader]

    def uniform(self, value: Value) -> Any:
        """A vector that is the same in all lanes, as one value."""
        if isinstance(value, np.ndarray):
            return value[self.leader].item()
        return value

    def shuffle(self, mode: str, value: Value, lane: Value, clamp: Value) -> tuple[Value, Value]:
        """shfl: the value of another lane, and whether that lane is in range."""
        if mode == "idx" and isinstance(lane, int) and clamp == 31:
            return (int(value[lane & 31]) if isinstance(value, np.ndarray) else value), True
        lane, clamp = np.asarray(lane, np.int64), np.asarray(clamp, np.int64)
        segment = (clamp >> 8) & 31
        bound = clamp & 31
        low = _LANES & segment
        high = low | (bound & ~segment)
        if mode == "up":
            source = _LANES - (lane & 31)
            inside = source >= high
        elif mode == "down":
            source = _LANES + (lane & 31)
            inside = source <= high
        elif mode == "bfly":
            source = _LANES ^ (lane & 31)
            inside = source <= high
        else:
            source = low | (lane & 31 & ~segment)
            inside = source <= high
        source = np.where(inside, source, _LANES)
        if not isinstance(value, np.ndarray):
            value = np.full(32, value, np.uint32)
        return value[source], inside

    def vote(self, mode: str, predicate: Value) -> int | bool:
        """vote.sync over the lanes that are here."""
        votes = np.broadcast_to(np.asarray(predicate, bool), (32,)) & self.mask
        count = int(np.count_nonzero(votes))
        if mode == "all":
            return count == self.lanes
        if mode == "any":
            return count > 0
        if mode == "uni":
            return count in (0, self.lanes)
        return int(np.packbits(votes, bitorder="little").view("<u4")[0])

    def reduce(self, op: str, value: Value, signed: bool) -> int:
        """redux.sync."""
        values = np.broadcast_to(np.asarray(value, np.uint32), (32,))[self.mask]
        if signed:
            values = values.view(np.int32)
        function = {
            "add": np.add, "min": np.minimum, "max": np.maximum,
            "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
        }[op]  # fmt: skip
        return int(function.reduce(values)) & 0xFFFFFFFF

    def reduce_float(self, op: str, value: Value, absolute: bool, keep_nan: bool) -> int:
        """redux.sync of f32: a NaN is left out unless it is to be kept."""
        bits = np.broadcast_to(np.asarray(value, np.uint32), (32,))[self.mask]
        values = np.abs(bits.view(np.float32)) if absolute else bits.view(np.float32)
        functions = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}
        result = np.float32(functions[op][keep_nan].reduce(values))
        return 0x7FFFFFFF if np.isnan(result) else int(result.view(np.uint32))

    def warp_sync(self) -> None:
        """bar.warp.sync: a warp is one thread to the detector."""

    def clock(self) -> int:
        """A clock that only goes forward: the model's cycles where it runs, else instructions."""
        return self.machine.retired + self.count if self.machine.timing is None else int(self.warp.time)

    def set_registers(self, way: str, count: int) -> bool:
        """setmaxnreg: needs every warp of the warpgroup."""
        return self.cta.set_registers(self, way, count)

    def pause(self) -> bool:
        """nanosleep: let others go first."""
        return self.machine.let_others_run(self)

    def grid_dependency(self, what: str) -> None:
        """griddepcontrol: launches run one after the other here, so there is nothing to wait for."""
