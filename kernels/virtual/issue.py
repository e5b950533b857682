"""Work handed to an engine: receives what a group issues, hands on its node, its bytes and its groups.

An operation happens when the machine chooses: at once (early), when nothing else can run (late), or in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.virtual import tensormap
from kernels.virtual.detect import GRANULE, Clock
from kernels.virtual.report import Fault

if TYPE_CHECKING:
    from kernels.virtual.barriers import MBarrier
    from kernels.virtual.cta import Cta
    from kernels.virtual.machine import Machine
    from kernels.virtual.memory import Span
    from kernels.virtual.warp import Warp


@dataclass(slots=True)
class Issue:
    """Who issued an operation, where, and what it may rely on. `node` is the operation's own."""

    who: str
    at: int
    where: str
    node: int
    clock: Clock
    warp: Any = None


@dataclass(slots=True)
class BulkStore:
    """A store that is under way: reads of shared memory and writes of global memory end apart."""

    read: Issue
    write: Issue
    done: bool = False
    waited: bool = False
    done_at: float = 0.0  # in the model


class IssueMixin:
    """What every asynchronous instruction needs."""

    warp: Warp
    cta: Cta
    machine: Machine
    mask: np.ndarray
    mask_bits: int
    leader: int
    at: int

    if TYPE_CHECKING:

        def block(self, why: Any) -> None: ...
        def where(self) -> str: ...
        def fault(self, kind: str, text: str) -> Fault: ...
        def shared_span(self, address: int, size: int) -> tuple[Span, int]: ...
        def _mbarrier(self, address: Any) -> MBarrier: ...
        def _find(self, address: int, size: int) -> Span: ...

    def issue(self, what: str) -> Issue:
        """A new operation's node: it follows what its issuer has done so far."""
        detector = self.machine.detector
        warp = self.warp
        if detector is None:
            return Issue("", self.at, "", 0, (0, 0), warp)
        node = detector.node()
        seen, proxied = warp.clock
        warp.release()  # what the warp does from here is not before the operation
        return Issue(f"{what} of {warp}", self.at, self.where(), node, (seen | 1 << node, proxied), warp)

    def _one(self, value: Any) -> int:
        """An operand of an instruction that a warp executes once."""
        if isinstance(value, np.ndarray):
            picked = value[self.mask]
            if not (picked == picked[0]).all():
                raise self.fault("protocol", "operands differ between lanes of one asynchronous operation")
            return int(picked[0])
        return int(value)

    def note(self, shadow: Any, place: Any, issue: Issue, *, write: bool, same: bool = False) -> bool:
        """Tell the detector of an asynchronous access; whether it only repeats another's write (see there)."""
        detector = self.machine.detector
        if detector is None:
            return False
        number = detector.access(issue.node, issue.at, False, issue.who, issue.where)
        if write:
            return detector.write(shadow, place, number, issue.clock, same=same)
        detector.read(shadow, place, number, issue.clock)
        return False

    # --- to shared memory -------------------------------------------------------------------------

    def _targets(
        self, dst: int, bar: int, mask: int | None, pair: int, nbytes: int
    ) -> list[tuple[Span, int, MBarrier]]:
        """Memory and barrier in each CTA that a load reaches."""
        if mask is None:
            span, offset = self.shared_span(dst, nbytes)
            return [(span, offset, self._mbarrier(bar))]
        out = []
        for rank in range(16):
            if mask >> rank & 1:
                span, offset = self.shared_span(rank << 24 | dst & 0xFFFFFF, nbytes)
                side = (rank & ~1) | (bar >> 24 & 1) if pair == 2 else rank
                out.append((span, offset, self._mbarrier(side << 24 | bar & 0xFFFFFF)))
        return out

    def _land(
        self, block: np.ndarray, targets: list[tuple[Span, int, MBarrier]], swizzle: int, issue: Issue,
        *, counted: int | None = None,
    ) -> None:  # fmt: skip
        """Write bytes to shared memory and count them (or as many as `counted` says) on the barriers."""
        nbytes = block.size * 16
        for span, offset, barrier in targets:
            if barrier.cta.gone:
                raise Fault("protocol", f"{issue.who} at {issue.where} lands in a CTA that has exited")
            for cta in (barrier.cta, self.cta.cluster.owner(span)):
                if cta is not None and cta is not self.cta:
                    cta.touch(issue.node, issue.who, issue.where)
            if swizzle:
                span.views[16][tensormap.chunks(offset, block.size, swizzle)] = block
            else:
                span.views[16][offset >> 4 : (offset >> 4) + block.size] = block
            if self.machine.detector is not None:
                place = slice(offset // GRANULE, (offset + nbytes) // GRANULE)
                self.note(span.with_shadow(), place, issue, write=True)
            self.machine.complete(barrier, nbytes if counted is None else counted, issue.clock, issue.who)

    # --- bulk groups ------------------------------------------------------------------------------

    def _ended(self, store: BulkStore) -> None:
        store.done = True
        if self.machine.timing is not None:
            store.done_at = self.machine.timing.now
        self.machine.progress += 1
        self.machine.wake(self.warp)

    def _open_store(self, what: str) -> BulkStore:
        store = BulkStore(self.issue(what), self.issue(what))
        store.write.clock = (store.write.clock[0] | store.read.clock[0], store.write.clock[1])
        groups = self.warp.bulk.setdefault(self.leader, [[]])
        groups[-1].append(store)
        return store

    def bulk_commit(self) -> None:
        """cp.async.bulk.commit_group, for each lane that has stored."""
        for lane, groups in self.warp.bulk.items():
            if self.mask_bits >> lane & 1:
                groups.append([])

    def bulk_wait(self, newest: int, read: bool) -> bool:
        """cp.async.bulk.wait_group: all but the newest groups have ended (their reads, with .read)."""
        for lane, groups in self.warp.bulk.items():
            if not self.mask_bits >> lane & 1:
                continue
            closed = groups[:-1]
            ended = closed[: len(closed) - newest] if newest else closed
            if not all(store.done for group in ended for store in group):
                self.block(self.warp)
                return False
            for group in ended:
                for store in group:
                    store.waited = True
                    if self.machine.timing is not None:
                        timing = self.machine.timing
                        self.warp.not_before(store.done_at if read else timing.stored(store.done_at))
                    if self.machine.detector is not None:
                        self.warp.acquire(store.read.clock if read else store.write.clock)
            if not read:
                del groups[: len(ended)]
        return True
