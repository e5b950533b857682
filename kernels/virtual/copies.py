"""Copies of bytes in a row and cluster launch control: receives instructions of a group, hands on operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.virtual.detect import GRANULE
from kernels.virtual.issue import IssueMixin


class CopyMixin(IssueMixin):
    """What generated code calls to copy."""

    lanes: int

    if TYPE_CHECKING:

        def uniform(self, value: Any) -> Any: ...

    # --- bytes in a row ---------------------------------------------------------------------------

    def _check_bulk(self, nbytes: int, *addresses: int) -> None:
        if nbytes % 16 or any(a % 16 for a in addresses):
            raise self.fault("alignment", f"bulk copy of {nbytes} bytes at {', '.join(map(hex, addresses))}")

    def bulk_load(self, dst: Any, src: Any, nbytes: Any, bar: Any, mask: int | None) -> None:
        """cp.async.bulk, global to shared."""
        dst, src, nbytes, bar = (self._one(v) for v in (dst, src, nbytes, bar))
        self._check_bulk(nbytes, dst, src)
        targets = self._targets(dst, bar, mask, 0, nbytes)
        span = self._find(src, nbytes)
        issue = self.issue("bulk load")

        def run() -> None:
            at = src - span.start
            if self.machine.detector is not None:
                place = slice(at // GRANULE, -(-(at + nbytes) // GRANULE))
                self.note(span.with_shadow(), place, issue, write=False)
            self._land(span.views[16][at >> 4 : (at + nbytes) >> 4].copy(), targets, 0, issue)

        self.machine.submit(run, "TMA", issue, ("load", nbytes))

    def bulk_copy(self, dst: Any, src: Any, nbytes: Any, bar: Any) -> None:
        """cp.async.bulk, shared to the shared memory of another CTA."""
        dst, src, nbytes, bar = (self._one(v) for v in (dst, src, nbytes, bar))
        self._check_bulk(nbytes, dst, src)
        targets = self._targets(dst, bar, None, 0, nbytes)
        span, at = self.shared_span(src, nbytes)
        issue = self.issue("bulk copy")

        def run() -> None:
            self.note(span.with_shadow(), slice(at // GRANULE, (at + nbytes) // GRANULE), issue, write=False)
            self._land(span.views[16][at >> 4 : (at + nbytes) >> 4].copy(), targets, 0, issue)

        self.machine.submit(run, "TMA", issue, ("load", nbytes))

    def bulk_store(self, dst: Any, src: Any, nbytes: Any) -> None:
        """cp.async.bulk, shared to global."""
        dst, src, nbytes = (self._one(v) for v in (dst, src, nbytes))
        self._check_bulk(nbytes, dst, src)
        span, at = self.shared_span(src, nbytes)
        whole = self._find(dst, nbytes)
        store = self._open_store("bulk store")

        def run() -> None:
            to = dst - whole.start
            whole.raw[to : to + nbytes] = span.raw[at : at + nbytes]
            if self.machine.detector is not None:
                self.note(
                    span.with_shadow(),
                    slice(at // GRANULE, (at + nbytes) // GRANULE),
                    store.read,
                    write=False,
                )
                place = slice(to // GRANULE, (to + nbytes) // GRANULE)
                self.note(whole.with_shadow(), place, store.write, write=True)
            self._ended(store)

        self.machine.submit(run, "TMA", store.write, ("store", nbytes))

    # --- cp.async: 4 to 16 bytes a lane -----------------------------------------------------------

    def copy_async(self, dst: Any, src: Any, size: int, used: Any, mask: np.ndarray | None = None) -> None:
        """cp.async: the machine does it at once; the detector knows it only from the wait on."""
        chosen = self.mask if mask is None else mask & self.mask
        issue = self.issue("cp.async")
        for lane in np.flatnonzero(chosen).tolist():
            to, come, count = (v if isinstance(v, int) else int(v[lane]) for v in (dst, src, used))
            if to % size or (count and come % size):
                raise self.fault("alignment", f"cp.async of {size} bytes from {come:#x} to {to:#x}")
            span, offset = self.shared_span(to, size)
            data = np.zeros(size, np.uint8)
            if count:
                whole = self._find(come, count)
                data[:count] = whole.raw[come - whole.start : come - whole.start + count]
            span.raw[offset : offset + size] = data
            self.note(
                span.with_shadow(), slice(offset // GRANULE, (offset + size) // GRANULE), issue, write=True
            )
        self.warp.copies[-1].append(issue)

    def copy_commit(self) -> None:
        """cp.async.commit_group."""
        self.warp.copies.append([])

    def copy_wait(self, newest: int) -> bool:
        """cp.async.wait_group."""
        closed = self.warp.copies[:-1]
        for group in closed[: len(closed) - newest]:
            for issue in group:
                self.warp.acquire(issue.clock)
        return True

    def copy_arrive(self, address: Any, noinc: bool) -> None:
        """cp.async.mbarrier.arrive: an arrival once the lane's copies so far have landed."""
        barrier = self._mbarrier(address)
        clock = self.warp.release()
        for group in self.warp.copies:
            for issue in group:
                clock = (clock[0] | issue.clock[0], clock[1] | issue.clock[1])
        if not noinc:
            barrier.pending += self.lanes
        self.machine.arrive(barrier, self.lanes, clock, str(self.warp))

    def store_async(
        self, address: Any, size: int, values: tuple[Any, ...], bar: Any, mask: np.ndarray | None = None
    ) -> None:
        """st.async: bytes to another CTA, counted on a barrier there."""
        chosen = self.mask if mask is None else mask & self.mask
        issue = self.issue("st.async")
        for lane in np.flatnonzero(chosen).tolist():
            to, where = (v if isinstance(v, int) else int(v[lane]) for v in (address, bar))
            span, offset = self.shared_span(to, size * len(values))
            barrier = self._mbarrier(where)
            for k, value in enumerate(values):
                span.views[size][offset // size + k] = value if isinstance(value, int) else value[lane]
            place = slice(offset // GRANULE, -(-(offset + size * len(values)) // GRANULE))
            self.note(span.with_shadow(), place, issue, write=True)
            if barrier.cta is not self.cta:
                barrier.cta.touch(issue.node, issue.who, issue.where)
            self.machine.complete(barrier, size * len(values), issue.clock, issue.who)

    # --- cluster launch control -------------------------------------------------------------------

    def clc_try_cancel(self, dst: Any, bar: Any, multicast: bool) -> None:
        """clusterlaunchcontrol.try_cancel: take over a cluster that has not started, if there is one."""
        dst, bar = self._one(dst), self._one(bar)
        ranks = range(self.cta.cluster.size) if multicast else [self.cta.rank]
        targets = [
            (*self.shared_span(r << 24 | dst & 0xFFFFFF, 16), self._mbarrier(r << 24 | bar & 0xFFFFFF))
            for r in ranks
        ]
        issue = self.issue("cluster launch control")

        def run() -> None:
            first = self.machine.cancel_cluster()
            words = np.zeros(4, np.uint32)
            if first is not None:
                words[:] = (first[0], first[1], first[2], 1)
            self._land(words.view(np.complex128), targets, 0, issue)

        self.machine.submit(run, "launch control", issue, ("load", 16))

    def clc_canceled(self, response: tuple[Any, Any]) -> bool:
        """query_cancel.is_canceled."""
        return bool(self.uniform(response[1]) >> 32)

    def clc_first(self, response: tuple[Any, Any]) -> tuple[int, int, int, int]:
        """query_cancel.get_first_ctaid."""
        low, high = self.uniform(response[0]), self.uniform(response[1])
        return low & 0xFFFFFFFF, low >> 32, high & 0xFFFFFFFF, 0
