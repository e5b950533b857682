"""A discrete-event model of one SM: receives a schedule and a chip, hands on what each role and engine does when.

Roles (a thread that loads, one that multiplies, a warpgroup that writes back) are generators that wait on
barriers and ask engines (engines.py), which serve one request after the other. Barriers are those of the kernels:
they count arrivals, hold a phase bit, and `wait(P)` passes once the bit differs from P. It knows the kernels'
schedules, not their instructions, and few parameters (chips.py), none fitted to a step.

Not modelled: the power cap, L2's own limits, divergence between SMs. It is a model; its times are never measured.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from kernels.engines import Engines, Request, Served
from kernels.schedules import COPIES_AT_ONCE, COPY_INSTRUCTIONS, Rates, Schedule

PRODUCER_PHASE = 1
CONSUMER_PHASE = 0


@dataclass(slots=True)
class Barrier:
    """An mbarrier: pending arrivals and bytes, a phase bit."""

    name: str
    index: int
    count: int
    pending: int = field(init=False)
    nbytes: int = 0
    bit: int = 0
    waiters: list[tuple[int, Callable[[], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending = self.count

    def passes(self, phase: int) -> bool:
        """Whether `wait(phase)` passes now."""
        return self.bit != phase


@dataclass(slots=True)
class Place:
    """PipelineState: stage and phase, which flips once a lap."""

    depth: int
    phase: int
    stage: int = 0

    def advance(self) -> None:
        """One stage on."""
        self.stage += 1
        if self.stage == self.depth:
            self.stage, self.phase = 0, self.phase ^ 1


Role = Generator[tuple[Any, ...], None, None]


class Machine:
    """Time in clocks, engines and barriers of one SM, and what happened."""

    def __init__(self, keep: bool = True) -> None:
        self.now = 0.0
        self.keep = keep
        self.spans: list[dict[str, Any]] = []
        self.flips: list[dict[str, Any]] = []
        self.waits: list[dict[str, Any]] = []
        self.handoffs: list[dict[str, Any]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._blocked: dict[str, tuple[Barrier, int]] = {}
        self._last: dict[tuple[str, int], str] = {}

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call then."""
        heapq.heappush(self._queue, (when, next(self._order), call))

    def span(self, lane: str, what: str, begin: float, end: float, **more: Any) -> None:
        """Note that `lane` did `what`."""
        if self.keep:
            self.spans.append({"lane": lane, "what": what, "begin": begin, "end": end, **more})

    def request(
        self, request: Request, what: str, then: Callable[[], None] | None = None, **more: Any
    ) -> Served:
        """Ask an engine now; `then` is called when the outcome is there."""
        served = request.serve(self.now)
        self.span(request.engine.lane, what, served.begin, served.end, asked=self.now, **more)
        if then is not None:
            self.at(served.seen, then)
        return served

    def arrive(self, barrier: Barrier, lane: str, *, nbytes: int = 0, arrivals: int = 1) -> None:
        """Count an arrival or landed bytes; flip when all are in and wake who waits."""
        barrier.pending -= arrivals
        barrier.nbytes -= nbytes
        if barrier.pending or barrier.nbytes:
            return
        barrier.bit ^= 1
        barrier.pending = barrier.count
        if self.keep:
            self.flips.append(
                {
                    "barrier": barrier.name,
                    "index": barrier.index,
                    "at": self.now,
                    "bit": barrier.bit,
                    "by": lane,
                }
            )
        self._last[barrier.name, barrier.index] = lane
        waiters, barrier.waiters = barrier.waiters, []
        for phase, wake in waiters:
            if barrier.passes(phase):
                wake()
            else:
                barrier.waiters.append((phase, wake))

    def start(self, lane: str, role: Role, handoff: float) -> None:
        """Let a role run."""

        def step() -> None:
            for command in role:
                match command:
                    case ("delay", clocks):
                        self.at(self.now + clocks, step)
                        return
                    case ("until", when):
                        self.at(max(when, self.now), step)
                        return
                    case ("wait", barrier, phase):
                        if not self._passed(lane, barrier, phase, step, handoff):
                            return

        self.at(self.now, step)

    def _passed(
        self, lane: str, barrier: Barrier, phase: int, step: Callable[[], None], handoff: float
    ) -> bool:
        wait = {
            "lane": lane,
            "barrier": barrier.name,
            "index": barrier.index,
            "phase": phase,
            "bit": barrier.bit,
            "begin": self.now,
            "end": self.now,
        }
        if self.keep:
            self.waits.append(wait)
        if barrier.passes(phase):
            return True
        wait["end"] = None
        self._blocked[lane] = (barrier, phase)

        def woken() -> None:
            del self._blocked[lane]
            wait["end"] = self.now + handoff
            if self.keep:
                self.handoffs.append(
                    {
                        "barrier": barrier.name,
                        "index": barrier.index,
                        "from": self._last[barrier.name, barrier.index],
                        "to": lane,
                        "at": self.now,
                        "until": self.now + handoff,
                    }
                )
            self.at(self.now + handoff, step)

        barrier.waiters.append((phase, woken))
        return False

    def run(self) -> list[dict[str, Any]]:
        """Until nothing happens any more; who waits then, in vain."""
        while self._queue:
            self.now, _, call = heapq.heappop(self._queue)
            call()
        return [
            {"lane": lane, "barrier": b.name, "index": b.index, "phase": phase, "bit": b.bit}
            for lane, (b, phase) in self._blocked.items()
        ]


