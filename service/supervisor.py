"""Keeps workers fed and alive: receives admitted work, hands on batches, and brings each outcome back.

Spawn, ready, ping, watchdog, restart and drain are Handle's; here is the queue, and what becomes of work whose
worker died: a GEMM is pure, so it runs once more, on the reference, and then fails clearly.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from service.admit import Bounds, Rates, admit
from service.arena import Arena
from service.awake import WakefulLoop, cores, seconds_for
from service.batch import Limits, Queue, Work
from service.begun import Begun, Told
from service.dispatch import Dispatcher
from service.errors import ServiceError
from service.gpus import places
from service.handle import Flight, Handle, State, Times
from service.kept import Kept
from service.messages import BatchDone, ItemDone, Operand, Ready, Report
from service.metrics import Metrics
from service.outcome import Outcome
from service.regions import Regions
from service.tally import Tally
from service.team import VARIANT, Spread, Team, together, too_large, why_not

log = logging.getLogger("gemm.supervisor")

#: A worker that died with it may have died of it: run it once more, then give up.
RETRIES = 1


@dataclass(slots=True)
class _Waiting:
    future: asyncio.Future[Outcome] | Begun
    admit_seconds: float


@dataclass(frozen=True, slots=True)
class Options:
    """How a supervisor runs: batch limits, queue bounds, worker times and arguments, batches sent ahead, and for
    how many seconds who waits stays awake for a GPU (see service.awake; None: as the machine allows); what ranks of
    sharded products keep, and where they are if not beside the workers.
    """

    limits: Limits
    bounds: Bounds
    times: Times
    arguments: tuple[str, ...] = ()
    workers: int = 1
    ahead: int = 2
    patience: float = 30.0
    awake: float | None = 0.0
    shard_bytes: int = 0
    spread: Spread | None = None


class Supervisor:
    """The queue and its workers, on the front's event loop."""

    def __init__(
        self, arena: Arena, metrics: Metrics, options: Options, regions: Regions | None = None
    ) -> None:
        self.options = options
        self.metrics = metrics
        self.queue = Queue(options.limits)
        self.tally = Tally(metrics)
        self.draining = False
        self.rates = Rates()
        #: Called with each batch's works and how it went, for whoever shows it.
        self.watchers: list[Callable[[tuple[Work, ...], BatchDone], None]] = []
        self.regions = Regions(most=0, share=0) if regions is None else regions
        self.regions.on_gone = self._unmap
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._orphaned = 0.0
        spots = places(options.workers, os.environ)
        awake = seconds_for(len(spots), cores()) if options.awake is None else options.awake
        self._awake = WakefulLoop(awake)
        self._idle = asyncio.Event()
        self._idle.set()
        self.kept = Kept(lambda worker, operand: self.handles[worker].fetch(operand))
        self.handles = [
            Handle(
                index,
                spot,
                arena,
                self.regions,
                [*options.arguments, "--awake-seconds", str(awake)],
                options.times,
                on_ready=self._on_ready,
                on_done=self._on_done,
                on_end=self._on_end,
                on_report=self._on_report,
            )
            for index, spot in enumerate(spots)
        ]
        self.dispatcher = Dispatcher(
            self.queue,
            self.handles,
            self.kept,
            metrics,
            self._awake,
            ahead=options.ahead,
            hang=options.times.hang,
        )
        self.team = Team(
            arena,
            self.regions,
            [handle.place for handle in self.handles],
            (*options.arguments, "--shard-bytes", str(options.shard_bytes)),
            options.times,
            options.spread,
        )
        metrics.live("gemm_queue_depth", "Requests that wait for a worker.", lambda: float(self.queue.depth))
        metrics.live(
            "gemm_queue_seconds", "Estimated seconds of the work that waits.", lambda: self.queue.seconds
        )
        metrics.live(
            "gemm_shards_kept_bytes",
            "Bytes of stored tensors' shards on ranks of sharded products.",
            lambda: float(self.team.kept_nbytes),
        )
        metrics.live(
            "gemm_workers_ready", "Workers that take work.", lambda: float(len(self.dispatcher.ready()))
        )

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers and the clock that drops what waited too long."""
        self._tasks = [asyncio.ensure_future(handle.run()) for handle in self.handles]
        self._tasks.append(asyncio.ensure_future(self._sweep()))

    @property
    def ready(self) -> bool:
        """Whether new work is taken and some worker can do it."""
        return not self.draining and bool(self.dispatcher.ready())

    def status(self) -> list[dict[str, Any]]:
        """Each worker's state, for pages and health."""
        return [
            {
                "index": h.index,
                "state": str(h.state),
                "detail": h.detail,
                "pid": h.pid,
                "device": h.ready and h.ready.device,
            }
            for h in self.handles
        ]

    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that take work."""
        devices = [handle.ready.device for handle in self.dispatcher.ready() if handle.ready is not None]
        return tuple(
            device["uuid"] for device in devices if device["arch"] != "cpu" and not device["virtual"]
        )

    async def drain(self, grace: float) -> None:
        """Refuse new work, finish what was accepted within `grace` seconds, and end the workers."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace)
        self._fail_queued()
        await self.kept.bring_all(grace)
        for handle in self.handles:
            handle.drain()
        runs = self._tasks[: len(self.handles)]
        await self.team.close(grace)
        if runs:
            await asyncio.wait(runs, timeout=max(1.0, min(grace, 5.0)))
        for handle in self.handles:
            handle.kill_for_good()
        if runs:
            await asyncio.wait(runs, timeout=5.0)
        self._fail_queued()  # what a worker still held came back to the queue as it ended
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _fail_queued(self) -> None:
        """Fail what waits for a worker, so that who asked can ask another front."""
        for work in list(self.queue):
            self.queue.discard(work)
            text = "the service shut down before this was done"
            self._fail(work, ServiceError("draining", text, retry_after=1.0))

    # -- work ---------------------------------------------------------------------------------------------------

    def work_id(self) -> int:
        """A number for a Work, unique in this process."""
        return next(self._ids)

    async def submit(self, work: Work) -> Outcome:
        """Queue `work` and wait for its outcome.

        Takes over `work.release`: it is called once the operands can't be read any more, whatever happens here.
        Cancelling drops the work while it is queued; once a worker has it, it is finished and forgotten.
        Raises ServiceError (queue_full, deadline, draining, no_worker, unsupported, no_room, …).
        """
        if len(self.kept.homes(work.stored)) > 1:
            try:
                await self.kept.gather(work.stored)
            except BaseException:
                work.release()
                raise
        admitting = self._admit(work)
        if self._is_sharded(work):
            return await self._submit_sharded(work, admitting)
        future = asyncio.get_running_loop().create_future()
        try:
            self._queue(work, _Waiting(future, admitting))
            outcome: Outcome = await future
        except asyncio.CancelledError:
            self._withdraw(work)
            raise
        return outcome

    def begin(self, work: Work, told: Told) -> Begun:
        """`submit` of work without stored operands, which has nothing to wait for before it is queued."""
        admitting = self._admit(work)
        begun = Begun(told, partial(self._withdraw, work))
        if self._is_sharded(work):
            # To the end, whoever leaves: a task that is cancelled before it began would release nothing.
            task = asyncio.ensure_future(self._submit_sharded(work, admitting))
            task.add_done_callback(begun.end_with)
        else:
            self._queue(work, _Waiting(begun, admitting))
        return begun

    def _withdraw(self, work: Work) -> None:
        """Nobody waits for it any more: drop it while it is queued; else it is finished and forgotten."""
        if self.queue.discard(work):
            self._finish(work)
        else:
            self._waiting.pop(work.id, None)

    def _queue(self, work: Work, waiting: _Waiting) -> None:
        self._waiting[work.id] = waiting
        self._idle.clear()
        self.dispatcher.put(work)

    def _admit(self, work: Work) -> float:
        """Let it in or release it and raise ServiceError; the seconds that took, which metrics have in any case."""
        began = time.monotonic()
        try:
            self._check_open()
            if lost := self.kept.refusal(work.stored):
                raise lost
            admit(work, self.queue, self.options.bounds, began)
            if work.rate is not None:
                self.rates.spend(work.rate, work.flops, began)
        except ServiceError as refusal:
            refusal.stage = "admit"
            work.release()
            self.metrics.took("admit", time.monotonic() - began, work.trace)
            raise
        work.arrived = time.monotonic()
        if not work.seconds:
            work.seconds = self.tally.estimate.seconds(work)
        took = work.arrived - began
        self.metrics.aside.put(partial(self.metrics.took, "admit", took, work.trace))
        return took

    def _is_sharded(self, work: Work) -> bool:
        """Whether it goes to all devices together: it asks for that, or no device has room for it."""
        if work.params.variant == VARIANT:
            return True
        kept = self.team.kept_beside_workers
        larger = work.params.variant == "auto" and too_large(work, self.handles, kept)
        return larger and why_not(work, self.handles, self.options.spread) is None

    async def _submit_sharded(self, work: Work, admitting: float) -> Outcome:
        try:
            if (because := why_not(work, self.handles, self.options.spread)) is not None:
                raise ServiceError("unsupported", because, field="variant")
            for operand in work.stored:
                await self.kept.bring(operand.tensor)
        except BaseException:
            work.release()
            raise
        begun = work.arrived

        def begin() -> None:
            nonlocal begun
            begun = time.monotonic()
            self.metrics.waited(begun - work.arrived, work.trace)

        done = together(await self.team.submit(work, begin))
        (item,) = done.items
        here = self.handles if self.options.spread is None else []
        self.tally.count(here, [work], done, time.monotonic())
        for watcher in self.watchers:
            watcher((work,), done)
        seconds = sum(done.seconds.values())
        queued = begun - work.arrived
        stages = {"admit": admitting, "batch": queued, **done.seconds}
        return Outcome(item.variant, item.reason, item.why, queued, seconds, 1, stages)

    def _check_open(self) -> None:
        if self.draining:
            raise ServiceError("draining", "the service is shutting down", retry_after=1.0)
        self._check_hope()

    def _check_hope(self) -> None:
        """Refuse where no worker will get ready by itself."""
        if all(handle.state is State.DOWN for handle in self.handles):
            raise ServiceError(
                "no_worker", self.handles[0].detail or "no worker can be started", retry_after=30.0
            )

    # -- news of workers ----------------------------------------------------------------------------------------

    def _on_ready(self, handle: Handle, ready: Ready) -> None:
        self.tally.ready(handle, ready)
        log.info("worker %d (pid %d) is ready on %s", handle.index, ready.pid, ready.device["name"])
        self.dispatcher.run()

    def _on_done(self, handle: Handle, flight: Flight, done: BatchDone) -> None:
        now = time.monotonic()
        for work, item in zip(flight.works, done.items, strict=True):
            if item.kept:
                self._keep(handle, work)
        # First: those who are told now write replies, and the worker has no need to wait for that.
        self.dispatcher.run()
        for work, item in zip(flight.works, done.items, strict=True):
            self._settle(work, item, flight, done)
        if handle.residency is not None:
            self._awake.ended(busy=any(each.flights for each in self.handles))
        self.metrics.aside.put(partial(self._ended, handle, flight, done, now))

    def _ended(self, handle: Handle, flight: Flight, done: BatchDone, now: float) -> None:
        self.tally.done(handle, flight, done, now)
        for watcher in self.watchers:
            watcher(flight.works, done)

    def _keep(self, handle: Handle, work: Work) -> None:
        """D stays on the worker's device; if nobody waits for it any more, it may go."""
        waiting = self._waiting.get(work.id)
        if waiting is None or waiting.future.done():
            self.forget(work.out.tensor)
            return
        self.kept.note(handle.index, work.out)
        if handle.residency is not None:
            handle.residency.note(work.out)

    def _settle(self, work: Work, item: ItemDone, flight: Flight, done: BatchDone) -> None:
        if item.code:
            named = item.code == "unsupported" and work.params.variant != "auto"
            refusal = ServiceError(item.code, item.detail, field="variant" if named else None)
            refusal.stage = "kernel"
            self._fail(work, refusal)
            return
        waiting = self._waiting.get(work.id)
        if waiting is not None and not waiting.future.done():
            queued = flight.sent - work.arrived
            stages = {"admit": waiting.admit_seconds, "batch": queued, **done.seconds}
            if done.host:
                stages["worker"] = done.host
            spent, batched = sum(done.seconds.values()), len(flight.works)
            outcome = Outcome(item.variant, item.reason, item.why, queued, spent, batched, stages)
            waiting.future.set_result(outcome)
        self._finish(work)

    def _on_end(self, handle: Handle, reason: str, flights: list[Flight]) -> None:
        if not self.draining:
            self.metrics.restarts.labels(reason).inc()
        self.kept.ended(handle.index)
        works = [work for flight in flights for work in flight.works]
        for work in list(self.queue):
            if (lost := self.kept.refusal(work.stored)) and self.queue.discard(work):
                self._fail(work, lost)
        for work in reversed(works):
            if work.id not in self._waiting:
                self._finish(work)
            elif lost := self.kept.refusal(work.stored):
                self._fail(work, lost)
            elif work.retries < RETRIES:
                work.retries += 1
                self.queue.put(work, first=True)
            else:
                text = f"two workers ended while they had this request (the last: {reason})"
                self._fail(work, ServiceError("no_worker", text, retry_after=1.0))
        self.dispatcher.run()

    def _on_report(self, handle: Handle, report: Report) -> None:
        self.tally.report(handle.index, report)

    # -- questions ----------------------------------------------------------------------------------------------

    async def ask(self, what: str, args: dict[str, Any] | None = None, timeout: float = 30.0) -> Any:
        """Ask a worker's kernels side: "variants", "choose", "predict", "trace"."""
        ready = self.dispatcher.ready()
        if not ready:
            self._check_hope()
            raise ServiceError("no_worker", "no worker is ready", retry_after=1.0)
        return await ready[0].ask(what, args or {}, timeout)

    async def tell_all(self, what: str, args: dict[str, Any], timeout: float = 30.0) -> None:
        """Ask every worker that is ready what has no answer; who can't is left."""
        asked = (handle.ask(what, args, timeout) for handle in self.dispatcher.ready())
        await asyncio.gather(*asked, return_exceptions=True)

    async def lend(self, operand: Operand) -> tuple[Handle, dict[str, Any]]:
        """Lend a tensor of the arena's in a GPU's memory: the worker, and its loan, handle and nbytes.

        ServiceError not_implemented where no GPU computes, no_room.
        """
        able = [handle for handle in self.dispatcher.ready() if handle.residency is not None]
        if not able:
            raise ServiceError("not_implemented", "no GPU computes here")
        near = [handle for handle in able if operand.tensor in (handle.residency or ())]
        handle = (near or able)[0]
        told = await handle.ask("lend", {"operand": msgspec.to_builtins(operand)}, 30.0)
        if told is None:
            raise ServiceError("no_room", "the GPU has no room for this loan", retry_after=1.0)
        return handle, told

    def end_loan(self, worker: int, life: int | None, loan: int) -> None:
        """A loan of the worker with process id `life` is over; another knows nothing of it."""
        handle = self.handles[worker]
        if handle.pid == life and handle.state is State.READY:
            asked = asyncio.ensure_future(handle.ask("end_loan", {"loan": loan}, 30.0))
            asked.add_done_callback(lambda task: task.cancelled() or task.exception())

    def forget(self, *tensors: str) -> None:
        """Stored content is gone or replaced: device caches drop it."""
        self.kept.forget(tensors)
        for handle in self.handles:
            handle.forget(tensors)
        self.team.forget(tensors)

    def _unmap(self, region: int) -> None:
        for handle in self.handles:
            handle.unmap(region)
        self.team.unmap(region)

    # -- inner --------------------------------------------------------------------------------------------------

    def _fail(self, work: Work, error: ServiceError) -> None:
        waiting = self._waiting.get(work.id)
        if waiting is not None and not waiting.future.done():
            waiting.future.set_exception(error)
        self._finish(work)

    def _finish(self, work: Work) -> None:
        self._waiting.pop(work.id, None)
        work.release()
        if not self._waiting and not any(handle.flights for handle in self.handles):
            self._idle.set()

    async def _sweep(self) -> None:
        """Ten times a second: drop what is past its deadline, or has waited too long for any worker."""
        while True:
            await asyncio.sleep(0.1)
            now = time.monotonic()
            for work in self.queue.expired(now):
                late = ServiceError("deadline", "the deadline passed in the queue", field="deadline_ms")
                late.stage = "batch"
                self._fail(work, late)
            if self.dispatcher.ready():
                self._orphaned = now
            else:
                down = all(handle.state is State.DOWN for handle in self.handles)
                self._give_up(now, 0.0 if down else self.options.patience)

    def _give_up(self, now: float, patience: float) -> None:
        """No worker is ready: whoever has waited for `patience` seconds since one was gets a clear 503."""
        for work in [w for w in self.queue if now - max(w.arrived, self._orphaned) > patience]:
            if self.queue.discard(work):  # who is told may take back others
                self._fail(work, ServiceError("no_worker", "no worker became ready in time", retry_after=5.0))
