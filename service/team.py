"""Products over several devices: receives one at a time, hands it to a rank on each device, brings the outcome back.

Ranks are processes beside the workers, or on the nodes of a Ray cluster behind one process beside the workers,
started when the first such product comes. So what goes wrong among them costs the workers nothing: when a rank ends,
fails or hangs, all of them are ended, the product fails clearly, and the next one starts new ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from service.arena import Arena
from service.batch import Work
from service.errors import ServiceError
from service.gpus import Place
from service.handle import Flight, Handle, State, Times
from service.messages import Batch, BatchDone, Item, Report
from service.regions import Regions

log = logging.getLogger("gemm.supervisor")

#: `variant` by which a request asks for this way.
VARIANT = "sharded"
#: A product that touches more than this share of a device's memory goes to all devices together.
DEVICE_SHARE = 0.9
#: Share of the seconds for a start in which ranks are to be placed and to find each other; the rest is for imports.
RANKS_SHARE = 0.75
#: Products that may wait for their turn.
WAITING = 64


@dataclass(frozen=True, slots=True)
class Spread:
    """Ranks that a Ray cluster places: its address, and how many."""

    address: str
    ranks: int


def too_large(work: Work, workers: Sequence[Handle], kept: int = 0) -> bool:
    """Whether no GPU of these workers that are ready has room for it beside `kept` bytes of its rank's shards."""
    rooms = [w.ready.device["memory_bytes"] for w in workers if w.ready and w.residency is not None]
    return bool(rooms) and work.nbytes > DEVICE_SHARE * min(rooms) - kept


def why_not(work: Work, workers: Sequence[Handle], spread: Spread | None = None) -> str | None:
    """Why ranks, on these workers' devices or spread over a cluster, can't take it; None where they can."""
    ranks = len(workers) if spread is None else spread.ranks
    if spread is None and (because := _no_ranks(workers)) is not None:
        return because
    if not len(work.out.shape) == len(work.a.shape) == len(work.b.shape) == 2:
        return "a sharded product has no batch"
    if min(work.out.shape) < ranks:
        return f"a sharded product has at least {ranks} rows and columns, one for each rank"
    return None


def _no_ranks(workers: Sequence[Handle]) -> str | None:
    """Why there can't be a rank on each of these workers' devices."""
    on_gpus = any(worker.residency is not None for worker in workers)
    devices = len({worker.place for worker in workers}) if on_gpus else len(workers)
    if devices < max(len(workers), 2):
        return (
            f"a sharded product needs two workers or more, each with a device of its own; there are {devices}"
        )
    if any(name.startswith("MIG-") for worker in workers for _, name in worker.place.environ):
        return "a sharded product needs whole GPUs, not MIG slices"
    if not all(worker.ready.versions.get("torch") for worker in workers if worker.ready):
        return "a sharded product needs torch"
    return None


def together(answers: Sequence[BatchDone]) -> BatchDone:
    """What the ranks say, as one: the longest of their times, the sum of their work."""
    first = answers[0]
    stages = ("copy_in", "kernel", "copy_out")
    return BatchDone(
        first.id,
        first.items,
        {stage: max(answer.seconds.get(stage, 0.0) for answer in answers) for stage in stages},
        {VARIANT: sum(answer.flops.get(VARIANT, 0.0) for answer in answers)},
        {VARIANT: sum(answer.busy.get(VARIANT, 0.0) for answer in answers)},
        shards={way: sum(answer.shards.get(way, 0) for answer in answers) for way in first.shards},
    )


@dataclass(slots=True)
class _Product:
    """One under way: the ranks that haven't answered, and what the others said."""

    future: asyncio.Future[list[BatchDone]]
    left: set[int]
    answers: list[BatchDone] = field(default_factory=list)


