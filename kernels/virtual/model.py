"""A clock for the virtual GPU: receives a chip's parameters, hands on when each warp and engine is done. A model.

A kernel runs as usual; beside it every warp has a time, every engine of an SM (TMA, tensor core) a time from which
it is free. An instruction costs issue slots, an operation starts when it is issued and its engine is free, a
barrier opens when its last arrival is in, and who waits for it goes on then. What isn't modelled: bank conflicts,
the memory system beyond a latency and a rate, clocks that sink under load.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kernels.chips import Chip
from kernels.perfetto import Span

if TYPE_CHECKING:
    from kernels.virtual.warp import Warp


@dataclass(slots=True)
class Timing:
    """Times of one run. CTAs of one rank in their cluster share an SM, however many are resident."""

    chip: Chip
    free: dict[tuple[str, int], float] = field(default_factory=dict)
    queue_done: dict[Any, float] = field(default_factory=dict)
    pending: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    tensor_busy: dict[int, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    count: int = 0
    now: float = 0.0
    end: float = 0.0
    keep: bool = False

    def issue_cost(self, instructions: int) -> float:
        """Cycles of plain instructions."""
        return instructions * self.chip.issue.value

    def submit(
        self, warp: Warp, engine: str, work: tuple[Any, ...], queue: Any, run: Callable[[], None]
    ) -> None:
        """Take in an operation; it is done when its engine has done it."""
        begin, end = self._place(warp, work, queue)
        self.count += 1
        heapq.heappush(self.pending, (end, self.count, run))
        if self.keep and work[0] != "commit":
            self.spans.append(Span(warp.cta.rank, engine, work[0], begin, end))

    def _place(self, warp: Warp, work: tuple[Any, ...], queue: Any) -> tuple[float, float]:
        """Begin and end of an operation."""
        chip, issued, sm = self.chip, warp.time, warp.cta.rank
        kind = work[0]
        if kind in ("load", "store"):
            rate = chip.load_rate.value if kind == "load" else chip.store_rate.value
            begin = max(issued, self.free.get((kind, sm), 0.0))
            moved = begin + work[1] / rate
            self.free[kind, sm] = moved
            return begin, moved + chip.load_latency.value
        if kind == "mma":
            return self._mma(issued, work, queue, sm)
        end = max(issued, self.queue_done.get(queue, 0.0)) + chip.signal.value
        return issued, end

    def _mma(self, issued: float, work: tuple[Any, ...], queue: Any, sm: int) -> tuple[float, float]:
        """A product of m × n × k by `pair` SMs: all of them are busy for the same time."""
        _, m, n, k, pair = work
        busy = m * n * k / (self.chip.mma_rate.value * pair)
        members = [sm] if pair == 1 else [sm & ~1, sm | 1]
        begin = max([issued, *(self.free.get(("mma", s), 0.0) for s in members)])
        for s in members:
            self.free["mma", s] = begin + busy
            self.tensor_busy[s] = self.tensor_busy.get(s, 0.0) + busy
        end = begin + busy + self.chip.mma_latency.value
        if queue is not None:
            self.queue_done[queue] = max(self.queue_done.get(queue, 0.0), end)
        return begin, end

    def warp_product(self, warp: Warp, n: int, k: int) -> float:
        """A warp's 16 rows of a wgmma: the end."""
        sm = warp.cta.rank
        busy = 16 * n * k / self.chip.mma_rate.value
        begin = max(warp.time, self.free.get(("mma", sm), 0.0))
        self.free["mma", sm] = begin + busy
        self.tensor_busy[sm] = self.tensor_busy.get(sm, 0.0) + busy
        if self.keep:
            self.spans.append(Span(sm, "tensor core", "wgmma", begin, begin + busy))
        return begin + busy + self.chip.mma_latency.value

    def plain_load(self, warp: Warp, count: int) -> None:
        """Loads into registers: those of one basic block are in flight together."""
        if warp.loaded_at != count:
            warp.loaded_at = count
            warp.stall += self.chip.plain_latency.value

    def next_done(self) -> float:
        """When the next operation is done."""
        return self.pending[0][0] if self.pending else float("inf")

    def do_next(self) -> None:
        """Carry out the operation that is done first."""
        self.now, _, run = heapq.heappop(self.pending)
        self.end = max(self.end, self.now)
        run()
