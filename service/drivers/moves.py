"""Operands to a GPU and results back: receives items, hands on device tensors, and D to where it belongs.

Operands are where they are kept, in a client's device memory, or copied from page-locked host memory on a stream of
their own. D that is to be stored stays on the device while there is room; else it is copied out on another stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kernels.operands import Operands
from service.drivers.events import Events
from service.drivers.flight import Flight, Moved, Stay
from service.drivers.lent import Lent
from service.drivers.resident import Cache
from service.memory import operands_of
from service.messages import ON_DEVICE, Item, Operand

#: Products between clients' device memory whose tensors are remembered.
MOST_VIEWS = 256


class Moves:
    """One GPU's: `inward` and `outward` are its streams for copies; who computes has another as the current one."""

    def __init__(
        self, torch: Any, place: Any, lent: Lent, cache: Cache, events: Events, inward: Any, outward: Any
    ) -> None:
        self._torch = torch
        self._place = place
        self._lent = lent
        self._cache = cache
        self._events = events
        self.inward = inward
        self.outward = outward
        self.types = {
            "fp16": torch.float16,
            "bf16": torch.bfloat16,
            "fp32": torch.float32,
            "fp64": torch.float64,
        }

    def knows(self, operand: Operand) -> bool:
        """Whether the operand's memory is mapped, or the device has it."""
        if operand.region == ON_DEVICE:
            return operand.tensor in self._cache
        return operand.region in self._lent.data

    def here(self, operand: Operand) -> Any:
        """The operand's bytes where they lie, as a tensor."""
        data = self._lent.data[operand.region][operand.offset : operand.offset + operand.nbytes]
        return data.view(self.types[operand.dtype]).view(operand.shape)

    def mark(self, flight: Flight, name: str, stream: Any) -> None:
        """Record an event of the flight."""
        event = flight.marks[name] = self._events.take(flight)
        event.record(stream)

    # -- in ---------------------------------------------------------------------------------------------------

    def find(self, item: Item) -> Moved | None:
        """A product between memory that the device has, where the last such product of these operands was found."""
        stay = self._lent.views.get(_place(item))
        return None if stay is None else Moved([item], stay.operands, stay)

    def copy_in(self, flight: Flight, items: Sequence[Item]) -> Moved:
        """Operands of one launch in device memory; rows of a stack side by side."""
        first = items[0]
        operands = self._gather(flight, items)
        if len(items) > 1 or not all(self._lent.on_device(x.region) for x in operands_of(first)):
            return Moved(items, operands)
        # Nothing moves, and clients ask for the same product again.
        views = self._lent.views
        if len(views) >= MOST_VIEWS:
            views.clear()
        stay = views[_place(first)] = Stay(operands)
        return Moved(items, operands, stay)

    def _gather(self, flight: Flight, items: Sequence[Item]) -> Operands:
        first = items[0]
        a = self._arrive(flight, first.a) if len(items) == 1 else self._stack(flight, items)
        b = self._arrive(flight, first.b)
        c = None if first.c is None else self._arrive(flight, first.c)
        bias = None if first.bias is None else self._arrive(flight, first.bias)
        if len(items) == 1 and self._lent.on_device(first.out.region):
            d = self.here(first.out)
        else:
            shape = first.out.shape if len(items) == 1 else (a.shape[0], first.out.shape[1])
            d = self._torch.empty(shape, dtype=self.types[first.out.dtype], device=self._place)
        flight.held += [a, b, c, bias, d]
        params = first.params
        return Operands(_logical(a, params.trans_a), _logical(b, params.trans_b), _three(d), _three(c), bias)

    def _arrive(self, flight: Flight, operand: Operand) -> Any:
        """An operand in device memory: kept there already, or copied now (and kept, if it is stored)."""
        if self._lent.on_device(operand.region):
            return self.here(operand)
        kept = self._cache.get(operand.tensor) if operand.tensor else None
        if kept is not None:
            return kept
        self._begins(flight)
        with self._torch.cuda.stream(self.inward):
            moved = self._torch.empty(operand.shape, dtype=self.types[operand.dtype], device=self._place)
            moved.copy_(self.here(operand), non_blocking=True)
        if operand.tensor:
            self._cache.put(operand.tensor, moved)
        return moved

    def _stack(self, flight: Flight, items: Sequence[Item]) -> Any:
        """Rows of all items' A."""
        torch, first = self._torch, items[0].a
        rows = sum(item.a.shape[0] for item in items)
        self._begins(flight)
        with torch.cuda.stream(self.inward):
            a = torch.empty((rows, first.shape[1]), dtype=self.types[first.dtype], device=self._place)
            at = 0
            for item in items:
                kept = self._cache.get(item.a.tensor) if item.a.tensor else None
                source = self.here(item.a) if kept is None else kept
                a[at : at + item.a.shape[0]].copy_(source, non_blocking=True)
                flight.held.append(source)
                at += item.a.shape[0]
        return a

    def _begins(self, flight: Flight) -> None:
        """The first copy of a batch is about to be queued."""
        if "begun" not in flight.marks:
            self.mark(flight, "begun", self.inward)

    # -- out --------------------------------------------------------------------------------------------------

    def stays(self, flight: Flight, items: Sequence[Item], d: Any) -> bool:
        """Whether D is where it belongs already: in a client's device memory, or here, as it is to be stored."""
        if len(items) > 1:
            return False
        if self._lent.on_device(items[0].out.region):
            return True
        return self._keep(flight, items[0], lambda: d.view(items[0].out.shape))

    def copy_out(self, flight: Flight, items: Sequence[Item], d: Any) -> None:
        """D into the slots; rows of a stack each to its own, or into memory of their own here."""
        with self._torch.cuda.stream(self.outward):
            if len(items) == 1:
                self.here(items[0].out).copy_(d.view(items[0].out.shape), non_blocking=True)
                return
            at = 0
            for item in items:
                rows = d[0, at : at + item.out.shape[0]]
                if not self._keep(flight, item, rows.clone):
                    self.here(item.out).copy_(rows, non_blocking=True)
                at += len(rows)

    def _keep(self, flight: Flight, item: Item, value: Callable[[], Any]) -> bool:
        """Keep D here, if it is to be stored and there is room."""
        if not item.out.tensor or not self._cache.takes(item.out.nbytes):
            return False
        try:
            self._cache.keep(item.out.tensor, value())
        except self._torch.OutOfMemoryError:
            return False
        flight.kept.add(item.id)
        return True


def _place(item: Item) -> tuple[object, ...]:
    """Where a product's operands lie, and how it is computed."""
    return item.a, item.b, item.out, item.c, item.bias, item.params


def _three(x: Any) -> Any:
    return x if x is None or x.dim() == 3 else x[None]


def _logical(x: Any, transposed: bool) -> Any:
    """op(X) as [layers, rows, columns]."""
    x = _three(x)
    return x.transpose(1, 2) if transposed else x
