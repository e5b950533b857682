"""Barriers: mbarriers, named barriers of a CTA and the cluster's barrier, with the edges that they make.

An mbarrier's wait for parity P passes exactly when its phase bit differs from P. The phase flips when no
arrival is pending and no bytes are outstanding; bytes may go negative on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.virtual.detect import NOTHING, Clock, join

if TYPE_CHECKING:
    from kernels.virtual.cta import Cta
    from kernels.virtual.machine import Machine
    from kernels.virtual.memory import Span
    from kernels.virtual.report import Fault
    from kernels.virtual.warp import Warp

_MOST_BYTES = (1 << 20) - 1


class MBarrier:
    """One mbarrier object."""

    def __init__(self, cta: Cta, offset: int, count: int, name: str) -> None:
        self.cta = cta
        self.offset = offset
        self.name = name
        self.count = count
        self.pending = count
        self.bytes = 0
        self.phase = 0
        self.gathering: Clock = NOTHING  # of the phase under way
        self.done: Clock = NOTHING  # of the last phase that completed
        self.init: Clock = NOTHING
        self.remote_arrival = ""  # who arrived from another CTA, for the scope lint
        self.remote_done = ""
        self.line = 0  # PTX line of the initialization
        self.gathered_at = 0.0  # in the model: time of the last arrival, and of the end of the last phase
        self.done_at = 0.0

    def __str__(self) -> str:
        return (
            f"{self.name} of CTA {self.cta.label} (phase {self.phase & 1}, {self.pending} of {self.count} "
            f"arrivals pending, {self.bytes} bytes outstanding)"
        )

    def settle(self) -> bool:
        """Flip the phase if everything is in."""
        if self.pending or self.bytes:
            return False
        self.phase += 1
        self.pending = self.count
        self.done_at = self.gathered_at
        self.done, self.gathering = self.gathering, NOTHING
        self.remote_done, self.remote_arrival = self.remote_arrival, ""
        return True


class Meeting:
    """A named barrier, or the cluster's: everybody arrives, then everybody goes on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.arrived = 0
        self.generation = 0
        self.gathering: Clock = NOTHING
        self.done: Clock = NOTHING
        self.votes: list[int] = []
        self.result: list[int] = []
        self.expected = 0
        self.gathered_at = 0.0
        self.done_at = 0.0

    def __str__(self) -> str:
        return f"{self.name} ({self.arrived} of {self.expected} threads have arrived)"

    def open(self) -> None:
        """Let all pass."""
        self.generation += 1
        self.arrived = 0
        self.done_at = self.gathered_at
        self.done, self.gathering = self.gathering, NOTHING
        self.result, self.votes = self.votes, []


