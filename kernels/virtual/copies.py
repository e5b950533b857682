"""Asynchronous copies: receives TMA and bulk instructions of a group, hands on operations for the machine to
time.

An operation happens when the machine chooses: at once (early), when nothing else can run (late), or in
between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.virtual import tensormap
from kernels.virtual.access import combine
from kernels.virtual.detect import GRANULE, Clock
from kernels.virtual.report import Fault
from kernels.virtual.tensormap import TensorMap

if TYPE_CHECKING:
    from kernels.virtual.barriers import MBarrier
    from kernels.virtual.machine import Cta, Machine
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


class CopyMixin:
    """What generated code calls to copy."""

    warp: Warp
    cta: Cta
    machine: Machine
    mask: np.ndarray
    mask_bits: int
    leader: int
    full: bool
    lanes: int
    at: int

    if TYPE_CHECKING:

        def block(self, why: Any) -> None: ...
        def where(self) -> str: ...
        def fault(self, kind: str, text: str) -> Fault: ...
        def shared_span(self, address: int, size: int) -> tuple[Span, int]: ...
        def _mbarrier(self, address: Any) -> MBarrier: ...
        def _find(self, address: int, size: int) -> Span: ...
        def uniform(self, value: Any) -> Any: ...

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

    # --- tensor maps ------------------------------------------------------------------------------

    def _map(self, address: int) -> TensorMap:
        data = self.machine.read_map(address)
        found = self.machine.maps.get(data)
        if found is None:
            found = tensormap.decode(data)
            self._check_map(found)
            self.machine.maps[data] = found
        return found

    def _check_map(self, found: TensorMap) -> None:
        if not found.item or found.interleave:
            raise self.fault("protocol", f"a tensor map that is not understood: {found}")
        if found.address % 16 or any(s % 16 for s in found.strides):
            raise self.fault(
                "alignment", f"tensor map of address {found.address:#x}, strides {found.strides}"
            )
        if found.box[0] * found.item % 16:
            raise self.fault("alignment", f"a box of {found.box[0]} x {found.item} bytes, no multiple of 16")
        if found.span and found.box[0] * found.item > found.span:
            raise self.fault(
                "protocol", f"a box row of {found.box[0] * found.item} bytes, wider than its swizzle"
            )

    def prefetch_map(self, address: int) -> None:
        """prefetch.tensormap."""
        self.machine.read_map(address)

    def tma_prefetch(self, address: int, coordinates: tuple[int, ...]) -> None:
        """cp.async.bulk.prefetch.tensor: no effect on values."""
        self.machine.read_map(address)

    def _tensor(self, found: TensorMap) -> tuple[np.ndarray, Span]:
        """The tensor as an array, slowest dimension first."""
        span = self._find(found.address, found.reach)
        strides = (found.item, *found.strides)[::-1]
        array = np.ndarray(
            found.dims[::-1], tensormap.UNITS[found.item], span.raw, found.address - span.start, strides
        )
        return array, span

    def _shadow_box(
        self, found: TensorMap, span: Span, slices: tuple[slice, ...]
    ) -> tuple[Any, tuple[Any, ...]]:
        """The detector's granules of a box, row by row."""
        inner = slices[-1]
        first = found.address - span.start + inner.start * found.item
        last = found.address - span.start + inner.stop * found.item
        rows = np.zeros(1, np.int64)
        for dim, stride in zip(slices[:-1], found.strides[::-1], strict=True):
            rows = (rows[:, None] + np.arange(dim.start, dim.stop) * stride).ravel()
        granules = np.arange(first // GRANULE, -(-last // GRANULE))
        return span.with_shadow(), (rows[:, None] // GRANULE + granules,)

    # --- TMA --------------------------------------------------------------------------------------

    def tma_load(
        self,
        dst: Any,
        address: Any,
        coordinates: tuple[Any, ...],
        bar: Any,
        mask: int | None,
        pair: int,
        cluster: bool,
    ) -> None:
        """cp.async.bulk.tensor, global to shared."""
        dst, bar = self._one(dst), self._one(bar)
        found = self._map(self._one(address))
        where = tuple(self._one(c) for c in coordinates)
        if len(where) != len(found.dims):
            raise self.fault(
                "protocol", f"{len(where)} coordinates for a tensor of {len(found.dims)} dimensions"
            )
        if dst % 128:
            raise self.fault("alignment", f"TMA destination {dst:#x} is no multiple of 128")
        targets = self._targets(dst, bar, mask, pair, found.box_bytes)
        issue = self.issue("TMA load")
        group = self

        def run() -> None:
            array, span = group._tensor(found)
            pairs = [tensormap.clip(c, b, d) for c, b, d in zip(where, found.box, found.dims, strict=True)][
                ::-1
            ]
            outer = tuple(p[0] for p in pairs)
            inner = tuple(p[1] for p in pairs)
            part = array[outer]
            if part.size and part.shape == found.box[::-1]:
                block = np.ascontiguousarray(part)
            else:
                block = np.zeros(found.box[::-1], array.dtype)
                block[inner] = part
            if group.machine.detector is not None and part.size:
                shadow, place = group._shadow_box(found, span, outer)
                group.note(shadow, place, issue, write=False)
            group._land(block.reshape(-1).view(np.complex128), targets, found.span, issue)

        self.machine.submit(run, "TMA", issue, ("load", found.box_bytes * len(targets)))

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
        self, block: np.ndarray, targets: list[tuple[Span, int, MBarrier]], swizzle: int, issue: Issue
    ) -> None:
        """Write bytes to shared memory and count them on the barriers."""
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
            self.machine.complete(barrier, nbytes, issue.clock, issue.who)

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

    def tma_store(self, address: Any, coordinates: tuple[Any, ...], src: Any, op: str | None) -> None:
        """cp.async.bulk.tensor and cp.reduce.async.bulk.tensor, shared to global."""
        src = self._one(src)
        found = self._map(self._one(address))
        where = tuple(self._one(c) for c in coordinates)
        if src % 128:
            raise self.fault("alignment", f"TMA source {src:#x} is no multiple of 128")
        span, offset = self.shared_span(src, found.box_bytes)
        store = self._open_store("TMA store")
        group = self

        def run() -> None:
            count = found.box_bytes // 16
            raw = span.views[16][tensormap.chunks(offset, count, found.span)]
            block = raw.view(tensormap.UNITS[found.item]).reshape(found.box[::-1])
            pairs = [tensormap.clip(c, b, d) for c, b, d in zip(where, found.box, found.dims, strict=True)][
                ::-1
            ]
            outer, inner = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
            array, whole = group._tensor(found)
            same = op is None and bool(
                np.array_equal(array[outer].view(np.uint8), block[inner].view(np.uint8))
            )
            if op is None:
                array[outer] = block[inner]
            else:
                kind = tensormap.FLOAT_KINDS.get(found.kind, f"u{8 * found.item}")
                target, part = array[outer], block[inner]
                flat = [
                    combine(op, kind, int(x), [int(y)]) for x, y in zip(target.flat, part.flat, strict=True)
                ]
                target[...] = np.array(flat, array.dtype).reshape(target.shape)
            if group.machine.detector is not None:
                place = slice(offset // GRANULE, (offset + found.box_bytes) // GRANULE)
                group.note(span.with_shadow(), place, store.read, write=False)
                if array[outer].size and op is None:
                    shadow, granules = group._shadow_box(found, whole, outer)
                    if group.note(shadow, granules, store.write, write=True, same=same):
                        text = "several warps store the same bytes to the same place, in no order"
                        group.machine.lint(store.write.at, text)
            self._ended(store)

        self.machine.submit(run, "TMA", store.write, ("store", found.box_bytes))

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
