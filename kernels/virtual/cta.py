"""Clusters and thread blocks: receives a launch, hands on the memories, barriers and warps of each CTA.

What has to hold when a CTA exits is checked here: stores waited for, tensor memory freed, no other CTA's work still on
its way to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernels.virtual.barriers import MBarrier, Meeting
from kernels.virtual.detect import GRANULE, Shadow
from kernels.virtual.issue import Issue
from kernels.virtual.memory import Span
from kernels.virtual.tmem import COLUMNS, LANES
from kernels.virtual.warp import Group, Warp

if TYPE_CHECKING:
    from kernels.virtual.machine import Machine

SMEM_BYTES = 232_448  # the most a CTA may ask for on sm_90 and sm_100
RESERVED = 1024  # at the bottom of each CTA's window


class Cluster:
    """CTAs that share a window of shared memory."""

    def __init__(self, machine: Machine, index: tuple[int, int, int]) -> None:
        launch = machine.launch
        self.index = index
        self.shape = launch.cluster
        self.grid = tuple(g // c for g, c in zip(launch.grid, launch.cluster, strict=True))
        self.size = int(np.prod(launch.cluster))
        self.explicit = int(launch.explicit_cluster)
        self.meeting = Meeting(f"cluster barrier of cluster {index}")
        self.members = [Cta(machine, self, rank) for rank in range(self.size)]
        self._owners = {id(member.smem): member for member in self.members}

    def member(self, rank: int) -> Cta | None:
        """The CTA of a rank."""
        return self.members[rank] if rank < self.size else None

    def owner(self, span: Span) -> Cta | None:
        """The CTA whose shared memory this is; None for global memory."""
        return self._owners.get(id(span))

    def live_threads(self) -> int:
        """Threads that have not exited."""
        return sum(m.live_threads() for m in self.members)


class Cta:
    """A thread block: its memories, barriers and warps."""

    def __init__(self, machine: Machine, cluster: Cluster, rank: int) -> None:
        launch = machine.launch
        self.machine = machine
        self.cluster = cluster
        self.rank = rank
        cx, cy, _ = launch.cluster
        self.in_cluster = (rank % cx, rank // cx % cy, rank // (cx * cy))
        self.index = tuple(
            base * size + place
            for base, size, place in zip(cluster.index, launch.cluster, self.in_cluster, strict=True)
        )
        self.label = ",".join(map(str, self.index))
        self.grid, self.block = launch.grid, launch.block
        self.window = rank << 24
        self.sm = machine.next_sm()
        self.params = machine.params
        self.dynamic_bytes = launch.dynamic_bytes
        self.smem_bytes = launch.program.static_bytes - RESERVED + launch.dynamic_bytes
        size = RESERVED + self.smem_bytes
        raw = np.full(-(-size // 16) * 16, 0xFF, np.uint8)
        self.smem = Span(f"shared memory of CTA {self.label}", self.window, size, self.window, raw)
        self.smem.end = size
        self.mbarriers: dict[int, MBarrier] = {}
        self.meetings: dict[int, Meeting] = {}
        self.watched: dict[str, tuple[Meeting, int]] = {}
        self.gone = False
        self.touched: dict[int, tuple[str, str]] = {}  # accesses from other CTAs: node, who and where
        self.signals: dict[int, Issue] = {}  # commits from other CTAs, by the nodes of their signals
        self.known = 0  # nodes that warps knew to be over when they exited
        self.relinquished = False
        self.tmem = np.full((LANES, COLUMNS), 0xFFFFFFFF, np.uint32)
        self.tmem_used = np.zeros(COLUMNS, bool)
        self.tmem_blocks: dict[int, int] = {}
        self.tmem_users: list[int] = []  # accesses that were remembered when it was freed
        self.freed_from: int | None = None  # where the other CTA of a pair has freed it
        self._tmem_shadow: Shadow | None = None
        self.register_waits: dict[int, dict[int, int]] = {}
        self.given: dict[
            tuple[int, int], set[int]
        ] = {}  # warps that gave registers up, by warpgroup and place
        threads = int(np.prod(launch.block))
        self.warps = [Warp(self, n) for n in range(-(-threads // 32))]

    def tmem_shadow(self) -> Shadow:
        """The detector's notes on tensor memory: a row a group of 16 lanes, a column a word."""
        if self._tmem_shadow is None:
            shadow = Shadow(f"tensor memory of CTA {self.label}", LANES // 16 * COLUMNS * GRANULE, 0)
            shadow.fold(COLUMNS)
            self._tmem_shadow = shadow
        return self._tmem_shadow

    def live_threads(self) -> int:
        """Threads that have not exited; a warp that has left in part counts whole."""
        return 32 * sum(not w.exited for w in self.warps)

    def watch(self, meeting: Meeting, threads: int) -> None:
        """Remember a barrier for all threads: it may open when others exit."""
        self.watched[meeting.name] = (meeting, threads)

    def touch(self, node: int, who: str, where: str) -> None:
        """Another CTA signals, reads or writes here: this one must not exit before it knows that to be over."""
        if self.machine.detector is not None:
            self.touched.setdefault(node, (who, where))

    def lanes_left(self, group: Group) -> None:
        """Some lanes have exited."""
        warp = group.warp
        if len(warp.groups) > 1:
            return
        self.known |= warp.clock[0]
        for groups in warp.bulk.values():
            for store in (s for g in groups for s in g):
                if not store.waited:
                    self.machine.find(
                        "protocol",
                        f"{warp} exits at {group.where()} without waiting for its {store.write.who}",
                    )
                    break
        self.machine.exits.append(warp)

    def settle_exits(self) -> None:
        """A warp has gone: barriers for all threads may open, and the CTA may be over."""
        for meeting, threads in self.watched.values():
            if not threads and meeting.arrived:
                meeting.expected = self.live_threads()
                if meeting.arrived >= meeting.expected:
                    meeting.open()
                    self.machine.wake(meeting)
        meeting = self.cluster.meeting
        if meeting.arrived:
            meeting.expected = self.cluster.live_threads()
            if meeting.arrived >= meeting.expected:
                meeting.open()
                self.machine.wake(meeting)
        if not self.gone and all(w.exited for w in self.warps):
            self.gone = True
            self._check_end()
            self.machine.cta_over(self)

    def _check_end(self) -> None:
        if self.machine.options.covered is not None:
            used = {b.line for b in self.mbarriers.values() if b.phase or b.pending != b.count}
            self.machine.used_lines |= used
            self.machine.idle_lines |= {b.line for b in self.mbarriers.values()} - used
        for first, columns in self.tmem_blocks.items():
            self.machine.find(
                "tensor memory", f"CTA {self.label} exits without freeing {columns} columns at column {first}"
            )
        unknown = [what for node, what in self.touched.items() if not self.known >> node & 1]
        if unknown:
            who, where = unknown[-1]
            self.machine.find(
                "exit",
                f"CTA {self.label} exits, and nothing orders that after {who} at {where}, which reaches it "
                f"from another CTA (one of {len(unknown)})",
            )
        for (number, at), warps in self.given.items():
            if len(warps) < sum(w.index // 4 == number for w in self.warps):
                self.machine.lint(at, "not every warp of the warpgroup gives up its registers")
        for node, issue in self.signals.items():
            if self.machine.detector is not None and not self.known >> node & 1:
                text = (
                    f"{issue.who.partition(' of ')[0]} to another CTA that exits without a wait for it: only a later "
                    f"signal of the same thread says that it has arrived"
                )
                self.machine.lint(issue.at, text)
        for barrier in self.mbarriers.values():
            if barrier.bytes > 0:
                self.machine.find("barrier", f"CTA {self.label} exits while {barrier} waits for bytes")

    def set_registers(self, group: Group, way: str, count: int) -> bool:
        """setmaxnreg: all four warps of a warpgroup have to execute it. Who gives registers up doesn't wait."""
        warp = group.warp
        key = warp.index // 4
        if way == "dec":
            warp.registers = count
            self.given.setdefault((key, group.at), set()).add(warp.index)
            return True
        arrived = self.register_waits.setdefault(key, {})
        arrived.setdefault(warp.index, 0)
        members = [w for w in self.warps if w.index // 4 == key]
        if warp.registers == count and arrived[warp.index] == 1:
            arrived[warp.index] = 0
            return True
        arrived[warp.index] = 2 if arrived[warp.index] == 0 else arrived[warp.index]
        if all(arrived.get(w.index) == 2 for w in members):
            for w in members:
                w.registers = count
                arrived[w.index] = 1
            self.machine.wake(self.register_waits)
            self.machine.progress += 1
            arrived[warp.index] = 0
            return True
        group.block(self.register_waits)
        return False
