"""The virtual GPU: receives a program and a launch, hands on a `Run` of it under one schedule.

Warps run one at a time until they wait. Asynchronous work is done when the schedule says (launch.py).
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.perfetto import Span as Stretch
from kernels.virtual.barriers import MBarrier, Meeting
from kernels.virtual.cta import RESERVED, SMEM_BYTES, Cluster, Cta
from kernels.virtual.detect import Clock, Detector, join
from kernels.virtual.issue import Issue
from kernels.virtual.launch import Launch, Options
from kernels.virtual.memory import GlobalMemory, Parameter
from kernels.virtual.ptx import Instr
from kernels.virtual.report import Fault, Finding, Run
from kernels.virtual.tensormap import TensorMap
from kernels.virtual.timing import Timing
from kernels.virtual.warp import GATHER, Group, Warp

_TIMED_BUDGET = 64  # blocks that a warp runs ahead in the model
_POLLING = 2_000  # blocks run without any progress before late work is done all the same
_SPIN_LIMIT = 1_000_000  # blocks run without any progress before a spin counts as a deadlock


Work = tuple[
    Any, ...
]  # what an operation costs: ("load", bytes), ("store", bytes), ("mma", m, n, k, CTAs), ("commit",)


@dataclass(slots=True)
class Operation:
    """Asynchronous work that has been issued."""

    run: Callable[[], None]
    engine: str
    issue: Issue


class Machine:
    """Runs one launch."""

    def __init__(self, launch: Launch, memory: GlobalMemory, options: Options) -> None:
        self.launch = launch
        self.program = launch.program
        self.memory = memory
        self.options = options
        self.roles = options.roles
        self.detector = Detector() if options.detect else None
        self.random = random.Random(options.schedule.seed)
        self.sms = options.sms
        self.timing = options.timing
        self.params = [Parameter(data) for data in launch.params]
        self.maps: dict[bytes, TensorMap] = {}
        self.map_bytes: dict[int, bytes] = {}
        self.maps_released = 0  # nodes whose writes of tensor maps a release fence covers
        self.sync_clocks: dict[Any, Clock] = {}
        self.findings: list[Finding] = []
        self.lints: dict[str, Finding] = {}
        self.queues: dict[Any, deque[Operation]] = {}
        self.loose: deque[Operation] = deque()
        self.ready: deque[Warp] = deque()
        self.waiters: dict[int, list[Warp]] = {}
        self.exits: list[Warp] = []
        self.progress = 0
        self.retired = 0
        self.loaded: Counter[int] = Counter()
        self.stored = 0
        self.names: dict[str, int] = {}
        self.running: Warp | None = None
        self.used_lines: set[int] = set()  # initializations of barriers that were used, and that weren't
        self.idle_lines: set[int] = set()
        self._sm = 0
        self._timeouts = False
        self._places: dict[int, str] = {}
        for name, size in (("grid", launch.grid), ("block", launch.block)):
            if min(size) < 1:
                raise Fault("protocol", f"a launch with {name} {size}")
        if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
            raise Fault("protocol", f"grid {launch.grid} is no multiple of cluster {launch.cluster}")
        self._check_memory()
        for reader, load in self.program.unwaited[:1]:
            text = f"{_where(reader)} reads what {_where(load)} loads, without tcgen05.wait::ld between"
            self.lints[text] = Finding("at", text)
        cgrid = tuple(g // c for g, c in zip(launch.grid, launch.cluster, strict=True))
        self.pending = deque(
            (x, y, z) for z in range(cgrid[2]) for y in range(cgrid[1]) for x in range(cgrid[0])
        )
        self.clusters: list[Cluster] = []

    def _check_memory(self) -> None:
        total = self.program.static_bytes - RESERVED + self.launch.dynamic_bytes
        if total > SMEM_BYTES:
            raise Fault(
                "bounds", f"the kernel asks for {total} bytes of shared memory; a CTA has {SMEM_BYTES}"
            )

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> Run:
        """Run to the end, or to the first fault that ends it."""
        begin = time.perf_counter()
        with np.errstate(all="ignore"):
            try:
                self._start_clusters()
                self._loop()
            except Fault as fault:
                self.findings.append(fault.finding)
        if self.options.covered is not None:
            self.options.covered -= self.idle_lines - self.used_lines
        if self.detector is not None:
            self.findings.extend(self.detector.findings.values())
        return Run(
            str(self.options.schedule),
            self.program.name,
            self.findings,
            list(self.lints.values()),
            self.retired,
            time.perf_counter() - begin,
            self.loaded,
            self.stored,
        )

    def _start_clusters(self) -> None:
        size = int(np.prod(self.launch.cluster))
        while self.pending and (len(self.clusters) + 1) * size <= max(self.sms, size):
            cluster = Cluster(self, self.pending.popleft())
            self.clusters.append(cluster)
            for cta in cluster.members:
                for warp in cta.warps:
                    self._enqueue(warp)

    def _enqueue(self, warp: Warp) -> None:
        if not warp.queued and not warp.exited:
            warp.queued = True
            self.ready.append(warp)

    def _loop(self) -> None:
        if self.timing is not None:
            self._timed_loop(self.timing)
            return
        kind = self.options.schedule.kind
        chance = kind == "random"
        last_progress, idle = -1, 0
        while True:
            if chance and (self.loose or self.queues) and self.random.random() < 0.3:
                self._do_one()
            if self.ready:
                warp = self._next_warp(chance)
                used = warp.run(self.random.randrange(1, 60) if chance else 4096)
                self._after(warp)
                if self.progress == last_progress:
                    idle += used
                    if idle > _POLLING and (
                        self.loose or self.queues
                    ):  # somebody polls for what is in flight
                        self._do_one()
                    if idle > _SPIN_LIMIT:
                        raise Fault("deadlock", "warps spin without progress\n" + self.waiting())
                else:
                    last_progress, idle = self.progress, 0
                continue
            if self.loose or self.queues:
                self._do_one()
                continue
            if not self.clusters:
                return
            self._stuck()

    def _timed_loop(self, timing: Timing) -> None:
        """Whoever comes first in the model's time: a warp that can go on, or an operation that is done."""
        while True:
            if not self.ready and not timing.pending:
                if not self.clusters:
                    return
                self._stuck()
                continue
            warp = min(self.ready, key=lambda w: w.time, default=None)
            if warp is None or timing.next_done() <= warp.time:
                self.progress += 1
                timing.do_next()
                continue
            self.ready.remove(warp)
            warp.queued = False
            timing.now = begin = warp.time
            self.running = warp
            warp.run(_TIMED_BUDGET)
            self.running = None
            timing.end = max(timing.end, warp.time)
            if timing.keep:
                timing.spans.append(Stretch(warp.cta.rank, str(warp), "runs", begin, warp.time))
            self._after(warp)

    def _next_warp(self, chance: bool) -> Warp:
        if chance and len(self.ready) > 1:
            self.ready.rotate(-self.random.randrange(len(self.ready)))
        warp = self.ready.popleft()
        warp.queued = False
        return warp

    def _after(self, warp: Warp) -> None:
        """Queue the warp again, or note what it waits for."""
        while self.exits:
            gone = self.exits.pop()
            self.progress += 1
            gone.cta.settle_exits()
        if warp.exited:
            return
        if len(warp.groups) > 1:
            warp.merge_all()
        runnable = False
        for group in warp.groups:
            if group.blocked is None:
                runnable = True
            elif group.blocked is not GATHER:
                reason = group.blocked[0] if isinstance(group.blocked, tuple) else group.blocked
                waiters = self.waiters.setdefault(id(reason), [])
                if warp not in waiters:
                    waiters.append(warp)
        if runnable:
            self._enqueue(warp)

    def _stuck(self) -> None:
        """Nothing runs or is in flight: waits time out once; without progress since, it is a deadlock."""
        if self._timeouts and self._stuck_at == self.progress:
            raise Fault("deadlock", "no warp can go on and nothing is in flight\n" + self.waiting())
        self._timeouts, self._stuck_at = True, self.progress
        found = False
        for cluster in self.clusters:
            for cta in cluster.members:
                for warp in cta.warps:
                    for group in warp.groups:
                        if isinstance(group.blocked, tuple):
                            group.timed_out = True
                            group.blocked = None
                            found = True
                    if any(g.blocked is None for g in warp.groups):
                        self._enqueue(warp)
        if not found:
            raise Fault("deadlock", "no warp can go on and nothing is in flight\n" + self.waiting())

    _stuck_at = -1

    def waiting(self) -> str:
        """Who waits for what, one line a group of lanes."""
        lines: list[str] = []
        for cluster in self.clusters:
            for cta in cluster.members:
                for warp in cta.warps:
                    lines.extend(self._wait_line(group) for group in warp.groups)
        return "\n".join(f"    {line}" for line in lines)

    def _wait_line(self, group: Group) -> str:
        why = group.blocked
        lanes = "" if group.full else f", {group.lanes} lanes"
        if isinstance(why, tuple) or (group.timed_out and why is None):
            barrier, state = why if isinstance(why, tuple) else (None, 0)
            text = f"waits for phase {state & 1} to end on {barrier}" if barrier else "polls"
        elif why is GATHER:
            text = "waits for the other lanes of its warp"
        elif isinstance(why, Meeting):
            text = f"waits at {why}"
        else:
            text = "waits" if why is not None else "runs"
        return f"{group.who()}{lanes} at {group.where()}: {text}"

    # --- asynchronous work ------------------------------------------------------------------------

    def submit(
        self, run: Callable[[], None], engine: str, issue: Issue, work: Work, queue: Any = None
    ) -> None:
        """Take in work; of one queue it is done in order."""
        if self.timing is not None:
            self.timing.submit(issue.warp, engine, work, queue, run)
            return
        operation = Operation(run, engine, issue)
        if self.options.schedule.kind == "early":
            self._do(operation)
        elif queue is None:
            self.loose.append(operation)
        else:
            self.queues.setdefault(queue, deque()).append(operation)

    def _do_one(self) -> None:
        """Do one piece of work: the oldest, or under a random schedule any that may be next."""
        loose, queues = len(self.loose), list(self.queues)
        pick = 0
        if self.options.schedule.kind == "random":
            pick = self.random.randrange(loose + len(queues))
        if pick < loose:
            self.loose.rotate(-pick)
            operation = self.loose.popleft()
            self.loose.rotate(pick)
        else:
            key = queues[pick - loose]
            queue = self.queues[key]
            operation = queue.popleft()
            if not queue:
                del self.queues[key]
        self._do(operation)

    def _do(self, operation: Operation) -> None:
        self.progress += 1
        operation.run()

    def complete(self, barrier: MBarrier, nbytes: int, clock: Clock, who: str) -> None:
        """Bytes have landed."""
        self._stamp(barrier)
        if barrier.cta.gone:
            raise Fault("protocol", f"{who} completes bytes on {barrier}, whose CTA has exited")
        barrier.bytes -= nbytes
        barrier.gathering = join(barrier.gathering, clock)
        self.progress += 1
        if barrier.settle():
            self.wake(barrier)

    def arrive(self, barrier: MBarrier, count: int, clock: Clock, who: str) -> None:
        """Arrivals on an mbarrier."""
        self._stamp(barrier)
        if barrier.cta.gone:
            raise Fault("protocol", f"{who} arrives on {barrier}, whose CTA has exited")
        if count > barrier.pending:
            raise Fault("barrier", f"{who} arrives beyond the count: {barrier}")
        barrier.pending -= count
        barrier.gathering = join(barrier.gathering, clock)
        self.progress += 1
        if barrier.settle():
            self.wake(barrier)

    def _stamp(self, barrier: MBarrier) -> None:
        """In the model: a phase ends no earlier than its last arrival."""
        if self.timing is not None:
            barrier.gathered_at = max(barrier.gathered_at, self.moment())

    def moment(self) -> float:
        """The model's time of what happens now: of the running warp, or of the operation that is done."""
        assert self.timing is not None
        return max(self.timing.now, self.running.time if self.running is not None else 0.0)

    def wake(self, reason: Any) -> None:
        """Let those who wait for something look again."""
        for warp in self.waiters.pop(id(reason), ()):
            warp.wake()
            self._enqueue(warp)

    # --- CTAs -------------------------------------------------------------------------------------

    def next_sm(self) -> int:
        """SMs in turn."""
        self._sm += 1
        return (self._sm - 1) % self.sms

    def cta_over(self, cta: Cta) -> None:
        """A CTA has exited; with its cluster over, another one starts."""
        if all(m.gone for m in cta.cluster.members):
            self.clusters.remove(cta.cluster)
            self._start_clusters()

    def cancel_cluster(self) -> tuple[int, int, int] | None:
        """Cluster launch control: first CTA of a cluster that a caller takes over before it starts."""
        if not self.pending:
            return None
        index = self.pending.popleft()
        x, y, z = (i * c for i, c in zip(index, self.launch.cluster, strict=True))
        return x, y, z

    # --- what groups ask --------------------------------------------------------------------------

    def time_out_now(self) -> bool:
        """Under a random schedule a try_wait sometimes gives up at once."""
        return self.options.schedule.kind == "random" and self.random.random() < 0.05

    def let_others_run(self, group: Group) -> bool:
        """nanosleep."""
        return True

    def read_map(self, address: int) -> bytes:
        """The 128 bytes of a tensor map, in a parameter or in global memory."""
        found = self.map_bytes.get(address)
        if found is not None:
            return found
        if address % 64:
            raise Fault("alignment", f"tensor map at {address:#x} is no multiple of 64")
        for parameter in self.params:
            offset = address - parameter.address
            if offset >= 0 and offset + 128 <= len(parameter.data):
                self.map_bytes[address] = parameter.data[offset : offset + 128]
                return self.map_bytes[address]
        span = self.memory.find(address, 128)
        return span.raw[address - span.start : address - span.start + 128].tobytes()

    def place(self, at: int) -> str:
        """An instruction for a report: source line if known, PTX line, mnemonic."""
        found = self._places.get(at)
        if found is None:
            found = self._places[at] = _where(self.program.instrs[at])
        return found

    def find(self, kind: str, text: str) -> None:
        """Note a fault that doesn't end the run."""
        self.findings.append(Finding(kind, text))

    def lint(self, at: int, text: str) -> None:
        """Note something questionable, once a place."""
        key = f"{self.place(at)}: {text.split(' of CTA', maxsplit=1)[0]}"
        self.lints.setdefault(key, Finding("at", f"{self.place(at)}: {text}"))

    def barrier_name(self, at: int, offset: int, cta: Cta) -> str:
        """A barrier's name: given, or read off the source line that initializes it."""
        if offset in self.options.barriers:
            return self.options.barriers[offset]
        from kernels.virtual.names import barrier_in_source

        found = barrier_in_source(self.program.instrs[at].source)
        if found is None:
            return f"mbarrier at {offset:#x}"
        key = f"{cta.label} {found}"
        self.names[key] = self.names.get(key, -1) + 1
        return f"{found}[{self.names[key]}]"


def _where(instr: Instr) -> str:
    where = f"{instr.source}" if instr.source else f"PTX line {instr.line}"
    return f"{where} ({instr.op.split('.mbarrier::')[0]})"


def launch_machine(launch: Launch, buffers: Sequence[tuple[str, int, int]], options: Options) -> Run:
    """Run a launch over named buffers (name, address, bytes)."""
    memory = GlobalMemory()
    for name, address, size in buffers:
        memory.add(name, address, size)
    return Machine(launch, memory, options).run()
