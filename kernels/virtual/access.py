"""Loads, stores and atomics of a group of lanes: receives addresses a lane, hands on values a lane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.virtual.detect import GRANULE, Clock
from kernels.virtual.lanes import UNSIGNED, Value
from kernels.virtual.memory import Span
from kernels.virtual.report import Fault

if TYPE_CHECKING:
    from kernels.virtual.cta import Cta
    from kernels.virtual.machine import Machine
    from kernels.virtual.warp import Warp

LOCAL_HIGH = 0x7E00_0000
SHARED_HIGH = 0x7F00_0000  # upper half of generic addresses of shared memory


class AccessMixin:
    """What generated code calls to reach memory."""

    warp: Warp
    cta: Cta
    machine: Machine
    mask: np.ndarray
    full: bool
    lanes: int
    at: int
    count: int

    # --- where ------------------------------------------------------------------------------------

    def _chosen(self, mask: np.ndarray | None) -> np.ndarray | None:
        """Lanes that take part; None for all 32."""
        if mask is not None:
            mask = mask & self.mask
            return None if mask.all() else mask
        return None if self.full else self.mask

    def shared_span(self, address: int, size: int) -> tuple[Span, int]:
        """The CTA's memory that an address in the cluster's window names, and the offset in it."""
        rank = address >> 24
        offset = address & 0xFFFFFF
        cta = self.cta if rank == self.cta.rank else self.cta.cluster.member(rank)
        if cta is None or cta.gone:
            raise self._bad(
                "bounds", f"shared memory of CTA {rank} of the cluster, which is not there (any more)"
            )
        if offset < 1024 or offset + size > cta.smem.end:
            raise self._bad(
                "bounds", f"{size} bytes of shared memory at {address:#x}; it ends at {cta.smem.end:#x}"
            )
        return cta.smem, offset

    def _bad(self, kind: str, text: str) -> Fault:
        return Fault(kind, f"{self.warp} at {self.machine.place(self.at)}: {text}")

    def _aligned(self, address: Value, size: int) -> None:
        low = address & (size - 1)
        if low if isinstance(low, int) else low.any():
            bad = address if isinstance(address, int) else int(address[np.flatnonzero(low)[0]])
            raise self._bad("alignment", f"address {bad:#x} is no multiple of {size}")

    def _span(self, space: str, address: Value, size: int) -> tuple[Span, Any]:
        """Memory that holds all addresses, and their offsets in it. Vectors hold only acting lanes."""
        if isinstance(address, int):
            if space == "shared":
                return self.shared_span(address, size)
            span = self._find(address, size)
            return span, address - span.start
        low, high = int(address.min()), int(address.max())
        if space == "shared":
            span, _ = self.shared_span(low, high - low + size)
            return span, address & np.uint32(0xFFFFFF)
        span = self._find(low, high - low + size)
        return span, address - np.uint64(span.start)

    def _find(self, address: int, size: int) -> Span:
        try:
            return self.machine.memory.find(address, size)
        except Fault as fault:
            raise self._bad(fault.finding.kind, fault.finding.text) from fault

    def _space_of(self, address: Value) -> tuple[str, Value]:
        """The space of a generic address."""
        first = address if isinstance(address, int) else int(address[0])
        if first >> 32 == LOCAL_HIGH:
            return "local", address & 0xFFFFFFFF if isinstance(address, int) else address.astype(np.uint32)
        if first >> 32 == SHARED_HIGH:
            return "shared", (first & 0xFFFFFFFF if isinstance(address, int) else address.astype(np.uint32))
        return "global", address

    # --- loads ------------------------------------------------------------------------------------

    def load_shared(
        self, address: Value, size: int, count: int, mask: np.ndarray | None = None, sync: bool = False
    ) -> Any:
        """ld.shared."""
        return self._load("shared", address, size, count, mask, sync)

    def load_global(
        self, address: Value, size: int, count: int, mask: np.ndarray | None = None, sync: bool = False
    ) -> Any:
        """ld.global."""
        return self._load("global", address, size, count, mask, sync)

    def load_generic(
        self, address: Value, size: int, count: int, mask: np.ndarray | None = None, sync: bool = False
    ) -> Any:
        """ld."""
        space, address = self._space_of(address)
        return self._load(space, address, size, count, mask, sync)

    def load_local(
        self, address: Value, size: int, count: int, mask: np.ndarray | None = None, sync: bool = False
    ) -> Any:
        """ld.local: each lane its own memory."""
        items = self._local(address, size, count, mask)
        found = self.warp.local.view(UNSIGNED[size * 8])[np.arange(32)[:, None], items]
        if count == 1:
            return np.ascontiguousarray(found[:, 0])
        return tuple(np.ascontiguousarray(found[:, k]) for k in range(count))

    def _load_local(self, address: Value, size: int, count: int, mask: np.ndarray | None) -> Any:
        """ld of a generic address; where the compiler takes the result to be the same in all lanes, it has to be."""
        found = self.load_local(address, size, count, mask)
        if not isinstance(address, int):
            return found
        values = found if count > 1 else (found,)
        if any((v[self.mask] != v[self.mask][0]).any() for v in values):
            raise self._bad(
                "protocol", "a generic load of local memory that differs between lanes is not modelled"
            )
        uniform = tuple(int(v[self.mask][0]) for v in values)
        return uniform if count > 1 else uniform[0]

    def store_local(
        self,
        address: Value,
        size: int,
        values: tuple[Value, ...],
        mask: np.ndarray | None = None,
        sync: bool = False,
    ) -> None:
        """st.local."""
        items = self._local(address, size, len(values), mask)
        lanes = np.arange(32) if (chosen := self._chosen(mask)) is None else np.flatnonzero(chosen)
        view = self.warp.local.view(UNSIGNED[size * 8])
        for k, value in enumerate(values):
            view[lanes, items[lanes, k]] = value[lanes] if isinstance(value, np.ndarray) else value

    def _local(self, address: Value, size: int, count: int, mask: np.ndarray | None) -> np.ndarray:
        """Items of a lane's local memory, [lane, count]; of lanes that don't take part the first."""
        where = np.broadcast_to(np.asarray(address, np.int64), (32,))
        chosen = self._chosen(mask)
        where = where if chosen is None else np.where(chosen, where, 0)
        self._aligned(where, size * count)
        if (where < 0).any() or (where + size * count > self.warp.local.shape[1]).any():
            raise self._bad("bounds", f"local memory at {int(where.max()):#x}")
        items: np.ndarray = where[:, None] // size + np.arange(count)
        return items

    def load_param(self, address: Value, size: int, count: int, mask: Any = None, sync: bool = False) -> Any:
        """ld.param through a register."""
        assert isinstance(address, int)
        for parameter in self.cta.params:
            if parameter.address <= address < parameter.address + len(parameter.data):
                return parameter.read(address - parameter.address, size, count)
        raise self._bad("bounds", f"no parameter at {address:#x}")

    def _load(
        self, space: str, address: Value, size: int, count: int, mask: np.ndarray | None, sync: bool
    ) -> Any:
        width = size * count
        if space == "local":
            return self._load_local(address, size, count, mask)
        if self.machine.timing is not None and space == "global":
            self.machine.timing.plain_load(self.warp, self.count)
        if isinstance(address, int):
            self._aligned(address, width)
            span, offset = self._span(space, address, width)
            self._note(span, offset, width, write=False, sync=sync)
            item = offset // size
            view = span.views[size]
            return view[item].item() if count == 1 else tuple(view[item : item + count].tolist())
        chosen = self._chosen(mask)
        picked = address if chosen is None else address[chosen]
        if picked.size == 0:
            zero = np.zeros(32, UNSIGNED[size * 8])
            return zero if count == 1 else (zero,) * count
        self._aligned(picked, width)
        span, offset = self._span(space, picked, width)
        self._note(span, offset, width, write=False, sync=sync)
        item = (offset // size).astype(np.int64)
        if count == 1:
            return self._spread(span.views[size][item], chosen)
        found = span.views[size][item[:, None] + np.arange(count)]
        return tuple(self._spread(np.ascontiguousarray(found[:, k]), chosen) for k in range(count))

    @staticmethod
    def _spread(values: np.ndarray, chosen: np.ndarray | None) -> np.ndarray:
        if chosen is None:
            return values
        out = np.zeros(32, values.dtype)
        out[chosen] = values
        return out

    # --- stores -----------------------------------------------------------------------------------

    def store_shared(
        self,
        address: Value,
        size: int,
        values: tuple[Value, ...],
        mask: np.ndarray | None = None,
        sync: bool = False,
    ) -> None:
        """st.shared."""
        self._store("shared", address, size, values, mask, sync)

    def store_global(
        self,
        address: Value,
        size: int,
        values: tuple[Value, ...],
        mask: np.ndarray | None = None,
        sync: bool = False,
    ) -> None:
        """st.global."""
        self._store("global", address, size, values, mask, sync)

    def store_generic(
        self,
        address: Value,
        size: int,
        values: tuple[Value, ...],
        mask: np.ndarray | None = None,
        sync: bool = False,
    ) -> None:
        """st."""
        if isinstance(address, np.ndarray) and not self.full:
            first = int(address[np.argmax(self.mask)])
            space = {SHARED_HIGH: "shared", LOCAL_HIGH: "local"}.get(first >> 32, "global")
            self._store(
                space, address if space == "global" else address.astype(np.uint32), size, values, mask, sync
            )
            return
        space, address = self._space_of(address)
        self._store(space, address, size, values, mask, sync)

    def _store(
        self,
        space: str,
        address: Value,
        size: int,
        values: tuple[Value, ...],
        mask: np.ndarray | None,
        sync: bool,
    ) -> None:
        count = len(values)
        width = size * count
        dtype = UNSIGNED[size * 8]
        if space == "local":
            self.store_local(address, size, values, mask)
            return
        self.machine.progress += space == "global" or sync
        chosen = self._chosen(mask)
        if isinstance(address, int):
            if chosen is not None and not chosen.any():
                return
            self._aligned(address, width)
            span, offset = self._span(space, address, width)
            self._note(span, offset, width, write=True, sync=sync)
            last = 31 if chosen is None else int(np.flatnonzero(chosen)[-1])
            for k, value in enumerate(values):  # of several lanes one wins
                span.views[size][offset // size + k] = value[last] if isinstance(value, np.ndarray) else value
            return
        picked = address if chosen is None else address[chosen]
        if picked.size == 0:
            return
        self._aligned(picked, width)
        span, offset = self._span(space, picked, width)
        self._note(span, offset, width, write=True, sync=sync)
        if count == 1:
            value = values[0]
            if chosen is not None and isinstance(value, np.ndarray):
                value = value[chosen]
            span.views[size][offset // size] = value
            return
        rows = np.empty((32, count), dtype)
        for k, value in enumerate(values):
            rows[:, k] = value
        if chosen is not None:
            rows = rows[chosen]
        if width <= 16:
            item = rows.view(span.views[width].dtype).reshape(-1)
            span.views[width][offset // width] = item
        else:
            span.views[size][(offset // size)[:, None].astype(np.int64) + np.arange(count)] = rows

    # --- the detector -----------------------------------------------------------------------------

    def _note(self, span: Span, offset: Any, width: int, *, write: bool, sync: bool) -> None:
        """Tell the detector of a generic access; a synchronizing one orders instead of racing."""
        detector = self.machine.detector
        if detector is None:
            return
        warp = self.warp
        if span is not self.cta.smem:
            other = self.cta.cluster.owner(span)
            if other is not None:
                other.touch(warp.node, str(warp), self.machine.place(self.at))
        if sync:
            key = (id(span), int(offset if isinstance(offset, int) else offset.min()))
            warp.acquire(self.machine.sync_clocks.get(key, (0, 0)))
            if write:
                clock: Clock = warp.release()
                held = self.machine.sync_clocks.get(key, (0, 0))
                self.machine.sync_clocks[key] = (held[0] | clock[0], held[1] | clock[1])
            return
        number = detector.access(warp.node, self.at, True, str(warp), self.machine.place(self.at))
        shadow = span.with_shadow()
        if isinstance(offset, int):
            place: Any = slice(offset // GRANULE, -(-(offset + width) // GRANULE))
        elif width <= GRANULE:
            place = offset // GRANULE
        else:
            place = (offset // GRANULE)[:, None] + np.arange(width // GRANULE, dtype=offset.dtype)
        (detector.write if write else detector.read)(shadow, place, number, warp.clock)
