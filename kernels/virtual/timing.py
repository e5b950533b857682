"""A clock for the virtual GPU: receives what warps issue, hands on when each warp and engine is done. A model.

A kernel runs as usual; beside it every warp has a time, and every SM the engines of kernels/engines.py, those that
`python -m kernels predict` drives by schedules. An instruction costs issue slots, an operation starts when it is
issued and its engine is free, a barrier opens when its last arrival is in, and who waits for it goes on then. What
isn't modelled: bank conflicts, the memory system beyond a latency and a rate, clocks that sink under load.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kernels.chips import Chip
from kernels.engines import Engines, Served, together
from kernels.perfetto import Span

if TYPE_CHECKING:
    from kernels.virtual.warp import Warp


class Timing:
    """Times of one run. CTAs of one rank in their cluster share an SM, however many are resident."""

    def __init__(self, chip: Chip, *, keep: bool = False) -> None:
        self.chip = chip
        self.keep = keep
        self.engines: defaultdict[int, Engines] = defaultdict(lambda: Engines(chip))
        self.queue_done: dict[Any, float] = {}
        self.pending: list[tuple[float, int, Callable[[], None]]] = []
        self.spans: list[Span] = []
        self.count = 0
        self.now = 0.0
        self.end = 0.0

    @property
    def tensor_busy(self) -> dict[int, float]:
        """Clocks that each SM's tensor core was busy."""
        return {sm: engines.tensor.busy for sm, engines in self.engines.items()}

    def issue_cost(self, instructions: int) -> float:
        """Cycles of plain instructions."""
        return instructions * self.chip.issue.value

    def submit(
        self, warp: Warp, engine: str, work: tuple[Any, ...], queue: Any, run: Callable[[], None]
    ) -> None:
        """Take in an operation; it is done when its engine has done it."""
        done = self._done(warp, engine, work, queue)
        self.count += 1
        heapq.heappush(self.pending, (done, self.count, run))

    def _done(self, warp: Warp, engine: str, work: tuple[Any, ...], queue: Any) -> float:
        sm, kind = warp.cta.rank, work[0]
        if kind == "load":
            return self._span(sm, engine, kind, self.engines[sm].load(work[1]).serve(warp.time)).seen
        if kind == "store":  # shared memory has been read; a wait for the bytes takes the latency besides
            return self._span(sm, engine, kind, self.engines[sm].write(work[1]).serve(warp.time)).end
        if kind == "mma":
            _, m, n, k, pair = work
            members = [sm] if pair == 1 else [sm & ~1, sm | 1]
            served = together([self.engines[s].multiply(m * n * k / pair) for s in members], warp.time)
            for s in members:
                self._span(s, engine, kind, served)
            self.queue_done[queue] = max(self.queue_done.get(queue, 0.0), served.seen)
            return served.seen
        return max(warp.time, self.queue_done.get(queue, 0.0))  # a commit, or a copy of scales

    def _span(self, sm: int, lane: str, name: str, served: Served) -> Served:
        if self.keep:
            self.spans.append(Span(sm, lane, name, served.begin, served.end))
        return served

    def warp_product(self, warp: Warp, n: int, k: int) -> float:
        """A warp's 16 rows of a wgmma: the end."""
        sm = warp.cta.rank
        product = self.engines[sm].multiply(16 * n * k)
        return self._span(sm, product.engine.lane, "wgmma", product.serve(warp.time)).seen

    def tensor_read(self, warp: Warp, nbytes: int) -> float:
        """A tcgen05.ld: when its registers are there."""
        sm = warp.cta.rank
        read = self.engines[sm].read(nbytes)
        return self._span(sm, read.engine.lane, "read", read.serve(warp.time)).seen

    def wake(self, warp: Warp, moment: float) -> None:
        """Let a warp go on then."""
        warp.not_before(moment)
        self.count += 1
        heapq.heappush(self.pending, (moment, self.count, lambda: warp.machine.wake(warp)))

    def stored(self, done: float) -> float:
        """When a store's bytes are in memory, of one that had read shared memory at `done`."""
        return done + self.chip.load_latency.value

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