class Cta:
    """One CTA's barriers and roles, on engines that it may share."""

    def __init__(
        self, machine: Machine, engines: Engines, rates: Rates, schedule: Schedule, prefix: str = ""
    ) -> None:
        self.machine, self.engines, self.schedule, self.prefix = machine, engines, schedule, prefix
        self.rates, self.handoff = rates, rates.chip.signal.value
        s = schedule
        self.tma2mma = [Barrier("tma2mma", i, 1) for i in range(s.depth)]
        self.mma2tma = [Barrier("mma2tma", i, s.consumers) for i in range(s.depth)]
        self.mma2ld = [Barrier("mma2ld", i, 1) for i in range(s.consumers)]
        self.ld2mma = [Barrier("ld2mma", i, 1) for i in range(s.consumers)]

    @property
    def _commits(self) -> bool:
        """Whether the tensor core signals by itself that an accumulator is complete (Blackwell)."""
        return self.schedule.arch == "sm_100a"

    @property
    def start_phase(self) -> int:
        """Of the producer: opposite to the consumer's, unless the mistake is asked for."""
        return CONSUMER_PHASE if self.schedule.same_phase else PRODUCER_PHASE

    def run(self, tiles: int, k_tiles: int) -> None:
        """Start all roles."""
        blocks = [(tile, k) for tile in range(tiles) for k in range(k_tiles)]
        go = self.machine.start
        hop = self.handoff
        if self.schedule.copied:
            go(self.prefix + "one team", self._copying_team(tiles, k_tiles), hop)
            return
        if not self.schedule.roles:
            go(self.prefix + "one team", self._team(tiles, k_tiles), hop)
            return
        go(self.prefix + "TMA warp", self._producer(blocks), hop)
        for c in range(self.schedule.consumers):
            name = f" {c}" if self.schedule.consumers > 1 else ""
            if self.schedule.apart:
                go(self.prefix + f"MMA warp{name}", self._multiplier(c, tiles, k_tiles), hop)
                go(self.prefix + f"write back{name}", self._writer(c, tiles), hop)
            else:
                go(self.prefix + f"consumer{name}", self._consumer(c, tiles, k_tiles), hop)

    # -- what roles do ------------------------------------------------------------------------------------------

    def _load(self, by: str, place: Place, tile: int, k: int) -> None:
        full = self.tma2mma[place.stage]
        nbytes = self.schedule.load_bytes
        full.nbytes += nbytes
        self.machine.arrive(full, "TMA")

        def landed() -> None:
            self.machine.arrive(full, "TMA", nbytes=nbytes, arrivals=0)

        self.machine.request(
            self.engines.load(nbytes), "load", landed, by=by, stage=place.stage, tile=tile, k=k
        )

    def _multiply(self, by: str, c: int, stage: int, tile: int, k: int, last: bool) -> float:
        empty, done = self.mma2tma[stage], self.mma2ld[c]
        # tcgen05.commit arrives by itself; after wgmma the warps that waited for it do
        who = "tensor core" if self._commits else by

        def finished() -> None:
            self.machine.arrive(empty, who)
            if last and self._commits:
                self.machine.arrive(done, who)

        product = self.engines.multiply(self.schedule.block_flops / 2)
        return self.machine.request(
            product, "mma", finished, by=by, stage=stage, tile=tile, k=k, consumer=c
        ).seen

    def _producer(self, blocks: list[tuple[int, int]]) -> Role:
        place = Place(self.schedule.depth, self.start_phase)
        for tile, k in blocks:
            yield "wait", self.mma2tma[place.stage], place.phase
            self._load(self.prefix + "TMA warp", place, tile, k)
            place.advance()

    def _multiplier(self, c: int, tiles: int, k_tiles: int) -> Role:
        place = Place(self.schedule.depth, CONSUMER_PHASE)
        drained = Place(1, self.start_phase)
        for tile in range(tiles):
            yield "wait", self.ld2mma[c], drained.phase
            drained.advance()
            for k in range(k_tiles):
                yield "wait", self.tma2mma[place.stage], place.phase
                self._multiply(self._lane("MMA warp", c), c, place.stage, tile, k, k == k_tiles - 1)
                place.advance()

    def _writer(self, c: int, tiles: int) -> Role:
        lane = self._lane("write back", c)
        ready = Place(1, CONSUMER_PHASE)
        for tile in range(tiles):
            yield "wait", self.mma2ld[c], ready.phase
            ready.advance()
            yield from self._write(lane, c, tile, release=True)

    def _consumer(self, c: int, tiles: int, k_tiles: int) -> Role:
        """Hopper's: multiplies, one group in flight, then writes its registers back."""
        lane = self._lane("consumer", c)
        place = Place(self.schedule.depth, CONSUMER_PHASE)
        before = 0.0
        for tile in range(tiles):
            for k in range(k_tiles):
                yield "wait", self.tma2mma[place.stage], place.phase
                end = self._multiply(lane, c, place.stage, tile, k, False)
                place.advance()
                yield "until", before
                before = end
            yield "until", before
            yield from self._write(lane, c, tile, release=False)

    def _team(self, tiles: int, k_tiles: int) -> Role:
        """One team: keeps `ahead` loads in flight, waits for each block, for its product, then writes back."""
        lane = self.prefix + "one team"
        ahead = min(self.schedule.ahead, self.schedule.depth)
        filling = Place(self.schedule.depth, self.start_phase)
        reading = Place(self.schedule.depth, CONSUMER_PHASE)
        ready = Place(1, CONSUMER_PHASE)
        blocks = deque((tile, k) for tile in range(tiles) for k in range(k_tiles))
        fresh = not self.schedule.persistent
        end = 0.0
        for tile in range(tiles):
            for k in range(k_tiles):
                in_flight = 0 if k else self._in_flight(tile, k_tiles, blocks)
                wanted = ahead if k == 0 else 1
                for _ in range(wanted - in_flight):
                    if not blocks or (fresh and blocks[0][0] != tile):
                        break
                    yield "wait", self.mma2tma[filling.stage], filling.phase
                    self._load(lane, filling, *blocks.popleft())
                    filling.advance()
                yield "wait", self.tma2mma[reading.stage], reading.phase
                end = self._multiply(lane, 0, reading.stage, tile, k, k == k_tiles - 1)
                reading.advance()
            if self._commits:
                yield "wait", self.mma2ld[0], ready.phase
                ready.advance()
            else:
                yield "until", end
            yield from self._write(lane, 0, tile, release=False)

    def _copying_team(self, tiles: int, k_tiles: int) -> Role:
        """Its threads copy a block themselves, then wait for the product: nothing overlaps within a CTA."""
        lane = self.prefix + "one team"
        ready = Place(1, CONSUMER_PHASE)
        for tile in range(tiles):
            end = 0.0
            for k in range(k_tiles):
                begin = self.machine.now
                yield "delay", self.engines.copy(self.schedule.copied, COPIES_AT_ONCE, COPY_INSTRUCTIONS)
                self.machine.span(lane, "copy", begin, self.machine.now, tile=tile, k=k)
                end = self._multiply(lane, 0, 0, tile, k, k == k_tiles - 1)
                yield "until", end
            if self._commits:
                yield "wait", self.mma2ld[0], ready.phase
                ready.advance()
            yield from self._write(lane, 0, tile, release=False)

    def _in_flight(self, tile: int, k_tiles: int, blocks: deque[tuple[int, int]]) -> int:
        """Blocks of this tile that are loading already."""
        return blocks[0][0] * k_tiles + blocks[0][1] - tile * k_tiles if blocks else 0

    def _write(self, lane: str, c: int, tile: int, *, release: bool) -> Role:
        """Read the accumulator by chunks, convert, stage and store; release it when it is read."""
        s = self.schedule
        chunks = max(1, s.columns // s.chunk)
        read = s.rows * s.chunk * 4
        stored = s.rows * s.chunk * 2
        staged: deque[float] = deque()
        for chunk in range(chunks):
            begin = self.machine.now
            if self._commits and (chunk == 0 or not s.early):
                # drained at once (`early`), or a chunk at a time
                amount = self.engines.read(read * (chunks if s.early else 1))
                yield "until", self.machine.request(amount, "read", tile=tile, consumer=c).seen
                self.machine.span(lane, "read", begin, self.machine.now, tile=tile)
            if release and chunk == (0 if s.early else chunks - 1):
                self.machine.arrive(self.ld2mma[c], lane)
            if len(staged) >= s.buffers:
                yield "until", staged.popleft()
            begin = self.machine.now
            yield "delay", stored / self.rates.chip.stage_rate.value + self.handoff
            self.machine.span(lane, "stage", begin, self.machine.now, tile=tile)
            store = self.machine.request(self.engines.write(stored), "store", tile=tile, consumer=c)
            staged.append(store.end)
        if not s.persistent or not s.roles:
            # what isn't persistent leaves only when its stores have reached memory
            latency = 0.0 if s.persistent else self.rates.chip.load_latency.value
            yield "until", self.engines.store.free + latency

    def _lane(self, role: str, c: int) -> str:
        return self.prefix + (f"{role} {c}" if self.schedule.consumers > 1 else role)

    def barriers(self) -> Iterator[Barrier]:
        """All barriers that the schedule uses."""
        yield from (*self.tma2mma, *self.mma2tma)
        if self._commits:
            yield from self.mma2ld
            if self.schedule.apart:
                yield from self.ld2mma
