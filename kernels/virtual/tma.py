"""TMA: receives tensor copies of a group, hands on operations over boxes of global tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.virtual import tensormap
from kernels.virtual.atomics import combine
from kernels.virtual.detect import GRANULE
from kernels.virtual.issue import Issue, IssueMixin
from kernels.virtual.memory import Span
from kernels.virtual.tensormap import TensorMap

MAP_BYTES = 128


class TmaMixin(IssueMixin):
    """What generated code calls to copy boxes."""

    if TYPE_CHECKING:

        def _space_of(self, address: Any) -> tuple[str, Any]: ...
        def _span(self, space: str, address: Any, size: int) -> tuple[Span, Any]: ...
        def _note(self, span: Span, offset: Any, width: int, *, write: bool, sync: bool) -> None: ...

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
        row = found.box[0] * found.item * (2 if found.padded else 1)
        if row % 16:
            raise self.fault("alignment", f"a box row of {row} bytes, no multiple of 16")
        if found.span and row > found.span:
            raise self.fault("protocol", f"a box row of {row} bytes, wider than its swizzle")

    def _box(self, address: int, coordinates: tuple[Any, ...]) -> tuple[TensorMap, tuple[int, ...]]:
        """The map and the box's first item in it."""
        found = self._map(address)
        where = tuple(self._one(c) for c in coordinates)
        if len(where) != len(found.dims):
            raise self.fault(
                "protocol", f"{len(where)} coordinates for a tensor of {len(found.dims)} dimensions"
            )
        if where[0] % found.per_item:
            raise self.fault(
                "alignment", f"coordinate {where[0]} is no multiple of {found.per_item} elements"
            )
        return found, (where[0] // found.per_item, *where[1:])

    def _note_map(self, address: int, issue: Issue) -> None:
        """A map in global memory may have been written by the kernel: its operation must see that."""
        detector = self.machine.detector
        if detector is None or address in self.machine.map_bytes:  # a parameter doesn't change
            return
        span = self._find(address, MAP_BYTES)
        place = slice((address - span.start) // GRANULE, (address - span.start + MAP_BYTES) // GRANULE)
        number = detector.access(issue.node, issue.at, False, issue.who, issue.where)
        clock = (issue.clock[0], self.warp.mapped)
        detector.read(span.with_shadow(), place, number, clock, fence="fence.proxy.tensormap")

    def replace_map(self, space: str, address: Any, field: str, ordinal: Any, value: Any) -> None:
        """tensormap.replace: a write of the whole map, through the generic proxy."""
        address, ordinal, value = (self._one(v) for v in (address, ordinal, value))
        if space == "generic":
            space, address = self._space_of(address)
        if address % MAP_BYTES:
            raise self.fault("alignment", f"tensor map at {address:#x} is no multiple of {MAP_BYTES}")
        span, offset = self._span(space, address, MAP_BYTES)
        self._note(span, offset, MAP_BYTES, write=True, sync=False)
        raw = span.raw[offset : offset + MAP_BYTES]
        try:
            raw[:] = np.frombuffer(tensormap.replaced(raw.tobytes(), field, ordinal, value), np.uint8)
        except ValueError as error:
            raise self.fault("protocol", f"a tensor map with {error}") from error
        self.machine.progress += 1

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

    # --- copies ------------------------------------------------------------------------------------

    def tma_load(
        self,
        dst: Any,
        address: Any,
        coordinates: tuple[Any, ...],
        bar: Any,
        mask: int | None,
        pair: int,
        cluster: bool,
        policy: int,
    ) -> None:
        """cp.async.bulk.tensor, global to shared."""
        dst, bar = self._one(dst), self._one(bar)
        address = self._one(address)
        found, where = self._box(address, coordinates)
        if dst % 128:
            raise self.fault("alignment", f"TMA destination {dst:#x} is no multiple of 128")
        targets = self._targets(dst, bar, mask, pair, found.shared_bytes)
        self.machine.loaded[policy] += found.box_bytes
        issue = self.issue("TMA load")
        self._note_map(address, issue)
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
            if found.padded:
                block = np.stack([block.reshape(-1), np.zeros(block.size, block.dtype)], axis=-1)
            chunks = block.reshape(-1).view(np.complex128)
            group._land(chunks, targets, found.span, issue, counted=found.box_bytes)

        self.machine.submit(run, "TMA", issue, ("load", found.box_bytes * len(targets)))

    def tma_store(self, address: Any, coordinates: tuple[Any, ...], src: Any, op: str | None) -> None:
        """cp.async.bulk.tensor and cp.reduce.async.bulk.tensor, shared to global."""
        src = self._one(src)
        address = self._one(address)
        found, where = self._box(address, coordinates)
        if src % 128:
            raise self.fault("alignment", f"TMA source {src:#x} is no multiple of 128")
        if found.padded:
            raise self.fault("protocol", "a store of padded elements of 4 bits is not modelled")
        self.machine.stored += found.box_bytes
        span, offset = self.shared_span(src, found.box_bytes)
        store = self._open_store("TMA store")
        self._note_map(address, store.read)
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
