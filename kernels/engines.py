"""The engines of one SM: receives a chip's parameters, hands on when each request begins, ends and is seen. A model.

Whoever drives it brings the requests in the order of time: the kernels' own schedules (model.py), at once and without
a compiler, or the compiled instructions on the virtual GPU (virtual/timing.py). What an engine takes for a request is
said here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.chips import Chip


@dataclass(slots=True)
class Engine:
    """Serves requests in the order in which they come."""

    lane: str
    free: float = 0.0  # clock from which it is idle
    busy: float = 0.0  # clocks served


@dataclass(frozen=True, slots=True)
class Served:
    """Clocks of a request: it is served from `begin` to `end`, and its outcome is there at `seen`."""

    begin: float
    end: float
    seen: float


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of an engine, in clocks. Latencies don't keep the engine: the next request overlaps them."""

    engine: Engine
    clocks: float
    before: float = 0.0  # latency ahead of the service
    after: float = 0.0  # latency of the outcome

    def serve(self, now: float) -> Served:
        """Ask now, or when the engine is free."""
        begin = max(now + self.before, self.engine.free)
        end = begin + self.clocks
        self.engine.free = end
        self.engine.busy += self.clocks
        return Served(begin, end, end + self.after)


def together(requests: list[Request], now: float) -> Served:
    """One operation of several SMs: it begins when all their engines are free."""
    start = max(now, *(r.engine.free - r.before for r in requests))
    served = [r.serve(start) for r in requests]
    return served[0]


class Engines:
    """What the CTAs of an SM share."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self.tma = Engine("TMA")
        self.tensor = Engine("tensor core")
        self.reader = Engine("tensor memory")
        self.store = Engine("TMA store")

    def load(self, nbytes: float) -> Request:
        """A TMA load; seen when its bytes have landed."""
        chip = self.chip
        return Request(self.tma, nbytes / chip.load_rate.value, before=chip.load_latency.value)

    def write(self, nbytes: float) -> Request:
        """A TMA store; it ends when shared memory has been read, and is seen when the bytes are in memory."""
        chip = self.chip
        return Request(self.store, nbytes / chip.store_rate.value, after=chip.load_latency.value)

    def multiply(self, fma: float) -> Request:
        """A product of so many multiply-adds of 16-bit operands."""
        chip = self.chip
        return Request(self.tensor, fma / chip.mma_rate.value, after=chip.mma_latency.value)

    def read(self, nbytes: float) -> Request:
        """A read of tensor memory into registers."""
        chip = self.chip
        return Request(self.reader, nbytes / chip.read_rate.value, before=chip.read_latency.value)

    def copy(self, elements: int, at_once: int, instructions: int) -> float:
        """Clocks of a thread that copies elements by plain loads, so many in flight, at so many instructions each."""
        chip = self.chip
        return elements / at_once * chip.plain_latency.value + elements * instructions * chip.issue.value