class Team:
    """One rank for each of `places`, or those of `spread` behind one process, on the front's event loop."""

    def __init__(
        self,
        arena: Arena,
        regions: Regions,
        places: Sequence[Place],
        arguments: Sequence[str],
        times: Times,
        spread: Spread | None = None,
    ) -> None:
        self.places = places if spread is None else [Place(0)]
        self.spread = spread
        self._arena = arena
        self._regions = regions
        self._arguments = arguments
        self._times = times
        self._turn = asyncio.Lock()
        self._batches = itertools.count(1)
        self._pending: set[asyncio.Task[list[BatchDone]]] = set()
        self._handles: list[Handle] = []
        self._lives: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._ended = ""
        self._kept: dict[int, int] = {}
        self._product: _Product | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._stopped = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that run."""
        return [handle.pid for handle in self._handles if handle.pid is not None]

    @property
    def kept_nbytes(self) -> int:
        """Bytes of shards that ranks keep between products."""
        return sum(self._kept.values())

    @property
    def kept_beside_workers(self) -> int:
        """Bytes of shards on the GPU of a worker, at most."""
        return 0 if self.spread is not None else max(self._kept.values(), default=0)

    async def submit(self, work: Work, began: Callable[[], None]) -> list[BatchDone]:
        """What each rank says of the product. `began` is called when they have it.

        Takes over `work.release`. Cancelling drops the work while it waits; once the ranks have it, it is finished
        and forgotten. Raises ServiceError: queue_full, deadline, draining, no_worker, or what a rank says.
        """
        if len(self._pending) >= WAITING:
            work.release()
            raise ServiceError(
                "queue_full", f"{WAITING} sharded products are waiting", limit=WAITING, retry_after=1.0
            )
        task = asyncio.ensure_future(self._take_turn(work, began))
        self._pending.add(task)
        task.add_done_callback(self._settled)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._product is None or work.id not in self._running:
                task.cancel()
            raise

    @property
    def _running(self) -> set[int]:
        return {work.id for handle in self._handles for f in handle.flights.values() for work in f.works}

    def _settled(self, task: asyncio.Task[list[BatchDone]]) -> None:
        self._pending.discard(task)
        if not task.cancelled():
            task.exception()  # who asked may have left

    async def _take_turn(self, work: Work, began: Callable[[], None]) -> list[BatchDone]:
        left = None if work.deadline is None else work.deadline - time.monotonic()
        try:
            async with asyncio.timeout(left) as limit, self._turn:
                if self._stopped:
                    raise ServiceError("draining", "the service is shutting down", retry_after=1.0)
                await self._come()
                if work.deadline is not None and work.deadline <= time.monotonic():
                    raise TimeoutError
                limit.reschedule(None)  # what ranks have begun is finished
                began()
                return await self._compute(work)
        except TimeoutError:
            raise ServiceError(
                "deadline", "the deadline passed before the ranks began", field="deadline_ms"
            ) from None
        finally:
            work.release()

    async def _compute(self, work: Work) -> list[BatchDone]:
        product = self._product = _Product(
            asyncio.get_running_loop().create_future(), {handle.index for handle in self._handles}
        )
        # The deadline was checked for all; each rank by itself might decide otherwise than its neighbour.
        item = work.item()
        item = Item(item.id, item.a, item.b, item.out, item.params, item.c, item.bias)
        batch = Batch(next(self._batches), (item,))
        now = time.monotonic()
        limit = now + self._times.hang + 20 * work.seconds + work.nbytes / 1e8
        try:
            for handle in self._handles:
                handle.send(Flight(batch, (work,), now, limit))
            return await product.future
        except ServiceError:
            await self._end()  # nobody writes into the arena any more when it is given back
            raise
        finally:
            self._product = None

    # -- life ---------------------------------------------------------------------------------------------------

    async def _come(self) -> None:
        """Start the ranks unless they are there. ServiceError no_worker where they can't."""
        if not self._handles or self._ended:
            await self._end()
            self._start()
        while not all(handle.state is State.READY for handle in self._handles):
            self._changed.clear()
            await self._changed.wait()
            if self._ended:
                why = self._ended
                await self._end()
                raise ServiceError("no_worker", f"{why} before all were ready", retry_after=5.0)

    def _start(self) -> None:
        # Less than what they have as processes, so that they say why they don't get together before they are ended.
        together = ["--rank-seconds", str(RANKS_SHARE * self._times.start)]
        if self.spread is None:
            self._folder = tempfile.TemporaryDirectory(prefix="gemm-ranks-")
            meet = str(Path(self._folder.name) / "meet")
            together += ["--ranks", str(len(self.places)), "--rendezvous", meet]
        else:
            together += ["--ranks", str(self.spread.ranks), "--ray", self.spread.address]
        self._handles = [
            Handle(
                rank,
                place,
                self._arena,
                self._regions,
                [*self._arguments, *together, "--rank", str(rank)],
                self._times,
                on_ready=lambda handle, ready: self._changed.set(),
                on_done=self._on_done,
                on_end=self._on_end,
                on_report=self._on_report,
            )
            for rank, place in enumerate(self.places)
        ]
        self._lives = [asyncio.ensure_future(handle.run()) for handle in self._handles]

    async def _end(self) -> None:
        """End all ranks, and wait until they are gone."""
        for handle in self._handles:
            handle.kill_for_good()
        if self._lives:
            await asyncio.wait(self._lives)
        self._handles, self._lives, self._ended = [], [], ""
        self._kept.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    async def close(self, grace: float) -> None:
        """Finish the product under way within `grace` seconds, refuse the rest, end the ranks."""
        self._stopped = True
        if self._pending:
            await asyncio.wait(set(self._pending), timeout=grace)
        if self._product is not None and not self._product.future.done():
            self._product.future.set_exception(
                ServiceError("draining", "the service shut down before this was done")
            )
        for task in set(self._pending):
            with contextlib.suppress(ServiceError, asyncio.CancelledError):
                await task
        await self._end()

    def forget(self, tensors: tuple[str, ...]) -> None:
        """Stored content is gone or replaced: ranks drop its shards."""
        for handle in self._handles:
            handle.forget(tensors)

    def unmap(self, region: int) -> None:
        """A client's memory is gone."""
        for handle in self._handles:
            handle.unmap(region)

    # -- news of ranks ------------------------------------------------------------------------------------------

    def _on_done(self, handle: Handle, flight: Flight, done: BatchDone) -> None:
        product = self._product
        if product is None or product.future.done():
            return
        code, detail = done.items[0].code, done.items[0].detail
        if code:
            # The others wait for this rank in vain.
            who = "" if self.spread is not None else f"rank {handle.index}: "
            product.future.set_exception(ServiceError(code, f"{who}{detail}"))
            return
        product.left.discard(handle.index)
        product.answers.append(done)
        if not product.left:
            product.future.set_result(product.answers)

    def _on_report(self, handle: Handle, report: Report) -> None:
        self._kept[handle.index] = report.device_bytes.get("shards", 0)

    def _on_end(self, handle: Handle, reason: str, flights: list[Flight]) -> None:
        who = "the ranks" if self.spread is not None else f"rank {handle.index} of {len(self.places)}"
        self._ended = self._ended or f"{who} ended ({handle.failure or reason})"
        # One by one: `handle.kill_for_good` also keeps `Handle.run` from starting another in its place.
        for each in self._handles:
            each.kill_for_good()
        product = self._product
        if product is not None and not product.future.done():
            text = f"{self._ended} amid the product; the others were stopped"
            product.future.set_exception(ServiceError("no_worker", text, retry_after=1.0))
        self._changed.set()