class BarrierMixin:
    """What generated code calls to synchronize."""

    warp: Warp
    cta: Cta
    machine: Machine
    mask: np.ndarray
    lanes: int
    at: int
    timed_out: bool

    if TYPE_CHECKING:

        def block(self, why: Any) -> None: ...
        def _one(self, value: Any) -> int: ...
        def together(self, members: int) -> bool: ...
        def where(self) -> str: ...
        def fault(self, kind: str, text: str) -> Fault: ...
        def shared_span(self, address: int, size: int) -> tuple[Span, int]: ...

    # --- mbarrier ---------------------------------------------------------------------------------

    def _mbarrier(self, address: Any) -> MBarrier:
        if isinstance(address, np.ndarray):  # the group acts on one barrier
            picked = address[self.mask]
            if not (picked == picked[0]).all():
                raise self.fault("protocol", "an mbarrier address that differs between lanes")
            address = int(picked[0])
        if address & 7:
            raise self.fault("alignment", f"mbarrier at {address:#x} is no multiple of 8")
        span, offset = self.shared_span(address, 8)
        cta = self.cta if span is self.cta.smem else self.cta.cluster.owner(span)
        assert cta is not None  # shared_span hands out no other memory
        barrier = cta.mbarriers.get(offset)
        if barrier is None:
            raise self.fault(
                "barrier", f"there is no mbarrier at {address:#x} (not initialized, or not any more)"
            )
        if self.machine.detector is not None and barrier.init[0] & ~self.warp.clock[0]:
            self.machine.lint(self.at, f"{barrier.name} is used without an edge from its initialization")
        return barrier

    def mbar_init(self, address: Any, count: Any, mask: np.ndarray | None = None) -> None:
        """mbarrier.init; each lane may initialize another one."""
        if isinstance(address, np.ndarray) or isinstance(count, np.ndarray) or mask is not None:
            acting = self.mask if mask is None else self.mask & mask
            pairs = np.stack(np.broadcast_arrays(address, count, np.zeros(32)), axis=1)[acting, :2]
            for each, arrivals in np.unique(pairs, axis=0).tolist():
                self.mbar_init(int(each), int(arrivals))
            return
        if address & 7:
            raise self.fault("alignment", f"mbarrier at {address:#x} is no multiple of 8")
        if not 1 <= count < 1 << 20:
            raise self.fault("barrier", f"an mbarrier of {count} arrivals")
        span, offset = self.shared_span(address, 8)
        if span is not self.cta.smem:
            raise self.fault("protocol", "initializes an mbarrier of another CTA")
        name = self.machine.barrier_name(self.at, offset, self.cta)
        barrier = MBarrier(self.cta, offset, count, name)
        barrier.init = (1 << self.warp.node, 0) if self.machine.detector is not None else NOTHING
        barrier.line = self.machine.program.instrs[self.at].line
        self.cta.mbarriers[offset] = barrier
        self.machine.progress += 1

    def mbar_invalidate(self, address: int) -> None:
        """mbarrier.inval."""
        barrier = self._mbarrier(address)
        del barrier.cta.mbarriers[barrier.offset]

    def mbar_expect_tx(self, address: int, count: int, mask: np.ndarray | None = None) -> None:
        """mbarrier.expect_tx."""
        barrier = self._mbarrier(address)
        for _ in range(self._acting(mask)):
            self._expect(barrier, count)

    def mbar_complete_tx(self, address: int, count: int, mask: np.ndarray | None = None) -> None:
        """mbarrier.complete_tx."""
        barrier = self._mbarrier(address)
        for _ in range(self._acting(mask)):
            self.machine.complete(barrier, count, self.warp.release(), str(self.warp))

    def _acting(self, mask: np.ndarray | None) -> int:
        return self.lanes if mask is None else int(np.count_nonzero(mask & self.mask))

    def _expect(self, barrier: MBarrier, count: int) -> None:
        barrier.bytes += count
        if abs(barrier.bytes) > _MOST_BYTES:
            raise self.fault("barrier", f"{barrier} holds more bytes than it can count")

    def mbar_arrive(
        self,
        address: Any,
        count: Any,
        scope: str,
        tx: int | None = None,
        drop: bool = False,
        mask: Any = None,
    ) -> int:
        """mbarrier.arrive, for each lane. The token is the phase that the arrival counts for."""
        if isinstance(address, np.ndarray):  # lanes may arrive on different barriers
            acting = self.mask if mask is None else self.mask & mask
            tokens = 0
            for each in np.unique(address[acting]).tolist():
                here = acting & (address == each)
                tokens = self.mbar_arrive(each, count, scope, tx, drop, here)
            return tokens
        times = self._acting(mask)
        if times == 0:
            return 0
        if isinstance(count, np.ndarray):
            acting = self.mask if mask is None else self.mask & mask
            count, times = int(count[acting].sum()), 1
        barrier = self._mbarrier(address)
        token = barrier.phase
        if barrier.cta is not self.cta:
            barrier.cta.touch(self.warp.node, str(self.warp), self.where())
        clock = self.warp.release()
        if tx is not None:
            for _ in range(times):
                self._expect(barrier, tx)
        if barrier.cta is not self.cta:
            barrier.remote_arrival = str(self.warp)
            if scope == "cta":
                self.machine.lint(self.at, f"arrives on {barrier.name} of another CTA with .cta scope")
        if drop:
            barrier.count -= count * times
        self.machine.arrive(barrier, count * times, clock, f"{self.warp} at {self.where()}")
        return token

    def mbar_wait(
        self, address: Any, state: Any, parity: bool, blocking: bool, scope: str, relaxed: bool
    ) -> bool | None:
        """mbarrier.try_wait and test_wait; None when the group has to wait."""
        barrier = self._mbarrier(address)
        state = self._one(state)
        passed = (barrier.phase & 1) != (state & 1) if parity else barrier.phase > state
        if passed:
            self.timed_out = False
            self._resume(barrier.done_at)
            if not relaxed:
                self.warp.acquire(barrier.done)
            if barrier.remote_done and scope in ("", "cta") and self.machine.detector is not None:
                other = f"where {barrier.remote_done} arrived from another CTA"
                text = f"waits on {barrier.name} with .cta scope, {other}"
                self.machine.lint(self.at, text)
            return True
        if not blocking:
            return False
        if self.timed_out or self.machine.time_out_now():
            self.timed_out = False
            return False
        self.block((barrier, state))
        return None

    def mbar_pending(self, state: int) -> int:
        """mbarrier.pending_count."""
        raise self.fault("protocol", "pending_count is not modelled")

    def _resume(self, moment: float) -> None:
        """In the model: whoever waited goes on a signal later."""
        timing = self.machine.timing
        if timing is not None and moment > self.warp.time:
            self.warp.not_before(moment + timing.chip.signal.value)

    def _stamp(self, meeting: Meeting) -> None:
        if self.machine.timing is not None:
            meeting.gathered_at = max(meeting.gathered_at, self.warp.time)

    # --- named barriers ---------------------------------------------------------------------------

    def _meeting(self, number: int) -> Meeting:
        return self.cta.meetings.setdefault(number, Meeting(f"barrier {number} of CTA {self.cta.label}"))

    def _enter(self, number: int, threads: int, vote: int = 0) -> Meeting | None:
        """Arrive once; None while lanes of the warp are missing."""
        if not 0 <= number < 16:
            raise self.fault("barrier", f"named barrier {number}; there are 16")
        if threads % 32:
            raise self.fault("barrier", f"named barrier {number} for {threads} threads, no multiple of 32")
        if not self.together(0xFFFFFFFF):
            return None
        meeting = self._meeting(number)
        self._stamp(meeting)
        meeting.arrived += 32
        meeting.votes.append(vote)
        meeting.expected = threads or self.cta.live_threads()
        meeting.gathering = join(meeting.gathering, self.warp.release())
        self.cta.watch(meeting, threads)
        if meeting.arrived > meeting.expected:
            text = f"{meeting.arrived} threads arrive at {meeting.name}, which is for {meeting.expected}"
            raise self.fault("barrier", text)
        self.machine.progress += 1
        if meeting.arrived == meeting.expected:
            meeting.open()
            self.machine.wake(meeting)
        return meeting

    def bar_arrive(self, number: int, threads: int) -> bool:
        """bar.arrive."""
        return self._enter(number, threads) is not None

    def bar_sync(self, number: int, threads: int) -> bool:
        """bar.sync and barrier.sync."""
        return self._meet(number, threads, 0) is not None

    def bar_reduce(self, number: int, threads: int, op: str, predicate: Any) -> Any:
        """bar.red: None while others are missing."""
        votes = int(np.count_nonzero(np.broadcast_to(np.asarray(predicate, bool), (32,)) & self.mask))
        meeting = self._meet(number, threads, votes)
        if meeting is None:
            return None
        total = sum(meeting.result)
        everybody = 32 * len(meeting.result)
        return {"popc": total, "and": total == everybody, "or": total > 0}[op]

    def _meet(self, number: int, threads: int, vote: int) -> Meeting | None:
        waits = self.warp.waits
        meeting = self._meeting(number)
        if number not in waits:
            generation = meeting.generation
            if self._enter(number, threads, vote) is None:
                return None
            waits[number] = generation
        if meeting.generation == waits[number]:
            self.block(meeting)
            return None
        del waits[number]
        self._resume(meeting.done_at)
        self.warp.acquire(meeting.done)
        return meeting

    # --- the cluster's barrier --------------------------------------------------------------------

    def cluster_arrive(self, relaxed: bool) -> bool:
        """barrier.cluster.arrive."""
        if not self.together(0xFFFFFFFF):
            return False
        meeting = self.cta.cluster.meeting
        if "cluster" in self.warp.waits:
            raise self.fault("barrier", "arrives twice at the cluster's barrier without a wait between")
        self.warp.waits["cluster"] = meeting.generation
        clock = self.warp.release()
        if not relaxed:
            meeting.gathering = join(meeting.gathering, clock)
        else:  # orders what a fence.mbarrier_init released
            meeting.gathering = join(meeting.gathering, self.warp.fenced)
        self._stamp(meeting)
        meeting.arrived += self.lanes
        meeting.expected = self.cta.cluster.live_threads()
        self.machine.progress += 1
        if meeting.arrived >= meeting.expected:
            meeting.open()
            self.machine.wake(meeting)
        return True

    def cluster_wait(self) -> bool:
        """barrier.cluster.wait."""
        if not self.together(0xFFFFFFFF):
            return False
        meeting = self.cta.cluster.meeting
        if "cluster" not in self.warp.waits:
            raise self.fault("barrier", "waits at the cluster's barrier without having arrived")
        if meeting.generation == self.warp.waits["cluster"]:
            self.block(meeting)
            return False
        del self.warp.waits["cluster"]
        self._resume(meeting.done_at)
        self.warp.acquire(meeting.done)
        return True

    # --- fences -----------------------------------------------------------------------------------

    def fence(self, kind: str) -> None:
        """fence.*: a proxy fence lets engines see generic writes, a release fence serves relaxed arrivals."""
        if self.machine.detector is None:
            return
        if kind.startswith("proxy.async"):
            seen, proxied = self.warp.clock
            self.warp.clock = (seen, proxied | seen)
            self.warp.release()
        elif kind.startswith("proxy.tensormap.generic.release"):
            self.machine.maps_released |= self.warp.release()[0]
        elif kind.startswith("proxy.tensormap.generic.acquire"):
            self.warp.mapped |= self.warp.clock[0] & self.machine.maps_released
        elif kind.startswith(("mbarrier_init", "acq_rel", "sc", "gl", "cta", "sys")):
            self.warp.fenced = join(self.warp.fenced, self.warp.release())
